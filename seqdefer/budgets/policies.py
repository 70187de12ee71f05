"""Token-level decisions: defer where the score reaches a threshold.

Whole and one-time decisions are made once per draft: see `hand_off_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqdefer.interfaces import Policy, TokenRejector
from seqdefer.types import Proposal


class Threshold(Policy[tuple[Any, Tensor]]):
    """Defers a token when the rejector's score is at least the threshold (the paper's rule at 0).

    `threshold` is one number, or a tensor (n,) with one for each row. `watch` is called with every proposal before the
    expert is asked.
    """

    def __init__(
        self,
        rejector: TokenRejector[Any],
        threshold: float | Tensor = 0.0,
        *,
        watch: Callable[[Proposal], None] | None = None,
    ) -> None:
        self.rejector, self.threshold, self.watch = rejector, threshold, watch

    def start(self, context: Tensor) -> tuple[Any, Tensor]:
        own = torch.as_tensor(self.threshold, device=context.device)
        return self.rejector.start(context), own.expand(len(context))

    def decide(
        self, state: tuple[Any, Tensor], position: int | Tensor, proposal: Proposal
    ) -> tuple[Tensor, Tensor, tuple[Any, Tensor]]:
        inner, thresholds = state
        scores, inner = self.rejector.score(inner, position, proposal)
        if self.watch is not None:
            self.watch(proposal)
        return scores, scores >= thresholds, (inner, thresholds)

    def select(self, state: tuple[Any, Tensor], rows: Tensor) -> tuple[Any, Tensor]:
        return self.rejector.select(state[0], rows), state[1][rows]

    def join(self, states: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor]:
        return self.rejector.join([inner for inner, _ in states]), torch.cat([own for _, own in states])
