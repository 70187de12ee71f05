"""How many passes the expert makes to write a sequence: what latency follows, where written tokens do not tell.

The predictor runs ahead in chunks, as in `seqdefer.engine.speculative`: it writes up to k tokens, and goes on with its
own token where it will defer. One pass of the expert then settles the chunk. A chunk ends after k tokens, at a deferred
position where the expert names another token (what the predictor wrote after it is dropped), or with the sequence.

    a rule that decides before the expert reads    a pass for every chunk with a deferred position
    a rule that lets the expert read first         a pass for every chunk

k = 1 is the plain loop: a pass for every deferred token, or one for every position. Whole and one-time deferral let the
expert write on its own: a pass for every token of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 8  # tokens


class PassCounter:
    """Counts the passes of rollouts of any shape, position by position."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, reads_first: bool, chunk: int = CHUNK) -> None:
        self.chunk = chunk
        self.passes = torch.zeros(shape, dtype=torch.long, device=device)
        self._every = torch.full(shape, reads_first, device=device)
        self._needed = self._every.clone()  # whether the chunk that is open takes a pass
        self._size = torch.zeros_like(self.passes)  # tokens in the chunk that is open

    def add(self, live: Tensor, defer: Tensor, differ: Tensor, is_last: Tensor) -> None:
        """Add one position: rows that reach it, that defer there, whose models name different tokens there, and that
        end there. All bool."""
        self._needed |= defer & live
        self._size += live
        closes = live & (is_last | (defer & differ) | (self._size == self.chunk))
        self.passes += closes & self._needed
        self._size = self._size.masked_fill(closes, 0)
        self._needed = torch.where(closes, self._every, self._needed)
