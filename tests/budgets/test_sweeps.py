"""Sweeps of whole and one-time deferral against loops over settings and instances."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hand_off_cases import HandOffCase, Points, assert_same_curve, slow_curve, slow_switch, whole_sweep
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.budgets.convex_hull import Floats, Integers
from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.sweeps import GridSweep, StepSweep, Sweep, hand_off_sweep, switch_sweep
from seqdefer.errors import DataError
from seqdefer.evaluation.curves import Ends, curve_of, optimal_once
from seqdefer.types import HandOffTable

seeds = st.integers(0, 2**32 - 1)
TWO_OF_ONE_TOKEN = HandOffTable(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.tensor([[1, 0], [1, 0]]))


# -- every setting, one by one -------------------------------------------------------------------------------------


@given(seeds)
def test_whole_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    case = HandOffCase(seed)
    scores = case.integers(4, case.n)
    expected = slow_curve(slow_switch(case, scores.tolist(), [0] * case.n), case.ends)
    assert_same_curve(curve_of(whole_sweep(scores, case.table), case.ends), expected)


@given(seeds)
def test_switch_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    case = HandOffCase(seed)
    scores, (deferred, loss) = case.integers(4, case.n), (case.table.deferred.numpy(), case.table.loss.numpy())
    points = switch_sweep(scores, (deferred[:, 1], loss[:, 1]), (deferred[:, 0], loss[:, 0])).curves(np.eye(case.n))
    for values, table in zip(points, (deferred, loss), strict=True):
        for column, at in enumerate([math.inf, *np.unique(scores)[::-1]]):
            assert values[:, column].tolist() == np.where(scores >= at, table[:, 0], table[:, 1]).tolist()


@given(seeds)
def test_odds_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    case = HandOffCase(seed)
    pool, grid = case.integers(3, 4, len(case.grid)), case.grid.tolist()
    pool[:, -1] += case.random.random(4)  # instances tie as copies of a row, not as sums that differ in rounding
    scores = pool[case.random.integers(0, 4, case.n)]
    no_deferral = scores[:, -1] - np.log(np.exp(scores).sum(1))  # log_softmax
    best = [grid[row.index(max(row))] for row in scores[:, :-1].tolist()]  # the first of equals
    expected = slow_curve(slow_switch(case, (-no_deferral).tolist(), best), case.ends)
    assert_same_curve(curve_of(case.once_sweep(scores, "odds"), case.ends), expected)


@given(seeds)
def test_largest_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    """Hand-offs past the end of a draft score -inf, as confidence rules do."""
    case = HandOffCase(seed)
    grid, scores = case.grid.tolist(), case.integers(3, case.n, len(case.grid))
    scores[case.grid.numpy() >= case.lengths[:, None]] = -np.inf
    best = [
        max((kept for kept in grid[:-1] if kept < case.lengths[row]), key=lambda k: (scores[row, grid.index(k)], -k))
        for row in range(case.n)
    ]
    values = [float(scores[row, grid.index(kept)]) for row, kept in enumerate(best)]
    expected = slow_curve(slow_switch(case, values, best), case.ends)
    assert_same_curve(curve_of(case.once_sweep(scores, "largest"), case.ends), expected)


def prices_between(scores: Floats, lengths: Integers, grid: list[int]) -> list[float]:
    """Return a price between each two at which any two hand-offs of an instance are equally dear, and both ends."""
    ties = set()
    for row, length in zip(scores.tolist(), lengths.tolist(), strict=True):
        options = [(max(length - kept, 0), -score) for kept, score in zip(grid, row, strict=True) if score > -math.inf]
        ties |= {(y0 - y1) / (x1 - x0) for x0, y0 in options for x1, y1 in options if x0 < x1}
    inner = [(one + other) / 2 for one, other in itertools.pairwise(sorted(ties))]
    return [math.inf, *reversed(inner), min(ties, default=0) - 1]


def cheapest(case: HandOffCase, scores: Floats, lengths: Integers, price: float) -> list[int]:
    """Choose for the instances one by one: the least loss + price x tokens left, the smallest kept among equals."""
    chosen = []
    for row, length in enumerate(lengths.tolist()):
        costs = {}
        for column, kept in enumerate(case.grid.tolist()):
            left = max(length - kept, 0)
            if scores[row, column] > -math.inf:
                costs[kept] = (price * left if left else 0.0) - scores[row, column]
        chosen.append(min(costs, key=lambda kept: (costs[kept], kept)))
    return chosen


@given(seeds)
def test_cost_sweep_equals_a_loop_over_prices(seed: int) -> None:
    case = HandOffCase(seed)
    scores = case.costs()
    points: Points = []
    for price in prices_between(scores, case.lengths, case.grid.tolist()):
        kept = cheapest(case, scores, case.lengths, price)
        assert case.scored(scores, "cost").kept(price).tolist() == kept
        points.append(case.mean_outcome(kept))
    assert_same_curve(curve_of(case.once_sweep(scores, "cost"), case.ends), slow_curve(points, case.ends))


@given(seeds)
def test_a_choice_has_changed_at_the_very_price_where_it_changes(seed: int) -> None:
    """Among equals the smallest kept is chosen. Prices are whole numbers over 4 here, which are exact."""
    case = HandOffCase(seed)
    lengths, scores = np.full(case.n, case.length), np.round(case.costs())
    scores[:, :-1] *= case.length - case.grid.numpy()[:-1]  # then all changes from or to the last are at whole prices
    scores[:, 1:-1] = -np.inf
    sweep = hand_off_sweep(ScoredHandOffs.of(scores, case.length, hand_offs=case.grid, rule="cost"), case.table)
    x, y = sweep.curves(np.ones((1, case.n)))
    for column, price in enumerate([math.inf, *np.unique(sweep.scores)[::-1]]):
        expected = case.mean_outcome(cheapest(case, scores, lengths, price))
        assert (x[0, column], y[0, column]) == pytest.approx(expected)


@given(seeds)
def test_the_ends_of_a_cost_sweep(seed: int) -> None:
    """Nothing is deferred at an infinite price, and in the end all that can be, at any estimated loss."""
    case = HandOffCase(seed)
    scores = case.costs()
    x, y = case.once_sweep(scores, "cost").curves(np.ones((1, case.n)))
    assert (x[0, 0], y[0, 0]) == pytest.approx((0.0, case.ends.predictor_loss.mean()))
    first = [int(case.grid[column]) for column in (scores > -math.inf).argmax(1)]
    assert (x[0, -1], y[0, -1]) == pytest.approx(case.mean_outcome(first))


def test_every_point_of_a_cost_sweep_is_a_choice_of_hand_offs() -> None:
    """With estimates on a line, rounding once took steps out of their order, to points that no hand-off leads to."""
    random = np.random.default_rng(0)
    n, length = 400, 50
    table = HandOffTable(torch.from_numpy(random.random((n, length + 1))), torch.arange(length, -1, -1).expand(n, -1))
    grid = np.append(np.sort(random.choice(length, 6, replace=False)), length)
    slope, start = random.normal(size=(2, n, 1))
    scored = ScoredHandOffs.of(slope * grid + 10 * start, length, hand_offs=grid, rule="cost")
    x, y = hand_off_sweep(scored, table).curves(np.eye(n))  # each alone
    loss = table.loss.numpy()[np.arange(n)[:, None], length - np.round(x).astype(np.int64)]
    assert np.allclose(x, np.round(x), atol=1e-9)
    assert np.isin(length - np.round(x), grid).all()
    assert np.allclose(y, loss, atol=1e-9)


@given(seeds)
def test_true_losses_reach_the_optimum_of_one_time_deferral(seed: int) -> None:
    """With sequences of one length, the sweep is the oracle's curve as long as deferral helps."""
    random = np.random.default_rng(seed)
    n, length = int(random.integers(1, 7)), int(random.integers(1, 7))
    loss = random.integers(0, 9, (n, length + 1)).astype(np.float64)
    table = HandOffTable(torch.from_numpy(loss), torch.arange(length, -1, -1).expand(n, -1))
    scored = ScoredHandOffs.of(-loss, length, hand_offs=np.arange(length + 1), rule="cost")
    curve, best = curve_of(hand_off_sweep(scored, table), Ends.of(table)), optimal_once(table)
    assert best.at(curve.deferred) == pytest.approx(np.minimum.accumulate(curve.loss))
    falling = best.deferred <= curve.deferred[curve.loss.argmin()]
    assert curve.at(best.deferred[falling]) == pytest.approx(best.loss[falling])
    assert curve.loss[-1] == pytest.approx(loss[:, 0].mean())


def test_odds_order_instances_where_softmax_saturates() -> None:
    """log_softmax of both no-deferral scores is 0 in float64, yet the first is more likely to need the expert."""
    scored = ScoredHandOffs.of(torch.tensor([[0.0, 800.0], [0.0, 900.0]]), 1, hand_offs=[0, 1], rule="odds")
    assert hand_off_sweep(scored, TWO_OF_ONE_TOKEN).curves(np.ones((1, 2)))[1].tolist() == [[1.5, 1.0, 0.0]]


def test_infinite_scores_always_and_never_defer() -> None:
    x, y = whole_sweep([-math.inf, math.inf], TWO_OF_ONE_TOKEN).curves(np.ones((1, 2)))
    assert (x.tolist(), y.tolist()) == ([[0.0, 0.5, 1.0]], [[1.5, 0.5, 0.0]])


# -- steps and weights ---------------------------------------------------------------------------------------------


@given(seeds)
def test_grid_sweep_equals_a_loop_over_settings(seed: int) -> None:
    case = HandOffCase(seed)
    sweep = case.grid_sweep()
    points = [
        (sum(deferred) / case.n, sum(loss) / case.n)
        for deferred, loss in zip(sweep.deferred.tolist(), sweep.loss.tolist(), strict=True)
    ]
    assert_same_curve(curve_of(sweep, case.ends), slow_curve(points, case.ends))


def test_steps_are_taken_by_falling_scores_equals_together() -> None:
    sweep = StepSweep([1.0, 3.0, 1.0, 2.0], [1, 0, 2, 0], ([1, 2, 3, 4], [-1, -2, -3, -4]), ([0, 0, 5], [9, 9, 9]))
    x, y = sweep.curves(np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0]]))
    assert x.tolist() == [[5 / 3, 7 / 3, 11 / 3, 5.0], [5 / 3, 3.0, 17 / 3, 20 / 3]]
    assert y.tolist() == [[9.0, 25 / 3, 7.0, 17 / 3], [9.0, 23 / 3, 5.0, 4.0]]


def test_a_sweep_without_a_step_is_its_start() -> None:
    table = HandOffTable(torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]]))
    scored = ScoredHandOffs.of([[-math.inf, 0.0]], 1, hand_offs=[0, 1], rule="cost")
    x, y = hand_off_sweep(scored, table).curves(np.ones((1, 1)))
    assert (x.tolist(), y.tolist()) == ([[0.0]], [[2.0]])


@pytest.mark.parametrize("rule", ["whole", "cost", "grid"])
@given(seed=seeds)
def test_a_weight_counts_copies_of_an_instance(rule: str, seed: int) -> None:
    case = HandOffCase(seed)
    scores = case.costs() if rule == "cost" else case.integers(4, case.n)
    weights = case.random.integers(0, 4, (3, case.n))
    weights[:, 0] += 1
    grid = case.grid_sweep()

    def sweep_of(rows: Integers) -> Sweep:
        if rule == "grid":
            return GridSweep(grid.deferred[:, rows], grid.loss[:, rows])
        table = case.table.select(torch.from_numpy(rows))
        if rule == "whole":
            return whole_sweep(scores[rows], table)
        scored = ScoredHandOffs.of(
            scores[rows], case.length, hand_offs=case.grid, rule=rule, lengths=case.lengths[rows]
        )
        return hand_off_sweep(scored, table)

    x, y = sweep_of(np.arange(case.n)).curves(weights.astype(np.float64))
    for row in range(3):
        copies = np.repeat(np.arange(case.n), weights[row])
        some_x, some_y = sweep_of(copies).curves(np.ones((1, len(copies))))
        points, some = (
            set(zip(*np.round(pair, 9).tolist(), strict=True)) for pair in ((x[row], y[row]), (some_x[0], some_y[0]))
        )
        assert points == some


def test_bad_input_is_named() -> None:
    with pytest.raises(DataError, match=r"same shape: scores \(2,\), deferred \(1,\)"):
        StepSweep([0.0, 1.0], [0, 0], ([1], [1]), ([0], [0]))
    with pytest.raises(DataError, match=r"same shape: start_deferred \(1,\), start_loss \(2,\)"):
        StepSweep([0.0], [0], ([1], [1]), ([0], [0, 0]))
    with pytest.raises(DataError, match=r"same shape: deferred \(1, 2\), loss \(2, 1\)"):
        GridSweep([[1, 2]], [[1.0], [2.0]])
