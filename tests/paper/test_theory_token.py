"""The paper's statements on token-level deferral (lemma 3.1, theorem 3.2), by enumeration on small discrete
distributions; where a printed form is wrong, a counterexample."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from oracles import BEST_MARGIN, LOGISTIC, ROUNDING, SQUARE, each_phi, random_scores, seeds, some, value_of

from seqdefer.errors import OptionError
from seqdefer.paper.theory import Floats, best_margin, excess_risk_bound, token_transform
from seqdefer.rejectors.losses import Phi

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class TokenWorld:
    """Rows (x, y, position), each with its probability over the length and the place of its decision: (position, x,
    prefix). Prefixes follow the oracle's decisions, as the paper assumes, so they depend on y."""

    place: Any  # (N,) int
    chance: Floats  # (N,), sums to 1
    loss: Floats  # (N,)
    cost: Floats  # (N,)

    def risk(self, scores: Floats, zero_defers: bool = True) -> float:
        """Return the risk of scores (P,), one per place."""
        at = scores[self.place]
        defers = at >= 0 if zero_defers else at > 0
        return float(self.chance @ np.where(defers, self.cost, self.loss))

    def surrogate(self, scores: Floats, phi: Phi) -> float:
        at = scores[self.place]
        return float(self.chance @ (self.loss * value_of(phi, at) + self.cost * value_of(phi, -at)))

    def expected(self) -> tuple[Floats, Floats]:
        """Return A and B: probability times expected loss and cost of each place. (P,)"""
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
    """With a cost of 0 the printed bound has no meaning; the tilted bound still holds."""
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
    """One place with a score just below 0 gives equality, so no smaller bound holds for all distributions."""
    loss, cost = 1.3, 0.4
    world = TokenWorld(np.array([0]), np.ones(1), np.array([loss]), np.array([cost]))
    scores, best = np.array([-1e-12]), best_margin(phi, [loss / (loss + cost)])
    surrogate = world.surrogate(scores, phi) - world.surrogate(best, phi)
    assert world.risk(scores) - world.risk(best) == pytest.approx(loss - cost)
    assert excess_risk_bound(token_transform(phi), surrogate, loss + cost) == pytest.approx(loss - cost)


def test_label_of_the_binary_problem_is_plus_one() -> None:
    """The appendix gives -1 the probability A / (A + B): the best score for loss 9 and cost 1 would then keep."""
    loss, cost = 9.0, 1.0
    right, printed = best_margin(LOGISTIC, [loss / (loss + cost), cost / (loss + cost)])
    world = TokenWorld(np.array([0]), np.ones(1), np.array([loss]), np.array([cost]))
    assert world.surrogate(np.array([right]), LOGISTIC) < world.surrogate(np.array([printed]), LOGISTIC)
    assert (world.risk(np.array([right])), world.risk(np.array([printed]))) == (cost, loss)


def test_one_plus_c_bar_is_not_enough() -> None:
    """The proof of theorem 3.2 uses 1 + C-bar; lemma 3.1 has l-bar + C-bar."""
    loss, cost = 10.0, 0.1
    world = TokenWorld(np.array([0]), np.ones(1), np.array([loss]), np.array([cost]))
    scores, best = np.array([-1e-9]), best_margin(LOGISTIC, [loss / (loss + cost)])
    surrogate = world.surrogate(scores, LOGISTIC) - world.surrogate(best, LOGISTIC)
    excess = world.risk(scores) - world.risk(best)
    printed = (1 + cost) * token_transform(LOGISTIC)(surrogate / cost)
    assert (excess, printed) == (pytest.approx(9.9), pytest.approx(1.1))
    assert excess <= excess_risk_bound(token_transform(LOGISTIC), surrogate, loss + cost, least_weight=cost)


def test_prefix_may_tell_the_target() -> None:
    """The proof takes expectations given x. The oracle's first decision depends on y, so the prefix reveals y, and
    the best rejector, which sees the prefix, beats every rejector under the proof's pointwise risk."""
    chance, loss, cost = np.full(4, 0.25), np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0, 1.0])
    seen = TokenWorld(np.array([0, 0, 1, 2]), chance, loss, cost)  # rows: two y at position 1, the same at position 2
    unseen = replace(seen, place=np.array([0, 0, 1, 1]))
    assert np.minimum(*seen.expected()).sum() == 0.25
    assert np.minimum(*unseen.expected()).sum() == 0.5


def test_best_decision_token_by_token_is_not_the_best_in_a_row() -> None:
    """Teacher forcing ignores this: keeping the first token is cheaper by itself, but spoils the second."""
    loss: dict[tuple[bool, ...], float] = {(): 0.5, (False,): 1.0, (True,): 0.0}  # by the decisions so far
    cost: dict[tuple[bool, ...], float] = {(): 0.6, (False,): 1.0, (True,): 0.0}

    def risk(decisions: tuple[bool, ...]) -> float:
        return sum((cost if defers else loss)[decisions[:j]] for j, defers in enumerate(decisions)) / 2

    cheapest: tuple[bool, ...] = ()
    for _ in range(2):
        cheapest = (*cheapest, loss[cheapest] >= cost[cheapest])
    assert (risk(cheapest), min(map(risk, itertools.product([False, True], repeat=2)))) == (0.75, 0.3)
