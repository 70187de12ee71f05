"""The paper's constants and bounds as functions of numbers. No training depends on them.

    excess risk (lemmas 3.1, B.3)             token_transform, one_time_transform, excess_risk_bound
    estimation error (theorems 3.3, 4.2)      estimation_bound_token, estimation_bound_once
    both together (corollaries 3.4, B.6)      corollary_token, corollary_once
    constants of a loss                       best_margin, calibration_gap, lipschitz_within, bound_within
    complexity of linear scores               linear_rademacher, linear_complexity, complexity_from_sample
    rewriting, upper bound (B.1, B.2)         one_time_offset

Further constants belong to the losses, `Phi` and `Psi` of `seqdefer.rejectors.losses`: `upper_scale` (gamma),
`calibration` (Gamma), `lipschitz` (rho) and `bound` (u_psi). Statements are numbered as in "Learning to
Partially Defer for Sequences" (Rayan and Tewari). Some constants are printed wrong there. This module has the corrected
ones; docs/theory.md lists the printed ones with counterexamples.

>>> from seqdefer.rejectors.losses import get_phi
>>> weather = Assumptions(n=70_080, most_loss=1.0, most_cost=1.0, limit=3.0)
>>> complexities = [linear_complexity(radius=3.0, largest_norm=1.0, n=weather.n)] * 6  # L = 6 tokens
>>> round(estimation_bound_token(get_phi("logistic"), weather, complexities), 3)
0.149
>>> round(corollary_token(get_phi("logistic"), weather, complexities), 3)
0.762
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.rejectors.losses import Phi, Psi

Floats: TypeAlias = NDArray[np.float64]
Transform: TypeAlias = Callable[[float], float]

# Limit of the search for minimisers. That of a certain label is at infinity; here it is within exp(-60) of the infimum.
MAX_MARGIN = 60.0


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of theorems 3.3 and 4.2, which hold with probability at least 1 - delta.

    n          number of independent examples
    most_loss  l-bar: 0 <= l <= l-bar; in one-time deferral, l is the loss of the whole kept prefix, not of one token
    most_cost  C-bar: 0 <= c <= C-bar
    limit      M: every score is within [-M, M]
    """

    n: int
    most_loss: float
    most_cost: float
    limit: float
    delta: float = 0.05

    def __post_init__(self) -> None:
        problems = [
            *_no_examples(self.n),
            *_not_finite_or_negative(most_loss=self.most_loss, most_cost=self.most_cost, limit=self.limit),
            *([] if 0 < self.delta < 1 else [f"delta is {self.delta}; it must be strictly between 0 and 1"]),
        ]
        _raise_for(problems)

    @property
    def weight(self) -> float:
        """l-bar + C-bar."""
        return self.most_loss + self.most_cost

    @property
    def deviation(self) -> float:
        """sqrt(2 log(2 / delta) / n): twice the deviation of a mean of n numbers, in units of their range."""
        return math.sqrt(2 * math.log(2 / self.delta) / self.n)


def _not_finite_or_negative(**values: float) -> list[str]:
    return [
        f"{name} is {value}; it must be a finite number, 0 or more"
        for name, value in values.items()
        if not 0 <= value < math.inf
    ]


def _raise_for(problems: list[str]) -> None:
    if problems:
        raise OptionError("; ".join(problems))


# Constants of a loss on a margin


def lipschitz_within(phi: Phi, limit: float) -> float:
    """Return rho of theorem 3.3 for scores within [-M, M]: the largest |phi'(z)|, |z| <= M.

    A convex function is steepest at an end. Square and exponential loss have no constant on the whole line, so the
    theorem covers them only with a limit.
    """
    _raise_for(_not_finite_or_negative(limit=limit))
    ends = torch.tensor([-limit, limit], dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(phi(ends).sum(), ends)
    return float(slopes.abs().max())


def bound_within(phi: Phi, limit: float) -> float:
    """Return u_phi(M), which theorem 3.3 lacks: the largest phi(z), |z| <= M, at an end of a convex function."""
    _raise_for(_not_finite_or_negative(limit=limit))
    return float(phi(torch.tensor([-limit, limit], dtype=torch.float64)).max())


def best_margin(phi: Phi, probability: ArrayLike) -> Floats:
    """Return argmin over t of p phi(t) + (1 - p) phi(-t) for every probability p, by bisection on the slope. Any shape.

    For a token with expected loss A and expected cost B the best score is that of p = A / (A + B): above 0 where A > B,
    which is consistency (theorem 3.2).
    """
    probabilities = _probabilities(probability)
    low, high = torch.full_like(probabilities, -MAX_MARGIN), torch.full_like(probabilities, MAX_MARGIN)
    for _ in range(70):  # 120 / 2^70 is below the resolution of float64
        middle = ((low + high) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(_binary_risk(phi, probabilities, middle).sum(), middle)
        low, high = torch.where(slope < 0, middle, low).detach(), torch.where(slope < 0, high, middle).detach()
    best: Floats = ((low + high) / 2).numpy()
    return best


def _probabilities(probability: ArrayLike) -> Tensor:
    values = np.asarray(probability, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise OptionError(f"probabilities must be within [0, 1]: {values}")
    return torch.tensor(values)


def _binary_risk(phi: Phi, probabilities: Tensor, margins: Tensor) -> Tensor:
    return probabilities * phi(margins) + (1 - probabilities) * phi(-margins)


def calibration_gap(phi: Phi, advantage: float) -> float:
    """Return the inverse of Gamma in lemma 3.1: the calibration function, or psi-transform of Bartlett et al. (2006).

    Formula: H(a) = phi(0) - min over t of p phi(t) + (1 - p) phi(-t), p = (1 + a) / 2: the least excess phi-risk
             of a decision that is worse than the best one by a in [0, 1]; for a convex phi, at a score of 0.
             logistic        ((1+a) log(1+a) + (1-a) log(1-a)) / 2
             exponential     1 - sqrt(1 - a^2)
             square, squared_hinge   a^2
    """
    probabilities = _probabilities((1 + advantage) / 2)
    best = torch.tensor(best_margin(phi, probabilities))
    return float(
        _binary_risk(phi, probabilities, torch.zeros_like(probabilities)) - _binary_risk(phi, probabilities, best)
    )


# Excess risk


def token_transform(phi: Phi) -> Transform:
    """Return Gamma of lemma 3.1: excess 0-1 risk <= Gamma(excess phi-risk), nondecreasing and concave.

    It is at most 1, like every excess 0-1 risk; the minimum of two concave functions is concave.
    """
    return lambda excess: min(1.0, phi.calibration(excess))


def one_time_transform(psi: Psi, n_hand_offs: int) -> Transform:
    """Return Gamma of lemma B.3 for |J| = n_hand_offs, at most 1.

    Formula: cross_entropy        the inverse of ((1+a) log(1+a) + (1-a) log(1-a)) / 2 for any |J|; 1 from log 2 on
             mean_absolute_error  Gamma(z) = |J| z; the paper prints L + 1, which is |J| with all hand-offs
    """
    _raise_for(_too_few(n_hand_offs))
    return lambda excess: min(1.0, psi.calibration(excess, n_hand_offs))


def _too_few(n_hand_offs: int) -> list[str]:
    return [] if n_hand_offs >= 2 else [f"{n_hand_offs} hand-offs; a choice needs at least 2"]


def excess_risk_bound(transform: Transform, excess: float, weight: float, least_weight: float | None = None) -> float:
    """Bound the excess risk of a rejector by its excess surrogate risk (lemmas 3.1 and B.3).

    Formula:   weight * Gamma(excess / least_weight)
    Inputs:    transform     token_transform(phi) or one_time_transform(psi, n_hand_offs)
               excess        R_surrogate(r) - R*_surrogate, with the infimum over all measurable rejectors
               weight        lemma 3.1: l-bar + C-bar; lemma B.3: (|J| - 1) (l-bar + C-bar)
               least_weight  lemma 3.1: c-bar; lemma B.3: Delta; None: the same as `weight`
    The default needs neither c-bar nor Delta, and is sharper: at weight w the excess is at most w Gamma(s / w), and by
    Jensen's inequality under the distribution tilted by w the mean is at most W Gamma(E[s] / W), W = E[w]. It rises
    with W, so any upper bound of E[w] suffices: E[l + c] averaged over tokens, E[sum_j (c_max - total_j)] one-time.
    """
    least = weight if least_weight is None else least_weight
    unclear = ["excess is nan; give the difference of two risks"] if math.isnan(excess) else []
    _raise_for([*_not_finite_or_negative(weight=weight), *unclear])
    if weight == 0:
        return 0.0
    if not 0 < least <= weight:
        raise OptionError(f"least_weight is {least}; give a number above 0 and at most the weight, {weight}, or None")
    return weight * transform(excess / least)


# Estimation error


def estimation_bound_token(phi: Phi, assumptions: Assumptions, complexities: Sequence[float]) -> float:
    """Bound the surrogate risk of the empirical minimiser minus the least of its class (theorem 3.3).

    Formula:   4 rho sqrt(2 (C-bar^2 + l-bar^2)) (1/L) sum_j R_n(F_j) + u_phi(M) (C-bar + l-bar) sqrt(2 log(2/delta)/n)
    Inputs:    complexities  R_n(F_j) for each of the L positions
    The paper omits u_phi(M), which bounds McDiarmid's differences. Its proof of the first term is wrong, but the term
    holds: one contraction per position gives 4 rho (C-bar + l-bar), which is never larger.
    """
    _check_complexities(complexities, at_least=1)
    scale = lipschitz_within(phi, assumptions.limit) * math.hypot(assumptions.most_cost, assumptions.most_loss)
    mean = math.fsum(complexities) / len(complexities)
    spread = bound_within(phi, assumptions.limit) * assumptions.weight
    return 4 * math.sqrt(2) * scale * mean + spread * assumptions.deviation


def estimation_bound_once(psi: Psi, assumptions: Assumptions, complexities: Sequence[float]) -> float:
    """Bound the same for one-time deferral (theorem 4.2).

    Formula:   2 sqrt(2) q rho sum_j R_n(G_j) + u_psi(M) q sqrt(2 log(2/delta) / n), q = 2 (|J| - 1) (C-bar + l-bar)
    Inputs:    complexities  R_n(G_j) for each of the |J| hand-offs
    rho and u_psi are the smallest possible: |J| - 1 in u_psi where the paper prints L, sqrt(2) / 4 for
    mean_absolute_error where it prints 2. Half of q would suffice in the second term: the surrogate is never negative.
    """
    _check_complexities(complexities, at_least=2)
    n_hand_offs = len(complexities)
    q = 2 * _one_time_weight(assumptions, n_hand_offs)
    bound = psi.bound(assumptions.limit, n_hand_offs)
    return 2 * math.sqrt(2) * q * psi.lipschitz * math.fsum(complexities) + bound * q * assumptions.deviation


def _one_time_weight(assumptions: Assumptions, n_hand_offs: int) -> float:
    """Return the largest sum_j (c_max - total_j): one total is c_max, and none is below 0."""
    return (n_hand_offs - 1) * assumptions.weight


def _check_complexities(complexities: Sequence[float], at_least: int) -> None:
    if len(complexities) < at_least:
        raise OptionError(f"{len(complexities)} complexities; give one per position, at least {at_least}")
    _raise_for(_not_finite_or_negative(**{f"complexity {j}": value for j, value in enumerate(complexities)}))


def corollary_token(
    phi: Phi,
    assumptions: Assumptions,
    complexities: Sequence[float],
    *,
    approximation: float = 0.0,
    least_cost: float | None = None,
) -> float:
    """Bound the token risk of the empirical minimiser of the surrogate minus the Bayes risk (corollary 3.4).

    Formula:   (l-bar + C-bar) Gamma((estimation_bound_token + approximation) / c-bar)
    Inputs:    approximation  A_phi(F): the least surrogate risk of the class minus that of all rejectors
               least_cost     c-bar; None: l-bar + C-bar instead, sharper and always true (excess_risk_bound)
    """
    _raise_for(_not_finite_or_negative(approximation=approximation))
    excess = estimation_bound_token(phi, assumptions, complexities) + approximation
    return excess_risk_bound(token_transform(phi), excess, assumptions.weight, least_cost)


def corollary_once(
    psi: Psi,
    assumptions: Assumptions,
    complexities: Sequence[float],
    *,
    approximation: float = 0.0,
    separation: float | None = None,
) -> float:
    """Bound the one-time risk of the empirical minimiser of the surrogate minus the Bayes risk (corollary B.6).

    Formula:   (|J| - 1) (C-bar + l-bar) Gamma((estimation_bound_once + approximation) / Delta)
    Inputs:    approximation  as in corollary_token
               separation     Delta; None: (|J| - 1) (C-bar + l-bar) instead, sharper and always true
    """
    _raise_for(_not_finite_or_negative(approximation=approximation))
    excess = estimation_bound_once(psi, assumptions, complexities) + approximation
    weight = _one_time_weight(assumptions, len(complexities))
    return excess_risk_bound(one_time_transform(psi, len(complexities)), excess, weight, separation)


# Rademacher complexity of linear scores


@dataclass(frozen=True)
class Estimate:
    """A mean of random draws and its standard error."""

    value: float
    standard_error: float


def linear_rademacher(features: ArrayLike, radius: float, *, draws: int = 1000, seed: int = 0) -> Estimate:
    """Estimate the empirical Rademacher complexity of {x -> w.x : |w| <= B} on the rows x_i of features (n, d).

    Formula:   E over signs s of sup over |w| <= B of (1/n) sum_i s_i w.x_i  =  (B/n) E |sum_i s_i x_i|
    The supremum is exact, the mean over signs comes from `draws` draws. At most B sqrt(sum |x_i|^2) / n.
    """
    rows = np.asarray(features, dtype=np.float64)
    _raise_for(_not_finite_or_negative(radius=radius))
    if rows.ndim != 2 or len(rows) == 0 or not np.isfinite(rows).all():
        raise OptionError(
            f"features have the shape {rows.shape}; give finite numbers, one row per example, at least one"
        )
    if draws < 2:
        raise OptionError(f"draws is {draws}; a standard error needs at least 2")
    random = np.random.default_rng(seed)
    lengths = [np.linalg.norm(random.choice([-1.0, 1.0], len(rows)) @ rows) for _ in range(draws)]
    scale = radius / len(rows)
    return Estimate(scale * float(np.mean(lengths)), scale * float(np.std(lengths, ddof=1)) / math.sqrt(draws))


def linear_complexity(radius: float, largest_norm: float, n: int) -> float:
    """Return B max|x| / sqrt(n), which bounds the complexity of {x -> w.x : |w| <= B}, empirical or expected."""
    _raise_for([*_not_finite_or_negative(radius=radius, largest_norm=largest_norm), *_no_examples(n)])
    return radius * largest_norm / math.sqrt(n)


def _no_examples(n: int) -> list[str]:
    return [] if n >= 1 else [f"n is {n}; give at least one example"]


def complexity_from_sample(empirical: float, assumptions: Assumptions) -> float:
    """Bound the expected complexity R_n of the theorems from a sample, with probability at least 1 - delta.

    Formula:   empirical + 2 M sqrt(log(1 / delta) / (2 n)), by McDiarmid: one example moves the empirical one by 2M/n.
    Each complexity from the sample spends another delta, beside that of the theorems.
    """
    _raise_for(_not_finite_or_negative(empirical=empirical))
    return empirical + 2 * assumptions.limit * math.sqrt(math.log(1 / assumptions.delta) / (2 * assumptions.n))


# The one-time loss, rewritten


def one_time_offset(total: ArrayLike) -> Floats:
    """Return the part of the one-time loss that no rejector changes, per example. total (..., J) -> (...)

    Formula:   sum_j total_j - (|J| - 1) c_max
    Reference: lemma B.1: loss = sum_j (c_max - total_j) 1[r != j] + offset. Hence psi.upper_scale * surrogate + offset
               bounds the loss for all scores; without the offset, as in proposition B.2, only where offset <= 0.
    """
    totals = np.asarray(total, dtype=np.float64)
    _raise_for(_too_few(totals.shape[-1] if totals.ndim else 0))
    offset: Floats = totals.sum(-1) - (totals.shape[-1] - 1) * totals.max(-1)
    return offset
