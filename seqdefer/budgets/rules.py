"""Budget rules: which setting a budget buys, given what settings spend.

    setting = NEAREST.choose(spending, budget=0.2)
    setting.threshold, setting.share

A new rule is a `BudgetRule`: it names the place of one setting among those of a `Spending`. `budgets.promises` has
those with a guarantee.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.hand_off_rules import ScoredHandOffs, Values
from seqdefer.budgets.spending import HandOffSpending, Spending, TokenSpending
from seqdefer.budgets.token_sweeps import TokenSweep
from seqdefer.errors import OptionError
from seqdefer.types import HandOffTable

TOLERANCE = 0.02  # a setting that spends this much more or less than the budget still meets it
INTERVAL_RESAMPLES = 1000
FINITE_LIMIT = 1e90  # stands for infinity in JSON; no score comes near


@dataclass(frozen=True)
class Setting:
    """What decides at a budget, and what it was seen to spend: the share of all tokens that the expert wrote, with the
    interval that holds 95 % of its resamples."""

    budget: float
    threshold: float  # on scores; the price of a token for OneTimeCost
    share: float
    low: float
    high: float

    def is_near(self, budget: float) -> bool:
        """Tell whether it meets a budget."""
        return abs(self.share - budget) <= TOLERANCE


class BudgetRule(ABC):
    """Chooses a setting for a budget."""

    @abstractmethod
    def place(self, spending: Spending, budget: float) -> int:
        """Return the place of the setting among those of the spending, which fall from never to always."""

    def choose(self, spending: Spending, budget: float) -> Setting:
        """Return the setting for a budget, from 0 to 1."""
        return self.choose_all(spending, [budget])[0]

    def choose_all(self, spending: Spending, budgets: Sequence[float]) -> tuple[Setting, ...]:
        """Return the settings for several budgets."""
        return settings_at(spending, budgets, self.places(spending, budgets))

    def places(self, spending: Spending, budgets: Sequence[float]) -> list[int]:
        """Return the places of the settings for several budgets."""
        return [self.place(spending, check_budget(budget)) for budget in budgets]


def settings_at(spending: Spending, budgets: Sequence[float], places: Sequence[int]) -> tuple[Setting, ...]:
    """Return the settings at some places, one for each budget, with what they were seen to spend."""
    seen = spending.at(places)
    shares = realised_shares(seen.deferred, seen.written)
    return tuple(
        Setting(budget, to_finite(spending.settings[place]), *map(float, found))
        for budget, place, *found in zip(budgets, places, *shares, strict=True)
    )


class Nearest(BudgetRule):
    """The setting whose share is nearest to the budget."""

    def place(self, spending: Spending, budget: float) -> int:
        return nearest_place(spending.shares, budget)


NEAREST = Nearest()


def nearest_place(shares: Floats, budget: float) -> int:
    """Return the place of the share nearest to the budget. 0 and 1 are the ends, on whatever inputs."""
    if budget in (0.0, 1.0):
        return 0 if budget == 0 else len(shares) - 1
    return int(np.abs(shares - budget).argmin())


def check_budget(budget: float) -> float:
    """Return the budget, or raise if it is not between 0 and 1."""
    given: Any = budget  # a text or None, from Python
    if not (isinstance(given, Real) and 0.0 <= float(given) <= 1.0):
        raise OptionError(
            f"budget is {budget!r}; it is the share of tokens the expert writes, from 0 to 1: 0.2 is 20 %"
        )
    return budget


def check_threshold(threshold: float) -> float:
    """Return the threshold, or raise if it is no number."""
    if math.isnan(threshold):
        raise OptionError("threshold is nan; it is a score, or inf to never defer")
    return threshold


def realised_shares(deferred: Floats, written: Floats) -> tuple[Floats, Floats, Floats]:
    """Return shares (T,) of all tokens, and their intervals over resampled inputs. deferred, written: (T, n)"""
    shares, draws = deferred.sum(1) / written.sum(1), resamples(deferred.shape[1])
    low, high = np.percentile((draws @ deferred.T) / (draws @ written.T), [2.5, 97.5], axis=0)
    return shares, np.minimum(low, shares), np.maximum(high, shares)  # of very few inputs it could lie outside


def resamples(n: int) -> Floats:
    """Return how often each of n inputs is in each resample; the same for equal n, so that intervals are paired.
    (R, n)"""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=INTERVAL_RESAMPLES).astype(np.float64)


def to_finite(setting: float) -> float:
    """Return a setting as JSON can hold it."""
    return max(-FINITE_LIMIT, min(FINITE_LIMIT, float(setting)))


# -- one call for each granularity ---------------------------------------------------------------------------------


def threshold_for(budget: float, sweep: TokenSweep) -> Setting:
    """Return the token-level threshold whose realised share on validation rollouts is nearest to the budget."""
    return NEAREST.choose(TokenSpending(sweep, int(sweep.lengths.max())), budget)


def whole_threshold_for(budget: float, scores: Tensor, lengths: Tensor, table: HandOffTable) -> Setting:
    """Return the threshold of whole deferral by scores (n,): sequences with the highest scores are deferred.
    lengths (n,) of the drafts."""
    return _hand_off_setting(budget, scores, table, lengths=lengths)


def once_threshold_for(budget: float, scores: Tensor, grid: Values, lengths: Tensor, table: HandOffTable) -> Setting:
    """Return the threshold of one-time deferral by scores (n, J), on the odds of deferring.

    A sequence is handed off at its best place, seldom at the first token: what that defers of all sequences is the
    most that can be spent. A larger budget is not met; `share` tells."""
    return _hand_off_setting(budget, scores, table, hand_offs=grid, rule="odds", lengths=lengths)


def price_for(budget: float, scores: Tensor, grid: Values, lengths: Tensor, table: HandOffTable) -> Setting:
    """Return the price of a token at which one-time deferral by estimated losses (n, J) spends the budget."""
    return _hand_off_setting(budget, scores, table, hand_offs=grid, rule="cost", lengths=lengths)


def _hand_off_setting(
    budget: float, scores: Tensor, table: HandOffTable, *, hand_offs: Values = (), rule: str = "largest",
    lengths: Tensor,
) -> Setting:  # fmt: skip
    length = table.loss.shape[1] - 1
    scored = ScoredHandOffs.of(scores, length, hand_offs=hand_offs, rule=rule, lengths=lengths)
    return NEAREST.choose(HandOffSpending(scored, table), budget)
