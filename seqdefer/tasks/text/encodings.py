"""What an encoder made of its inputs, remembered: labelling and trees come back to the same documents again and again.

An encoding belongs to a document, not to a batch: `Encodings.of` pads what it remembers and what is new to one width.
Documents that are new are encoded in groups of similar length, because padding is work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

AT_ONCE = {"cpu": 512, "gpu": 65_536}  # tokens that keep the machine busy
Encode = Callable[[Tensor], Tensor]  # inputs (R, S) -> states (R, S, H)


class Encodings:
    """The latest encodings, of at most `n_bytes` together. 0 remembers nothing."""

    def __init__(self, n_bytes: int = 0) -> None:
        self.n_bytes = n_bytes
        self.n_encoded = 0  # documents the encoder has read
        self._size = 0
        self._states: OrderedDict[bytes, Tensor] = OrderedDict()  # by the document's token ids: (S of its own, H)

    def of(self, inputs: Tensor, encode: Encode) -> Tensor:
        """States (R, S, H) of inputs (R, S) whose rows end with negative ids as padding; 0 there."""
        lengths = (inputs >= 0).sum(1).cpu()
        keys = self._keys(inputs, lengths) if self.n_bytes else []
        known = {row: self._states[key] for row, key in enumerate(keys) if key in self._states}
        new = torch.tensor([row for row in range(len(inputs)) if row not in known], dtype=torch.long)
        if len(new) == len(inputs) and bool((lengths == lengths[0]).all()):
            states = self._run(inputs, encode)
        else:
            states = self._gather(inputs, lengths, new, known, encode)
        for row in new.tolist() if self.n_bytes else ():
            self._remember(keys[row], states[row, : int(lengths[row])].clone())
        for row in known:
            if keys[row] in self._states:  # not forgotten just now
                self._states.move_to_end(keys[row])
        return states

    def _gather(self, inputs: Tensor, lengths: Tensor, new: Tensor, known: dict[int, Tensor], encode: Encode) -> Tensor:
        states: Tensor | None = None
        for rows in alike(new, lengths, AT_ONCE["cpu" if inputs.device.type == "cpu" else "gpu"]):
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

    def _remember(self, key: bytes, states: Tensor) -> None:
        if key not in self._states:
            self._states[key] = states
            self._size += states.nbytes
        while self._size > self.n_bytes:
            self._size -= self._states.popitem(last=False)[1].nbytes


def alike(rows: Tensor, lengths: Tensor, n_tokens: int) -> Iterator[Tensor]:
    """Rows of similar length together, about `n_tokens` tokens with their padding."""
    rows = rows[lengths[rows].argsort(descending=True)]
    while len(rows):
        group, rows = rows.tensor_split([max(1, n_tokens // int(lengths[rows[0]]))])
        yield group
