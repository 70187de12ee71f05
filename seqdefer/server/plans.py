"""The plan of a cohort with an expert that may fail: what was written, and what the expert missed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqdefer.methods.plans import DroppedRows, PlanStep
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.fallback import ExpertCaller, FallbackExpert
from seqdefer.types import PREDICTOR, Examples


@dataclass(frozen=True)
class CohortStep:
    """One position of n rows, and what the expert missed."""

    written: PlanStep
    missed: Tensor  # bool (n,): deferred rows that the expert failed to write, here or before


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
            watch=self.guard.note,
        )

    def steps(self, dropped: DroppedRows) -> Generator[CohortStep, None, None]:
        """Yield each position as soon as it is written."""
        missed = torch.zeros(len(self.may_defer), dtype=torch.bool)
        for step in self.plan.steps(dropped):
            if self.guard.has_failed:
                missed = missed | (step.wanted & self.may_defer & step.active)
            yield CohortStep(replace(step, authors=step.authors.masked_fill(missed, PREDICTOR)), missed)
