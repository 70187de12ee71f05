"""A cache of encoder states: labelling reads the same documents again and again.

Entries belong to documents, not to batches: `EncoderCache.get` pads cached and new states to one width. New documents
are encoded in groups of similar length, because padding costs time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from seqdefer.tasks.text.batches import group_by_length

TOKENS_PER_PASS = {"cpu": 512, "gpu": 65_536}  # enough to keep the device busy
Encode = Callable[[Tensor], Tensor]  # inputs (R, S) -> states (R, S, H)


class EncoderCache:
    """An LRU cache of at most `n_bytes` of encoder states; 0 disables it."""

    def __init__(self, n_bytes: int = 0) -> None:
        self.n_bytes = n_bytes
        self.n_encoded = 0  # documents encoded so far
        self._size = 0
        self._states: OrderedDict[bytes, Tensor] = OrderedDict()  # token ids: (own S, H)

    def get(self, inputs: Tensor, encode: Encode) -> Tensor:
        """Return states (R, S, H) of inputs (R, S), 0 at the padding: negative ids at the end of a row."""
        lengths = (inputs >= 0).sum(1).cpu()
        keys = self._keys(inputs, lengths) if self.n_bytes else []
        known = {row: self._states[key] for row, key in enumerate(keys) if key in self._states}
        new = torch.tensor([row for row in range(len(inputs)) if row not in known], dtype=torch.long)
        if len(new) == len(inputs) and bool((lengths == lengths[0]).all()):
            states = self._run(inputs, encode)
        else:
            states = self._gather(inputs, lengths, new, known, encode)
        for row in new.tolist() if self.n_bytes else ():
            self._store(keys[row], states[row, : int(lengths[row])].clone())
        for row in known:
            if keys[row] in self._states:  # not evicted just now
                self._states.move_to_end(keys[row])
        return states

    def _gather(self, inputs: Tensor, lengths: Tensor, new: Tensor, known: dict[int, Tensor], encode: Encode) -> Tensor:
        states: Tensor | None = None
        n_tokens = TOKENS_PER_PASS["cpu" if inputs.device.type == "cpu" else "gpu"]
        for rows in group_by_length(new, lengths, n_tokens):
            width, place = int(lengths[rows].max()), rows.to(inputs.device)
            made = self._run(inputs[place, :width], encode)
            states = made.new_zeros(*inputs.shape, made.shape[2]) if states is None else states
            states[place, :width] = made * (inputs[place, :width] >= 0)[:, :, None]
        for row, found in known.items():
            states = found.new_zeros(*inputs.shape, found.shape[1]) if states is None else states
            states[row, : len(found)] = found
        assert states is not None
        return states

    def _run(self, inputs: Tensor, encode: Encode) -> Tensor:
        self.n_encoded += len(inputs)
        return encode(inputs)

    @staticmethod
    def _keys(inputs: Tensor, lengths: Tensor) -> list[bytes]:
        rows = inputs.cpu().numpy()
        return [rows[row, :length].tobytes() for row, length in enumerate(lengths.tolist())]

    def _store(self, key: bytes, states: Tensor) -> None:
        if key not in self._states:
            self._states[key] = states
            self._size += states.nbytes
        while self._size > self.n_bytes:
            self._size -= self._states.popitem(last=False)[1].nbytes
