"""The mathematics of guarantees, against exact enumeration of small cases and simulation of known distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from seqdefer.budgets.guarantees import (
    MAX_LEAST_INPUTS,
    _binomial_distribution,
    accepted_settings,
    betting_bounds,
    betting_p_values,
    conformal_bounds,
    hoeffding_bentkus_p_values,
    least_inputs,
    monotone_envelope,
    stakes,
    token_losses,
)

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]
DISTRIBUTIONS: dict[str, tuple[float, Draw]] = {  # with their means
    "coins": (0.2, lambda random, shape: (random.random(shape) < 0.2) * 1.0),
    "rare": (0.03, lambda random, shape: (random.random(shape) < 0.03) * 1.0),
    "beta": (0.2, lambda random, shape: random.beta(2, 8, shape)),
    "two points": (0.35, lambda random, shape: (random.random(shape) < 0.5) * 0.7),
    "uniform": (0.5, lambda random, shape: random.random(shape)),
}
each_distribution = pytest.mark.parametrize("name", DISTRIBUTIONS)


def sample(name: str, repeats: int, n: int) -> tuple[float, Floats]:
    mean, draw = DISTRIBUTIONS[name]
    return mean, draw(np.random.default_rng(7), (repeats, n))


def at_most(rate: float, repeats: int) -> float:
    """What a frequency with this expectation exceeds once in some thousand studies."""
    return rate + 3.3 * math.sqrt(rate * (1 - rate) / repeats)


# -- p-values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "p"), [(1, 0.3), (7, 0.5), (40, 0.02), (300, 0.9)])
def test_binomial_distribution_is_a_sum_of_coefficients(n: int, p: float) -> None:
    masses = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    assert _binomial_distribution(n, p) == pytest.approx(np.cumsum(masses), rel=1e-9)


@pytest.mark.parametrize("n", [5, 40, 300])
@pytest.mark.parametrize("budget", [0.05, 0.3, 0.8])
def test_hoeffding_bentkus_is_a_p_value_for_coins_exactly(n: int, budget: float) -> None:
    """P[p <= delta] <= delta at every delta that some outcome has, where the expectation is the budget."""
    masses = np.diff(_binomial_distribution(n, budget), prepend=0.0)
    p_values = hoeffding_bentkus_p_values(np.arange(n + 1) / n, n, budget)
    for delta in p_values:
        assert masses[p_values <= delta].sum() <= delta + 1e-12
    assert p_values[0] == pytest.approx((1 - budget) ** n)  # no loss at all: Hoeffding is exact
    assert (np.diff(p_values) >= -1e-15).all()


def plain_wealth(losses: list[float], budget: float, delta: float) -> list[float]:
    """The formula, step by step."""
    n, wealth, path = len(losses), 1.0, []
    for i, loss in enumerate(losses):
        seen = losses[:i]
        means = [(0.5 + sum(seen[: j + 1])) / (j + 2) for j in range(i)]
        variance = (0.25 + sum((one - mean) ** 2 for one, mean in zip(seen, means, strict=True))) / (i + 1)
        stake = min(1.0, math.sqrt(2 * math.log(1 / delta) / (n * variance)))
        wealth *= 1 - stake * (loss - budget)
        path.append(wealth)
    return path


def test_bets_follow_the_formula() -> None:
    losses = np.random.default_rng(1).random((5, 30)) ** 2
    for delta, budget in [(0.1, 0.4), (0.01, 0.9), (0.5, 0.2)]:
        expected = [1 / max(1.0, *plain_wealth(row.tolist(), budget, delta)) for row in losses]
        assert betting_p_values(losses, budget, delta) == pytest.approx(expected)


def test_stakes_know_only_earlier_losses() -> None:
    losses = np.random.default_rng(2).random((1, 200))
    changed = losses.copy()
    changed[0, 11:] = 1 - changed[0, 11:]
    before, after = stakes(losses, 0.1), stakes(changed, 0.1)
    assert (before[0, :12] == after[0, :12]).all()
    assert (before[0, 12:] != after[0, 12:]).any()


@pytest.mark.parametrize("points", [(0.0, 1.0), (0.1, 0.6)])
@pytest.mark.parametrize("chance", [0.2, 0.5])
def test_wealth_is_fair_where_the_budget_is_the_expectation(points: tuple[float, float], chance: float) -> None:
    """All sequences of 12 losses with two values: wealth has an expectation of 1, and reaches 1 / delta with
    probability delta at most."""
    n, budget = 12, points[0] + chance * (points[1] - points[0])
    sequences = np.array(list(product(points, repeat=n)))
    weights = np.where(sequences == points[1], chance, 1 - chance).prod(1)
    last = [plain_wealth(row.tolist(), budget, 0.1)[-1] for row in sequences]
    assert weights @ np.array(last) == pytest.approx(1)
    for delta in (0.05, 0.1, 0.3):
        assert weights[betting_p_values(sequences, budget, delta) <= delta].sum() <= delta
        assert weights[betting_p_values(sequences, budget - 0.05, delta) <= delta].sum() <= delta


@each_distribution
@pytest.mark.parametrize("n", [60, 400])
def test_bounds_are_above_the_expectation_as_often_as_they_say(name: str, n: int) -> None:
    repeats, delta = 250, 0.1
    mean, losses = sample(name, repeats, n)
    assert (betting_bounds(losses, delta) < mean).mean() <= at_most(delta, repeats)


@each_distribution
def test_betting_is_the_tighter_bound(name: str) -> None:
    """That is why `confident` bets: the choice may not depend on the losses."""
    _, losses = sample(name, 200, 100)
    tests = zip(losses.mean(1)[:, None], betting_bounds(losses, 0.1), strict=True)
    by_mean = [hoeffding_bentkus_p_values(mean, 100, bound)[0] for mean, bound in tests]
    assert np.mean(by_mean) > 0.1  # where betting begins to pass, the other does not yet


def test_bounds_are_where_the_tests_begin_to_pass() -> None:
    losses = np.random.default_rng(3).beta(2, 5, (6, 80))
    for delta in (0.05, 0.2):
        bounds = betting_bounds(losses, delta)
        for row in range(6):
            one = losses[row : row + 1]
            assert (
                betting_p_values(one, bounds[row] + 1e-6, delta)
                <= delta
                < betting_p_values(one, bounds[row] - 1e-6, delta)
            )


def test_settings_are_tested_until_the_first_failure() -> None:
    assert accepted_settings(np.array([True, True, False, True])) == 2
    assert accepted_settings(np.array([False, True])) == 0
    assert accepted_settings(np.array([True, True])) == 2


# -- in expectation ------------------------------------------------------------------------------------------------


def expected_loss(curves: Floats, budget: float, n: int, *, envelope: bool) -> float:
    """The exact expectation of the next input's loss at the setting that n others choose. curves (m, T)"""
    total = 0.0
    for drawn in product(range(len(curves)), repeat=n + 1):
        losses = curves[list(drawn[:n])].T
        bounds = conformal_bounds(monotone_envelope(losses) if envelope else losses)
        chosen = np.flatnonzero(bounds <= budget)
        total += curves[drawn[n], chosen[-1]] if len(chosen) else 0.0
    return total / len(curves) ** (n + 1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [0.3, 0.5])
def test_expectation_holds_exactly(seed: int, budget: float) -> None:
    curves = np.sort(np.random.default_rng(seed).random((5, 6)) ** 2, axis=1)
    assert 0 < expected_loss(curves, budget, 4, envelope=True) <= budget


def test_losses_that_fall_need_the_envelope() -> None:
    """Every setting spends 0.6, each on other inputs: one that looks cheap on a few of them is taken."""
    curves = 1.0 - np.array([[one in kept for kept in combinations(range(5), 2)] for one in range(5)])
    assert curves.mean(0).tolist() == pytest.approx([0.6] * 10)
    assert expected_loss(curves, 0.45, 4, envelope=False) > 0.45
    assert expected_loss(curves, 0.45, 4, envelope=True) <= 0.45


def test_envelope_is_the_least_rise_above() -> None:
    losses = np.array([[0.1, 0.5], [0.3, 0.2], [0.2, 0.6]])
    assert monotone_envelope(losses).tolist() == [[0.1, 0.5], [0.3, 0.5], [0.3, 0.6]]


# -- the nearest setting promises nothing --------------------------------------------------------------------------


def test_nearest_exceeds_a_budget_as_often_as_not_and_tests_do_not() -> None:
    """Inputs are deferred whole by uniform scores: at a threshold t the expected share is 1 - t, exactly."""
    n, repeats, budget, delta = 100, 400, 0.2, 0.1
    thresholds = np.linspace(1, 0, 101)[:, None]
    spent: dict[str, list[float]] = {"nearest": [], "expected": [], "confident": []}
    random = np.random.default_rng(11)
    for _ in range(repeats):
        losses = (random.random(n) >= thresholds) * 1.0
        places = {
            "nearest": np.abs(losses.mean(1) - budget).argmin(),
            "expected": np.flatnonzero(conformal_bounds(losses) <= budget)[-1],
            "confident": accepted_settings(betting_p_values(losses, budget, delta) <= delta) - 1,
        }
        for name, place in places.items():
            spent[name].append(1 - float(thresholds[place, 0]))
    exceeds = {name: (np.array(shares) > budget + 1e-9).mean() for name, shares in spent.items()}
    assert exceeds["nearest"] > 0.35
    assert exceeds["confident"] <= at_most(delta, repeats)
    error = np.std(spent["expected"]) / math.sqrt(repeats)
    assert 0.18 < np.mean(spent["expected"]) <= budget + 3.3 * error


# -- the share of all tokens ---------------------------------------------------------------------------------------


def test_share_of_all_tokens_is_tested_as_a_mean() -> None:
    random = np.random.default_rng(4)
    written = random.integers(1, 21, 500).astype(float)
    deferred = np.floor(random.random(500) * (written + 1))
    share = deferred.sum() / written.sum()
    for budget in (0.05, share, 0.95):
        losses = token_losses(deferred, written, budget, 20)
        assert losses.min() >= 0
        assert losses.max() <= 1
        assert losses.mean() - budget == pytest.approx((share - budget) * written.mean() / 20)


def test_long_sequences_can_make_the_two_shares_differ() -> None:
    """A bound on the mean share per input says nothing about the share of all tokens: hence two kinds of losses."""
    written, deferred = np.array([1.0, 1.0, 1.0, 17.0]), np.array([0.0, 0.0, 0.0, 17.0])
    assert (deferred / written).mean() == 0.25
    assert token_losses(deferred, written, 0.25, 20).mean() > 0.25


# -- how many inputs -----------------------------------------------------------------------------------------------


def test_least_inputs_is_the_first_that_is_enough() -> None:
    for least in (1, 2, 3, 44, 1000):
        assert least_inputs(lambda n, least=least: n >= least) == least
    assert least_inputs(lambda n: False) == MAX_LEAST_INPUTS
