"""How the rows of a cohort are written, one position of all rows at a time.

Token by token, each row has its own threshold. One-time, the predictor drafts first; the positions before the first
hand-off are yielded, and then the expert completes all deferred rows in one call.
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
from seqdefer.interfaces import Policy, TokenRejector
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.networks import DraftNetwork, TokenNetwork
from seqdefer.server.fallback import ExpertCaller, FallbackExpert
from seqdefer.types import Examples, Proposal, Rollout

Unwanted = Callable[[], Tensor]  # int64 indices of rows that need no more tokens


@dataclass(frozen=True)
class PlanStep:
    """One position of n rows; tensors (n,), on the CPU."""

    position: int
    tokens: Tensor
    by_expert: Tensor  # bool
    scores: Tensor
    active: Tensor  # bool: rows that reach this position
    wishes: Tensor  # bool: the rejector's decision, even if the expert failed
    missed: Tensor  # bool: deferred rows that the expert failed to write, here or before


class Plan(ABC):
    """A plan for n rows with `thresholds` (n,). `silent` rows, bool (n,), only score: they never defer."""

    guard: FallbackExpert

    def __init__(self, model: DeferringModel, examples: Examples, thresholds: Sequence[float], silent: Tensor) -> None:
        self.model, self.served, self.examples = model, model.served, examples
        self.thresholds, self.silent = list(thresholds), silent

    @abstractmethod
    def write(self, unwanted: Unwanted) -> Generator[PlanStep, None, None]: ...


class ByToken(Plan):
    def __init__(self, *whose: Any, call: ExpertCaller) -> None:
        super().__init__(*whose)
        self.guard = FallbackExpert(self.served.expert, call)

    def write(self, unwanted: Unwanted) -> Generator[PlanStep, None, None]:
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
            yield PlanStep(step.position, step.tokens.cpu(), by_expert, scores, active, wishes, missed)
            try:
                step = steps.send(unwanted().to(step.rows.device))
            except StopIteration:
                return


class OneTime(Plan):
    def __init__(self, *whose: Any, call: ExpertCaller) -> None:
        super().__init__(*whose)
        rejector = self.model.rejector
        assert isinstance(rejector, DraftNetwork)
        drafted = draft(self.served.predictor, self.examples, self.served.spec)
        scores = rejector.score(drafted)
        rows = zip(torch.arange(len(self.examples)).split(1), self.thresholds, strict=True)
        self.drafts, self.scores = drafted.sequences, by_position(scores, rejector.sizes.hand_offs)
        self.kept = torch.cat([choose_kept(rejector, scores[row], drafted.select(row), at) for row, at in rows])
        self.guard = FallbackExpert(self.served.expert, call, drafted.sequences)

    def write(self, unwanted: Unwanted) -> Generator[PlanStep, None, None]:
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

    def _positions(self, rollout: Rollout, positions: range, missed: Tensor) -> Generator[PlanStep, None, None]:
        mask = rollout.sequences.mask()
        for position in positions:
            by_expert = rollout.by_expert[:, position] & ~missed
            tokens, scores, active = (part[:, position] for part in (rollout.sequences.tokens, rollout.scores, mask))
            yield PlanStep(position, tokens, by_expert, scores, active, position >= self.kept, missed)


class RowThresholds(Policy[tuple[Any, Tensor]]):
    """`policies.Threshold` with a threshold per row (n,); tells the fallback expert what the predictor proposes."""

    def __init__(self, rejector: TokenRejector[Any], thresholds: Tensor, guard: FallbackExpert) -> None:
        self.rejector, self.thresholds, self.guard = rejector, thresholds, guard

    def start(self, context: Tensor) -> tuple[Any, Tensor]:
        return self.rejector.start(context), self.thresholds.to(context.device)

    def decide(
        self, state: tuple[Any, Tensor], position: int, proposal: Proposal
    ) -> tuple[Tensor, Tensor, tuple[Any, Tensor]]:
        inner, thresholds = state
        scores, inner = self.rejector.score(inner, position, proposal)
        self.guard.proposed = proposal.tokens
        return scores, scores >= thresholds, (inner, thresholds)

    def select(self, state: tuple[Any, Tensor], rows: Tensor) -> tuple[Any, Tensor]:
        return self.rejector.select(state[0], rows), state[1][rows]
