"""What n losses in [0, 1] tell about their expectation: the mathematics of guarantees.

Losses (T, n) of T settings on n inputs, which must be like those to come (exchangeable with them; independent for the
tests below). The settings fall from never to always, so losses rise along the first axis, or nearly.

In expectation (conformal risk control, Angelopoulos et al. 2024). Say that the losses of every input rise, and take the
last setting k with (sum of L_i(k) + 1) / (n + 1) <= b. Had the next input been among those of the calibration, its loss
of at most 1 would have stood in the sum: the setting chosen from all n + 1 spends at least as much, its mean over them
is at most b, and by symmetry each of them has that expectation. Where losses do not rise, their running maximum does
and is not below them (`monotone_envelope`).

With probability 1 - delta (learn then test, Angelopoulos et al. 2021). For a setting, p is a p-value of "the expected
loss is b or more". Settings are tested in a fixed order until the first p > delta (`accepted_settings`): to go wrong,
the first false one must pass, which happens with probability delta, however many there are.

    Hoeffding    P[mean <= m] <= exp(-n kl(m, b)) for m <= b, kl the divergence of two coins
    Bentkus      P[mean <= m] <= e P[Bin(n, b) <= ceil(n m)]
    betting      K_i = product over j <= i of (1 + nu_j (b - L_j)): the wealth of a gambler who bets, with stakes
                 nu_j in [0, 1] from earlier losses alone, that losses are below b. If their expectation is b or more,
                 wealth does not grow in expectation, and it ever reaches 1 / delta with probability delta at most
                 (Ville). The stakes are those of Waudby-Smith and Ramdas (2024): small where the losses vary.

The smaller of two p-values is not a p-value: choose the test before you look at the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from seqdefer.budgets.convex_hull import Floats

Booleans: TypeAlias = NDArray[np.bool_]
BISECTIONS = 30
MAX_LEAST_INPUTS = 10_000_000


# -- losses --------------------------------------------------------------------------------------------------------


def monotone_envelope(losses: Floats) -> Floats:
    """Return the largest loss of each input up to each setting. (T, n)"""
    return np.maximum.accumulate(losses, axis=0)


def token_losses(deferred: Floats, written: Floats, budget: float, length: int) -> Floats:
    """Return losses in [0, 1] with an expectation of at most `budget` exactly where E deferred <= budget x E written:
    the share of all tokens is a ratio, and this is a mean. No sequence is longer than `length`."""
    return np.asarray((deferred - budget * written + budget * length) / length)


# -- in expectation ------------------------------------------------------------------------------------------------


def conformal_bounds(losses: Floats) -> Floats:
    """Return for each setting the mean over the inputs and one more, whose loss is 1. (T, n) -> (T,)"""
    return np.asarray((losses.sum(-1) + 1) / (losses.shape[-1] + 1))


# -- with a probability --------------------------------------------------------------------------------------------


def hoeffding_bentkus_p_values(means: Floats, n: int, budget: float) -> Floats:
    """Return p-values of "the expected loss is `budget` or more", from means of n losses. (T,) -> (T,)"""
    bentkus = math.e * _binomial_distribution(n, budget)[np.ceil(n * means).astype(np.int64)]
    hoeffding = np.exp(-n * _coin_divergence(np.minimum(means, budget), budget))
    return np.asarray(np.minimum(1.0, np.minimum(hoeffding, bentkus)))


def betting_p_values(losses: Floats, budget: float | Floats, delta: float, *, most: float = 1.0) -> Floats:
    """Return the same from the losses themselves, in an order that does not depend on them; the bets are made for a
    test at `delta`, with stakes of at most `most`, which may be up to 1 / (1 - budget). (T, n) -> (T,)"""
    with np.errstate(divide="ignore"):  # log(0): a lost all-in bet
        wealth = np.log1p(stakes(losses, delta, most=most) * (budget - losses)).cumsum(-1)
    return np.asarray(np.exp(-wealth.max(-1).clip(min=0)))


def accepted_settings(passes: Booleans) -> int:
    """Return how many settings pass their test before the first that does not. bool (T,)"""
    return len(passes) if passes.all() else int(passes.argmin())


def betting_bounds(losses: Floats, delta: float) -> Floats:
    """Return what the expected losses are below with probability 1 - delta, to 1e-9. (T, n) -> (T,)"""
    low, high = np.zeros(len(losses)), np.ones(len(losses))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        passes = betting_p_values(losses, middle[:, None], delta) <= delta
        low, high = np.where(passes, low, middle), np.where(passes, middle, high)
    return high


def stakes(losses: Floats, delta: float, *, most: float = 1.0) -> Floats:
    """Return what is bet at each input, from the losses before it. (T, n)"""
    n = losses.shape[-1]
    counts = np.arange(2, n + 2)
    means = (0.5 + losses.cumsum(-1)) / counts
    variances = (0.25 + ((losses - means) ** 2).cumsum(-1)) / counts
    before = np.concatenate([np.full_like(losses[..., :1], 0.25), variances[..., :-1]], -1)
    return np.asarray(np.minimum(most, np.sqrt(2 * math.log(1 / delta) / (n * before))))


def _coin_divergence(a: Floats, b: float) -> Floats:
    """kl(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b)), with 0 ln 0 = 0 and 0 < b < 1."""
    a = np.asarray(a, dtype=np.float64)
    first = np.where(a > 0, a * np.log(np.where(a > 0, a, 1.0) / b), 0.0)
    second = np.where(a < 1, (1 - a) * np.log(np.where(a < 1, 1 - a, 1.0) / (1 - b)), 0.0)
    return np.asarray(first + second)


def _binomial_distribution(n: int, p: float) -> Floats:
    """Return P[Bin(n, p) <= k] for k = 0..n, with 0 < p < 1."""
    factorials = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
    k = np.arange(n + 1)
    logs = factorials[n] - factorials - factorials[::-1] + k * math.log(p) + (n - k) * math.log1p(-p)
    return np.minimum(1.0, np.exp(np.logaddexp.accumulate(logs)))


# -- how many inputs -----------------------------------------------------------------------------------------------


def least_inputs(is_enough: Callable[[int], bool]) -> int:
    """Return the least n that is enough, where more always are; at most MAX_LEAST_INPUTS."""
    high = 1
    while not is_enough(high):
        if high > MAX_LEAST_INPUTS:
            return MAX_LEAST_INPUTS
        high *= 2
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
