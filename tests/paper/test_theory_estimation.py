"""Estimation from n examples (theorems 3.3 and 4.2, corollaries 3.4 and B.6): each term of the bounds by enumeration,
counterexamples to wrong printed forms, and the bounds against simulated data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    CROSS_ENTROPY,
    LOGISTIC,
    MEAN_ABSOLUTE_ERROR,
    ROUNDING,
    SQUARE,
    each_phi,
    each_psi,
    seeds,
    some,
    value_of,
)

from seqdefer.paper.theory import (
    Assumptions,
    Floats,
    best_margin,
    bound_within,
    complexity_from_sample,
    corollary_once,
    corollary_token,
    estimation_bound_once,
    estimation_bound_token,
    linear_complexity,
    linear_rademacher,
    lipschitz_within,
    token_transform,
)
from seqdefer.rejectors.losses import PHIS, PSIS, Phi, Psi
from tests.paper.test_theory import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")


# The terms


def signs(n: int) -> Floats:
    return np.array(list(itertools.product([-1.0, 1.0], repeat=n)))


def complexity(values: Floats) -> float:
    """Return the empirical Rademacher complexity of a finite class, over all signs. values (F, n)"""
    return float((signs(values.shape[1]) @ values.T).max(1).mean()) / values.shape[1]


@each_phi
@some
@given(seeds)
def test_first_term_of_theorem_3_3_survives_its_proof(phi: Phi, seed: int) -> None:
    """R_n(losses) <= rho (C + l) / L sum_j R_n(F_j) <= the printed rho sqrt(2 (C^2 + l^2)) / L sum_j R_n(F_j)."""
    random, length, limit = np.random.default_rng(seed), 3, 4.0
    scores = random.uniform(-limit, limit, (length, 3, 5))  # three functions a position, five examples
    loss, cost = random.uniform(0, 1, (2, length, 1, 5))
    values = (loss * value_of(phi, scores) + cost * value_of(phi, -scores)) / length
    of_losses = sum(complexity(each) for each in values)  # a supremum over a product splits
    of_scores = sum(complexity(each) for each in scores) / length
    contraction = lipschitz_within(phi, limit) * (1.0 + 1.0) * of_scores
    assert of_losses <= contraction + ROUNDING
    assert contraction <= lipschitz_within(phi, limit) * math.sqrt(2 * (1.0 + 1.0)) * of_scores + ROUNDING


def test_lipschitz_step_in_the_proof_of_theorem_3_3_fails() -> None:
    """Printed: rho sqrt(C^2 + l^2) / L in the 2-norm. The square of a sum may exceed the sum of the squares, over
    positions (16 of them: off by 4) or over loss and cost (square loss, |r| <= 9: 1.8 against 1.41)."""
    length, far = 16, -30.0
    step = float(value_of(LOGISTIC, far - 1.0) - value_of(LOGISTIC, far))  # l = 1, c = 0, each position moves by 1
    assert step / math.sqrt(length) == pytest.approx(1 / 4)
    assert step / math.sqrt(length) > 1.0 * math.sqrt(0.0 + 1.0) / length == 1 / 16
    near, end = 9 - 1e-6, 9.0  # l = c = 1
    change = sum(float(value_of(SQUARE, sign * end) - value_of(SQUARE, sign * near)) for sign in (1, -1))
    rho = lipschitz_within(SQUARE, 9.0)
    assert change / (end - near) / rho == pytest.approx(1.8, abs=1e-3)


def test_theorem_3_3_lacks_the_bound_of_phi() -> None:
    """One token, logistic loss, two rejectors: always defer (r = 1000) or never (r = -1000). Loss and cost are (1, 0)
    or (0, 1), the second slightly more likely. All exact: the minimiser is wrong with probability above delta,
    and is then worse by more than the printed bound; with the bound of phi the theorem holds."""
    n, limit, delta = 201, 1000.0, 1e-12
    mean_sign = math.fsum(math.comb(n, k) * abs(n - 2 * k) for k in range(n + 1)) / 2**n / n
    assumptions = Assumptions(n=n, most_loss=1.0, most_cost=1.0, limit=limit, delta=delta)
    right = estimation_bound_token(LOGISTIC, assumptions, [limit * mean_sign])
    missing = bound_within(LOGISTIC, limit)
    printed = right - 2.0 * (missing - 1) * assumptions.deviation
    tilt = 1.01 * printed / limit  # E[cost - loss], so that the wrong choice is worse by tilt * 1000
    chance = (1 - tilt) / 2  # of (1, 0)
    wrong = math.fsum(math.comb(n, k) * chance**k * (1 - chance) ** (n - k) for k in range((n + 1) // 2, n + 1))
    assert tilt < 1
    assert limit * tilt > printed
    assert wrong > 3 * delta
    assert limit * tilt < right


@each_psi
@some
@given(seeds)
def test_first_term_of_theorem_4_2(psi: Psi, seed: int) -> None:
    """R_n(losses) <= sqrt(2) (|J| - 1) (C + l) rho sum_j R_n(G_j), by all signs: 3 hand-offs, 2 functions each."""
    random = np.random.default_rng(seed)
    functions = random.uniform(-3, 3, (3, 2, 5))
    total = random.uniform(0, 2, (5, 3))
    weights = total.max(1, keepdims=True) - total
    scores = np.array([np.stack(each, -1) for each in itertools.product(*functions)])  # (8, 5, 3)
    of_losses = complexity((weights * value_of(psi, scores)).sum(2))
    assert of_losses <= math.sqrt(2) * 2 * 2.0 * psi.lipschitz * sum(map(complexity, functions)) + ROUNDING


def test_formulas_once_by_hand() -> None:
    deviation = math.sqrt(2 * math.log(20) / 1000)
    rho, u = 1 / (1 + math.exp(-1.5)), math.log(1 + math.exp(1.5))
    token = 4 * rho * math.sqrt(2 * (0.25 + 4)) / 2 * (0.1 + 0.3) + 2.5 * u * deviation
    assert estimation_bound_token(LOGISTIC, PLAIN, [0.1, 0.3]) == pytest.approx(token)
    q, u = 2 * 2 * 2.5, -math.log(math.exp(-1.5) / (math.exp(-1.5) + 2 * math.exp(1.5)))
    once = 2 * math.sqrt(2) * q * math.sqrt(2) * 0.6 + u * q * deviation
    assert estimation_bound_once(CROSS_ENTROPY, PLAIN, [0.1, 0.2, 0.3]) == pytest.approx(once)
    wide = 2.5 * token_transform(SQUARE)((estimation_bound_token(SQUARE, PLAIN, [1e-3]) + 0.01) / 2.5)
    assert corollary_token(SQUARE, PLAIN, [1e-3], approximation=0.01) == pytest.approx(wide)
    large = replace(PLAIN, n=10**8)
    printed = 5.0 * 3 * (estimation_bound_once(MEAN_ABSOLUTE_ERROR, large, [1e-5] * 3) + 1e-4) / 0.2
    options = {"approximation": 1e-4, "separation": 0.2}
    assert corollary_once(MEAN_ABSOLUTE_ERROR, large, [1e-5] * 3, **options) == pytest.approx(printed)


def all_bounds(assumptions: Assumptions, complexities: list[float], approximation: float = 0.0) -> Floats:
    token = [estimation_bound_token(phi, assumptions, complexities) for phi in PHIS.values()]
    once = [estimation_bound_once(psi, assumptions, complexities) for psi in PSIS.values()]
    both = [
        *(corollary_token(phi, assumptions, complexities, approximation=approximation) for phi in PHIS.values()),
        *(corollary_once(psi, assumptions, complexities, approximation=approximation) for psi in PSIS.values()),
    ]
    return np.array([*token, *once, *both])


@pytest.mark.parametrize(
    "worse", [{"n": 10**9}, {"delta": 0.01}, {"most_loss": 2.2}, {"most_cost": 0.6}, {"limit": 1.6}], ids=str
)
def test_bounds_are_monotone(worse: dict[str, float]) -> None:
    large = replace(PLAIN, n=10**10)  # where no corollary has reached its ceiling
    assert (all_bounds(replace(large, **worse), [1e-6] * 3) > all_bounds(large, [1e-6] * 3)).all()


def test_bounds_rise_with_complexity_and_approximation_and_vanish_with_n() -> None:
    large = replace(PLAIN, n=10**10)
    assert (all_bounds(large, [1e-6, 1e-6, 2e-6]) > all_bounds(large, [1e-6] * 3)).all()
    assert (all_bounds(large, [1e-6] * 3, 1e-6)[6:] > all_bounds(large, [1e-6] * 3)[6:]).all()
    assert (all_bounds(replace(PLAIN, n=10**18), [1e-12] * 3) < 1e-2).all()


@given(st.floats(1e-3, 1e3))
def test_bounds_scale_with_the_units_of_loss_and_cost(unit: float) -> None:
    scaled = replace(PLAIN, most_loss=2.0 * unit, most_cost=0.5 * unit)
    np.testing.assert_allclose(all_bounds(scaled, [1e-3] * 3), unit * all_bounds(PLAIN, [1e-3] * 3))


# Rademacher complexity


@some
@given(seeds)
def test_linear_rademacher_against_all_signs(seed: int) -> None:
    random = np.random.default_rng(seed)
    n, radius = int(random.integers(1, 8)), float(random.uniform(0, 3))
    features = random.normal(size=(n, 3))
    exact = radius * np.linalg.norm(signs(n) @ features, axis=1).mean() / n
    estimate = linear_rademacher(features, radius, draws=400, seed=seed)
    assert abs(estimate.value - exact) <= 6 * estimate.standard_error + ROUNDING
    sharper = radius * math.sqrt((features**2).sum()) / n
    assert exact <= sharper + ROUNDING
    assert sharper <= linear_complexity(radius, float(np.linalg.norm(features, axis=1).max()), n) + ROUNDING


def test_linear_rademacher_is_the_supremum_over_directions() -> None:
    """Compare with a grid of the circle, for each sign."""
    features = np.random.default_rng(0).normal(size=(6, 2))
    angles = np.linspace(0, 2 * math.pi, 2000)
    grid = 1.5 * np.stack([np.cos(angles), np.sin(angles)])
    assert complexity((features @ grid).T) == pytest.approx(
        1.5 * np.linalg.norm(signs(6) @ features, axis=1).mean() / 6, rel=1e-5
    )


def test_linear_rademacher_falls_with_the_root_of_n_and_is_repeatable() -> None:
    features = np.random.default_rng(0).normal(size=(1600, 4))
    few, many = linear_rademacher(features[:100], 1.0, draws=300), linear_rademacher(features, 1.0, draws=300)
    assert few.value / many.value == pytest.approx(4, rel=0.1)
    assert linear_rademacher(features, 2.0, draws=300).value == pytest.approx(2 * many.value)
    assert linear_rademacher(features, 1.0, draws=300) == many
    assert linear_rademacher(features, 1.0, draws=300, seed=1) != many
    bound = linear_complexity(1.0, float(np.linalg.norm(features, axis=1).max()), 1600)
    assert many.value < bound < 3 * many.value


@some
@given(seeds)
def test_one_example_moves_the_empirical_complexity_by_2m_over_n(seed: int) -> None:
    """complexity_from_sample relies on it."""
    random = np.random.default_rng(seed)
    values = random.uniform(-2, 2, (4, 5))  # four functions, M = 2
    moved = values.copy()
    moved[:, 0] = random.uniform(-2, 2, 4)
    assert abs(complexity(values) - complexity(moved)) <= 2 * 2.0 / 5
    assert complexity_from_sample(0.1, PLAIN) == pytest.approx(0.1 + 3.0 * math.sqrt(math.log(10) / 2000))


# The bounds against simulated data: linear scores on eight directions of the plane, whose risks are known exactly.
# Weights are projected to a ball of radius 2, so |scores| <= 2; minimisers come from projected gradient descent.

ANGLES = np.arange(8) * math.pi / 4
DIRECTIONS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1)  # (8, 2), norm 1
RADIUS, RUNS = 2.0, 200


def minimise_linear(slopes: Callable[[Floats], Floats], n_scores: int, step: float) -> Floats:
    """Return weights (runs, scores, 2); `slopes` maps scores (runs, scores, 8) to the slopes of the surrogate."""
    weights = np.zeros((RUNS, n_scores, 2))
    for _ in range(400):
        weights = weights - step * slopes(weights @ DIRECTIONS.T) @ DIRECTIONS
        norms = np.linalg.norm(weights, axis=2, keepdims=True)
        weights *= np.minimum(1, RADIUS / np.maximum(norms, RADIUS))
    return weights


def sample_means(random: np.random.Generator, values: Floats, n: int) -> Floats:
    """Return means over `n` examples of equally likely cells, times the probability of x, in every run; the first run
    is the truth. values (..., 8, Y) -> (runs, ..., 8)"""
    n_cells = values.shape[-2] * values.shape[-1]
    chances = random.multinomial(n, np.full(n_cells, 1 / n_cells), RUNS) / n
    chances[0] = 1 / n_cells
    means: Floats = np.einsum("...xy,rxy->r...x", values, chances.reshape(RUNS, *values.shape[-2:]))
    return means


def test_token_bounds_hold_on_simulated_data() -> None:
    """At n = 100,000 the estimation bound is below the excess of the worst rejector of the class, and four orders of
    magnitude above the observed excess."""
    random, n = np.random.default_rng(0), 100_000
    loss, cost = random.uniform(0, 1, (2, 2, 8, 3))  # two positions, eight inputs, three targets each
    means = sample_means(random, np.stack([loss, cost]), n)  # (runs, 2, L, 8)
    a, b = means[:, 0], means[:, 1]
    fitted = minimise_linear(lambda r: (b / (1 + np.exp(-r)) - a / (1 + np.exp(r))) / 2, 2, step=8.0)
    truth_a, truth_b = a[0], b[0]

    def surrogate(weights: Floats) -> Floats:
        r = weights @ DIRECTIONS.T
        risk: Floats = (truth_a * value_of(LOGISTIC, r) + truth_b * value_of(LOGISTIC, -r)).mean(1).sum(1)
        return risk

    risks = surrogate(fitted)
    excess = risks[1:] - risks[0]  # the first run saw the truth
    assumptions = Assumptions(n=n, most_loss=1.0, most_cost=1.0, limit=RADIUS)
    complexities = [linear_complexity(RADIUS, 1.0, n)] * 2
    bound = estimation_bound_token(LOGISTIC, assumptions, complexities)
    worst = surrogate(-fitted[:1] / np.linalg.norm(fitted[:1], axis=2, keepdims=True) * RADIUS)[0] - risks[0]
    assert excess.min() > -1e-9
    assert excess.max() < bound < worst
    assert 5_000 < bound / np.quantile(excess, 0.95) < 100_000
    best = best_margin(LOGISTIC, truth_a / (truth_a + truth_b))
    bayes = float((truth_a * value_of(LOGISTIC, best) + truth_b * value_of(LOGISTIC, -best)).mean(0).sum())
    decided = np.where(fitted @ DIRECTIONS.T >= 0, truth_b, truth_a)
    target = (decided - np.minimum(truth_a, truth_b)).mean(1).sum(1)
    whole = corollary_token(LOGISTIC, assumptions, complexities, approximation=risks[0] - bayes)
    assert target.max() < whole < 1


def test_one_time_bounds_hold_on_simulated_data() -> None:
    random, n = np.random.default_rng(1), 30_000_000
    total = random.uniform(0, 1, (3, 8, 3))  # three hand-offs, eight inputs, three targets each
    weights = sample_means(random, total.max(0) - total, n)  # (runs, 3, 8)

    def softmax(scores: Floats) -> Floats:
        powers = np.exp(scores)
        shares: Floats = powers / powers.sum(1, keepdims=True)
        return shares

    fitted = minimise_linear(lambda g: weights.sum(1, keepdims=True) * softmax(g) - weights, 3, step=2.0)
    risks = -(weights[0] * np.log(softmax(fitted @ DIRECTIONS.T))).sum((1, 2))
    excess = risks[1:] - risks[0]
    assumptions = Assumptions(n=n, most_loss=0.5, most_cost=0.5, limit=RADIUS)
    bound = estimation_bound_once(CROSS_ENTROPY, assumptions, [linear_complexity(RADIUS, 1.0, n)] * 3)
    assert excess.min() > -1e-9
    assert excess.max() < bound < 0.05 * risks[0]
    assert bound / np.quantile(excess, 0.95) > 10_000
