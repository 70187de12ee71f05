"""The paper's statements on small discrete distributions, by enumeration; where a printed form is wrong, a
counterexample to it. What concerns one loss alone (gamma, Gamma, rho, convexity) is in test_losses.py."""

from __future__ import annotations

import doctest
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_docs import ROOT, run_blocks

from seqdefer import theory
from seqdefer.errors import OptionError
from seqdefer.losses import PHIS, PSIS, Phi, Psi, get_phi, get_psi, one_time_loss, one_time_surrogate
from seqdefer.theory import (
    Assumptions,
    Floats,
    best_margin,
    bound_within,
    calibration_gap,
    complexity_from_sample,
    corollary_once,
    corollary_token,
    estimation_bound_once,
    estimation_bound_token,
    excess_risk_bound,
    linear_complexity,
    linear_rademacher,
    lipschitz_within,
    one_time_offset,
    one_time_transform,
    token_transform,
)

each_phi = pytest.mark.parametrize("phi", PHIS.values(), ids=lambda phi: phi.name)
each_psi = pytest.mark.parametrize("psi", PSIS.values(), ids=lambda psi: psi.name)
some = settings(max_examples=40)
seeds = st.integers(0, 2**32 - 1)
ROUNDING = 1e-12  # goes inside Gamma, whose slope at 0 may be infinite
PAGE = ROOT / "docs" / "theory.md"

pytestmark = pytest.mark.usefixtures("one_thread")

LOGISTIC, SQUARE = get_phi("logistic"), get_phi("square")
CROSS_ENTROPY, MEAN_ABSOLUTE_ERROR = get_psi("cross_entropy"), get_psi("mean_absolute_error")

BEST_MARGIN: dict[str, Callable[[Floats], Floats]] = {
    "logistic": lambda p: np.log(p / (1 - p)),
    "exponential": lambda p: np.log(p / (1 - p)) / 2,
    "square": lambda p: 2 * p - 1,
    "squared_hinge": lambda p: 2 * p - 1,
}
GAP: dict[str, Callable[[float], float]] = {
    "logistic": lambda a: (xlogx(1 + a) + xlogx(1 - a)) / 2,
    "exponential": lambda a: 1 - math.sqrt(1 - a * a),
    "square": lambda a: a * a,
    "squared_hinge": lambda a: a * a,
}
LIPSCHITZ: dict[str, Callable[[float], float]] = {
    "logistic": lambda m: 1 / (1 + math.exp(-m)),
    "exponential": math.exp,
    "square": lambda m: 2 * (1 + m),
    "squared_hinge": lambda m: 2 * (1 + m),
}
BOUND: dict[str, Callable[[float], float]] = {
    "logistic": lambda m: m + math.log1p(math.exp(-m)),
    "exponential": math.exp,
    "square": lambda m: (1 + m) ** 2,
    "squared_hinge": lambda m: (1 + m) ** 2,
}


def xlogx(x: float) -> float:
    return x * math.log(x) if x > 0 else 0.0


def value_of(loss: Phi | Psi, scores: Any) -> Floats:
    result: Floats = loss(torch.tensor(np.asarray(scores, float))).numpy()
    return result


# Small worlds. A token world is a list of (x, y, position), each with its chance over the length, and the place it is
# decided at: (position, x, prefix). Prefixes follow the oracle's decisions, as the paper assumes, so they depend on y.


@dataclass(frozen=True)
class TokenWorld:
    place: Any  # (N,) int
    chance: Floats  # (N,), sums to 1
    loss: Floats  # (N,)
    cost: Floats  # (N,)

    def risk(self, scores: Floats, zero_defers: bool = True) -> float:
        """Of scores (P,), one a place."""
        at = scores[self.place]
        defers = at >= 0 if zero_defers else at > 0
        return float(self.chance @ np.where(defers, self.cost, self.loss))

    def surrogate(self, scores: Floats, phi: Phi) -> float:
        at = scores[self.place]
        return float(self.chance @ (self.loss * value_of(phi, at) + self.cost * value_of(phi, -at)))

    def expected(self) -> tuple[Floats, Floats]:
        """A and B: chance times expected loss and cost of each place. (P,)"""
        return np.bincount(self.place, self.chance * self.loss), np.bincount(self.place, self.chance * self.cost)


def token_world(random: np.random.Generator, n_inputs: int = 3, n_targets: int = 3, length: int = 3) -> TokenWorld:
    shape = (n_inputs, n_targets, length, 2 ** (length - 1))
    loss, cost = random.uniform(0, 2, shape), random.uniform(0.1, 3, shape)
    chances = random.dirichlet(np.ones(n_inputs * n_targets)).reshape(n_inputs, n_targets)
    rows, places = [], []
    for x, y in itertools.product(range(n_inputs), range(n_targets)):
        prefix = 0
        for j in range(length):
            here = x, y, j, prefix
            places.append((j, x, prefix))
            rows.append((chances[x, y] / length, loss[here], cost[here]))
            prefix = 2 * prefix + int(loss[here] >= cost[here])
    numbers = {place: i for i, place in enumerate(sorted(set(places)))}
    return TokenWorld(np.array([numbers[place] for place in places]), *np.array(rows).T)


@dataclass(frozen=True)
class OneTimeWorld:
    chance: Floats  # (X, Y), sums to 1
    total: Floats  # (X, Y, J): loss of the prefix kept + cost of the expert

    @property
    def n_hand_offs(self) -> int:
        return int(self.total.shape[2])

    @property
    def weights(self) -> Floats:
        """c_max - total: (X, Y, J)"""
        weights: Floats = self.total.max(2, keepdims=True) - self.total
        return weights

    def risk(self, scores: Floats) -> float:
        """Of scores (X, J)."""
        chosen = scores.argmax(1)
        return float((self.chance * self.total[np.arange(len(scores)), :, chosen]).sum())

    def best_risk(self) -> float:
        return float((self.chance[:, :, None] * self.total).sum(1).min(1).sum())

    def surrogate(self, scores: Floats, psi: Psi) -> float:
        return float((self.chance[:, :, None] * self.weights * value_of(psi, scores)[:, None, :]).sum())

    def expected_weights(self) -> Floats:
        """(X, J), with the chance of x."""
        expected: Floats = (self.chance[:, :, None] * self.weights).sum(1)
        return expected

    def best_surrogate(self, psi: Psi) -> float:
        """In closed form: the entropy of the weights, or what the heaviest leaves."""
        weights, sums = self.expected_weights(), self.expected_weights().sum(1)
        if psi is MEAN_ABSOLUTE_ERROR:
            return float((sums - weights.max(1)).sum())
        return sum(xlogx(total) - sum(map(xlogx, row)) for total, row in zip(sums, weights, strict=True))


def one_time_world(random: np.random.Generator, n_inputs: int = 3, n_targets: int = 3) -> OneTimeWorld:
    """Prefix losses in [0, 1], 0 for the empty prefix, and costs in [0, 1], 0 for no deferral: l-bar = C-bar = 1."""
    n_hand_offs = int(random.integers(2, 6))
    steps = random.dirichlet(np.ones(n_hand_offs), (n_inputs, n_targets)) * random.uniform(0, 1)
    loss = np.concatenate([np.zeros((n_inputs, n_targets, 1)), steps.cumsum(2)[:, :, :-1]], 2)
    cost = random.uniform(0, 1, loss.shape) ** int(random.integers(1, 4))
    cost[:, :, -1] = 0
    return OneTimeWorld(random.dirichlet(np.ones(n_inputs * n_targets)).reshape(n_inputs, n_targets), loss + cost)


def random_scores(random: np.random.Generator, *shape: int) -> Floats:
    """Of all sizes, some exactly 0."""
    scores = random.normal(size=shape) * 10 ** random.uniform(-2, 0.7, shape)
    return np.where(random.random(shape) < 0.2, 0.0, scores)


# Constants of the losses


@each_phi
def test_best_margin_in_closed_form(phi: Phi) -> None:
    chances = np.array([1e-6, 0.1, 0.3, 0.5, 0.77, 1 - 1e-6])
    np.testing.assert_allclose(best_margin(phi, chances), BEST_MARGIN[phi.name](chances), atol=1e-9)
    assert (np.sign(best_margin(phi, [0.0, 1.0])) == [-1, 1]).all()


@each_phi
@some
@given(st.floats(0, 1))
def test_calibration_gap_in_closed_form_and_inverse_to_gamma(phi: Phi, advantage: float) -> None:
    gap = calibration_gap(phi, advantage)
    assert gap == pytest.approx(GAP[phi.name](advantage), abs=1e-7)  # (1 + a) / 2 may round to 1
    assert token_transform(phi)(gap) == pytest.approx(advantage, abs=1e-4)  # Gamma's slope at 0 and at 1 is infinite


@each_phi
@given(st.floats(0, 12))
def test_constants_within_a_limit(phi: Phi, limit: float) -> None:
    rho, largest = lipschitz_within(phi, limit), bound_within(phi, limit)
    assert rho == pytest.approx(LIPSCHITZ[phi.name](limit))
    assert largest == pytest.approx(BOUND[phi.name](limit))
    margins = np.linspace(-limit, limit, 101)
    values = value_of(phi, margins)
    assert values.max() <= largest * (1 + ROUNDING)
    assert (abs(np.diff(values)) <= rho * np.diff(margins) * (1 + 1e-9) + ROUNDING).all()


def transforms() -> list[Any]:
    one_time = [pytest.param(one_time_transform(psi, 4), id=psi.name) for psi in PSIS.values()]
    return [*(pytest.param(token_transform(phi), id=phi.name) for phi in PHIS.values()), *one_time]


@pytest.mark.parametrize("transform", transforms())
@given(st.floats(0, 3), st.floats(0, 3), st.floats(0, 1))
def test_transform_is_nondecreasing_concave_and_0_at_0(
    transform: Callable[[float], float], a: float, b: float, share: float
) -> None:
    low, high = sorted((a, b))
    assert transform(0.0) == 0
    assert transform(low) <= transform(high) <= 1
    assert transform(share * a + (1 - share) * b) >= share * transform(a) + (1 - share) * transform(b) - ROUNDING
    assert transform(1e-12) < 1e-5  # continuous at 0: this is what consistency rests on


# Lemma 3.1 and theorem 3.2


@each_phi
@some
@given(seeds)
def test_lemma_3_1_with_prefixes_that_depend_on_the_target(phi: Phi, seed: int) -> None:
    """In three forms, each implying the next: mean weights, l-bar + C-bar, and the paper's c-bar. Both conventions for
    a score of 0, that of the main text (defer) and that of the appendix (keep)."""
    random = np.random.default_rng(seed)
    world = token_world(random)
    loss, cost = world.expected()
    scores = random_scores(random, len(loss))
    surrogate = world.surrogate(scores, phi) - world.surrogate(BEST_MARGIN[phi.name](loss / (loss + cost)), phi)
    assert surrogate >= -ROUNDING
    target = max(world.risk(scores, zero) for zero in (True, False)) - np.minimum(loss, cost).sum()
    transform, excess = token_transform(phi), surrogate + ROUNDING
    sharpest = excess_risk_bound(transform, excess, float((loss + cost).sum()))
    without_least = excess_risk_bound(transform, excess, 2.0 + 3.0)
    printed = excess_risk_bound(transform, excess, 2.0 + 3.0, least_weight=0.1)
    assert target <= sharpest <= without_least * (1 + 1e-9) <= printed * (1 + 2e-9)


@each_phi
@some
@given(seeds)
def test_theorem_3_2_minimiser_takes_the_bayes_decision(phi: Phi, seed: int) -> None:
    world = token_world(np.random.default_rng(seed), n_inputs=1, n_targets=3)
    loss, cost = world.expected()
    best = best_margin(phi, loss / (loss + cost))
    decisions = itertools.product([-1.0, 1.0], repeat=len(loss))
    assert world.risk(best) == pytest.approx(min(world.risk(np.array(each)) for each in decisions))
    moved = [best + step for step in (-0.1, 0.1)]
    assert all(world.surrogate(best, phi) <= world.surrogate(scores, phi) for scores in moved)


@each_phi
def test_lemma_3_1_needs_no_least_cost(phi: Phi) -> None:
    """A cost of 0 leaves the printed bound without meaning; the tilted one goes on."""
    world = TokenWorld(np.arange(2), np.array([0.5, 0.5]), np.array([0.3, 0.1]), np.array([0.0, 0.2]))
    scores = np.array([-0.2, 0.4])  # both wrong
    best = np.array([50.0, float(BEST_MARGIN[phi.name](np.array(1 / 3)))])  # the first token's cost is 0
    if phi is SQUARE:
        best[0] = 1.0
    surrogate = world.surrogate(scores, phi) - world.surrogate(best, phi)
    excess = world.risk(scores) - world.risk(best)
    assert excess == pytest.approx(0.2)
    assert excess <= excess_risk_bound(token_transform(phi), surrogate, 0.3)
    with pytest.raises(OptionError, match="above 0"):
        excess_risk_bound(token_transform(phi), surrogate, 0.3, least_weight=0.0)


@each_phi
def test_lemma_3_1_without_least_cost_is_tight(phi: Phi) -> None:
    """One place, a score just below 0: an equality, so no smaller bound is true of all distributions."""
    loss, cost = 1.3, 0.4
    world = TokenWorld(np.array([0]), np.ones(1), np.array([loss]), np.array([cost]))
    scores, best = np.array([-1e-12]), best_margin(phi, [loss / (loss + cost)])
    surrogate = world.surrogate(scores, phi) - world.surrogate(best, phi)
    assert world.risk(scores) - world.risk(best) == pytest.approx(loss - cost)
    assert excess_risk_bound(token_transform(phi), surrogate, loss + cost) == pytest.approx(loss - cost)


def test_label_of_the_binary_problem_is_plus_one() -> None:
    """The appendix gives -1 the chance A / (A + B): then the best score for a loss far above the cost would keep."""
    loss, cost = 9.0, 1.0
    right, printed = best_margin(LOGISTIC, [loss / (loss + cost), cost / (loss + cost)])
    world = TokenWorld(np.array([0]), np.ones(1), np.array([loss]), np.array([cost]))
    assert world.surrogate(np.array([right]), LOGISTIC) < world.surrogate(np.array([printed]), LOGISTIC)
    assert (world.risk(np.array([right])), world.risk(np.array([printed]))) == (cost, loss)


def test_one_plus_c_bar_is_not_enough() -> None:
    """As the proof of theorem 3.2 has it; lemma 3.1 has l-bar + C-bar."""
    loss, cost = 10.0, 0.1
    world = TokenWorld(np.array([0]), np.ones(1), np.array([loss]), np.array([cost]))
    scores, best = np.array([-1e-9]), best_margin(LOGISTIC, [loss / (loss + cost)])
    surrogate = world.surrogate(scores, LOGISTIC) - world.surrogate(best, LOGISTIC)
    excess = world.risk(scores) - world.risk(best)
    printed = (1 + cost) * token_transform(LOGISTIC)(surrogate / cost)
    assert (excess, printed) == (pytest.approx(9.9), pytest.approx(1.1))
    assert excess <= excess_risk_bound(token_transform(LOGISTIC), surrogate, loss + cost, least_weight=cost)


def test_prefix_may_tell_the_target() -> None:
    """The proof takes expectations given x. The oracle's first decision depends on y, so the prefix tells y, and the
    best rejector, which sees the prefix, beats every one that the proof's pointwise risk allows."""
    chance, loss, cost = np.full(4, 0.25), np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0, 1.0])
    seen = TokenWorld(np.array([0, 0, 1, 2]), chance, loss, cost)  # rows: two y at position 1, the same at position 2
    unseen = replace(seen, place=np.array([0, 0, 1, 1]))
    assert np.minimum(*seen.expected()).sum() == 0.25
    assert np.minimum(*unseen.expected()).sum() == 0.5


def test_best_decision_token_by_token_is_not_the_best_in_a_row() -> None:
    """What teacher forcing assumes away: keeping the first token is cheaper by itself, but spoils the second."""
    loss: dict[tuple[bool, ...], float] = {(): 0.5, (False,): 1.0, (True,): 0.0}  # by the decisions so far
    cost: dict[tuple[bool, ...], float] = {(): 0.6, (False,): 1.0, (True,): 0.0}

    def risk(decisions: tuple[bool, ...]) -> float:
        return sum((cost if defers else loss)[decisions[:j]] for j, defers in enumerate(decisions)) / 2

    cheapest: tuple[bool, ...] = ()
    for _ in range(2):
        cheapest = (*cheapest, loss[cheapest] >= cost[cheapest])
    assert (risk(cheapest), min(map(risk, itertools.product([False, True], repeat=2)))) == (0.75, 0.3)


# Lemma B.1, proposition B.2, lemma B.3 and theorem 4.1


@each_psi
@some
@given(seeds)
def test_lemma_b_1_rewrites_the_loss_and_bounds_it(psi: Psi, seed: int) -> None:
    """Every example of a world by itself, with the losses that train. The offset makes the bound true for all."""
    random = np.random.default_rng(seed)
    total = one_time_world(random).total.reshape(9, -1)
    scores = random_scores(random, *total.shape)
    offset = one_time_offset(total)
    for row, g, constant in zip(total, scores, offset, strict=True):
        one = torch.tensor(g)[None], torch.tensor(row)[None]
        loss, surrogate = float(one_time_loss(*one)), float(one_time_surrogate(*one, psi))
        wrong = np.arange(len(row)) != g.argmax()
        assert loss == pytest.approx(float((row.max() - row) @ wrong) + constant)
        assert loss <= psi.upper_scale * surrogate + constant + ROUNDING
        assert constant > 0 or loss <= psi.upper_scale * surrogate + ROUNDING


@each_psi
def test_upper_bound_without_the_offset_fails_at_every_scale(psi: Psi) -> None:
    """Section 4.2 claims it for all totals. One hand-off costs 0.5 and all others 1: the surrogate can fall to 0."""
    total = np.array([[1.0, 0.5, 1.0]])
    scores = np.array([[0.0, 60.0, 0.0]])
    loss = float(one_time_loss(torch.tensor(scores), torch.tensor(total)))
    surrogate = float(one_time_surrogate(torch.tensor(scores), torch.tensor(total), psi))
    assert loss == 0.5
    assert 1e20 * surrogate < loss
    assert one_time_offset(total) == [0.5]


@given(st.floats(1e-3, 10), st.floats(1e-3, 10))
def test_condition_of_proposition_b_2_excludes_two_hand_offs(a: float, b: float) -> None:
    """c_max > total_1 + total_2 for two totals above 0: never."""
    assert one_time_offset([a, b]) == pytest.approx(min(a, b))


@each_psi
@some
@given(seeds)
def test_lemma_b_3_in_three_forms(psi: Psi, seed: int) -> None:
    random = np.random.default_rng(seed)
    world = one_time_world(random)
    scores = random_scores(random, *world.expected_weights().shape)
    excess = world.surrogate(scores, psi) - world.best_surrogate(psi) + ROUNDING
    assert excess >= 0
    target = world.risk(scores) - world.best_risk()
    transform, weight = one_time_transform(psi, world.n_hand_offs), (world.n_hand_offs - 1) * 2.0
    separation = float(np.ptp(world.total, 2).min())
    sharpest = excess_risk_bound(transform, excess, float(world.expected_weights().sum()))
    without_separation = excess_risk_bound(transform, excess, weight)
    printed = excess_risk_bound(transform, excess, weight, least_weight=separation)
    assert target <= sharpest <= without_separation * (1 + 1e-9) <= printed * (1 + 2e-9)


@each_psi
def test_lemma_b_3_needs_no_separation(psi: Psi) -> None:
    """An input whose hand-offs all cost the same has weight 0: Delta would be 0, yet it harms nothing."""
    total = np.array([[[0.5, 0.5, 0.5]], [[0.2, 0.9, 0.4]]])
    world = OneTimeWorld(np.array([[0.5], [0.5]]), total)
    scores = np.array([[1.0, 0.0, 0.0], [0.0, 1e-9, 0.0]])
    excess = world.surrogate(scores, psi) - world.best_surrogate(psi)
    weight = float(world.expected_weights().sum())
    assert world.risk(scores) - world.best_risk() <= excess_risk_bound(one_time_transform(psi, 3), excess, weight)


@each_psi
@some
@given(seeds)
def test_theorem_4_1_minimiser_takes_the_bayes_decision(psi: Psi, seed: int) -> None:
    """Cross entropy: where the gradient, weights' sum * softmax - weights, is 0. Mean absolute error: at infinity."""
    random = np.random.default_rng(seed)
    world = one_time_world(random)
    weights = np.maximum(world.expected_weights(), 1e-300)
    far = np.where(weights == weights.max(1, keepdims=True), 50.0, 0.0)
    best = np.log(weights) if psi is CROSS_ENTROPY else far
    assert world.surrogate(best, psi) == pytest.approx(world.best_surrogate(psi), abs=1e-9)
    assert world.risk(best) == pytest.approx(world.best_risk())
    others = random_scores(random, 20, *weights.shape)
    assert all(world.surrogate(scores, psi) >= world.best_surrogate(psi) - ROUNDING for scores in others)


@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_gamma_of_mean_absolute_error_is_tight(n_classes: int) -> None:
    """All classes but one equally likely, scores nearly tied, the impossible class ahead: |J| times, no less."""
    probability = np.append(np.full(n_classes - 1, 1 / (n_classes - 1)), 0.0)
    scores = np.append(np.zeros(n_classes - 1), 1e-9)
    excess = float(probability @ value_of(MEAN_ABSOLUTE_ERROR, scores)) - (1 - probability.max())
    assert probability.max() == pytest.approx(one_time_transform(MEAN_ABSOLUTE_ERROR, n_classes)(excess))
    assert probability.max() > 1.05 * (n_classes - 1) * excess


def test_printed_l_is_loose_where_not_every_hand_off_is_allowed() -> None:
    """L = 20 tokens, 5 hand-offs: Gamma_mae with L + 1 = 21 for 5, u_psi with L = 20 for 4. Equal for all 21."""
    limit, length = 3.0, 20
    assert one_time_transform(MEAN_ABSOLUTE_ERROR, 5)(0.01) == pytest.approx(0.05)
    assert one_time_transform(MEAN_ABSOLUTE_ERROR, length + 1)(0.01) == pytest.approx(0.21)
    printed = -math.log(math.exp(-limit) / (math.exp(-limit) + length * math.exp(limit)))
    assert (CROSS_ENTROPY.bound(limit, 5), printed) == (pytest.approx(7.387, abs=1e-3), pytest.approx(8.996, abs=1e-3))
    assert CROSS_ENTROPY.bound(limit, length + 1) == pytest.approx(printed)


def one_input(*total: float) -> OneTimeWorld:
    return OneTimeWorld(np.ones((1, 1)), np.array([[total]]))


@each_psi
def test_one_time_totals_must_not_be_negative(psi: Psi) -> None:
    """Only upper bounds are printed: l-bar + C-bar = 1 bounds these totals, and the excess risk is 11."""
    world = one_input(1.0, -10.0)
    assert world.expected_weights().sum() == 11
    excess = world.risk(np.array([[1e-9, 0.0]])) - world.best_risk()
    assert excess == 11 > excess_risk_bound(one_time_transform(psi, 2), math.inf, (2 - 1) * 1.0)


@each_psi
def test_l_bar_must_bound_the_prefix_not_the_token(psi: Psi) -> None:
    """Printed: l(y, y_j) <= l-bar. Ten tokens of loss 1 make a prefix of loss 10; the expert costs nothing."""
    world = one_input(0.0, 10.0)
    excess = world.risk(np.array([[0.0, 1e-9]])) - world.best_risk()
    assert excess == 10 > excess_risk_bound(one_time_transform(psi, 2), math.inf, (2 - 1) * (1.0 + 0.0))


def test_printed_separation_compares_the_wrong_costs() -> None:
    """|l_i + c_i - l_j - c_i|: losses 0 and 1, costs 1 and 0 satisfy it with Delta = 0.9, but the totals are equal, and
    the weights' sum, which Delta should bound from below, is 0."""
    loss, cost = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    assert abs(loss[0] + cost[0] - loss[1] - cost[0]) > 0.9
    assert abs(loss[0] + cost[0] - loss[1] - cost[1]) == 0
    assert one_input(*(loss + cost)).expected_weights().sum() == 0


def test_rejector_is_the_argmax_not_the_argmin() -> None:
    world = one_input(0.1, 0.5, 0.9)
    best = np.log(np.maximum(world.expected_weights(), 1e-300))
    assert world.risk(best) == 0.1
    assert world.risk(-best) == 0.9  # theorem 4.2's x -> argmin_j g_j(x)


def test_prefix_ends_before_the_hand_off() -> None:
    """With l(y, y_<=j), as the appendix writes, deferring everything would pay for a token of the predictor; and no
    deferral, j = L + 1, would need a token that does not exist. It changes the best decision."""
    token_losses, cost = np.array([0.5, 0.2]), np.array([0.4, 0.3, 0.0])  # L = 2
    before = np.append(0.0, token_losses.cumsum())  # l(y, y_<j), j = 1, 2, 3
    through = np.append(token_losses, 0.0).cumsum()  # l(y, y_<=j), the missing token for nothing
    np.testing.assert_allclose([before + cost, through + cost], [[0.4, 0.8, 0.7], [0.9, 1.0, 0.7]])
    assert ((before + cost).argmin(), (through + cost).argmin()) == (0, 2)


# Theorems 3.3 and 4.2: the terms


def signs(n: int) -> Floats:
    return np.array(list(itertools.product([-1.0, 1.0], repeat=n)))


def complexity(values: Floats) -> float:
    """Empirical Rademacher complexity of a finite class, by all signs. values (F, n)"""
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
    """Printed: rho sqrt(C^2 + l^2) / L in the 2-norm. A square of a sum is not below the sum of the squares, over
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
    or (0, 1), the second slightly more likely. All exact: the minimiser is wrong with a chance above delta, and is
    then worse by more than the printed bound; with the bound of phi the theorem stands."""
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


PLAIN = Assumptions(n=1000, most_loss=2.0, most_cost=0.5, limit=1.5, delta=0.1)


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
    """Against a grid of the circle, for each sign."""
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
    """What complexity_from_sample rests on."""
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
    """Weights (runs, scores, 2); `slopes` gives the surrogate's slope in every score: (runs, scores, 8) -> the same."""
    weights = np.zeros((RUNS, n_scores, 2))
    for _ in range(400):
        weights = weights - step * slopes(weights @ DIRECTIONS.T) @ DIRECTIONS
        norms = np.linalg.norm(weights, axis=2, keepdims=True)
        weights *= np.minimum(1, RADIUS / np.maximum(norms, RADIUS))
    return weights


def sample_means(random: np.random.Generator, values: Floats, n: int) -> Floats:
    """Means over `n` examples of equally likely cells, times the chance of x, in every run; the first run is the truth.
    values (..., 8, Y) -> (runs, ..., 8)"""
    n_cells = values.shape[-2] * values.shape[-1]
    chances = random.multinomial(n, np.full(n_cells, 1 / n_cells), RUNS) / n
    chances[0] = 1 / n_cells
    means: Floats = np.einsum("...xy,rxy->r...x", values, chances.reshape(RUNS, *values.shape[-2:]))
    return means


def test_token_bounds_hold_on_simulated_data() -> None:
    """At n = 100,000 the estimation bound is no longer empty (less than the worst rejector of the class costs), and is
    larger than what is observed by four orders of magnitude."""
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


# What is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n is 0; at least one example"),
        ({"most_loss": -1.0}, "most_loss is -1.0; it must be a finite number, 0 or more"),
        ({"limit": math.inf}, "limit is inf"),
        ({"most_cost": math.nan, "delta": 1.0}, "most_cost is nan.*; delta is 1.0; it must lie strictly between"),
    ],
    ids=str,
)
def test_impossible_assumptions(values: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        replace(PLAIN, **values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimation_bound_token(LOGISTIC, PLAIN, []), "0 complexities; give one a position, at least 1"),
        (lambda: estimation_bound_once(CROSS_ENTROPY, PLAIN, [0.1]), "1 complexities.*at least 2"),
        (lambda: estimation_bound_token(LOGISTIC, PLAIN, [0.1, -0.1]), "complexity 1 is -0.1"),
        (lambda: corollary_token(LOGISTIC, PLAIN, [0.1], approximation=-1.0), "approximation is -1.0"),
        (lambda: corollary_token(LOGISTIC, PLAIN, [0.1], least_cost=9.0), "at most the weight, 2.5, or None"),
        (lambda: excess_risk_bound(token_transform(LOGISTIC), math.nan, 1.0), "excess is not a number"),
        (lambda: one_time_transform(CROSS_ENTROPY, 1), "1 hand-offs; a choice needs at least 2"),
        (lambda: one_time_offset([1.0]), "1 hand-offs"),
        (lambda: best_margin(LOGISTIC, [0.5, 1.5]), "outside of"),
        (lambda: lipschitz_within(LOGISTIC, -1.0), "limit is -1.0"),
        (lambda: linear_rademacher([[1.0]], 1.0, draws=1), "draws is 1; an error needs at least 2"),
        (lambda: linear_rademacher([1.0, 2.0], 1.0), "one row an example"),
        (lambda: linear_complexity(1.0, 1.0, 0), "n is 0"),
    ],
)
def test_impossible_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_nothing_to_lose() -> None:
    assert excess_risk_bound(token_transform(LOGISTIC), 0.3, 0.0) == 0


# Documentation


def test_examples_run() -> None:
    assert doctest.testmod(theory).failed == 0
    run_blocks(PAGE)


def test_page_names_tests_and_functions_that_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    tests = "".join((ROOT / "tests" / f"test_{name}.py").read_text(encoding="utf-8") for name in ("theory", "losses"))
    named = re.findall(r"`(test_\w+)`", text)
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in tests] == []
    public = [name for name, value in vars(theory).items() if getattr(value, "__module__", "") == theory.__name__]
    assert [name for name in public if not name.startswith("_") and f"`{name}`" not in text] == []
