"""A promise put to the test: half of the test inputs calibrate budgets, the other half shows what they spend.

    check = check_promise("TokenwiseModel", spending)
    check.budgets[4].budget, check.budgets[4].bound, check.budgets[4].spent

Shares are means of the inputs' shares. The halves are drawn at random. Nothing else in a run depends on this choice.
"""

from __future__ import annotations

import math

import numpy as np

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.guarantees import betting_bounds
from seqdefer.budgets.promises import DEFAULT_CONFIDENCE, Confident
from seqdefer.budgets.spending import Spending
from seqdefer.evaluation.results import PromiseCheck, PromisedBudget

PROMISED_BUDGETS = tuple(step / 20 for step in range(21))
LEAST_INPUTS = 20  # fewer promise nothing worth a figure


def check_promise(method: str, spending: Spending) -> PromiseCheck | None:
    """Return what is promised, and what inputs spent that the calibration never saw; None with few inputs."""
    if spending.inputs < LEAST_INPUTS:
        return None
    order = np.random.default_rng(0).permutation(spending.inputs)
    half = spending.inputs // 2
    calibrated, unseen = spending.select(order[:half]), spending.select(order[half:])
    places = Confident(DEFAULT_CONFIDENCE, "inputs").places(calibrated, PROMISED_BUDGETS)
    seen, bounds = _shares(calibrated, calibrated, places), _bounds(calibrated, places)
    spent = _shares(unseen, calibrated, places)
    columns = bounds, seen.mean(1), spent.mean(1), 1.96 * spent.std(1) / math.sqrt(unseen.inputs)
    rows = zip(PROMISED_BUDGETS, *columns, strict=True)
    budgets = tuple(PromisedBudget(budget, *map(float, numbers)) for budget, *numbers in rows)
    return PromiseCheck(method, DEFAULT_CONFIDENCE, half, spending.inputs - half, budgets)


def _shares(spending: Spending, calibrated: Spending, places: list[int]) -> Floats:
    """Return what inputs spend at settings of the calibration. (P, n)"""
    outcomes = [spending.at_setting(float(calibrated.settings[place])) for place in places]
    return np.concatenate([one.deferred / one.written for one in outcomes])


def _bounds(calibrated: Spending, places: list[int]) -> Floats:
    """Return what the expected shares are below, with the confidence of the promise, each for itself. To never defer
    spends nothing."""
    order = np.random.default_rng(0).permutation(calibrated.inputs)  # that of the rule: its bets win up to the bound
    bounds = betting_bounds(_shares(calibrated, calibrated, places)[:, order], 1 - DEFAULT_CONFIDENCE)
    return np.where(np.array(places) == 0, 0.0, bounds)
