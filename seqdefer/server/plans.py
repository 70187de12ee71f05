"""Who decides in a cohort, and what is then written, one position of all rows at a time.

By token each row has its own threshold. One-time, the predictor's drafts come first; what it wrote before the first
hand-off can be told at once, and then the expert completes all rows that are handed off in one call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqdefer.budgets.policies import by_position, choose_kept
from seqdefer.engine.interleaved import complete_drafts, draft, interleave
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.networks import DraftNetwork, TokenNetwork
from seqdefer.server.guarding import Caller, Guard, RowThresholds
from seqdefer.types import Examples, Rollout

Unwanted = Callable[[], Tensor]  # rows that nothing more need be written of, int64 indices


@dataclass(frozen=True)
class Written:
    """One position of n rows; tensors (n,), on the CPU."""

    position: int
    tokens: Tensor
    by_expert: Tensor  # bool
    scores: Tensor
    active: Tensor  # bool: rows that go as far
    wishes: Tensor  # bool: where the rejector wants the expert, whoever then wrote
    missed: Tensor  # bool: rows that the expert should have written, here or before, and did not


class Plan(ABC):
    """`thresholds` (n,) are the rows' own; `silent` (bool (n,)) ones never defer, and only say where they would."""

    guard: Guard

    def __init__(self, model: DeferringModel, examples: Examples, thresholds: Sequence[float], silent: Tensor) -> None:
        self.model, self.served, self.examples = model, model.served, examples
        self.thresholds, self.silent = list(thresholds), silent

    @abstractmethod
    def write(self, unwanted: Unwanted) -> Generator[Written, None, None]: ...


class ByToken(Plan):
    def __init__(self, *whose: Any, call: Caller) -> None:
        super().__init__(*whose)
        self.guard = Guard(self.served.expert, call)

    def write(self, unwanted: Unwanted) -> Generator[Written, None, None]:
        assert isinstance(self.model.rejector, TokenNetwork)
        thresholds, missed = torch.tensor(self.thresholds), torch.zeros(len(self.examples), dtype=torch.bool)
        effective = torch.where(self.silent, math.inf, thresholds)
        policy = RowThresholds(self.model.rejector, effective, self.guard)
        steps = interleave(self.served.predictor, self.guard, self.examples, policy, self.served.spec)
        step = next(steps)
        while True:
            scores, active = step.scores.cpu(), step.active.cpu()
            wishes = scores >= thresholds
            if self.guard.has_failed:
                missed = missed | (wishes & ~self.silent & active)
            by_expert = step.by_expert.cpu() & ~missed
            yield Written(step.position, step.tokens.cpu(), by_expert, scores, active, wishes, missed)
            try:
                step = steps.send(unwanted().to(step.rows.device))
            except StopIteration:
                return


class OneTime(Plan):
    def __init__(self, *whose: Any, call: Caller) -> None:
        super().__init__(*whose)
        rejector = self.model.rejector
        assert isinstance(rejector, DraftNetwork)
        drafted = draft(self.served.predictor, self.examples, self.served.spec)
        scores = rejector.score(drafted)
        rows = zip(torch.arange(len(self.examples)).split(1), self.thresholds, strict=True)
        self.drafts, self.scores = drafted.sequences, by_position(scores, rejector.sizes.hand_offs)
        self.kept = torch.cat([choose_kept(rejector, scores[row], drafted.select(row), at) for row, at in rows])
        self.guard = Guard(self.served.expert, call, drafted.sequences)

    def write(self, unwanted: Unwanted) -> Generator[Written, None, None]:
        length = self.served.spec.length
        kept = torch.where(self.silent, length, self.kept)
        nobody = torch.zeros(len(kept), dtype=torch.bool)
        first = int(kept.min())
        alone = self._completed(torch.full_like(kept, length))
        yield from self._positions(alone, range(first), nobody)
        if first < length:
            kept[unwanted()] = length
            whole = self._completed(kept)
            missed = kept < self.drafts.lengths if self.guard.has_failed else nobody
            yield from self._positions(whole, range(first, length), missed)

    def _completed(self, kept: Tensor) -> Rollout:
        predictor, spec = self.served.predictor, self.served.spec
        return complete_drafts(predictor, self.guard, self.examples, self.drafts, kept, self.scores, spec)

    def _positions(self, rollout: Rollout, positions: range, missed: Tensor) -> Generator[Written, None, None]:
        mask = rollout.sequences.mask()
        for position in positions:
            by_expert = rollout.by_expert[:, position] & ~missed
            tokens, scores, active = (part[:, position] for part in (rollout.sequences.tokens, rollout.scores, mask))
            yield Written(position, tokens, by_expert, scores, active, position >= self.kept, missed)
