"""The deferral losses and their surrogates: pure functions of tensors. Nothing here knows a network or a task.

    token level (sections 3, 3.1)   token_loss, token_surrogate         phi, a loss on a margin:  PHIS, get_phi
    one-time    (sections 4, 4.2)   one_time_loss, one_time_surrogate   psi, a loss on J scores:  PSIS, get_psi

and what the labels need beside them: `query_costs`, `rule_of_thumb`, `hand_off_grid`. Section and equation numbers are
those of "Learning to Partially Defer for Sequences" (Rayan and Tewari).

>>> scores = torch.tensor([[1.0, -1.0]])  # defer the first token, keep the second
>>> loss, cost = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.2, 0.2]])
>>> mask = torch.ones(1, 2, dtype=torch.bool)
>>> round(float(token_loss(scores, loss, cost, mask)), 4)
0.1
>>> round(float(token_surrogate(scores, loss, cost, mask, get_phi("logistic"))), 4)
0.3193
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from seqdefer.errors import OptionError, look_up
from seqdefer.types import HandOffTable

NO_MASS = -1e4  # a score that no softmax sees, yet finite, so that a weight of 0 makes it 0
EXPONENTIAL_LIMIT = 20.0  # past a margin of -20 the exponential loss goes on as its tangent


@dataclass(frozen=True)
class Phi:
    """A convex, classification-calibrated loss on a margin, with the constants that the paper's bounds ask for.

    `calibration` is Gamma of lemma 3.1: excess 0-1 risk <= Gamma(excess phi-risk), nondecreasing and concave.
    `lipschitz` is rho of theorem 3.3, None where there is no useful one on the whole line.
    `upper_scale` is the least gamma with gamma * phi(z) >= 1[z <= 0] (proposition A.1).
    """

    name: str
    function: Callable[[Tensor], Tensor]
    calibration: Callable[[float], float]
    lipschitz: float | None
    upper_scale: float

    def __call__(self, margins: Tensor) -> Tensor:
        """Return phi of every margin, any shape."""
        return self.function(margins)


@dataclass(frozen=True)
class Psi:
    """A surrogate of the multiclass 0-1 loss 1[argmax g != j], with the constants that the paper's bounds ask for.

    `calibration(z, n_classes)` is Gamma of lemma B.3: excess 0-1 risk <= Gamma(excess psi-risk).
    `bound(M, n_classes)` is u_psi(M) of theorem 4.2: the largest value while every score lies within [-M, M].
    `lipschitz` is rho of theorem 4.2: the least constant, in the 2-norm of the scores, for any number of classes.
    `upper_scale` is the least gamma with gamma * psi(g, j) >= 1[argmax g != j] (proposition B.2).
    """

    name: str
    function: Callable[[Tensor], Tensor]
    calibration: Callable[[float, int], float]
    bound: Callable[[float, int], float]
    lipschitz: float
    upper_scale: float
    convex: bool

    def __call__(self, scores: Tensor) -> Tensor:
        """Return psi(g, j) for every j: scores g (..., J) -> (..., J)."""
        return self.function(scores)


def logistic(margins: Tensor) -> Tensor:
    """Logistic loss.

    Formula:   phi(z) = log(1 + exp(-z)).
    Reference: section 3.1; Gamma and gamma from Bartlett, Jordan and McAuliffe (2006).
    Requires:  nothing. The default: the only phi here with a Lipschitz constant, so the paper's bounds apply.
    Prefer:    square for scores that should estimate a cost difference, squared hinge to ignore settled tokens.
    Example:
    >>> round(float(logistic(torch.tensor(0.0))), 4)
    0.6931
    """
    # Exact to rounding with this threshold; -logsigmoid is the same, but starts threads for the smallest tensor.
    return softplus(-margins, threshold=40)


def square(margins: Tensor) -> Tensor:
    """Square loss.

    Formula:   phi(z) = (1 - z)^2.
    Reference: section 3.1. Its minimiser is (l - c) / (l + c), a bounded score that can be read as a cost difference.
    Requires:  scores of moderate size: being right by more than 1 is punished too.
    Prefer:    squared hinge where that punishment hurts, logistic for scores without bounds.
    Example:
    >>> float(square(torch.tensor(3.0)))
    4.0
    """
    return (1 - margins).square()


def exponential(margins: Tensor) -> Tensor:
    """Exponential loss.

    Formula:   phi(z) = exp(-z) down to z = -20 (EXPONENTIAL_LIMIT), below it the tangent at that point.
    Reference: Bartlett et al. (2006). Still convex; Gamma still holds, since the tangent only lowers the best risk.
    Requires:  clean labels: one confident mistake outweighs a batch.
    Prefer:    logistic, nearly always.
    Example:
    >>> round(float(exponential(torch.tensor(-1.0))), 4)
    2.7183
    """
    tail = torch.relu(-margins - EXPONENTIAL_LIMIT)  # not clamp, whose slope at the joint would count twice
    return torch.exp(-margins.clamp(min=-EXPONENTIAL_LIMIT)) + math.exp(EXPONENTIAL_LIMIT) * tail


def squared_hinge(margins: Tensor) -> Tensor:
    """Squared hinge loss.

    Formula:   phi(z) = max(0, 1 - z)^2.
    Reference: Bartlett et al. (2006).
    Requires:  nothing; gradients vanish past a margin of 1, so settled tokens stop moving the rejector.
    Prefer:    logistic where the size of a score matters (a threshold sweep), not its sign alone.
    Example:
    >>> float(squared_hinge(torch.tensor(3.0)))
    0.0
    """
    return (1 - margins).clamp(min=0).square()


def cross_entropy(scores: Tensor) -> Tensor:
    """Cross entropy psi_ce.

    Formula:   psi(g, j) = -log softmax(g)_j.
    Reference: section 4.2; Gamma from Mao, Mohri and Zhong (2023), theorem 3.1. Convex in g.
    Requires:  nothing. The default.
    Prefer:    mean_absolute_error where labels are noisy and a few examples would dominate.
    Example:
    >>> [round(float(value), 4) for value in cross_entropy(torch.tensor([0.0, 0.0]))]
    [0.6931, 0.6931]
    """
    return -torch.log_softmax(scores, -1)


def mean_absolute_error(scores: Tensor) -> Tensor:
    """Mean absolute error psi_mae.

    Formula:   psi(g, j) = 1 - softmax(g)_j.
    Reference: section 4.2; Ghosh, Kumar and Sastry (2017). Consistent and bounded, but NOT convex in g, whatever
               proposition B.2 says: along g = (z, 0) it is a sigmoid. Its Lipschitz constant is sqrt(2) / 4.
    Requires:  scores that start near 0: a saturated softmax has no gradient.
    Prefer:    cross_entropy, unless labels are noisy.
    Example:
    >>> [round(float(value), 4) for value in mean_absolute_error(torch.tensor([0.0, 0.0]))]
    [0.5, 0.5]
    """
    return -torch.expm1(torch.log_softmax(scores, -1))


def invert_entropy(excess: float) -> float:
    """Return the t in [0, 1] with (1+t)/2 log(1+t) + (1-t)/2 log(1-t) = excess; 1 from log 2 on."""
    if excess >= math.log(2):
        return 1.0
    low, high = 0.0, min(1.0, _root(2 * excess))  # the function is at least t^2 / 2
    for _ in range(50):  # no more, or the middle could round to 1, where log1p(-t * t) ends
        middle = (low + high) / 2
        low, high = (middle, high) if _entropy_gap(middle) < excess else (low, middle)
    return high  # the upper end: a bound that rounding must not make too small


def _entropy_gap(t: float) -> float:
    """Return (1+t)/2 log(1+t) + (1-t)/2 log(1-t), computed so that nothing cancels for small t."""
    return t * math.atanh(t) + math.log1p(-t * t) / 2


def _root(excess: float) -> float:
    return math.sqrt(max(excess, 0.0))


def _exponential_calibration(excess: float) -> float:
    return 1.0 if excess >= 1 else _root(excess * (2 - excess))


def _cross_entropy_bound(limit: float, n_classes: int) -> float:
    """Return log(1 + (J - 1) exp(2M)), the loss with the true class at -M and all others at M, without overflow."""
    return 2 * limit + math.log(math.exp(-2 * limit) + n_classes - 1)


PHIS: dict[str, Phi] = {
    phi.name: phi
    for phi in (
        Phi("logistic", logistic, invert_entropy, lipschitz=1.0, upper_scale=1 / math.log(2)),
        Phi("square", square, _root, lipschitz=None, upper_scale=1.0),
        Phi("exponential", exponential, _exponential_calibration, lipschitz=None, upper_scale=1.0),
        Phi("squared_hinge", squared_hinge, _root, lipschitz=None, upper_scale=1.0),
    )
}

PSIS: dict[str, Psi] = {
    psi.name: psi
    for psi in (
        Psi(
            "cross_entropy",
            cross_entropy,
            calibration=lambda excess, n_classes: invert_entropy(excess),
            bound=_cross_entropy_bound,
            lipschitz=math.sqrt(2),
            upper_scale=1 / math.log(2),
            convex=True,
        ),
        Psi(
            "mean_absolute_error",
            mean_absolute_error,
            calibration=lambda excess, n_classes: n_classes * max(excess, 0.0),
            bound=lambda limit, n_classes: -math.expm1(-_cross_entropy_bound(limit, n_classes)),
            lipschitz=math.sqrt(2) / 4,
            upper_scale=2.0,
            convex=False,
        ),
    )
}


def get_phi(name: str) -> Phi:
    """Return the token-level surrogate of this name."""
    return look_up("loss", name, PHIS)


def get_psi(name: str) -> Psi:
    """Return the one-time surrogate of this name."""
    return look_up("loss", name, PSIS)


def token_loss(scores: Tensor, loss: Tensor, cost: Tensor, mask: Tensor) -> Tensor:
    """Return the true token-level deferral loss, by which a rejector is judged. It has no useful gradient.

    Formula:   mean over sequences of (1/L) sum_j  l_j 1[r_j < 0] + c_j 1[r_j >= 0].
    Reference: equation 3.
    Requires:  nothing.
    Inputs:    scores  (B, L)       r_j, defer when >= 0
               loss    (B, L)       l_j >= 0, of the predictor's token
               cost    (B, L)       c_j >= 0, of having the expert write it
               mask    (B, L) bool  True where a token stands; whatever stands elsewhere, NaN included, is ignored,
                                    and a row without any token does not count
    Prefer:    token_surrogate to train with.
    Example:   in the module's docstring.
    """
    scores, loss, cost = (tensor.masked_fill(~mask, 0) for tensor in (scores, loss, cost))
    return _mean_over_sequences(torch.where(scores >= 0, cost, loss), mask)


def token_surrogate(scores: Tensor, loss: Tensor, cost: Tensor, mask: Tensor, phi: Phi) -> Tensor:
    """Return the token-level surrogate, which trains a token-level rejector.

    Formula:   mean over sequences of (1/L) sum_j  l_j phi(r_j) + c_j phi(-r_j).
    Reference: equation 4; convex in the scores; phi.upper_scale times it bounds token_loss (proposition A.1).
    Requires:  for the consistency bound (lemma 3.1), costs bounded away from 0; a zero cost is harmless here.
    Inputs:    as token_loss, and phi: get_phi(...)
    Prefer:    one_time_surrogate for an expert that only completes prefixes.
    Example:   in the module's docstring.
    """
    # Padding is cleared before phi, not after: the gradient of an infinite or NaN score would survive a zero weight.
    scores, loss, cost = (tensor.masked_fill(~mask, 0) for tensor in (scores, loss, cost))
    return _mean_over_sequences(loss * phi(scores) + cost * phi(-scores), mask)


def _mean_over_sequences(values: Tensor, mask: Tensor) -> Tensor:
    """Average over the tokens of each sequence, then over sequences that have any. values: 0 where mask is False."""
    n_tokens = mask.sum(1)
    per_sequence = values.sum(1) / n_tokens.clamp(min=1)
    return per_sequence.sum() / (n_tokens > 0).sum().clamp(min=1)


def one_time_loss(scores: Tensor, total: Tensor) -> Tensor:
    """Return the true one-time deferral loss, by which a one-time rejector is judged. It has no useful gradient.

    Formula:   mean over examples of total_k, k = argmax_j g_j (the first of equals).
    Reference: equation 6.
    Requires:  nothing.
    Inputs:    scores  (B, J)  g_j, one per allowed hand-off, in the order of hand_off_grid
               total   (B, J)  sequence loss of that hand-off + its query cost, see query_costs
    Prefer:    one_time_surrogate to train with.
    Example:
    >>> float(one_time_loss(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.5, 0.25]])))
    0.5
    """
    return total.gather(1, scores.argmax(1, keepdim=True)).mean()


def one_time_surrogate(scores: Tensor, total: Tensor, psi: Psi) -> Tensor:
    """Return the one-time surrogate, which trains a one-time rejector.

    Formula:   mean over examples of sum_j (c_max - total_j) psi(g, j), c_max = max_j total_j of that example.
    Reference: section 4.2; convex in the scores if psi is. psi.upper_scale times it bounds one_time_loss only on
               examples with (J - 1) c_max >= sum_j total_j (proposition B.2): constant totals give it no weight at all.
    Requires:  for consistency (theorem 4.1), totals that differ; an example whose totals are all equal is harmless.
    Inputs:    as one_time_loss, and psi: get_psi(...)
    Prefer:    token_surrogate for an expert that names next tokens: finer deferral, usually the better curve.
    Example:
    >>> scores, total = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.5, 0.5]])
    >>> round(float(one_time_surrogate(scores, total, get_psi("cross_entropy"))), 4)
    0.6931
    """
    weights = total.amax(1, keepdim=True) - total  # (B, J)
    values = psi(scores).masked_fill(weights == 0, 0)  # a score of -inf rules a hand-off out: 0 * inf would be NaN
    return (weights * values).sum(1).mean()


def query_costs(deferred: Tensor, alpha_1: float, length: int) -> Tensor:
    """Return the price of the expert's tokens: alpha_1 / L each, so that a whole sequence of L tokens costs alpha_1.

    For sequences of fixed length this is the paper's schedule alpha_j = (L - j + 1) / L * alpha_1 (appendix F), where
    j = kept + 1 and deferred = L - kept. Written per token it also prices sequences of any length. Any shape.

    >>> query_costs(torch.tensor([4, 2, 0]), alpha_1=1.0, length=4)
    tensor([1.0000, 0.5000, 0.0000])
    """
    return deferred * (alpha_1 / length)


def rule_of_thumb(table: HandOffTable) -> float:
    """Return alpha_1 by the paper's rule of thumb (appendix F): the median gain of the expert alone over the predictor
    alone, over the training examples; 0 where there is no gain."""
    gains = (table.loss[:, -1] - table.loss[:, 0]).double()
    return max(0.0, float(gains.quantile(0.5)))


def is_ended(grid: Tensor, lengths: Tensor) -> Tensor:
    """Mark the hand-offs of `grid` (J,) at or past the end of a draft, which equal no deferral, the last. bool (n, J)

    The last itself is not marked. lengths: (n,) of the drafts."""
    ended = grid[None, :] >= lengths[:, None]
    ended[:, -1] = False
    return ended


def merge_ended(scores: Tensor, ended: Tensor) -> Tensor:
    """Give the mass of ended hand-offs to no deferral, which they equal, in scores (n, J). Otherwise a softmax would
    split no deferral's mass over its copies, and a policy would take a copy for a deferral."""
    last = torch.where(ended, scores, -torch.inf).logsumexp(1).logaddexp(scores[:, -1])
    merged = torch.where(ended, NO_MASS, scores)
    return torch.cat([merged[:, :-1], last[:, None]], 1)


def hand_off_grid(length: int, size: int) -> Tensor:
    """Return the allowed hand-offs: `size` values of `kept`, uniform over 0..length, always with 0 (the expert alone)
    and length (no deferral). int64 (size,)

    >>> hand_off_grid(length=20, size=5)
    tensor([ 0,  5, 10, 15, 20])
    """
    if not 2 <= size <= length + 1:
        raise OptionError(
            f"cannot choose from {size} hand-offs: a sequence of {length} tokens has {length + 1}; give from 2 to "
            f"{length + 1} (--hand-offs)"
        )
    steps = size - 1
    return (2 * torch.arange(size) * length + steps) // (2 * steps)  # rounded to nearest, in exact integers
