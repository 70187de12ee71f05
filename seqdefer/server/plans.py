"""The plan of a cohort with an expert that may fail: what was written, and what the expert missed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqdefer.methods.plans import DroppedRows, HandOffPlan
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.fallback import ExpertCaller, FallbackExpert
from seqdefer.types import PREDICTOR, Examples


@dataclass(frozen=True)
class CohortStep:
    """One position of n rows; tensors (n,), on the CPU."""

    position: int
    tokens: Tensor
    authors: Tensor  # int64
    scores: Tensor
    active: Tensor  # bool: rows that reach this position
    wanted: Tensor  # bool: the rejector wants the expert here, whoever then wrote
    missed: Tensor  # bool: deferred rows that the expert failed to write, here or before


class CohortPlan:
    """The shared plan of a batch; from the expert's first failure on, the predictor's tokens take its place."""

    def __init__(
        self,
        model: DeferringModel,
        examples: Examples,
        settings: Sequence[float],
        may_defer: Tensor,
        call: ExpertCaller,
    ) -> None:
        self.guard, self.may_defer = FallbackExpert(model.served.expert, call), may_defer
        self.plan = model.plan(
            examples,
            torch.tensor(settings, dtype=torch.float64),
            expert=self.guard,
            may_defer=may_defer,
            watch=self.guard.note_proposal,
        )

    def steps(self, dropped: DroppedRows) -> Generator[CohortStep, None, None]:
        """Yield each position as soon as it is written."""
        if isinstance(self.plan, HandOffPlan):
            self.guard.drafted = self.plan.drafted.sequences
        missed = torch.zeros(len(self.may_defer), dtype=torch.bool)
        for step in self.plan.steps(dropped):
            if self.guard.has_failed:
                missed = missed | (step.wanted & self.may_defer & step.active)
            authors = step.authors.masked_fill(missed, PREDICTOR)
            yield CohortStep(step.position, step.tokens, authors, step.scores, step.active, step.wanted, missed)
