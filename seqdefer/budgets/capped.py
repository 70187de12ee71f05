"""What caps leave to rows on the way: the state that `budgets.policies.Threshold` decides by.

What was spent is part of a row's state, so that rows which go back in the speculative loop get it back, and both loops
write the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from seqdefer.budgets.caps import ROUNDING, Allowance
from seqdefer.types import BatchRecord

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
class CapLedger(BatchRecord):
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
    def of(cls, allowed: Sequence[Allowance], device: torch.device) -> CapLedger:
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

    def spend(self, defer: Tensor, prices: Tensor, positions: Tensor) -> CapLedger:
        return replace(
            self,
            questions=self.questions - defer.double(),
            money=torch.where(defer, self.money - prices, self.money),
            last=torch.where(defer, positions, self.last),
        )

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        return replace(super().join(parts), may_rise=any(part.may_rise for part in parts))
