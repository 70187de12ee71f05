"""The records that stages exchange: frozen dataclasses of tensors whose first dimension is the batch.

Shapes: B rows in a batch, n examples, L the longest sequence, F features of a step, C numbers of context.
A token is a float (a forecast) or an int64 (a vocabulary id, a city); a record never mixes the two.
Past the end of a shorter sequence tokens are padding (0) and carry no meaning: read `lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

import torch
from torch import Tensor

Granularity = Literal["whole", "once", "token"]
PREDICTOR, EXPERT = 0, 1  # authors of a token; `Served.authors` has their names


class TensorRecord:
    """Base of frozen dataclasses of tensors and other records; fields of other types stay as they are."""

    def _map(self, change: Callable[[Any], Any]) -> Self:
        """Return a copy with every tensor and record changed."""
        parts = vars(self).items()
        return type(self)(**{n: change(part) if isinstance(part, Tensor | TensorRecord) else part for n, part in parts})

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda part: part.to(device))


class BatchRecord(TensorRecord):
    """Base of records with a row for each item of a batch: the first dimension of every tensor."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def select(self, rows: Tensor) -> Self:
        """Return `rows` (int64 indices, repeats allowed), in that order."""
        return self._map(lambda part: part[rows] if isinstance(part, Tensor) else part.select(rows))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Put the rows of all parts under each other."""
        if len(parts) == 1:
            return parts[0]
        columns = {name: [vars(part)[name] for part in parts] for name in vars(parts[0])}
        return cls(**{name: _joined(column) for name, column in columns.items()})


def _joined(column: list[Any]) -> Any:
    first = column[0]
    if isinstance(first, Tensor):
        return torch.cat(column)
    return first.join(column) if isinstance(first, BatchRecord) else first


@dataclass(frozen=True)
class SequenceSpec:
    """What every sequence of a task looks like: at most `length` tokens; `end`, if any, is the token that ends one."""

    length: int
    end: int | None = None

    def is_end(self, tokens: Tensor) -> Tensor:
        """Mark the tokens that end their sequence. (B,) -> bool (B,)"""
        return torch.zeros_like(tokens, dtype=torch.bool) if self.end is None else tokens == self.end

    def is_over(self, prefixes: Sequences) -> Tensor:
        """Mark the prefixes that are whole sequences: they end with the end token, or have all tokens. bool (B,)"""
        last = (prefixes.lengths - 1).clamp(min=0)
        at_end = self.is_end(prefixes.tokens.gather(1, last[:, None]).squeeze(1)) & (prefixes.lengths > 0)
        return at_end | (prefixes.lengths >= self.length)


@dataclass(frozen=True)
class Examples(BatchRecord):
    """Inputs with their targets. Predictors see `inputs` alone; a simulated expert may look at `targets`."""

    inputs: Tensor  # (n, ...)
    targets: Tensor  # (n, ...)
    ids: Tensor  # (n,) int64, an identity that survives selection and splitting


@dataclass(frozen=True)
class PairStatistics(BatchRecord):
    """What both models' distributions say about a position, once the expert has read what was written before it.

    q is the predictor's distribution, p the expert's, v the token that the predictor proposes.
    """

    max_q: Tensor  # (B,)
    max_p: Tensor  # (B,)
    q_v: Tensor  # (B,) q(v)
    p_v: Tensor  # (B,) p(v)
    entropy_p: Tensor  # (B,) in nats
    distance: Tensor  # (B,) total variation: sum of max(0, p - q)
    differ: Tensor  # (B,) 1 where the expert names another token than v, else 0

    @classmethod
    def of(cls, columns: Tensor) -> Self:
        """Return the statistics in the columns of a tensor (B, 7), as `stack` made it."""
        return cls(*columns.unbind(1))

    def stack(self) -> Tensor:
        """Return all of them in one tensor (B, 7)."""
        return torch.stack([getattr(self, one.name) for one in fields(self)], 1)


@dataclass(frozen=True)
class Proposal(BatchRecord):
    """The predictor's next token, and what it knows about it. `pair` is there only for those who let the expert read
    first."""

    tokens: Tensor  # (B,)
    features: Tensor  # (B, F) decoder state and whatever else the rejector may see at this step
    uncertainty: Tensor  # (B,) -log p(token), or a variance for real-valued tokens: larger is less certain
    entropy: Tensor | None = None  # (B,) of the predictive distribution; None for real-valued tokens
    pair: PairStatistics | None = field(default=None, kw_only=True)

    def tensors(self) -> list[Tensor]:
        """Return the tensors, without `pair`; `Proposal(*tensors)` is the proposal again."""
        return [self.tokens, self.features, self.uncertainty, *([] if self.entropy is None else [self.entropy])]


@dataclass(frozen=True)
class Sequences(BatchRecord):
    """Sequences (or prefixes) of different lengths in one padded tensor."""

    tokens: Tensor  # (B, L)
    lengths: Tensor  # (B,) int64, the end token counted

    def truncate(self, kept: Tensor) -> Sequences:
        """Keep the first `kept` tokens of each row (all of a row that is shorter). kept: (B,)"""
        return Sequences(self.tokens, torch.minimum(self.lengths, kept))

    def mask(self) -> Tensor:
        """Mark the positions that hold a token. bool (B, L)"""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return positions[None, :] < self.lengths[:, None]


@dataclass(frozen=True)
class Step:
    """One position of a batch as the engine writes it."""

    position: int
    tokens: Tensor  # (B,)
    authors: Tensor  # int64 (B,): PREDICTOR or EXPERT
    scores: Tensor  # (B,): the policy's score of deferring here
    active: Tensor  # bool (B,): False where the row had ended before this step
    rows: Tensor  # int64 (R,): the rows for which the predictor still runs
    proposal: Proposal  # the predictor's for `rows`, also where the expert wrote
    context: Tensor  # (B, C) as `Predictor.start` gave it

    @property
    def by_expert(self) -> Tensor:
        """Mark the tokens that the expert wrote. bool (B,)"""
        return self.authors != PREDICTOR


@dataclass(frozen=True)
class Rollout:
    """Whole sequences as the engine wrote them, with the author of every token."""

    sequences: Sequences
    authors: Tensor  # int64 (B, L): PREDICTOR or EXPERT; 0 past the end
    scores: Tensor  # (B, L), 0 past the end

    @property
    def by_expert(self) -> Tensor:
        """Mark the tokens that the expert wrote. bool (B, L)"""
        return self.authors != PREDICTOR

    @property
    def deferred(self) -> Tensor:
        """Count the tokens that the expert wrote. int64 (B,)"""
        return self.by_expert.sum(1)

    @property
    def switches(self) -> Tensor:
        """Count the changes of author. int64 (B,)"""
        mask = self.sequences.mask()
        return ((self.authors[:, 1:] != self.authors[:, :-1]) & mask[:, 1:]).sum(1)

    @property
    def share(self) -> float:
        """The realised budget: the share of all tokens that the expert wrote."""
        return float(self.by_expert.sum() / self.sequences.lengths.sum())


@dataclass(frozen=True)
class Draft(BatchRecord):
    """What the predictor writes on its own, with everything a rejector may look at."""

    context: Tensor  # (B, C)
    sequences: Sequences
    features: Tensor  # (B, L, F), 0 past the end
    uncertainty: Tensor  # (B, L), 0 past the end
    entropy: Tensor | None  # (B, L)


@dataclass(frozen=True)
class HandOffTable(BatchRecord):
    """The outcome of every one-time hand-off: column k keeps k tokens of the draft, the expert writes the rest.

    Column 0 is the expert alone, column L the predictor alone. A draft that ends before k has nothing left to hand
    off, so its columns from there on repeat the last one. Hand-offs that were not labelled have a loss of nan.
    """

    loss: Tensor  # (n, L+1) sequence loss
    deferred: Tensor  # (n, L+1) tokens that the expert wrote; -1 where not labelled
