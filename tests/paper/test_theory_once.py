"""The paper's statements on one-time deferral (lemma B.1, proposition B.2, lemma B.3, theorem 4.1), by enumeration on
small discrete distributions; where a printed form is wrong, a counterexample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import CROSS_ENTROPY, MEAN_ABSOLUTE_ERROR, ROUNDING, each_psi, random_scores, seeds, some, value_of, xlogx

from seqdefer.paper.theory import Floats, excess_risk_bound, one_time_offset, one_time_transform
from seqdefer.rejectors.losses import Psi, one_time_loss, one_time_surrogate

pytestmark = pytest.mark.usefixtures("one_thread")


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
        """Return the risk of scores (X, J)."""
        chosen = scores.argmax(1)
        return float((self.chance * self.total[np.arange(len(scores)), :, chosen]).sum())

    def best_risk(self) -> float:
        return float((self.chance[:, :, None] * self.total).sum(1).min(1).sum())

    def surrogate(self, scores: Floats, psi: Psi) -> float:
        return float((self.chance[:, :, None] * self.weights * value_of(psi, scores)[:, None, :]).sum())

    def expected_weights(self) -> Floats:
        """Return the weights times the probability of x. (X, J)"""
        expected: Floats = (self.chance[:, :, None] * self.weights).sum(1)
        return expected

    def best_surrogate(self, psi: Psi) -> float:
        """Return the closed form: the entropy of the weights, or their sum without the largest."""
        weights, sums = self.expected_weights(), self.expected_weights().sum(1)
        if psi is MEAN_ABSOLUTE_ERROR:
            return float((sums - weights.max(1)).sum())
        return sum(xlogx(total) - sum(map(xlogx, row)) for total, row in zip(sums, weights, strict=True))


def one_time_world(random: np.random.Generator, n_inputs: int = 3, n_targets: int = 3) -> OneTimeWorld:
    """Draw prefix losses and costs in [0, 1], 0 for the empty prefix and for no deferral: l-bar = C-bar = 1."""
    n_hand_offs = int(random.integers(2, 6))
    steps = random.dirichlet(np.ones(n_hand_offs), (n_inputs, n_targets)) * random.uniform(0, 1)
    loss = np.concatenate([np.zeros((n_inputs, n_targets, 1)), steps.cumsum(2)[:, :, :-1]], 2)
    cost = random.uniform(0, 1, loss.shape) ** int(random.integers(1, 4))
    cost[:, :, -1] = 0
    return OneTimeWorld(random.dirichlet(np.ones(n_inputs * n_targets)).reshape(n_inputs, n_targets), loss + cost)


@each_psi
@some
@given(seeds)
def test_lemma_b_1_rewrites_the_loss_and_bounds_it(psi: Psi, seed: int) -> None:
    """Check every example with the losses used in training. The offset makes the bound true for all."""
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
    """An input whose hand-offs all cost the same has weight 0: Delta is 0, but the bound holds."""
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
    """All classes but one equally likely, scores nearly tied, the impossible class ahead: exactly |J| times."""
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
    """With l(y, y_<=j), as in the appendix, full deferral would pay for a token of the predictor, and no deferral,
    j = L + 1, would need a token that does not exist. It changes the best decision."""
    token_losses, cost = np.array([0.5, 0.2]), np.array([0.4, 0.3, 0.0])  # L = 2
    before = np.append(0.0, token_losses.cumsum())  # l(y, y_<j), j = 1, 2, 3
    through = np.append(token_losses, 0.0).cumsum()  # l(y, y_<=j), the missing token at loss 0
    np.testing.assert_allclose([before + cost, through + cost], [[0.4, 0.8, 0.7], [0.9, 1.0, 0.7]])
    assert ((before + cost).argmin(), (through + cost).argmin()) == (0, 2)
