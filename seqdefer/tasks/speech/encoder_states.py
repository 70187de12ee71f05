"""A cache of the encoder states of clips, in memory and on disk.

A CPU encodes a clip with whisper-small in about 3 s and reads its states, 4.6 MB, in milliseconds. Labelling and
evaluation pass over all clips again and again, so that a memory that holds fewer than all helps little; a folder holds
them all, one file for each clip, named by its samples. The files of a model lie in a folder named by its fingerprint.

States are kept as they are. Rounded to half precision they would take half the room, and a model could write other
tokens where two are about equally likely.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import torch
from torch import Tensor

from seqdefer.errors import CheckpointError
from seqdefer.storage.files import read_tensors, write_tensors
from seqdefer.tasks.speech.waveforms import NO_SAMPLE
from seqdefer.tasks.text.encoder_cache import Encode, EncoderCache

CLIPS_PER_PASS = {"cpu": 1, "gpu": 16}


class UnstoredStatesWarning(UserWarning):
    """Encoder states could not be stored, so that clips will be encoded again."""


class ClipStates(EncoderCache):
    """A cache of at most `n_bytes` in memory; with `folder`, of all clips on disk."""

    def __init__(self, n_bytes: int = 0, folder: Path | None = None) -> None:
        super().__init__(n_bytes)
        self.folder = folder

    def get(self, inputs: Tensor, encode: Encode) -> Tensor:
        """Return states (R, S, H) of waveforms (R, W)."""
        if not self.n_bytes and self.folder is None:
            return torch.cat([self._run(part, encode) for part in inputs.split(_per_pass(inputs))])
        keys = [
            hashlib.blake2b(row[row != NO_SAMPLE].numpy().tobytes(), digest_size=16).digest() for row in inputs.cpu()
        ]
        found = {key: self._find(key) for key in dict.fromkeys(keys)}
        new = [keys.index(key) for key, states in found.items() if states is None]
        for start in range(0, len(new), _per_pass(inputs)):
            part = new[start : start + _per_pass(inputs)]
            made = self._run(inputs[torch.tensor(part, device=inputs.device)], encode)
            for row, states in zip(part, made, strict=True):
                found[keys[row]] = kept = states.clone()
                self._write(keys[row], kept)
        rows = [found[key] for key in keys]
        for key, states in found.items():
            if states is not None and self.n_bytes:
                self._store(key, states)
        return torch.stack([row.to(inputs.device) for row in rows if row is not None])

    def _find(self, key: bytes) -> Tensor | None:
        if key in self._states:
            self._states.move_to_end(key)
            return self._states[key]
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        try:
            return read_tensors(path)["states"]
        except (CheckpointError, KeyError):  # damaged: it is made again
            return None

    def _write(self, key: bytes, states: Tensor) -> None:
        path = self._path(key)
        if path is None:
            return
        try:
            write_tensors(path, {"states": states})
        except OSError as error:
            self.folder = None
            warnings.warn(
                f"cannot store encoder states in {path.parent}: {error.strerror or error}; clips will be encoded again",
                UnstoredStatesWarning,
                stacklevel=2,
            )

    def _path(self, key: bytes) -> Path | None:
        return None if self.folder is None else self.folder / f"{key.hex()}.safetensors"


def _per_pass(inputs: Tensor) -> int:
    return CLIPS_PER_PASS["cpu" if inputs.device.type == "cpu" else "gpu"]
