"""Budgets that were measured: a setting for every budget, and what it buys where references are known.

Inputs like those to come are written at every setting, and the tokens by the expert are counted (`Spending`). No
references are needed. Where there are some, the same rollouts tell what each budget buys: a curve of losses.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from seqdefer.budgets.capped import Schedule
from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.drift import DriftReference, drift_reference
from seqdefer.budgets.guarantees import token_losses
from seqdefer.budgets.promises import Promise, PromisingRule
from seqdefer.budgets.rules import (
    FINITE_LIMIT,
    NEAREST,
    BudgetRule,
    Setting,
    check_budget,
    nearest_place,
    resamples,
    settings_at,
)
from seqdefer.budgets.spending import Outcomes, Spending, n_to_give
from seqdefer.errors import OptionError

BUDGETS = tuple(step / 100 for step in range(101))  # each has a setting in a calibration
SHOWN_BUDGETS = (0.05, 0.1, 0.2, 0.5)  # in the repr
FEW_INPUTS = 200  # fewer measure the share of a budget only to some percentage points
TYPICAL_BUDGET = 0.2  # whose range says how rough all are
DIGITS = 12  # of a loss; those behind are rounding errors of sums
EASY_BUDGET = 0.5  # where inputs are too few for it, nothing is promised at all


@dataclass(frozen=True)
class Calibration:
    """A setting for each of BUDGETS, rising; the first never defers, the last as much as this rejector can."""

    settings: tuple[Setting, ...]
    inputs: int  # that it was measured on
    rejector: str  # fingerprint of the rejector it belongs to
    promise: Promise | None = None  # what the rule that chose the settings guarantees, if anything
    reference: DriftReference | None = None  # what later inputs are compared with; older files have none
    remaining: tuple[float, ...] = ()  # tokens expected from each position on; empty in files of earlier versions

    def __repr__(self) -> str:
        """Return a line for notebooks: a hundred settings would fill the screen."""
        spent = ", ".join(f"{one.share:.3f} at {one.budget:g}" for one in self.settings if one.budget in SHOWN_BUDGETS)
        promised = "" if self.promise is None else f", guarantee {self.promise.rule}"
        return f"Calibration({self.inputs} inputs{promised}, spent: {spent})"

    def for_budget(self, budget: float) -> Setting:
        """Return the setting whose realised share comes nearest to a budget; with a promise, the setting of the
        largest of BUDGETS that is not above it."""
        check_budget(budget)
        if self.promise is not None:
            return self.settings[bisect_right(BUDGETS, budget) - 1]
        shares = np.array([one.share for one in self.settings])
        return self.settings[nearest_place(shares, budget)]

    def limit(self, setting: Setting) -> float | None:
        """Return what the expected share at one of the settings is at most: the budget, where that is promised with a
        confidence, else the ceiling. None where neither is known, and for other settings."""
        if setting not in self.settings:
            return None
        if self.promise is not None and self.promise.confidence is not None:
            return setting.budget
        return None if self.reference is None else self.reference.ceilings[BUDGETS.index(setting.budget)]

    def spent(self, setting: Setting, deferred: int, written: int, length: int) -> float:
        """Return what an input spent, to compare with the limit. No sequence is longer than `length`."""
        promise = self.promise
        if promise is not None and promise.confidence is not None and promise.share_of == "tokens":
            return float(token_losses(np.array(deferred), np.array(written), setting.budget, length))
        return deferred / written

    def schedule(self, length: int) -> Schedule:
        """Return the thresholds that a rising cap chooses from, for sequences of up to `length` tokens."""
        shares = np.maximum.accumulate([one.share for one in self.settings])
        remaining = self.remaining or tuple(float(length - place) for place in range(length))
        return Schedule(tuple(shares.tolist()), tuple(one.threshold for one in self.settings), remaining)

    @property
    def mean_length(self) -> float | None:
        """The tokens of a sequence, on average; None in files of earlier versions."""
        return self.remaining[0] if self.remaining else None

    def roughness(self) -> str | None:
        """Return in words how rough budgets are, if they were measured on few inputs."""
        if self.inputs >= FEW_INPUTS:
            return None
        found = self.for_budget(TYPICAL_BUDGET)
        return (
            f"budgets were measured on {self.inputs} inputs only: by 95 % of resamples, a budget of {TYPICAL_BUDGET:g} "
            f"spends {found.low:.2f} to {found.high:.2f}; {FEW_INPUTS} or more make it more precise"
        )

    def shortfall(self, budget: float) -> str | None:
        """Return in words why a budget is not spent, if it is not."""
        found, promise = self.for_budget(budget), self.promise
        if promise is None:
            is_met = found.is_near(budget)
            return None if is_met else f"a budget of {budget:g} cannot be met; the nearest is {found.share:.3f}"
        if budget == 0 or found.threshold < FINITE_LIMIT:
            return None
        if budget < BUDGETS[1]:
            return (
                f"a budget of {budget:g} is below {BUDGETS[1]:g}, the least calibrated one: the expert writes nothing"
            )
        needed = max(promise.least_inputs(budget), promise.inputs + 1)
        return (
            f"a budget of {budget:g} cannot be promised from {promise.inputs} inputs, so the expert writes nothing; "
            f"calibrate with more, at least {needed}"
        )


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
    # 95 % of paired resamples of the inputs; None in files of earlier versions
    gap: tuple[float, float] | None = None  # loss of the predictor alone minus that of the last point
    gain: tuple[float, float] | None = None  # loss at random minus the loss, at TYPICAL_BUDGET of the last share

    def __repr__(self) -> str:
        """Return a line for notebooks, as of a calibration."""
        bought = ", ".join(f"{self.loss_at(share):.2f} at {share:g}" for share in (0.0, *SHOWN_BUDGETS, 1.0))
        return f"LossCurve({self.unit}, {self.inputs} inputs, loss: {bought})"

    def loss_at(self, share: float) -> float:
        """Return the loss at a share, on the line between the points around it."""
        points = sorted(self.points, key=lambda point: point.share)
        return float(np.interp(share, [point.share for point in points], [point.loss for point in points]))

    def random_at(self, share: float) -> float:
        """Return the loss of deferring at random: on the line between the ends."""
        first, last = self.points[0], self.points[-1]
        return first.loss + (last.loss - first.loss) * (share - first.share) / max(last.share - first.share, 1e-12)

    def worth(self) -> str:
        """Return in words what the rejector is worth at a typical budget, beside deferring at random."""
        first, last = self.points[0], self.points[-1]
        gap, is_unclear = first.loss - last.loss, _contains_zero(self.gap)
        share = TYPICAL_BUDGET * last.share
        loss, at_random = self.loss_at(share), self.random_at(share)
        if gap <= 0 or is_unclear:
            ends = (
                f"the predictor alone loses {first.loss:.4g}, and with {100 * last.share:.0f} % of the tokens by the "
                f"expert it is {last.loss:.4g}{_resampled(self.gap, 'less')}"
            )
            if self._beats_predictor():
                return (
                    f"deferring pays on these {self.inputs} inputs, though the expert alone is not clearly better: "
                    f"with {100 * share:.0f} % of the tokens by the expert the loss is {loss:.4g}; {ends}"
                )
            verdict = "cannot tell whether deferring pays" if is_unclear else "deferring does not pay"
            return (
                f"{verdict} on these {self.inputs} inputs: {ends}; check the prompt (prefix, suffix), the metric and "
                f"the expert, {'give more data, ' * is_unclear}or use the predictor alone"
            )
        closed, closed_at_random = (100 * (first.loss - one) / gap for one in (loss, at_random))
        more = _resampled(self.gain, "points more", 100 / gap)
        said = (
            f"{100 * share:.0f} % of the tokens by the expert close {closed:.0f} % of the gap between both models, at "
            f"random {closed_at_random:.0f} %{more} on these {self.inputs} inputs"
        )
        if _contains_zero(self.gain):
            return f"{said}: cannot tell whether this rejector is better than chance; give more data"
        if loss < at_random and (self.gain is None or self.gain[0] > 0):
            return said
        return f"{said}: this rejector is no better than chance; give more data, or use one of the models alone"

    def _beats_predictor(self) -> bool:
        """Tell whether a typical budget loses less than the predictor alone, by the low ends of both intervals."""
        return self.gap is not None and self.gain is not None and self.gain[0] + TYPICAL_BUDGET * self.gap[0] > 0


def _contains_zero(interval: tuple[float, float] | None) -> bool:
    """Tell whether a sign is not known. Of two models that always lose the same it is: the interval is 0 alone."""
    return interval is not None and interval[0] <= 0 <= interval[1] and interval[0] < interval[1]


def _resampled(interval: tuple[float, float] | None, unit: str, scale: float = 1.0) -> str:
    """Return an interval in words, in brackets."""
    if interval is None:
        return ""
    low, high = (scale * end for end in interval)
    return f" ({low:.3g} to {high:.3g} {unit} in 95 % of resamples)"


def calibrate(spending: Spending, *, inputs: int, rejector: str, rule: BudgetRule = NEAREST) -> Calibration:
    """Choose a setting for each of BUDGETS. `rejector` is the fingerprint that the calibration will belong to."""
    promise = rule.promise(spending.inputs) if isinstance(rule, PromisingRule) else None
    if promise is not None and (least := promise.least_inputs(EASY_BUDGET)) > spending.inputs:
        beside = f" beside the thresholds' own, {n_to_give(least)} in all" if spending.has_fixed_settings else ""
        raise OptionError(
            f"{spending.inputs} inputs are too few to promise a budget, even of {EASY_BUDGET:g}: that takes at "
            f"least {least}{beside}, and smaller budgets take more"
        )
    places = rule.places(spending, BUDGETS)
    settings, reference = settings_at(spending, BUDGETS, places), drift_reference(spending, places)
    ends = spending.at([0, len(spending.settings) - 1])  # the predictor alone, and the last setting
    remaining = remaining_tokens(ends.written.ravel(), spending.length)
    return Calibration(settings, inputs, rejector, promise, reference, remaining)


def remaining_tokens(lengths: Floats, length: int) -> tuple[float, ...]:
    """Return how many tokens are expected from each position on, that one included, of sequences that get there, by
    the lengths (n,) of some. None is longer than `length`."""
    found = [lengths[lengths > place] - place for place in range(length)]
    return tuple(float(left.mean()) if len(left) else 1.0 for left in found)


def loss_curve(spending: Spending, *, unit: str, inputs: int, rejector: str) -> LossCurve:
    """Return what the nearest settings of `calibrate` buy."""
    places = list(dict.fromkeys(NEAREST.place(spending, budget) for budget in BUDGETS))
    losses = spending.at(places).loss.mean(1)
    points = (LossPoint(float(spending.shares[place]), float(loss)) for place, loss in zip(places, losses, strict=True))
    return LossCurve(unit, inputs, rejector, tuple(points), *_loss_intervals(spending.at(places)))


def _loss_intervals(seen: Outcomes) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the intervals `gap` and `gain` of a curve, from the outcomes at its points. Each resample has a curve of
    its own, and both sides of a difference."""
    draws = resamples(seen.loss.shape[1])
    losses = draws @ seen.loss.T / seen.loss.shape[1]  # (R, P)
    shares = (draws @ seen.deferred.T) / (draws @ seen.written.T)
    gaps = draws @ (seen.loss[0] - seen.loss[-1]) / seen.loss.shape[1]
    order = shares.argsort(1, kind="stable")
    curves = np.take_along_axis(shares, order, 1), np.take_along_axis(losses, order, 1)
    found = [np.interp(TYPICAL_BUDGET * last, *curve) for last, *curve in zip(shares[:, -1], *curves, strict=True)]
    gains = losses[:, 0] - TYPICAL_BUDGET * gaps - found
    low, high = np.percentile([gaps, gains], [2.5, 97.5], axis=1).round(DIGITS).tolist()
    return (low[0], high[0]), (low[1], high[1])
