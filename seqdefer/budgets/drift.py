"""Drift: is what is served still like the calibration? Two tests that may look after every input, forever.

    spent    more is spent than the calibration allows
    scores   the rejector's scores are not those of the calibration

Each is a gambler who bets against a hypothesis, with money that cannot grow in expectation while the hypothesis holds.
The wealth is the evidence: starting from 1, it ever reaches 1 / alpha with probability alpha at most (Ville), however
long the stream is. Bets begin at every input t, with 1 / (t (t + 1)) of the first money: a change after t quiet inputs
must earn t (t + 1) times as much, which takes only logarithmically longer.

spent. The expected share of each input, given those before it, is at most a limit: the budget, where that was promised
with a confidence, else the ceiling of its setting (`share_ceilings`). Shares in [0, 1], each with a limit of its own
because requests ask for different budgets:

    1 + f (share / limit - 1),   0 < f < 1

scores. Inputs served are exchangeable with those of the calibration. The rank of a score among all before it, those of
the calibration first, is then uniform and independent of earlier ranks, however few inputs the calibration had (Vovk et
al., conformal test martingales). The score must not depend on the budget: it is the highest setting at which an input
is deferred; at token level, at which its first token is. For p in [0, 1], with equal scores in random order:

    1 + e (1 - 2 p)              higher or lower scores, -1 < e < 1
    1 + e (3 (1 - 2 p)^2 - 1)    more or less varied ones, -1/2 < e < 1
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.guarantees import betting_bounds
from seqdefer.budgets.rules import to_finite
from seqdefer.budgets.spending import Spending

CEILING_DELTA = 0.01  # probability that some ceiling is too low
TEST_DELTA = 0.02  # of a false alarm of each test, ever
DELTA = CEILING_DELTA + 2 * TEST_DELTA  # of any false alarm, ever
STAKES = np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
SLOPES, SPREADS = (-0.9, -0.3, 0.3, 0.9), (-0.4, 0.4, 0.9)
BETS, IS_SLOPE = np.array([*SLOPES, *SPREADS]), np.arange(7) < len(SLOPES)
MAX_EVIDENCE = 1e90


@dataclass(frozen=True)
class DriftReference:
    """What a calibration knows about inputs like its own."""

    ceilings: tuple[float, ...]  # for each of BUDGETS: what the expected share of an input is below
    scores: tuple[float, ...]  # of its inputs, rounded


def drift_reference(spending: Spending, places: Sequence[int]) -> DriftReference | None:
    """Return what later tests compare with; `places` are those of the settings of BUDGETS. None without scores."""
    if spending.first_scores is None:
        return None
    scores = tuple(sorted(round_score(score) for score in spending.first_scores))
    return DriftReference(tuple(map(float, share_ceilings(spending, places))), scores)


def share_ceilings(spending: Spending, places: Sequence[int]) -> Floats:
    """Return what the expected shares of an input are below at some settings; of all settings at once, except with
    probability CEILING_DELTA. To never defer spends nothing."""
    different = sorted(set(places))
    seen = spending.at(different)
    order = np.random.default_rng(0).permutation(spending.inputs)  # files are often sorted
    bounds = betting_bounds((seen.deferred / seen.written)[:, order], CEILING_DELTA / len(spending.settings))
    ceilings = np.where(spending.settings[different] == np.inf, 0.0, bounds)
    return np.asarray(ceilings[np.searchsorted(different, places)])


def round_score(score: float) -> float:
    """Return a score to three digits: few enough different ones to count them all."""
    return to_finite(float(f"{score:.3g}"))


class Evidence:
    """The wealth of a gambler who makes several kinds of bets, and begins them anew at every input."""

    def __init__(self, n_bets: int) -> None:
        self.inputs, self.value = 0, 1.0
        self.alarm_at: int | None = None  # the number of inputs at the first alarm, which stays
        self._reserve, self._at_stake = 1.0, np.zeros(n_bets)

    @property
    def has_alarm(self) -> bool:
        return self.alarm_at is not None

    def add(self, factors: Floats) -> None:
        """Multiply what is at stake in each kind of bet."""
        self.inputs += 1
        begins = self._reserve / (self.inputs + 1)
        self._reserve -= begins
        self._at_stake = (self._at_stake + begins / len(factors)) * factors
        self.value = min(MAX_EVIDENCE, self._reserve + float(self._at_stake.sum()))
        self._at_stake = np.minimum(self._at_stake, MAX_EVIDENCE)
        if self.alarm_at is None and self.value >= 1 / TEST_DELTA:
            self.alarm_at = self.inputs


class SpendingTest:
    """Tests that the expected share of each input is at most its limit."""

    def __init__(self) -> None:
        self.evidence = Evidence(len(STAKES))

    def observe(self, share: float, limit: float) -> None:
        """Count an input. A limit of 0 or 1 cannot be exceeded, and tells nothing."""
        if 0 < limit < 1:
            self.evidence.add(1 + STAKES * (share / limit - 1))


class ScoreTest:
    """Tests that scores are exchangeable with those of a calibration."""

    def __init__(self, calibrated: Sequence[float], seed: int = 0) -> None:
        self.evidence = Evidence(len(BETS))
        counts = Counter(calibrated)
        self._scores = sorted(counts)  # without repeats
        self._counts = [counts[score] for score in self._scores]
        self._n, self._random = len(calibrated), random.Random(seed)

    def observe(self, score: float) -> None:
        """Count an input."""
        p = self._rank(round_score(score))
        self.evidence.add(1 + np.where(IS_SLOPE, 1 - 2 * p, 3 * (1 - 2 * p) ** 2 - 1) * BETS)

    def _rank(self, score: float) -> float:
        """Return the share of all scores so far, this one included, that are higher; of equal ones a random part."""
        place = bisect_left(self._scores, score)
        if place == len(self._scores) or self._scores[place] != score:
            self._scores.insert(place, score)
            self._counts.insert(place, 0)
        self._counts[place] += 1
        self._n += 1
        return (sum(self._counts[place + 1 :]) + self._random.random() * self._counts[place]) / self._n
