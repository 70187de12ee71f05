"""Token-level decisions under a cap: defer where the score reaches the threshold and the cap allows it.

What was spent is part of a row's state, so that rows which go back in the speculative loop get it back, and both loops
write the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from seqdefer.budgets.caps import ROUNDING, UNLIMITED, Allowance
from seqdefer.interfaces import Policy, TokenRejector
from seqdefer.types import Proposal

NEVER = -1  # the last position where a row asked that has not asked yet


@dataclass(frozen=True)
class Schedule:
    """What a calibration knows: the threshold that spends each share, and how long sequences go on."""

    shares: tuple[float, ...]  # rising from 0
    thresholds: tuple[float, ...]  # falling
    remaining: tuple[float, ...]  # tokens expected from each position on, that one included

    def thresholds_for(self, left: Tensor, positions: Tensor) -> Tensor:
        """Return the thresholds at which `left` (n,) tokens are expected to last to the end. (n,)"""
        shares, thresholds, remaining = _tensors(self, left.device)
        budgets = (left / remaining[positions.clamp(max=len(remaining) - 1)]).clamp(max=1.0)
        return thresholds[torch.searchsorted(shares, budgets, right=True) - 1]


@lru_cache(maxsize=8)
def _tensors(schedule: Schedule, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    columns = (schedule.shares, schedule.thresholds, schedule.remaining)
    shares, thresholds, remaining = (torch.tensor(one, dtype=torch.float64, device=device) for one in columns)
    return shares, thresholds, remaining


@dataclass(frozen=True)
class _Ledger:
    """What is left to each row, and what it pays. float64 (n,) unless noted."""

    questions: Tensor
    money: Tensor
    last: Tensor  # int64, where it last asked
    call: Tensor
    read: Tensor
    cached: Tensor
    write: Tensor
    input_tokens: Tensor
    rises: Tensor  # bool
    may_rise: bool  # False: none does

    @classmethod
    def of(cls, allowed: Sequence[Allowance], device: torch.device) -> _Ledger:
        columns = {
            "questions": [one.questions for one in allowed],
            "money": [one.money * (1 + ROUNDING) for one in allowed],
            **{name: [getattr(one.charge, name) for one in allowed] for name in ("call", "read", "cached", "write")},
            "input_tokens": [one.charge.input_tokens for one in allowed],
        }
        floats = {name: torch.tensor(column, dtype=torch.float64, device=device) for name, column in columns.items()}
        last = torch.full((len(allowed),), NEVER, device=device)
        rises = [one.rises for one in allowed]
        return cls(**floats, last=last, rises=torch.tensor(rises, device=device), may_rise=any(rises))

    def prices(self, positions: Tensor) -> Tensor:
        """Return what it costs to ask now: `Charge.of_call` for one token."""
        before = torch.where(self.last == NEVER, 0.0, self.input_tokens + self.last)
        new = self.input_tokens + positions - before
        return self.call + self.cached * before + self.read * new + self.write

    def tokens_left(self, prices: Tensor) -> Tensor:
        """Return how many tokens are left, at the price of the next."""
        by_money = torch.where(prices > 0, self.money / prices, torch.inf)
        return torch.minimum(self.questions, by_money)

    def spend(self, defer: Tensor, prices: Tensor, positions: Tensor) -> _Ledger:
        return replace(
            self,
            questions=self.questions - defer.double(),
            money=torch.where(defer, self.money - prices, self.money),
            last=torch.where(defer, positions, self.last),
        )

    def select(self, rows: Tensor) -> _Ledger:
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @staticmethod
    def join(parts: Sequence[_Ledger]) -> _Ledger:
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in COLUMNS}
        return _Ledger(**columns, may_rise=any(part.may_rise for part in parts))


COLUMNS = tuple(field.name for field in fields(_Ledger) if field.name != "may_rise")


@dataclass(frozen=True)
class _Capped:
    """State of rows: the rejector's, their thresholds (n,), and their ledger if any of them has a cap."""

    inner: Any
    thresholds: Tensor
    ledger: _Ledger | None


class CappedThreshold(Policy[_Capped]):
    """Defers as `Threshold` does, as long as the caps of rows allow it.

    `threshold` and `allowed` are for the rows that it starts; `schedule` is needed if a cap rises."""

    def __init__(
        self,
        rejector: TokenRejector[Any],
        threshold: float | Tensor = 0.0,
        allowed: Sequence[Allowance] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.rejector, self.threshold, self.allowed, self.schedule = rejector, threshold, allowed, schedule

    def start(self, context: Tensor) -> _Capped:
        own = torch.as_tensor(self.threshold, device=context.device).expand(len(context))
        ledger = None if self.allowed is None else _Ledger.of(self.allowed, context.device)
        return _Capped(self.rejector.start(context), own, ledger)

    def decide(self, state: _Capped, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor, _Capped]:
        scores, inner = self.rejector.score(state.inner, position, proposal)
        if (ledger := state.ledger) is None:
            return scores, scores >= state.thresholds, replace(state, inner=inner)
        positions = torch.as_tensor(position, device=scores.device).expand(len(scores))
        prices = ledger.prices(positions)
        thresholds = self._raised(state.thresholds, ledger, prices, positions)
        defer = (scores >= thresholds) & (ledger.questions >= 1) & (ledger.money >= prices)
        return scores, defer, _Capped(inner, state.thresholds, ledger.spend(defer, prices, positions))

    def _raised(self, thresholds: Tensor, ledger: _Ledger, prices: Tensor, positions: Tensor) -> Tensor:
        if self.schedule is None or not ledger.may_rise:
            return thresholds
        needed = self.schedule.thresholds_for(ledger.tokens_left(prices), positions)
        return torch.where(ledger.rises, torch.maximum(thresholds.double(), needed), thresholds)

    def select(self, state: _Capped, rows: Tensor) -> _Capped:
        ledger = None if state.ledger is None else state.ledger.select(rows)
        return _Capped(self.rejector.select(state.inner, rows), state.thresholds[rows], ledger)

    def join(self, states: Sequence[_Capped]) -> _Capped:
        ledgers = None
        if any(state.ledger is not None for state in states):
            ledgers = _Ledger.join([_with_ledger(state) for state in states])
        inner = self.rejector.join([state.inner for state in states])
        return _Capped(inner, torch.cat([state.thresholds for state in states]), ledgers)


def _with_ledger(state: _Capped) -> _Ledger:
    """Return the ledger of rows, without limits if they have none."""
    rows = state.thresholds
    return _Ledger.of([UNLIMITED] * len(rows), rows.device) if state.ledger is None else state.ledger
