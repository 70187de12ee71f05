"""Token losses of any sequence loss: what a token costs if the expert completes the sequence after it.

With V(w) the loss of the expert's completion of a prefix w, a token t adds

    max(0, V(w t) - V(w))

The expert's own token adds nothing: it is how the completion of w goes on. A token of the predictor adds what it spoils
even for the expert. Without the maximum, the losses of all tokens add up to the loss of the sequence less V of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from seqdefer.interfaces import Expert
from seqdefer.types import Examples, Sequences, SequenceSpec

MAX_KNOWN = 100_000  # completions to remember


class _Prefix(NamedTuple):
    """The first tokens of a sequence for an example."""

    example: int  # its id
    tokens: tuple[int, ...]


class _Completion(NamedTuple):
    """The expert's completion of a prefix."""

    tokens: tuple[int, ...]
    loss: float


class CostToGo:
    """Losses of tokens from the losses of whole sequences. It remembers completions: trees repeat prefixes, and where
    a token is the one that the expert would write, the completion stays the same."""

    def __init__(
        self, expert: Expert, spec: SequenceSpec, sequence_loss: Callable[[Examples, Sequences], Tensor]
    ) -> None:
        self.expert, self.spec, self.sequence_loss = expert, spec, sequence_loss
        self._known: dict[_Prefix, _Completion] = {}

    def token_losses(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        """Return what `tokens` (B,) add after `prefixes`. (B,)"""
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        before = _prefixes(examples, prefixes)
        after = [_Prefix(id_, (*old, new)) for (id_, old), new in zip(before, tokens.tolist(), strict=True)]
        self._complete(examples, before)
        for short, long in zip(before, after, strict=True):
            known = self._known[short]
            if self.expert.deterministic and known.tokens[: len(long.tokens)] == long.tokens:
                self._known[long] = known
        self._complete(examples, after)
        rises = [self._known[long].loss - self._known[short].loss for short, long in zip(before, after, strict=True)]
        return torch.tensor(rises, device=tokens.device).clamp(min=0)

    def _complete(self, examples: Examples, wanted: Iterable[_Prefix]) -> None:
        """Have the expert complete the prefixes that are not known yet; rows of `examples` belong to them in order."""
        rows = {prefix: row for row, prefix in enumerate(wanted) if prefix not in self._known}
        missing, size = list(rows), self.expert.batch_size
        for start in range(0, len(missing), size):
            batch = missing[start : start + size]
            picked = examples.select(torch.tensor([rows[one] for one in batch], device=examples.inputs.device))
            written = self.expert.complete(picked, self._padded(batch, examples.targets.device), self.spec)
            losses = self.sequence_loss(picked, written).tolist()
            whole = [row[:n] for row, n in zip(written.tokens.tolist(), written.lengths.tolist(), strict=True)]
            for prefix, row, loss in zip(batch, whole, losses, strict=True):
                self._known[prefix] = _Completion(tuple(row), loss)

    def _padded(self, prefixes: list[_Prefix], device: torch.device) -> Sequences:
        rows = [[*one.tokens, *[0] * (self.spec.length - len(one.tokens))] for one in prefixes]
        lengths = [len(one.tokens) for one in prefixes]
        return Sequences(torch.tensor(rows, device=device), torch.tensor(lengths, device=device))


def _prefixes(examples: Examples, prefixes: Sequences) -> list[_Prefix]:
    rows = zip(examples.ids.tolist(), prefixes.tokens.tolist(), prefixes.lengths.tolist(), strict=True)
    return [_Prefix(id_, tuple(tokens[:n])) for id_, tokens, n in rows]
