"""Plans: how one batch of inputs runs at the settings of its rows, whoever asks (Python, evaluation, server).

    plan = TokenPlan(pair, rejector, examples, settings)
    for step in plan.steps():        # as soon as each position is written
        print(step.position, step.tokens, step.authors)
    result = plan.run()              # or all at once

Token level, each row has its own threshold. One-time, the predictor drafts first; what it wrote before the first
hand-off can be shown at once, and then the expert completes all rows that are handed off in one call. A batch may run
with another expert than the pair's (one that falls back to the predictor), and rows may be barred from deferring:
they only show where they would.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import complete_drafts, draft, is_past
from seqdefer.engine.interleaved import interleave, roll_out
from seqdefer.interfaces import DraftRejector, Expert, Predictor, TokenRejector
from seqdefer.types import Draft, Examples, Proposal, Rollout, SequenceSpec

DroppedRows = Callable[[], Tensor]  # returns the rows that need nothing more, int64 indices


def _no_rows() -> Tensor:
    return torch.arange(0)


class Pair(Protocol):
    """A predictor and an expert; tasks and served pairs are pairs."""

    @property
    def predictor(self) -> Predictor[Any]: ...
    @property
    def expert(self) -> Expert: ...
    @property
    def spec(self) -> SequenceSpec: ...


@dataclass(frozen=True)
class PlanStep:
    """One position of n rows; tensors (n,), on the CPU."""

    position: int
    tokens: Tensor
    authors: Tensor  # int64
    scores: Tensor
    active: Tensor  # bool: rows that reach this position
    wanted: Tensor  # bool: the rejector wants the expert here, whoever then wrote


@dataclass(frozen=True)
class PlanResult:
    """What n rows came to, on the CPU."""

    rollout: Rollout
    wanted: Tensor  # bool (n, L), False past the end


class Plan(ABC):
    """A batch to be written. `settings` (n,) are the rows' own; `may_defer` (bool (n,)), all rows by default.

    `watch` is called with what the predictor would write, before the expert is asked: every proposal, or the drafts."""

    def __init__(
        self,
        pair: Pair,
        rejector: Any,
        examples: Examples,
        settings: Tensor,
        *,
        expert: Expert | None = None,
        may_defer: Tensor | None = None,
        watch: Callable[[Proposal | Draft], None] = lambda _: None,
    ) -> None:
        self.pair, self.rejector, self.examples, self.settings = pair, rejector, examples, settings
        self.watch = watch
        self.expert = pair.expert if expert is None else expert
        self.may_defer = torch.ones(len(examples), dtype=torch.bool) if may_defer is None else may_defer

    @abstractmethod
    def steps(self, dropped: DroppedRows = _no_rows) -> Generator[PlanStep, None, None]:
        """Yield each position as soon as it is written. Rows in `dropped()` need nothing more: the plan asks for them
        before work that it can then save, and what it still yields for them has no meaning."""

    @abstractmethod
    def run(self) -> PlanResult:
        """Write all positions."""


class TokenPlan(Plan):
    """Token-level deferral."""

    rejector: TokenRejector[Any]

    def steps(self, dropped: DroppedRows = _no_rows) -> Generator[PlanStep, None, None]:
        pair = self.pair
        steps = interleave(pair.predictor, self.expert, self.examples, self._policy, pair.spec)
        step = next(steps)
        while True:
            scores = step.scores.cpu()
            parts = (step.tokens.cpu(), step.authors.cpu(), scores, step.active.cpu())
            yield PlanStep(step.position, *parts, scores >= self.settings)
            try:
                step = steps.send(dropped().to(step.rows.device))
            except StopIteration:
                return

    def run(self) -> PlanResult:
        pair = self.pair
        rollout = _on_cpu(roll_out(pair.predictor, self.expert, self.examples, self._policy, pair.spec))
        return PlanResult(rollout, (rollout.scores >= self.settings[:, None]) & rollout.sequences.mask())

    @property
    def _policy(self) -> Threshold:
        thresholds = torch.where(self.may_defer, self.settings, math.inf)
        return Threshold(self.rejector, thresholds, watch=self.watch)


class HandOffPlan(Plan):
    """Whole and one-time deferral."""

    rejector: DraftRejector

    @cached_property
    def drafted(self) -> Draft:
        """What the predictor writes alone."""
        drafted = draft(self.pair.predictor, self.examples, self.pair.spec)
        self.watch(drafted)
        return drafted

    @cached_property
    def kept(self) -> Tensor:
        """Tokens of each draft that stay where its row may defer. int64 (n,)"""
        return torch.from_numpy(self._scored.kept(self.settings))

    def steps(self, dropped: DroppedRows = _no_rows) -> Generator[PlanStep, None, None]:
        length = self.pair.spec.length
        kept = torch.where(self.may_defer, self.kept, length)
        first = int(kept.min())
        yield from self._positions(self._completed(torch.full_like(kept, length)), range(first))
        if first < length:
            kept[dropped()] = length
            yield from self._positions(self._completed(kept), range(first, length))

    def run(self) -> PlanResult:
        length = self.pair.spec.length
        rollout = self._completed(torch.where(self.may_defer, self.kept, length))
        return PlanResult(rollout, is_past(self.kept, length) & rollout.sequences.mask())

    @cached_property
    def _scored(self) -> ScoredHandOffs:
        return scored_hand_offs(self.rejector, self.drafted, self.pair.spec.length)

    @cached_property
    def _scores(self) -> Tensor:
        return torch.from_numpy(self._scored.by_position()).float()

    def _completed(self, kept: Tensor) -> Rollout:
        predictor, drafts = self.pair.predictor, self.drafted.sequences
        return complete_drafts(predictor, self.expert, self.examples, drafts, kept, self._scores, self.pair.spec)

    def _positions(self, rollout: Rollout, positions: range) -> Generator[PlanStep, None, None]:
        mask = rollout.sequences.mask()
        for position in positions:
            tokens, authors, scores, active = (
                part[:, position] for part in (rollout.sequences.tokens, rollout.authors, rollout.scores, mask)
            )
            yield PlanStep(position, tokens, authors, scores, active, position >= self.kept)


def scored_hand_offs(rejector: DraftRejector, drafted: Draft, length: int) -> ScoredHandOffs:
    """Score drafts, with the rule that the rejector decides by."""
    return ScoredHandOffs.of(
        rejector.score(drafted), length, hand_offs=rejector.hand_offs, rule=rejector.rule,
        lengths=drafted.sequences.lengths,
    )  # fmt: skip


def _on_cpu(rollout: Rollout) -> Rollout:
    sequences = type(rollout.sequences)(rollout.sequences.tokens.cpu(), rollout.sequences.lengths.cpu())
    return Rollout(sequences, rollout.authors.cpu(), rollout.scores.cpu())
