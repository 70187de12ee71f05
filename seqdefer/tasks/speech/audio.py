"""Clips of sound: read WAV and FLAC into mono samples at 16,000 Hz, write FLAC.

    samples = read_clip(Path("hello.wav"))  # float32 (n,), between -1 and 1

Files of other rates are resampled (soxr), channels are averaged. The format is recognised by the content, and only the
decoders of WAV and FLAC ever see a file. Size and length are checked before anything is decoded.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from seqdefer.errors import DataError, FormatError, TooLongError, missing_extra
from seqdefer.storage.files import write_aside
from seqdefer.storage.user_files import check_size

SAMPLE_RATE = 16_000  # Hz, as Whisper hears
MIN_SECONDS, MAX_SECONDS = 0.1, 30.0  # Whisper's window is 30 s
MAX_FILE_MIB = 64  # 30 s of 8 channels at 48,000 Hz and 32 bits have 44
MIN_RATE, MAX_RATE, MAX_CHANNELS = 4_000, 192_000, 8
MAX_AMPLITUDE = 8.0  # floats may exceed 1 a little; 16-bit numbers stored as floats would be cut to noise
MIN_RANGE = 2.0**-15  # between the largest and the smallest sample: less is silence once rounded to 16 bits

Samples = NDArray[np.float32]
_CONVERT = "convert it, for example with: ffmpeg -i IN -ac 1 -ar 16000 OUT.flac"
_BLOCK_FRAMES = 2**16  # decoded at a time: channels are averaged before they fill the memory
_UNKNOWN_LENGTH = 2**62  # libsndfile's number of frames is then the largest of 64 bits


def read_clip(source: Path | bytes | BinaryIO, name: str | None = None, *, max_seconds: float = MAX_SECONDS) -> Samples:
    """Return the samples of a clip at 16,000 Hz. `name` stands for bytes and uploads in errors."""
    name = _name(source, name)
    with _opened(source, name, max_seconds) as sound:
        mono, rate = _decode(sound), int(sound.samplerate)
    check_samples(mono, rate, name)
    return resample(mono, rate)


def read_seconds(
    source: Path | bytes | BinaryIO, name: str | None = None, *, max_seconds: float = MAX_SECONDS
) -> float:
    """Return the length of a clip from its header, after the checks that need no decoding."""
    with _opened(source, _name(source, name), max_seconds) as sound:
        return float(sound.frames / sound.samplerate)


def resample(samples: Samples, rate: int) -> Samples:
    """Return samples of another rate at 16,000 Hz."""
    if rate == SAMPLE_RATE:
        return samples
    return np.asarray(_package("soxr").resample(samples, rate, SAMPLE_RATE), dtype=np.float32)


def write_clip(path: Path, samples: Samples) -> Path:
    """Write samples at 16,000 Hz as FLAC of 16 bits. Values beyond -1 and 1 are clipped."""
    content = to_flac(samples)

    def write(aside: Path) -> None:
        aside.write_bytes(content)

    return write_aside(path, write)


def to_flac(samples: Samples) -> bytes:
    """Return the file that `write_clip` writes."""
    file = io.BytesIO()
    _package("soundfile").write(file, np.clip(samples, -1, 1), SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def check_samples(samples: Samples, rate: int, name: str) -> None:
    """Refuse samples that are too few, not numbers, too large or silent."""
    if not len(samples):
        raise DataError(f"{name} has no samples; give a clip with speech")
    if len(samples) < MIN_SECONDS * rate:
        raise DataError(f"{name} lasts {in_seconds(len(samples) / rate)}; give at least {MIN_SECONDS} s")
    if not np.isfinite(samples).all():
        raise DataError(f"{name} has samples that are not numbers (NaN or infinite); record or convert it again")
    lowest, highest = float(samples.min()), float(samples.max())
    if (loudest := max(-lowest, highest)) > MAX_AMPLITUDE:
        raise DataError(f"{name} has a sample of {loudest:g}; samples lie between -1 and 1: convert it again")
    if highest - lowest <= MIN_RANGE:
        raise DataError(f"{name} is silent: its samples are all about the same; give a clip with speech")


def in_seconds(length: float) -> str:
    """Return a length for a message, to the sample: 30.00006 s are more than 30 s."""
    return f"{length:,.7g} s"


# -- files ---------------------------------------------------------------------------------------------------------


def _name(source: Path | bytes | BinaryIO, name: str | None) -> str:
    return name or (str(source) if isinstance(source, Path) else "the audio")


@contextmanager
def _opened(source: Path | bytes | BinaryIO, name: str, max_seconds: float) -> Iterator[Any]:
    """Open a clip as a `soundfile.SoundFile` whose size, format and header were checked."""
    with _reading_errors(name), _binary_file(source, name) as file:
        check_size(file.seek(0, os.SEEK_END), MAX_FILE_MIB, name, _cut(max_seconds))
        file.seek(0)
        _check_format(file.read(12), name)
        file.seek(0)
        # A number, because soundfile would take the format from the name of a file.
        handle = file.fileno() if isinstance(source, Path) else file
        with _package("soundfile").SoundFile(handle, closefd=False) as sound:
            _check_header(sound, name, max_seconds)
            yield sound


def _binary_file(source: Path | bytes | BinaryIO, name: str) -> BinaryIO:
    if not isinstance(source, Path):
        return io.BytesIO(source if isinstance(source, bytes) else source.read(MAX_FILE_MIB * 2**20 + 1))
    if source.is_fifo():  # its length is unknown, and opening it would wait
        raise DataError(f"cannot read {name}: it is a pipe; give a file")
    return source.open("rb", buffering=0)


@contextmanager
def _reading_errors(name: str) -> Iterator[None]:
    try:
        yield
    except _package("soundfile").LibsndfileError as error:
        reason = error.error_string.removeprefix("Error : ").strip(" .")
        raise DataError(f"{name} is damaged: {reason}; record or convert it again") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise DataError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error


def _check_format(magic: bytes, name: str) -> None:
    if not magic:
        raise DataError(f"{name} is empty; give a WAV or FLAC file")
    is_wav = magic[:4] in (b"RIFF", b"RIFX", b"RF64") and magic[8:] == b"WAVE"
    if not is_wav and magic[:4] != b"fLaC":
        raise FormatError(f"{name} is not a WAV or FLAC file; {_CONVERT}")


def _check_header(sound: Any, name: str, max_seconds: float) -> None:
    frames, rate, channels = int(sound.frames), int(sound.samplerate), int(sound.channels)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DataError(f"{name} has a rate of {rate:,} Hz; give {MIN_RATE:,} to {MAX_RATE:,} Hz")
    if channels > MAX_CHANNELS:
        raise DataError(f"{name} has {channels} channels; give at most {MAX_CHANNELS}")
    if frames >= _UNKNOWN_LENGTH:
        raise DataError(f"{name} does not say how long it is; {_CONVERT}")
    if frames > max_seconds * rate:
        raise TooLongError(f"{name} lasts {in_seconds(frames / rate)}; {_cut(max_seconds)}")


def _cut(max_seconds: float) -> str:
    return f"cut it into clips of at most {max_seconds:g} s"


def _decode(sound: Any) -> Samples:
    """Return the average of all channels. float32 (frames,)"""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are refused afterwards
        # `frames` is for what cannot seek (GSM).
        blocks = sound.blocks(_BLOCK_FRAMES, frames=sound.frames, dtype="float32", always_2d=True)
        parts = [block.mean(axis=1) for block in blocks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: soundfile without its library
        raise missing_extra(name, "speech", "reading and writing sound") from error
