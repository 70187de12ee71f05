"""Budgets that were measured: a setting for every budget, and what it buys where references are known.

Inputs like those to come are written at every setting, and the tokens by the expert are counted (`Spending`). No
references are needed. Where there are some, the same rollouts tell what each budget buys: a curve of losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqdefer.budgets.rules import NEAREST, BudgetRule, Setting, check_budget, nearest_place
from seqdefer.budgets.spending import Spending

BUDGETS = tuple(step / 100 for step in range(101))  # each has a setting in a calibration


@dataclass(frozen=True)
class Calibration:
    """A setting for each of BUDGETS, rising; the first never defers, the last as much as this rejector can."""

    settings: tuple[Setting, ...]
    inputs: int  # that it was measured on
    rejector: str  # fingerprint of the rejector it belongs to

    def for_budget(self, budget: float) -> Setting:
        """Return the setting whose realised share comes nearest to a budget."""
        shares = np.array([one.share for one in self.settings])
        return self.settings[nearest_place(shares, check_budget(budget))]


@dataclass(frozen=True)
class LossPoint:
    """A share of expert tokens, and the mean loss at it."""

    share: float
    loss: float


@dataclass(frozen=True)
class LossCurve:
    """What the settings of a calibration buy, on inputs with references: a point for each of them that differs from
    the one before, from the predictor alone to as much of the expert as this rejector can ask for."""

    unit: str  # of the loss
    inputs: int
    rejector: str  # as in Calibration
    points: tuple[LossPoint, ...]

    def loss_at(self, share: float) -> float:
        """Return the loss at a share, on the line between the points around it."""
        points = sorted(self.points, key=lambda point: point.share)
        return float(np.interp(share, [point.share for point in points], [point.loss for point in points]))

    def random_at(self, share: float) -> float:
        """Return the loss of deferring at random: on the line between the ends."""
        first, last = self.points[0], self.points[-1]
        return first.loss + (last.loss - first.loss) * (share - first.share) / max(last.share - first.share, 1e-12)


def calibrate(spending: Spending, *, inputs: int, rejector: str, rule: BudgetRule = NEAREST) -> Calibration:
    """Choose a setting for each of BUDGETS. `rejector` is the fingerprint that the calibration will belong to."""
    return Calibration(rule.choose_all(spending, BUDGETS), inputs, rejector)


def loss_curve(spending: Spending, *, unit: str, inputs: int, rejector: str, rule: BudgetRule = NEAREST) -> LossCurve:
    """Return what the settings of `calibrate` buy."""
    places = list(dict.fromkeys(rule.place(spending, budget) for budget in BUDGETS))
    losses = spending.at(places).loss.mean(1)
    points = (LossPoint(float(spending.shares[place]), float(loss)) for place, loss in zip(places, losses, strict=True))
    return LossCurve(unit, inputs, rejector, tuple(points))
