"""Token-level decisions: defer where the score reaches a threshold and caps allow it.

Whole and one-time decisions are made once per draft: see `hand_off_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqdefer.budgets.capped import CapLedger, Schedule
from seqdefer.budgets.caps import UNLIMITED, Allowance
from seqdefer.interfaces import Policy, TokenRejector
from seqdefer.types import Proposal


@dataclass(frozen=True)
class ThresholdState:
    """State of rows: the rejector's, their thresholds (n,), and their ledger if any of them has a cap."""

    inner: Any
    thresholds: Tensor
    ledger: CapLedger | None


class Threshold(Policy[ThresholdState]):
    """Defers a token when the rejector's score is at least the threshold (the paper's rule at 0).

    `threshold` is one number, or a tensor (n,) with one for each row that it starts; `allowed` are their caps, if any.
    Caps that rise need a `schedule`.
    """

    def __init__(
        self,
        rejector: TokenRejector[Any],
        threshold: float | Tensor = 0.0,
        allowed: Sequence[Allowance] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.rejector, self.threshold, self.allowed, self.schedule = rejector, threshold, allowed, schedule

    def start(self, context: Tensor) -> ThresholdState:
        own = torch.as_tensor(self.threshold, device=context.device).expand(len(context))
        ledger = None if self.allowed is None else CapLedger.of(self.allowed, context.device)
        return ThresholdState(self.rejector.start(context), own, ledger)

    def decide(
        self, state: ThresholdState, position: int | Tensor, proposal: Proposal
    ) -> tuple[Tensor, Tensor, ThresholdState]:
        scores, inner = self.rejector.score(state.inner, position, proposal)
        if (ledger := state.ledger) is None:
            return scores, scores >= state.thresholds, replace(state, inner=inner)
        positions = torch.as_tensor(position, device=scores.device).expand(len(scores))
        prices = ledger.prices(positions)
        thresholds = self._raised(state.thresholds, ledger, prices, positions)
        defer = (scores >= thresholds) & (ledger.questions >= 1) & (ledger.money >= prices)
        return scores, defer, replace(state, inner=inner, ledger=ledger.spend(defer, prices, positions))

    def _raised(self, thresholds: Tensor, ledger: CapLedger, prices: Tensor, positions: Tensor) -> Tensor:
        if self.schedule is None or not ledger.may_rise:
            return thresholds
        needed = self.schedule.thresholds_for(ledger.tokens_left(prices), positions)
        return torch.where(ledger.rises, torch.maximum(thresholds.double(), needed), thresholds)

    def is_fixed(self, state: ThresholdState) -> bool:
        return state.ledger is None and not self.rejector.has_memory

    def select(self, state: ThresholdState, rows: Tensor) -> ThresholdState:
        ledger = None if state.ledger is None else state.ledger.select(rows)
        return ThresholdState(self.rejector.select(state.inner, rows), state.thresholds[rows], ledger)

    def join(self, states: Sequence[ThresholdState]) -> ThresholdState:
        ledgers = None
        if any(state.ledger is not None for state in states):
            ledgers = CapLedger.join([_ledger_of(state) for state in states])
        inner = self.rejector.join([state.inner for state in states])
        return ThresholdState(inner, torch.cat([state.thresholds for state in states]), ledgers)


def _ledger_of(state: ThresholdState) -> CapLedger:
    """Return the ledger of rows, without limits if they have none."""
    rows = state.thresholds
    return CapLedger.of([UNLIMITED] * len(rows), rows.device) if state.ledger is None else state.ledger
