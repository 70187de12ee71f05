"""Clips of sound are read whatever their rate, depth and channels; what is no speech is refused in one line."""

from __future__ import annotations

import io
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqdefer.errors import DataError, MissingExtraError
from seqdefer.tasks.speech import audio
from seqdefer.tasks.speech.audio import (
    SAMPLE_RATE,
    Samples,
    read_clip,
    read_seconds,
    write_clip,
)

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")


def tone(seconds: float = 1.0, rate: int = SAMPLE_RATE, hertz: float = 440.0, amplitude: float = 0.5) -> Samples:
    times = np.arange(round(seconds * rate)) / rate
    return (amplitude * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def packed(samples: Any, rate: int = SAMPLE_RATE, kind: str = "WAV", subtype: str = "PCM_16") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


# -- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [
        ("WAV", "PCM_U8", 1 / 127),
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "FLOAT", 1e-7),
        ("WAVEX", "PCM_16", 1e-4),
        ("RF64", "PCM_16", 1e-4),
        ("WAV", "ULAW", 0.02),
        ("FLAC", "PCM_S8", 1 / 127),
        ("FLAC", "PCM_16", 1e-4),
        ("FLAC", "PCM_24", 1e-6),
    ],
)
def test_formats(kind: str, subtype: str, error: float, tmp_path: Path) -> None:
    content = packed(tone(), kind=kind, subtype=subtype)
    samples = read_clip(content)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, tone(), atol=error)
    path = tmp_path / "clip.raw"  # the content decides, not the name
    path.write_bytes(content)
    assert np.array_equal(read_clip(path), samples)
    assert np.array_equal(read_clip(io.BytesIO(content)), samples)
    assert read_seconds(path) == read_seconds(content) == 1.0


def test_files_that_cannot_seek() -> None:
    """Regression: soundfile's ValueError went through."""
    samples = read_clip(packed(tone(), subtype="GSM610"))
    assert np.corrcoef(samples, tone())[0, 1] > 0.9


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 192_000])
def test_other_rates_are_resampled(rate: int) -> None:
    samples = read_clip(packed(tone(rate=rate), rate, subtype="FLOAT"))
    assert len(samples) == SAMPLE_RATE
    inner = slice(800, -800)  # the filter rings at the ends
    np.testing.assert_allclose(samples[inner], tone()[inner], atol=2e-3)


def test_what_16_khz_cannot_hold_is_filtered_out() -> None:
    high = read_clip(packed(tone(rate=48_000, hertz=12_000.0), 48_000, subtype="FLOAT"))
    assert np.abs(high[800:-800]).max() < 1e-3


def test_channels_are_averaged() -> None:
    left, right = tone(), tone(hertz=700.0)
    samples = read_clip(packed(np.stack([left, right], axis=1), subtype="FLOAT"))
    np.testing.assert_allclose(samples, (left + right) / 2, atol=1e-6)


def test_thirty_seconds_fit_and_more_do_not(tmp_path: Path) -> None:
    assert len(read_clip(packed(tone(30.0)))) == 30 * SAMPLE_RATE
    assert len(read_clip(packed(tone(30.0, rate=44_100), 44_100))) == 30 * SAMPLE_RATE
    with pytest.raises(DataError, match=r"^a.wav lasts 30.5 s; cut it into clips of at most 30 s$"):
        read_clip(packed(tone(30.5)), "a.wav")
    with pytest.raises(DataError, match=r"lasts 30.00006 s; cut it into clips of at most 30 s"):
        read_clip(packed(tone(30 + 1 / SAMPLE_RATE)))  # regression: it said 30.0 s
    with pytest.raises(DataError, match=r"lasts 1 s; cut it into clips of at most 0.5 s"):
        read_clip(packed(tone()), max_seconds=0.5)


def test_ten_hours_are_refused_undecoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = np.zeros(10 * 3600 * 4000, dtype=np.int16)
    content = packed(hours, 4000, "FLAC")
    assert len(content) < 2**20  # small enough for any limit on size
    path = tmp_path / "talk.flac"
    path.write_bytes(content)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
    for read in (read_clip, read_seconds):
        with pytest.raises(DataError, match=r"talk.flac lasts 36,000 s; cut it into clips of at most 30 s"):
            read(path)


def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "talk.wav"
    with path.open("wb") as file:  # a sparse file
        file.write(packed(tone()))
        file.truncate(audio.MAX_FILE_MIB * 2**20 + 1)
    with pytest.raises(DataError, match=r"talk.wav is larger than 64 MiB; cut it into clips of at most 30 s"):
        read_clip(path)

    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= audio.MAX_FILE_MIB * 2**20 + 1
            return bytes(size)

    with pytest.raises(DataError, match="the upload is larger than 64 MiB"):
        read_clip(Endless(), "the upload")  # type: ignore[arg-type]


# -- refusals ------------------------------------------------------------------------------------------------------


def with_value(value: float) -> bytes:
    samples = tone()
    samples[7000] = value
    return packed(samples, subtype="FLOAT")


def without_length() -> bytes:
    content = bytearray(packed(tone(), kind="FLAC"))
    content[21] &= 0xF0  # the number of samples in the header: 36 bits
    content[22:26] = bytes(4)
    return bytes(content)


def overwritten(content: bytes, place: int) -> bytes:
    return content[:place] + b"\xff\x00\x13nothing" + content[place + 10 :]


NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, SAMPLE_RATE)
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is empty; give a WAV or FLAC file"),
    "text": (lambda: b"hello, this is no sound", "is not a WAV or FLAC file; convert it, for example with: ffmpeg"),
    "mp3": (lambda: packed(tone(), kind="MP3", subtype="MPEG_LAYER_III"), "is not a WAV or FLAC file"),
    "ogg": (lambda: packed(tone(), kind="OGG", subtype="VORBIS"), "is not a WAV or FLAC file"),
    "riff without a wave": (lambda: b"RIFF\x04\x00\x00\x00AVI LIST", "is not a WAV or FLAC file"),
    "no samples": (lambda: packed(np.zeros(0)), "has no samples; give a clip with speech"),
    "short": (lambda: packed(tone(0.05)), "lasts 0.05 s; give at least 0.1 s"),
    "a sample short": (lambda: packed(tone(0.1 - 1 / SAMPLE_RATE)), "lasts 0.0999375 s; give at least 0.1 s"),
    "silence": (
        lambda: packed(np.zeros(16_000)),
        "is silent: its samples are all about the same; give",
    ),
    "silence of 8 bits": (lambda: packed(np.zeros(16_000), subtype="PCM_U8"), "is silent"),
    "a constant": (lambda: packed(np.full(16_000, 0.25)), "is silent"),
    "less than 16 bits tell": (lambda: packed(tone(amplitude=1e-5), subtype="FLOAT"), "is silent"),
    "opposite channels": (lambda: packed(np.stack([tone(), -tone()], 1)), "is silent"),
    "NaN": (lambda: with_value(float("nan")), "has samples that are not numbers"),
    "infinite": (lambda: with_value(float("-inf")), "has samples that are not numbers"),
    "huge": (lambda: with_value(-1e30), r"has a sample of 1e\+30; samples lie between -1 and 1"),
    "integers as floats": (lambda: packed(tone() * 2**15, subtype="FLOAT"), "has a sample of 1638.; samples lie"),
    "low rate": (lambda: packed(tone(), 100), "has a rate of 100 Hz; give 4,000 to 192,000 Hz"),
    "high rate": (lambda: packed(tone(), 400_000), "has a rate of 400,000 Hz"),
    "channels": (lambda: packed(np.stack([tone()] * 9, 1)), "has 9 channels; give at most 8"),
    "cut FLAC": (lambda: packed(NOISE, kind="FLAC")[:9000], "is damaged: .*; record or convert it again"),
    "corrupt FLAC": (lambda: overwritten(packed(NOISE, kind="FLAC"), 9000), "is damaged: "),
    "corrupt FLAC header": (lambda: overwritten(packed(NOISE, kind="FLAC"), 12), "is damaged: "),
    "corrupt WAV header": (lambda: overwritten(packed(NOISE), 20), "is damaged: "),
    "only a magic number": (lambda: b"fLaC", "is damaged: "),
    "unknown length": (without_length, "does not say how long it is; convert it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    path = tmp_path / "clip"
    path.write_bytes(make())
    with pytest.raises(DataError, match=f"clip {message}") as raised:
        read_clip(path)
    assert "\n" not in str(raised.value)
    with pytest.raises(DataError, match=f"^the audio {message}"):
        read_clip(make())


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "no.wav", "No such file"), (tmp_path, "Is a dir"), (Path("a\0b"), "null byte")):
        with pytest.raises(DataError, match=f"cannot read .*{reason}"):
            read_clip(path)
    for path, reason in ((Path("a" * 300), "File name too long"), (Path("/proc/self/mem"), "Invalid argument")):
        with pytest.raises(DataError, match=f"cannot read .*{reason}"):
            read_clip(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="it is a pipe; give a file"):
        read_clip(tmp_path / "pipe")


@settings(max_examples=60)
@given(place=st.integers(0, 200), garbage=st.binary(max_size=12), kind=st.sampled_from(["WAV", "FLAC"]))
def test_any_content_is_read_or_a_data_error(place: int, garbage: bytes, kind: str) -> None:
    content = packed(tone(0.2), kind=kind)
    with suppress(DataError):
        samples = read_clip(content[:place] + garbage + content[place + len(garbage) :])
        assert np.isfinite(samples).all()


def test_a_header_that_promises_more_than_there_is() -> None:
    content = packed(tone())
    assert len(read_clip(content[:40] + struct.pack("<I", 2**31) + content[44:])) == SAMPLE_RATE


@pytest.mark.parametrize(("package", "rate"), [("soundfile", SAMPLE_RATE), ("soxr", 8000)])
def test_a_missing_package_is_named(package: str, rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = packed(tone(rate=rate), rate)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{package}'; .*pip install 'seqdefer\[speech\]'"):
        read_clip(content)


# -- writing -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "folder" / "clip.flac", 3 * tone())
    np.testing.assert_allclose(read_clip(path), np.clip(3 * tone(), -1, 1), atol=1e-4)
    assert path.read_bytes()[:4] == b"fLaC"
    assert [one.name for one in path.parent.iterdir()] == ["clip.flac"]
