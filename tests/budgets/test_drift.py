"""Tests of drift: evidence is fair while nothing has changed, however long one looks, and grows when something has."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from toy_pair import Toy, numbers

from seqdefer.budgets.calibration import BUDGETS, calibrate
from seqdefer.budgets.drift import (
    STAKES,
    TEST_DELTA,
    Evidence,
    ScoreTest,
    SpendingTest,
    drift_reference,
    round_score,
    share_ceilings,
)
from seqdefer.budgets.promises import Confident, Expected
from seqdefer.methods.deferral import UnjudgedTask, deferral_of

pytestmark = pytest.mark.usefixtures("one_thread")
STREAMS = 250


def at_most(delta: float, repeats: int = STREAMS) -> float:
    """The largest rate that `repeats` streams may show: delta and three standard errors."""
    return delta + 3 * math.sqrt(delta * (1 - delta) / repeats)


# -- evidence ------------------------------------------------------------------------------------------------------


def test_bets_begin_at_every_input() -> None:
    """A factor that only the last input multiplies earns its part of the first money, 1 / (t (t + 1))."""
    for t in (1, 2, 7, 100):
        evidence = Evidence(1)
        for _ in range(t - 1):
            evidence.add(np.zeros(1))  # loses all that was at stake
        evidence.add(np.array([1000.0]))
        assert evidence.value == pytest.approx(1000 / (t * (t + 1)) + 1 / (t + 1))


def test_an_alarm_stays() -> None:
    evidence = Evidence(1)
    evidence.add(np.array([2 / TEST_DELTA]))
    assert evidence.alarm_at == 1
    for _ in range(5):
        evidence.add(np.zeros(1))
    assert evidence.value < 1
    assert evidence.alarm_at == 1


def test_evidence_stays_finite() -> None:
    evidence = Evidence(2)
    for _ in range(2000):
        evidence.add(np.array([2.0, 3.0]))
    assert math.isfinite(evidence.value)


# -- what is spent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high", "limit"), [(0.0, 1.0, 0.3), (0.1, 0.6, 0.25)])
def test_spending_at_the_limit_is_a_fair_game(low: float, high: float, limit: float) -> None:
    chance, total = (limit - low) / (high - low), 0.0
    for shares in product((low, high), repeat=8):
        test = SpendingTest()
        for share in shares:
            test.observe(share, limit)
        weight = math.prod(chance if share == high else 1 - chance for share in shares)
        total += weight * test.evidence.value
    assert total == pytest.approx(1)


def test_limits_that_cannot_be_exceeded_are_not_counted() -> None:
    test = SpendingTest()
    for limit in (0.0, 1.0):
        test.observe(limit, limit)
    assert (test.evidence.inputs, test.evidence.value) == (0, 1.0)
    assert (1 + STAKES * -1 > 0).all()  # no share ruins the gambler


def spending_alarm(shares: np.ndarray, limits: np.ndarray) -> int | None:
    test = SpendingTest()
    for share, limit in zip(shares, limits, strict=True):
        test.observe(float(share), float(limit))
        if test.evidence.alarm_at is not None:
            break
    return test.evidence.alarm_at


def test_false_alarms_about_spending_are_rare_with_mixed_budgets() -> None:
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(STREAMS):
        limits = rng.choice([0.1, 0.2, 0.5], 1000)
        alarms += spending_alarm(rng.random(1000) < limits, limits) is not None
    assert alarms / STREAMS <= at_most(TEST_DELTA)


def test_spending_above_the_limit_is_found() -> None:
    rng = np.random.default_rng(1)
    limits = rng.choice([0.1, 0.2], 3000)
    found = spending_alarm(rng.random(3000) < 1.5 * limits, limits)
    assert found is not None
    assert found < 1500
    half = np.where(np.arange(3000) < 1500, 1.0, 2.0)
    late = spending_alarm(rng.random(3000) < half * limits, limits)
    assert late is not None
    assert 1500 < late < 2500


# -- scores --------------------------------------------------------------------------------------------------------


def test_ranks_of_exchangeable_scores_are_uniform() -> None:
    """All orders of seven scores, two of them equal; the first three are the calibration's. The mean of each rank is
    1/2, ranks are independent, and so evidence has an expectation of 1."""
    scores = [1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    values, ranks = [], []
    for seed, order in enumerate(permutations(scores)):
        test = ScoreTest(sorted(order[:3]), seed)
        seen = [test._rank(score) for score in order[3:]]
        ranks.append(seen)
        test = ScoreTest(sorted(order[:3]), seed)
        for score in order[3:]:
            test.observe(score)
        values.append(test.evidence.value)
    found, n = np.array(ranks), len(ranks)
    assert found.mean(0) == pytest.approx(np.full(4, 0.5), abs=4 * 0.29 / math.sqrt(n))
    assert np.corrcoef(found.T)[np.triu_indices(4, 1)] == pytest.approx(np.zeros(6), abs=4 / math.sqrt(n))
    assert np.mean(values) == pytest.approx(1, abs=4 * np.std(values) / math.sqrt(n))


def score_alarm(calibrated: np.ndarray, served: np.ndarray, seed: int = 0) -> int | None:
    test = ScoreTest([round_score(score) for score in calibrated], seed)
    for score in served:
        test.observe(float(score))
        if test.evidence.alarm_at is not None:
            break
    return test.evidence.alarm_at


@pytest.mark.parametrize("n", [20, 200])
def test_false_alarms_about_scores_are_rare_however_few_were_calibrated(n: int) -> None:
    """A test against the calibration's distribution as if it were the true one would alarm: with 20 inputs, their mean
    is wrong by a fifth of a standard deviation, which 700 inputs show."""
    rng = np.random.default_rng(n)
    alarms = [score_alarm(rng.normal(size=n), rng.normal(size=700), seed) is not None for seed in range(STREAMS)]
    assert np.mean(alarms) <= at_most(TEST_DELTA)


@pytest.mark.parametrize(("mean", "deviation"), [(0.7, 1.0), (-0.7, 1.0), (0.0, 2.5), (0.0, 0.4)])
def test_other_scores_are_found(mean: float, deviation: float) -> None:
    rng = np.random.default_rng(2)
    quiet, other = rng.normal(size=400), rng.normal(mean, deviation, 600)
    found = score_alarm(rng.normal(size=300), np.concatenate([quiet, other]))
    assert found is not None
    assert 400 < found < 600


def test_scores_are_counted_in_little_memory() -> None:
    test = ScoreTest([])
    for score in np.random.default_rng(3).lognormal(size=4000):
        test.observe(float(score))
    assert len(test._scores) == len(test._counts) < 2500
    assert test._n == sum(test._counts) == 4000
    assert round_score(-math.inf) == round_score(-1e99) == -1e90
    assert round_score(0.123456) == 0.123


# -- the reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeModel", "OneTimeCost", "WholeModelScore"])
def test_first_scores_tell_when_an_input_is_deferred(method: str) -> None:
    """At higher settings nothing of it is deferred; at token level, nothing of its first token."""
    toy = Toy.of(length=5)
    deferral = deferral_of(toy.rejector(method))
    examples = toy.served.codec.encode(numbers(40))
    spending = deferral.spending(UnjudgedTask(toy.served), examples)
    scores = spending.first_scores
    assert scores is not None
    for place in (1, len(spending.settings) // 2, len(spending.settings) - 2):
        setting, deferred = spending.settings[place], spending.at([place]).deferred[0]
        is_first = scores >= setting
        if method == "TokenwiseModel":
            assert (deferred[is_first] > 0).all()
        else:
            assert ((deferred > 0) == is_first).all()
    rows = np.array([3, 3, 0])
    assert spending.select(rows).first_scores == pytest.approx(scores[rows])


def test_ceilings_are_above_expectations() -> None:
    """Of all settings at once: 100 calibrations of 60 inputs, drawn from a population whose shares are known."""
    toy = Toy.of(length=5)
    spending = deferral_of(toy.rejector("TokenwiseModel")).spending(
        UnjudgedTask(toy.served), toy.served.codec.encode(numbers(300)), set_aside=True
    )
    deferred, written = spending.counts
    expected, every = (deferred / written).mean(1), list(range(len(spending.settings)))
    wrong = 0
    for seed in range(100):
        sample = spending.select(np.random.default_rng(seed).integers(0, spending.inputs, 60))
        wrong += bool((share_ceilings(sample, every) < expected).any())
    assert wrong <= 100 * at_most(0.01, 100)
    places = [5, 2, 2, 9]
    assert share_ceilings(spending, places) == pytest.approx(share_ceilings(spending, every)[places])


def test_a_calibration_knows_its_limits() -> None:
    toy = Toy.of(length=5)
    spending = deferral_of(toy.rejector("OneTimeModel")).spending(
        UnjudgedTask(toy.served), toy.served.codec.encode(numbers(200))
    )
    found = calibrate(spending, inputs=200, rejector="r")
    reference = found.reference
    assert reference is not None
    assert len(reference.scores) == 200
    assert len(reference.ceilings) == len(BUDGETS)
    setting = found.for_budget(0.3)
    assert found.limit(setting) == reference.ceilings[BUDGETS.index(setting.budget)] > setting.share
    assert found.spent(setting, 2, 5, 5) == 2 / 5
    promised = calibrate(spending, inputs=200, rejector="r", rule=Confident(0.9))
    setting = promised.for_budget(0.305)
    assert promised.limit(setting) == 0.3
    assert promised.spent(setting, 2, 4, 5) == pytest.approx((2 - 0.3 * 4 + 0.3 * 5) / 5)
    by_input = calibrate(spending, inputs=200, rejector="r", rule=Confident(0.9, "inputs"))
    assert by_input.spent(setting, 2, 4, 5) == 0.5
    # In expectation over calibrations: this one may spend more than its budget, and that is no drift.
    expected = calibrate(spending, inputs=200, rejector="r", rule=Expected())
    setting = expected.for_budget(0.3)
    limit = expected.limit(setting)
    assert limit is not None
    assert limit > 0.3
    assert replace(found, reference=None).limit(found.for_budget(0.3)) is None


def test_spending_without_scores_has_no_reference() -> None:
    toy = Toy.of(length=5)
    examples = toy.served.codec.encode(numbers(40))
    spending = deferral_of(toy.rejector("TokenwiseModel")).spending(UnjudgedTask(toy.served), examples)
    spending.first_scores = None
    assert drift_reference(spending, [0, 1]) is None
