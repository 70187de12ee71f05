"""Sound to waveforms and tokens to text: what users give, what the models hear, and what each token adds."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqdefer.errors import DataError, InputError
from seqdefer.interfaces import Codec
from seqdefer.tasks.speech.audio import SAMPLE_RATE, check_samples, in_seconds, read_clip
from seqdefer.tasks.speech.network import SAMPLES_PER_STATE, SpeechNetwork
from seqdefer.tasks.speech.waveforms import stack_waveforms, to_samples
from seqdefer.tasks.text.codec import END_SIGN
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.types import Examples


class SpeechCodec(Codec):
    """The codec of speech: a WAV or FLAC file in, a text out.

    An input is a `Path`, the bytes of a file, or samples at 16,000 Hz between -1 and 1 as a NumPy array. A text is
    the base64 code of a file, optionally as a data URL: requests bring files so, and can name none on this machine.
    """

    kind, field, hint = "text", "audio_filepath", "clip.wav"
    about = "listens to speech and writes it down"
    reads_bytes = True
    sample_rate, columns_per_token = SAMPLE_RATE, SAMPLES_PER_STATE
    max_seconds: float

    def __init__(self, pair: TextPair, language: str | None = None) -> None:
        self.language = language
        self.tokenizer, self.end = pair.predictor.model.tokenizer, pair.predictor.end
        networks = [model.network for model in pair.models]
        self.max_seconds = min(one.max_seconds for one in networks if isinstance(one, SpeechNetwork))

    def local_input(self, text: str, folder: Path) -> Path:
        return folder / Path(text).expanduser()

    def encode(self, inputs: Sequence[Any]) -> Examples:
        rows = []
        for place, one in enumerate(inputs):
            name = str(one) if isinstance(one, Path) else f"input {place + 1} of {len(inputs)}"
            rows.append(self._samples(one, name))
        samples = stack_waveforms(rows) if rows else torch.zeros(0, 1, dtype=torch.int16)
        return Examples(samples, torch.zeros(len(rows), 1, dtype=torch.long), torch.arange(len(rows)))

    def _samples(self, one: Any, name: str) -> Tensor:
        """Return the samples of one input. int16 (W,)"""
        if isinstance(one, np.ndarray):
            return to_samples(self._checked(one, name))
        content = _from_base64(one, name) if isinstance(one, str) else one
        if not isinstance(content, bytes | Path):
            raise InputError(f"{name} is a {type(one).__name__}; give a Path, the bytes of a file, or samples")
        return to_samples(read_clip(content, name, max_seconds=self.max_seconds))

    def _checked(self, samples: Any, name: str) -> Any:
        if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
            raise DataError(f"{name} is {samples.dtype} {samples.shape}; give floats (n,) between -1 and 1")
        seconds = len(samples) / SAMPLE_RATE
        if seconds > self.max_seconds:
            raise DataError(f"{name} lasts {in_seconds(seconds)}; give samples of at most {self.max_seconds:g} s")
        check_samples(samples, SAMPLE_RATE, name)
        return samples

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "contentEncoding": "base64", "description": "a WAV or FLAC file"}

    def decode(self, tokens: Sequence[Any]) -> str:
        return self.text(tokens).strip()

    def text(self, tokens: Sequence[Any]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def pieces(self, tokens: Sequence[Any]) -> list[str]:
        """Return what each token adds; the end token, which has no text, is shown as a sign."""
        pieces = zip(super().pieces(tokens), tokens, strict=True)
        return [piece + (END_SIGN if token == self.end else "") for piece, token in pieces]


def _from_base64(text: str, name: str) -> bytes:
    head, comma, tail = text.partition(",")
    code = tail if comma and head.startswith("data:") else text
    try:
        return base64.b64decode(code, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"{name} is not the base64 code of a WAV or FLAC file; in Python, give the name of a file as a Path"
        ) from error
