"""The mathematics of the surrogates: gradients, convexity, bounds, consistency; and slow versions of what is fast."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.rejectors import losses
from seqdefer.rejectors.losses import (
    EXPONENTIAL_LIMIT,
    PHIS,
    PSIS,
    Phi,
    Psi,
    get_phi,
    get_psi,
    hand_off_grid,
    invert_entropy,
    is_ended,
    merge_ended,
    one_time_loss,
    one_time_surrogate,
    query_costs,
    rule_of_thumb,
    token_loss,
    token_surrogate,
)
from seqdefer.types import HandOffTable

each_phi = pytest.mark.parametrize("phi", PHIS.values(), ids=lambda phi: phi.name)
each_psi = pytest.mark.parametrize("psi", PSIS.values(), ids=lambda psi: psi.name)
few = settings(max_examples=30)  # each example is a batch of random cases
seeds = st.integers(0, 2**32 - 1)


pytestmark = pytest.mark.usefixtures("one_thread")


class Draw:
    """Random float64 tensors from one seed: hypothesis picks the seed, and shrinks it."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def distribution(self, *shape: int) -> Tensor:
        """Sums to 1 along the last dimension; sometimes nearly all the mass is on one."""
        return torch.softmax(self.normal(*shape) * self.integer(1, 8), -1)

    def mask(self, n_rows: int, length: int) -> Tensor:
        lengths = torch.randint(1, length + 1, (n_rows,), generator=self.generator)
        return torch.arange(length) < lengths[:, None]


def minimise_margin(risk_at: Tensor, phi: Phi) -> Tensor:
    """argmin over t of eta phi(t) + (1 - eta) phi(-t) for every eta, by ternary search on a convex function."""
    low, high = torch.full_like(risk_at, -60.0), torch.full_like(risk_at, 60.0)
    for _ in range(80):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        rising = binary_risk(risk_at, left, phi) < binary_risk(risk_at, right, phi)
        low, high = torch.where(rising, low, left), torch.where(rising, right, high)
    return (low + high) / 2


def binary_risk(eta: Tensor, scores: Tensor, phi: Phi) -> Tensor:
    return eta * phi(scores) + (1 - eta) * phi(-scores)


# Gradients and shapes


@each_phi
@few
@given(seeds)
def test_token_gradient_is_that_of_finite_differences(phi: Phi, seed: int) -> None:
    draw = Draw(seed)
    scores = (3 * draw.normal(3, 4)).requires_grad_()
    loss, cost, mask = draw.uniform(3, 4), draw.uniform(3, 4), draw.mask(3, 4)
    assert torch.autograd.gradcheck(lambda r: token_surrogate(r, loss, cost, mask, phi), scores)


@each_psi
@few
@given(seeds)
def test_one_time_gradient_is_that_of_finite_differences(psi: Psi, seed: int) -> None:
    draw = Draw(seed)
    scores, total = (3 * draw.normal(3, 5)).requires_grad_(), draw.uniform(3, 5)
    assert torch.autograd.gradcheck(lambda g: one_time_surrogate(g, total, psi), scores)


@each_phi
@given(st.floats(-100, 100), st.floats(-100, 100), st.floats(0, 1))
def test_phi_is_convex(phi: Phi, a: float, b: float, share: float) -> None:
    between, left, right = phi(torch.tensor([share * a + (1 - share) * b, a, b], dtype=torch.float64))
    chord = share * left + (1 - share) * right
    assert between <= chord + 1e-12 * (1 + left + right)


@each_phi
@few
@given(seeds, st.floats(0, 1))
def test_token_surrogate_is_convex(phi: Phi, seed: int, share: float) -> None:
    draw = Draw(seed)
    a, b = 9 * draw.normal(2, 3), 9 * draw.normal(2, 3)
    loss, cost, mask = draw.uniform(2, 3), draw.uniform(2, 3), draw.mask(2, 3)
    ends = [token_surrogate(scores, loss, cost, mask, phi) for scores in (a, b)]
    chord = share * ends[0] + (1 - share) * ends[1]
    assert token_surrogate(share * a + (1 - share) * b, loss, cost, mask, phi) <= chord + 1e-12 * (1 + sum(ends))


@few
@given(seeds, st.floats(0, 1))
def test_one_time_surrogate_is_convex_with_cross_entropy(seed: int, share: float) -> None:
    draw, psi = Draw(seed), get_psi("cross_entropy")
    a, b, total = 9 * draw.normal(2, 5), 9 * draw.normal(2, 5), draw.uniform(2, 5)
    chord = share * one_time_surrogate(a, total, psi) + (1 - share) * one_time_surrogate(b, total, psi)
    assert one_time_surrogate(share * a + (1 - share) * b, total, psi) <= chord + 1e-10


def test_mean_absolute_error_is_not_convex() -> None:
    """The paper says it is: along g = (z, 0) it is a sigmoid, which lies above its chord left of 0."""
    psi = get_psi("mean_absolute_error")
    left, middle, right = psi(torch.tensor([[-4.0, 0.0], [-2.0, 0.0], [0.0, 0.0]]))[:, 0]
    assert middle > (left + right) / 2
    assert [psi.convex for psi in PSIS.values()] == [True, False]


# Upper bounds


@each_phi
@given(st.floats(-50, 50))
def test_scaled_phi_bounds_the_zero_one_loss(phi: Phi, margin: float) -> None:
    value = phi.upper_scale * phi(torch.tensor(margin, dtype=torch.float64))
    assert value >= (margin <= 0) - 1e-12


@each_phi
def test_upper_scale_of_phi_is_the_least(phi: Phi) -> None:
    assert phi.upper_scale * float(phi(torch.zeros((), dtype=torch.float64))) == pytest.approx(1)


@each_phi
@few
@given(seeds)
def test_scaled_token_surrogate_bounds_the_loss(phi: Phi, seed: int) -> None:
    draw = Draw(seed)
    scores, loss, cost, mask = 3 * draw.normal(4, 5), draw.uniform(4, 5), draw.uniform(4, 5), draw.mask(4, 5)
    bound = phi.upper_scale * token_surrogate(scores, loss, cost, mask, phi)
    assert bound >= token_loss(scores, loss, cost, mask) - 1e-12


@each_psi
@few
@given(seeds)
def test_scaled_psi_bounds_the_zero_one_loss(psi: Psi, seed: int) -> None:
    draw = Draw(seed)
    scores = draw.integer(1, 9) * draw.normal(50, draw.integer(2, 6))
    wrong = torch.arange(scores.shape[1]) != scores.argmax(1, keepdim=True)
    assert (psi.upper_scale * psi(scores) >= wrong.double() - 1e-12).all()
    if psi.name == "cross_entropy":  # the constant the paper prints for it is negative, and bounds nothing
        assert not (math.log(0.5) * psi(scores) >= wrong.double()).all()


@each_psi
def test_upper_scale_of_psi_is_the_least(psi: Psi) -> None:
    """Two classes nearly tied: the loser's psi is as small as a loser's can be."""
    scores = torch.tensor([1e-9, 0.0], dtype=torch.float64)
    assert psi.upper_scale * float(psi(scores)[1]) == pytest.approx(1)


@each_psi
@few
@given(seeds)
def test_scaled_one_time_surrogate_bounds_the_loss_where_the_proposition_says(psi: Psi, seed: int) -> None:
    draw = Draw(seed)
    n_classes = draw.integer(2, 6)
    scores, total = 3 * draw.normal(50, n_classes), draw.uniform(50, n_classes) ** 3
    holds = (n_classes - 1) * total.amax(1) >= total.sum(1)
    for row in holds.nonzero().squeeze(1):
        bound = psi.upper_scale * one_time_surrogate(scores[row, None], total[row, None], psi)
        assert bound >= one_time_loss(scores[row, None], total[row, None]) - 1e-12


@each_psi
def test_one_time_bound_needs_its_condition(psi: Psi) -> None:
    """Equal totals weigh nothing, whatever the loss."""
    scores, total = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2)
    assert one_time_surrogate(scores, total, psi) == 0
    assert one_time_loss(scores, total) == 1


# Excess risk: target <= Gamma(surrogate). The slack goes inside Gamma, whose slope at 0 may be infinite.


@each_phi
@few
@given(seeds)
def test_binary_excess_risk(phi: Phi, seed: int) -> None:
    draw = Draw(seed)
    eta, weight = draw.distribution(20, 2)[:, 0], draw.distribution(20)
    scores = draw.integer(1, 9) * draw.normal(20)
    target = torch.where(scores >= 0, 1 - eta, eta) - torch.minimum(eta, 1 - eta)
    surrogate = binary_risk(eta, scores, phi) - binary_risk(eta, minimise_margin(eta, phi), phi)
    assert float(weight @ target) <= phi.calibration(float(weight @ surrogate) + 1e-12)


@each_phi
def test_calibration_of_phi_is_tight(phi: Phi) -> None:
    """At a score of 0 and one point, the inequality is an equality for these phi."""
    for eta in (0.3, 0.49, 0.05):
        at = torch.tensor([eta], dtype=torch.float64)
        excess = binary_risk(at, torch.zeros_like(at), phi) - binary_risk(at, minimise_margin(at, phi), phi)
        assert phi.calibration(float(excess)) == pytest.approx(1 - 2 * eta, abs=1e-6)


def test_calibration_survives_the_tangent_of_the_exponential() -> None:
    """Beyond its limit the exponential loss is linear, and even certainty (eta = 1) keeps the inequality."""
    phi = get_phi("exponential")
    eta = torch.tensor([1.0, 1 - 1e-15], dtype=torch.float64)
    for score in (-1e-9, -1.0, -EXPONENTIAL_LIMIT - 30):
        scores = torch.full_like(eta, score)
        excess = binary_risk(eta, scores, phi) - binary_risk(eta, minimise_margin(eta, phi), phi)
        assert all(phi.calibration(float(value) + 1e-12) >= 1 - 1e-6 for value in excess)


@each_phi
@few
@given(seeds)
def test_token_excess_risk_of_lemma_3_1(phi: Phi, seed: int) -> None:
    draw = Draw(seed)
    loss, cost, scores = draw.uniform(4, 5, high=2.0), draw.uniform(4, 5, low=0.1, high=3.0), 2 * draw.normal(4, 5)
    mask = torch.ones(4, 5, dtype=torch.bool)
    best = minimise_margin(loss / (loss + cost), phi)
    excess = token_loss(scores, loss, cost, mask) - torch.minimum(loss, cost).mean()
    surrogate = token_surrogate(scores, loss, cost, mask, phi) - token_surrogate(best, loss, cost, mask, phi)
    assert float(excess) <= (2.0 + 3.0) * phi.calibration((float(surrogate) + 1e-12) / 0.1)


def best_multiclass_risk(probability: Tensor, psi: Psi) -> Tensor:
    """inf over g of sum_j p_j psi(g, j). (n, J) -> (n,)"""
    if psi.name == "cross_entropy":
        return -torch.xlogy(probability, probability).sum(-1)
    return 1 - probability.amax(-1)


@each_psi
@few
@given(seeds)
def test_multiclass_excess_risk(psi: Psi, seed: int) -> None:
    draw = Draw(seed)
    n_classes = draw.integer(2, 6)
    probability, weight = draw.distribution(20, n_classes), draw.distribution(20)
    scores = draw.normal(20, n_classes) * draw.integer(0, 5)
    target = probability.amax(1) - probability.gather(1, scores.argmax(1, keepdim=True))[:, 0]
    surrogate = (probability * psi(scores)).sum(1) - best_multiclass_risk(probability, psi)
    assert float(weight @ target) <= psi.calibration(float(weight @ surrogate) + 1e-12, n_classes)


@each_psi
@few
@given(seeds)
def test_one_time_excess_risk_of_lemma_b_3(psi: Psi, seed: int) -> None:
    """One x, several y: every y has two totals that differ by more than Delta, and no total exceeds C + l = 1."""
    draw = Draw(seed)
    n_classes = draw.integer(2, 6)
    total, scores = draw.uniform(3, n_classes), draw.normal(1, n_classes).expand(3, -1)
    delta = float((total.amax(1) - total.amin(1)).min()) * 0.99
    weights = (total.amax(1, keepdim=True) - total).mean(0)
    best = float(weights.sum() * best_multiclass_risk(weights / weights.sum(), psi))
    excess = float(one_time_loss(scores, total) - total.mean(0).min())
    surrogate = float(one_time_surrogate(scores, total, psi)) - best
    assert excess <= (n_classes - 1) * psi.calibration((surrogate + 1e-12) / delta, n_classes)


@given(st.floats(0, 1))
def test_inverse_of_the_entropy_function(t: float) -> None:
    halves = torch.tensor([1 + t, 1 - t], dtype=torch.float64)
    excess = float(torch.xlogy(halves, halves).sum()) / 2
    assert invert_entropy(excess) == pytest.approx(t, abs=3e-8)


def test_calibration_at_its_ends() -> None:
    for phi in PHIS.values():
        assert phi.calibration(0.0) == phi.calibration(-1e-18) == 0
        assert phi.calibration(2.0) >= 1
    assert invert_entropy(math.nextafter(math.log(2), 0)) == pytest.approx(1)
    assert [psi.calibration(0.0, 5) for psi in PSIS.values()] == [0, 0]


# Consistency: the minimiser of the expected surrogate takes the Bayes decision


@each_phi
@few
@given(seeds)
def test_best_token_score_takes_the_bayes_decision(phi: Phi, seed: int) -> None:
    """One prefix, several possible y: the score cannot know which."""
    draw = Draw(seed)
    loss, cost = draw.uniform(6, 1), draw.uniform(6, 1)
    candidates = torch.linspace(-8, 8, 6401, dtype=torch.float64)
    risks = loss.mean() * phi(candidates) + cost.mean() * phi(-candidates)
    best = candidates[risks.argmin()].expand(6, 1)
    mask = torch.ones(6, 1, dtype=torch.bool)
    assert float(token_surrogate(best, loss, cost, mask, phi)) == pytest.approx(float(risks.min()))
    if abs(loss.mean() - cost.mean()) > 0.01:  # else the best score is within a step of 0
        assert token_loss(best, loss, cost, mask) == pytest.approx(min(float(loss.mean()), float(cost.mean())))


@each_psi
def test_best_one_time_scores_take_the_bayes_decision(psi: Psi) -> None:
    """60 problems of one x and 5 possible y, each y with its own c_max: gradient descent from zero, which knows only
    the surrogate, ends at the hand-off of least expected total."""
    total = Draw(0).uniform(60, 5, 4)
    scores = torch.zeros(60, 1, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(300):
        surrogate = one_time_surrogate(scores.expand(60, 5, 4).flatten(0, 1), total.flatten(0, 1), psi)
        (gradient,) = torch.autograd.grad(60 * surrogate, scores)
        scores = (scores - gradient).detach().requires_grad_()
    best, second = total.mean(1).sort().values[:, :2].unbind(1)
    clear = second - best > 0.01
    assert clear.sum() > 50
    assert (scores[:, 0].argmax(1) == total.mean(1).argmin(1))[clear].all()


# Lipschitz constants and bounds


@each_psi
@few
@given(seeds)
def test_lipschitz_constant_of_psi_holds(psi: Psi, seed: int) -> None:
    draw = Draw(seed)
    n_classes = draw.integer(2, 6)
    a = draw.integer(1, 6) * draw.normal(200, n_classes)
    b = a + 10.0 ** -draw.integer(0, 3) * draw.normal(200, n_classes)
    steps = (a - b).norm(dim=1, keepdim=True)
    assert ((psi(a) - psi(b)).abs() <= psi.lipschitz * steps * (1 + 1e-6) + 1e-12).all()


@each_psi
def test_lipschitz_constant_of_psi_is_the_least(psi: Psi) -> None:
    """Cross entropy is steepest at a hopeless class, mean absolute error (sqrt(2) / 4, not the paper's 2) at a tie."""
    steepest = 0.0
    for middle in (0.0, -20.0):
        a = torch.tensor([middle, 0.0], dtype=torch.float64)
        b = a + torch.tensor([1e-4, -1e-4], dtype=torch.float64)
        steepest = max(steepest, float((psi(a) - psi(b))[0].abs() / (a - b).norm()))
    assert steepest == pytest.approx(psi.lipschitz, rel=1e-6)


@given(st.floats(-100, 100), st.floats(-100, 100))
def test_lipschitz_constant_of_logistic(a: float, b: float) -> None:
    phi = get_phi("logistic")
    left, right = phi(torch.tensor([a, b], dtype=torch.float64))
    assert phi.lipschitz == 1
    assert abs(left - right) <= abs(a - b) + 1e-12
    far = phi(torch.tensor([-40.0, -41.0], dtype=torch.float64))
    assert float(far[1] - far[0]) == pytest.approx(1)  # the least such constant
    assert [phi.lipschitz for phi in PHIS.values()].count(None) == 3


@each_psi
@given(st.floats(0, 30), st.integers(2, 60))
def test_bound_of_psi_is_reached_by_the_worst_scores(psi: Psi, limit: float, n_classes: int) -> None:
    worst = torch.full((n_classes,), limit, dtype=torch.float64)
    worst[0] = -limit
    assert psi.bound(limit, n_classes) == pytest.approx(float(psi(worst)[0]))
    within = Draw(n_classes).uniform(20, n_classes, low=-limit, high=limit)
    assert float(psi(within).amax()) <= psi.bound(limit, n_classes) + 1e-12


# Slow versions


@each_phi
@few
@given(seeds)
def test_padding_is_never_seen(phi: Phi, seed: int) -> None:
    """A loop over the unpadded sequences gives the same value, and NaN and inf in the padding do not change it."""
    draw = Draw(seed)
    scores, loss, cost, mask = draw.normal(4, 6), draw.uniform(4, 6), draw.uniform(4, 6), draw.mask(4, 6)
    true, surrogate = [], []
    for i in range(4):
        tokens = [(scores[i, j], loss[i, j], cost[i, j]) for j in range(6) if mask[i, j]]
        true.append(sum(float(c if r >= 0 else a) for r, a, c in tokens) / len(tokens))
        surrogate.append(sum(float(a * phi(r) + c * phi(-r)) for r, a, c in tokens) / len(tokens))
    scores = scores.masked_fill(~mask, math.inf).requires_grad_()
    loss, cost = loss.masked_fill(~mask, math.nan), cost.masked_fill(~mask, math.nan)
    assert token_loss(scores, loss, cost, mask).item() == pytest.approx(sum(true) / 4)
    result = token_surrogate(scores, loss, cost, mask, phi)
    assert result.item() == pytest.approx(sum(surrogate) / 4)
    (gradient,) = torch.autograd.grad(result, scores)
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()


def test_sequence_without_tokens_does_not_count() -> None:
    scores, loss, cost = torch.ones(2, 3), torch.ones(2, 3), torch.full((2, 3), 0.5)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert token_loss(scores, loss, cost, mask) == 0.5
    assert token_loss(scores, loss, cost, torch.zeros_like(mask)) == 0
    assert token_surrogate(scores, loss, cost, torch.zeros_like(mask), get_phi("square")) == 0


def test_score_of_zero_defers() -> None:
    assert token_loss(torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), 3.0), torch.tensor([[True]])) == 3


@each_psi
@few
@given(seeds)
def test_one_time_equals_a_loop_with_the_largest_total_of_each_example(psi: Psi, seed: int) -> None:
    draw = Draw(seed)
    scores, total = draw.normal(5, 4), draw.uniform(5, 4) * torch.tensor([[1.0], [10.0], [0.1], [3.0], [100.0]])
    true, surrogate = 0.0, 0.0
    for g, costs in zip(scores, total, strict=True):
        chosen = max(range(4), key=lambda j: float(g[j]))
        true += float(costs[chosen]) / 5
        surrogate += sum(float((max(costs) - costs[j]) * psi(g)[j]) for j in range(4)) / 5
    assert float(one_time_loss(scores, total)) == pytest.approx(true)
    assert float(one_time_surrogate(scores, total, psi)) == pytest.approx(surrogate)


@few
@given(seeds)
def test_one_token_is_plain_learning_to_defer(seed: int) -> None:
    """Equation 1, which the token loss generalises: l 1[r < 0] + c 1[r >= 0]."""
    draw = Draw(seed)
    score, loss, cost = draw.normal(50, 1), draw.uniform(50, 1), draw.uniform(50, 1)
    by_indicators = loss * (score < 0) + cost * (score >= 0)
    mask = torch.ones(50, 1, dtype=torch.bool)
    assert float(token_loss(score, loss, cost, mask)) == pytest.approx(float(by_indicators.mean()))


@few
@given(seeds)
def test_hand_offs_are_the_experts_of_learning_to_defer_to_many(seed: int) -> None:
    """Equations 2, 5 and 6: a sum of indicators over the choices. A set of fewer hand-offs takes its columns."""
    draw = Draw(seed)
    scores, total = draw.normal(40, 6), draw.uniform(40, 6)
    for allowed in (list(range(6)), [0, 2, 5], [0, 5]):
        chosen = torch.tensor([max(allowed, key=lambda j: float(row[j])) for row in scores])
        by_indicators = sum(total[:, j] * (chosen == j) for j in allowed)
        loss = one_time_loss(scores[:, allowed], total[:, allowed])
        assert float(loss) == pytest.approx(float(by_indicators.mean()))


def test_one_time_ties_go_to_the_first() -> None:
    assert one_time_loss(torch.zeros(1, 3), torch.tensor([[7.0, 1.0, 2.0]])) == 7


# Extremes


@each_phi
@pytest.mark.parametrize("size", [0.0, 1.0, EXPONENTIAL_LIMIT, 1e4])
def test_phi_survives_extreme_scores(phi: Phi, size: float) -> None:
    scores = torch.tensor([[size, -size]], requires_grad=True)  # float32
    for loss, cost in ([1.0, 2.0], [0.0, 1.0], [0.0, 0.0]):
        mask = torch.ones(1, 2, dtype=torch.bool)
        result = token_surrogate(scores, torch.full((1, 2), loss), torch.full((1, 2), cost), mask, phi)
        (gradient,) = torch.autograd.grad(result, scores)
        assert result.isfinite()
        assert gradient.isfinite().all()


@each_psi
@pytest.mark.parametrize("size", [0.0, 1e4, math.inf])
def test_psi_survives_extreme_scores(psi: Psi, size: float) -> None:
    """A score of -inf rules out a hand-off; where that has no weight, it may not turn 0 * inf into NaN."""
    scores = torch.tensor([[0.0, 1.0, -size]], requires_grad=True)
    for total in ([[0.5, 0.2, 1.0]], [[1.0, 1.0, 1.0]]):
        result = one_time_surrogate(scores, torch.tensor(total), psi)
        (gradient,) = torch.autograd.grad(result, scores)
        assert result.isfinite()
        assert gradient.isfinite().all()


def test_exponential_goes_on_as_its_tangent() -> None:
    margins = torch.tensor([-EXPONENTIAL_LIMIT, -EXPONENTIAL_LIMIT - 3], dtype=torch.float64, requires_grad=True)
    values = get_phi("exponential")(margins)
    (slopes,) = torch.autograd.grad(values.sum(), margins)
    edge = math.exp(EXPONENTIAL_LIMIT)
    assert values.tolist() == pytest.approx([edge, edge * 4])
    assert slopes.tolist() == pytest.approx([-edge, -edge])


# Costs and grids


@given(st.integers(1, 60), st.floats(0, 10))
def test_query_costs_are_the_schedule_of_the_paper(length: int, alpha_1: float) -> None:
    deferred = torch.tensor([length - kept for kept in range(length + 1)])
    schedule = [(length - j + 1) / length * alpha_1 for j in range(1, length + 2)]
    assert query_costs(deferred, alpha_1, length).tolist() == pytest.approx(schedule, rel=1e-5)


def test_rule_of_thumb_is_the_median_gain() -> None:
    def table(predictor: list[float], expert: list[float]) -> HandOffTable:
        loss = torch.tensor([expert, [9.0] * len(expert), predictor]).T
        return HandOffTable(loss, torch.zeros_like(loss))

    assert rule_of_thumb(table([3.0, 5.0, 100.0], [1.0, 1.0, 1.0])) == 4
    assert rule_of_thumb(table([3.0, 5.0], [1.0, 1.0])) == 3
    assert rule_of_thumb(table([1.0, 1.0, 9.0], [2.0, 2.0, 2.0])) == 0


@given(st.integers(1, 80), st.data())
def test_grid_is_uniform_and_holds_both_ends(length: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, length + 1))
    grid = hand_off_grid(length, size)
    assert grid.dtype == torch.int64
    assert (int(grid[0]), int(grid[-1]), len(grid)) == (0, length, size)
    assert (grid.diff() >= 1).all()
    exact = [i * length / (size - 1) for i in range(size)]
    assert all(abs(kept - place) <= 0.5 for kept, place in zip(grid.tolist(), exact, strict=True))
    assert hand_off_grid(length, length + 1).tolist() == list(range(length + 1))


@pytest.mark.parametrize("size", [-1, 0, 1, 22])
def test_grid_of_impossible_size(size: int) -> None:
    with pytest.raises(OptionError, match="from 2 to 21"):
        hand_off_grid(20, size)


def test_unknown_names() -> None:
    with pytest.raises(OptionError, match="unknown loss 'hinge'; available: exponential, logistic, square, squared_h"):
        get_phi("hinge")
    with pytest.raises(OptionError, match="unknown loss 'ce'; available: cross_entropy, mean_absolute_error"):
        get_psi("ce")
    assert all(get_phi(name).name == name for name in PHIS)
    assert all(get_psi(name).name == name for name in PSIS)


def test_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(losses).failed == 0


def test_ended_hand_offs_are_no_deferral() -> None:
    """Their mass was counted as deferring: a draft of one token was "handed off" after its end, which does nothing."""
    grid, lengths = torch.tensor([0, 1, 3, 5]), torch.tensor([1, 4, 5])
    ended = is_ended(grid, lengths)
    assert ended.tolist() == [[False, True, True, False], [False, False, False, False], [False, False, False, False]]
    scores = torch.randn(3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0), requires_grad=True)
    merged = merge_ended(scores, ended)
    chances, expected = merged.softmax(1), scores.softmax(1).detach()
    torch.testing.assert_close(chances[1:], expected[1:])
    torch.testing.assert_close(
        chances[0], torch.stack([expected[0, 0], *torch.zeros(2), expected[0, 1:].sum()]).double()
    )
    gradient = torch.autograd.grad(chances[:, -1].sum(), scores)[0]
    assert gradient.isfinite().all()


def test_ended_hand_offs_learn_the_bayes_decision() -> None:
    """One token drafted, the expert better with p = 0.45: the surrogate's minimiser keeps it, copies or not."""
    grid, lengths = torch.arange(6), torch.ones(2, dtype=torch.long)
    ended = is_ended(grid, lengths)
    totals = torch.tensor([[0.0, 1, 1, 1, 1, 1], [1.0, 0, 0, 0, 0, 0]])  # expert better, expert worse
    totals = torch.where(ended, totals.amax(1, keepdim=True), totals)
    scores = torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.Adam([scores], lr=0.1)
    weight = torch.tensor([0.45, 0.55])
    for _ in range(500):
        both = merge_ended(scores.expand(2, 6), ended)
        risk = sum(
            weight[i] * one_time_surrogate(both[i : i + 1], totals[i : i + 1], get_psi("cross_entropy")) for i in (0, 1)
        )
        optimizer.zero_grad()
        risk.backward()
        optimizer.step()
    chances = merge_ended(scores.detach()[None], ended[:1]).softmax(1)[0]
    assert chances[0] == pytest.approx(0.45, abs=0.01)
    assert chances[-1] == pytest.approx(0.55, abs=0.01)
