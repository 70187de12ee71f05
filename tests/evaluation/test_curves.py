"""Curves against slow, obvious versions; the optimum against every decision there is; the interval against a truth."""

from __future__ import annotations

import doctest
import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.budgets.policies import choose_by_cost
from seqdefer.budgets.sweeps import GridSweep, StepSweep, Sweep, switch_sweep
from seqdefer.errors import DataError, OptionError
from seqdefer.evaluation import curves
from seqdefer.evaluation.curves import (
    Curve,
    Ends,
    Floats,
    Integers,
    Run,
    curve_of,
    improvement,
    once_confidence_sweep,
    once_cost_sweep,
    once_sweep,
    optimal_curve,
    optimal_once,
    optimal_whole,
    paired_bootstrap,
    random_curve,
    whole_sweep,
)
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.types import HandOffTable

Points = list[tuple[float, float]]
seeds = st.integers(0, 2**32 - 1)


class Case:
    """A random test set from one seed: few distinct values, so that scores, losses and counts tie often."""

    def __init__(self, seed: int, n: int | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.n = n or int(self.random.integers(1, 9))
        self.length = int(self.random.integers(1, 7))
        self.grid = hand_off_grid(self.length, int(self.random.integers(2, self.length + 2)))
        self.lengths = self.random.integers(1, self.length + 1, self.n)
        kept = np.minimum(np.arange(self.length + 1), self.lengths[:, None])  # a short draft repeats its last column
        loss = np.take_along_axis(self.integers(5, self.n, self.length + 1), kept, 1)
        written = np.maximum(self.lengths[:, None] - kept + self.random.integers(-2, 3, kept.shape), 1)
        deferred = np.where(kept == self.lengths[:, None], 0, written)
        self.table = HandOffTable(torch.tensor(loss), torch.tensor(deferred))
        self.ends = Ends.of(self.table)

    def integers(self, below: int, *shape: int) -> Floats:
        return self.random.integers(0, below, shape).astype(np.float64)

    def sweep(self) -> Sweep:
        """Any of the sweeps that a table allows."""
        once = self.integers(3, self.n, len(self.grid))
        sure = self.integers(3, self.n, self.length)
        choices = [
            once_cost_sweep(self.costs(), self.lengths, self.grid, self.table),
            whole_sweep(self.integers(4, self.n), self.table),
            once_sweep(once, self.grid, self.table),
            once_confidence_sweep(sure, self.lengths, self.grid, self.table),
            self.grid_sweep(),
        ]
        return choices[int(self.random.integers(len(choices)))]

    def costs(self) -> Floats:
        """Minus the estimated losses, in quarters, so that quotients are equal just where they should be; hand-offs
        past the end of a draft are none, and some others neither."""
        scores = -self.integers(9, self.n, len(self.grid)) / 4
        kept = self.grid.numpy()
        none = (kept >= self.lengths[:, None]) | (self.random.random(scores.shape) < 0.15)
        none[:, -1] = False
        return np.where(none, -np.inf, scores)

    def grid_sweep(self) -> GridSweep:
        """Thresholds that take any hand-off per instance, in no order."""
        kept = self.random.integers(0, self.length + 1, (int(self.random.integers(1, 8)), self.n))
        rows = np.arange(self.n)
        return GridSweep(self.table.deferred.numpy()[rows, kept], self.table.loss.numpy()[rows, kept])

    def column(self, kept: int, row: int) -> tuple[float, float]:
        return float(self.table.deferred[row, kept]), float(self.table.loss[row, kept])


def slow_curve(points: Points, ends: Ends) -> Points:
    """The definition: sort by x, then by falling loss; the expert's end takes the place of all that lies beyond it."""
    last = (float(np.mean(ends.expert_deferred)), float(np.mean(ends.expert_loss)))
    inside = sorted((point for point in points if point[0] <= last[0]), key=lambda point: (point[0], -point[1]))
    return [(0.0, float(np.mean(ends.predictor_loss))), *inside, last]


def slow_area(points: Points) -> float:
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points))


def slow_switch(scores: list[float], keep: Points, defer: Points) -> Points:
    """For every threshold, go through the instances one by one."""
    points = []
    for threshold in [math.inf, *sorted(set(scores), reverse=True)]:
        taken = [d if score >= threshold else k for score, k, d in zip(scores, keep, defer, strict=True)]
        points.append((sum(x for x, _ in taken) / len(taken), sum(y for _, y in taken) / len(taken)))
    return points


def assert_same(curve: Curve, points: Points) -> None:
    """Equal areas, and equal points up to repeated ones."""
    got, expected = (np.round(some, 9).tolist() for some in (curve.points, points))
    assert [point for point, _ in itertools.groupby(got)] == [point for point, _ in itertools.groupby(expected)]
    assert curve.area == pytest.approx(slow_area(points))


# Sweeps


@given(seeds)
def test_whole_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    case = Case(seed)
    scores = case.integers(4, case.n)
    keep = [case.column(case.length, row) for row in range(case.n)]
    defer = [case.column(0, row) for row in range(case.n)]
    expected = slow_curve(slow_switch(scores.tolist(), keep, defer), case.ends)
    assert_same(curve_of(whole_sweep(scores, case.table), case.ends), expected)


@given(seeds)
def test_once_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    case = Case(seed)
    pool, grid = case.integers(3, 4, len(case.grid)), case.grid.tolist()
    pool[:, -1] += case.random.random(4)  # instances tie as copies of a row, not as sums that differ in rounding
    scores = pool[case.random.integers(0, 4, case.n)]
    log_softmax = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    keep, defer = [], []
    for row in range(case.n):
        handing = scores[row, :-1].tolist()
        kept = grid[handing.index(max(handing))]  # the first of equals
        keep.append(case.column(case.length, row))
        defer.append(case.column(kept, row))
    expected = slow_curve(slow_switch((-log_softmax[:, -1]).tolist(), keep, defer), case.ends)
    assert_same(curve_of(once_sweep(scores, case.grid, case.table), case.ends), expected)


@given(seeds)
def test_once_confidence_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    case = Case(seed)
    uncertainty = case.integers(3, case.n, case.length)
    for row in range(case.n):
        uncertainty[row, case.lengths[row] :] = 99  # padding may hold anything
    keep, defer, scores = [], [], []
    for row in range(case.n):
        allowed = [kept for kept in case.grid.tolist()[:-1] if kept < case.lengths[row]]
        least_sure = max(allowed, key=lambda kept: (uncertainty[row, kept], -kept))
        scores.append(float(uncertainty[row, least_sure]))
        keep.append(case.column(case.length, row))
        defer.append(case.column(least_sure, row))
    sweep = once_confidence_sweep(uncertainty, case.lengths, case.grid, case.table)
    assert_same(curve_of(sweep, case.ends), slow_curve(slow_switch(scores, keep, defer), case.ends))


@given(seeds)
def test_grid_sweep_equals_a_loop_over_thresholds(seed: int) -> None:
    case = Case(seed)
    sweep = case.grid_sweep()
    points = [
        (sum(deferred) / case.n, sum(loss) / case.n)
        for deferred, loss in zip(sweep.deferred.tolist(), sweep.loss.tolist(), strict=True)
    ]
    assert_same(curve_of(sweep, case.ends), slow_curve(points, case.ends))


def prices_between(scores: Floats, lengths: Floats, grid: list[int]) -> list[float]:
    """A price between each two at which any two hand-offs of an instance are equally dear, and one beyond each end."""
    ties = set()
    for row, length in zip(scores.tolist(), lengths.tolist(), strict=True):
        options = [(max(length - kept, 0), -score) for kept, score in zip(grid, row, strict=True) if score > -math.inf]
        ties |= {(y0 - y1) / (x1 - x0) for x0, y0 in options for x1, y1 in options if x0 < x1}
    inner = [(one + other) / 2 for one, other in itertools.pairwise(sorted(ties))]
    return [math.inf, *reversed(inner), min(ties, default=0) - 1]


def slow_prices(case: Case, scores: Floats) -> Points:
    """For every price, choose for the instances one by one."""
    points = []
    lengths, grid = torch.from_numpy(case.lengths), case.grid
    for price in prices_between(scores, case.lengths, grid.tolist()):
        kept = choose_by_cost(torch.from_numpy(scores), grid, lengths, price).tolist()
        taken = [case.column(one, row) for row, one in enumerate(kept)]
        points.append((sum(x for x, _ in taken) / case.n, sum(y for _, y in taken) / case.n))
    return points


@given(seeds)
def test_once_cost_sweep_equals_a_loop_over_prices(seed: int) -> None:
    case = Case(seed)
    scores = case.costs()
    sweep = once_cost_sweep(scores, case.lengths, case.grid, case.table)
    assert_same(curve_of(sweep, case.ends), slow_curve(slow_prices(case, scores), case.ends))


@given(seeds)
def test_at_the_very_price_where_a_choice_changes_it_has_changed(seed: int) -> None:
    """As `choose_by_cost` has it: among equals the smallest kept. Prices of whole numbers over 4 are exact here."""
    case = Case(seed)
    lengths, scores = np.full(case.n, case.length), np.round(case.costs())
    scores[:, :-1] *= case.length - case.grid.numpy()[:-1]  # then all changes from or to the last are at whole prices
    scores[:, 1:-1] = -np.inf
    sweep = once_cost_sweep(scores, lengths, case.grid, case.table)
    x, y = sweep.curves(np.ones((1, case.n)))
    for column, price in enumerate([math.inf, *np.unique(sweep.scores)[::-1]]):
        kept = choose_by_cost(torch.from_numpy(scores), case.grid, torch.from_numpy(lengths), price).tolist()
        taken = [case.column(one, row) for row, one in enumerate(kept)]
        assert (x[0, column], y[0, column]) == pytest.approx(np.mean(taken, 0))


@given(seeds)
def test_the_ends_of_a_cost_sweep(seed: int) -> None:
    """Nothing is deferred at an infinite price; in the end all that may be, however much it is thought to hurt."""
    case = Case(seed)
    scores = case.costs()
    x, y = once_cost_sweep(scores, case.lengths, case.grid, case.table).curves(np.ones((1, case.n)))
    assert (x[0, 0], y[0, 0]) == pytest.approx((0.0, case.ends.predictor_loss.mean()))
    most = [
        next(kept for kept, score in zip(case.grid.tolist(), row, strict=True) if score > -math.inf) for row in scores
    ]
    assert (x[0, -1], y[0, -1]) == pytest.approx(np.mean([case.column(kept, row) for row, kept in enumerate(most)], 0))


def test_every_point_of_a_cost_sweep_is_a_choice_of_hand_offs() -> None:
    """Estimates on a line: rounding took steps out of their order, to points that no hand-off leads to."""
    random = np.random.default_rng(0)
    n, length = 400, 50
    table = HandOffTable(torch.from_numpy(random.random((n, length + 1))), torch.arange(length, -1, -1).expand(n, -1))
    grid = np.append(np.sort(random.choice(length, 6, replace=False)), length)
    slope, start = random.normal(size=(2, n, 1))
    x, y = once_cost_sweep(slope * grid + 10 * start, [length] * n, grid, table).curves(np.eye(n))  # each alone
    loss = table.loss.numpy()[np.arange(n)[:, None], length - np.round(x).astype(np.int64)]
    assert np.allclose(x, np.round(x), atol=1e-9)
    assert np.isin(length - np.round(x), grid).all()
    assert np.allclose(y, loss, atol=1e-9)


@given(seeds)
def test_true_losses_reach_the_optimum_of_one_time_deferral(seed: int) -> None:
    """Sequences of one length: the sweep is the oracle's curve as long as handing off helps; then it must go on."""
    random = np.random.default_rng(seed)
    n, length = int(random.integers(1, 7)), int(random.integers(1, 7))
    loss = random.integers(0, 9, (n, length + 1)).astype(np.float64)
    deferred = torch.arange(length, -1, -1).expand(n, -1)
    table = HandOffTable(torch.from_numpy(loss), deferred)
    curve = curve_of(once_cost_sweep(-loss, [length] * n, np.arange(length + 1), table), Ends.of(table))
    best = optimal_once(table)
    assert best.at(curve.deferred) == pytest.approx(np.minimum.accumulate(curve.loss))
    falling = best.deferred <= curve.deferred[curve.loss.argmin()]
    assert curve.at(best.deferred[falling]) == pytest.approx(best.loss[falling])
    assert curve.loss[-1] == pytest.approx(loss[:, 0].mean())


def test_steps_are_taken_by_falling_scores_equals_together() -> None:
    sweep = StepSweep([1.0, 3.0, 1.0, 2.0], [1, 0, 2, 0], ([1, 2, 3, 4], [-1, -2, -3, -4]), ([0, 0, 5], [9, 9, 9]))
    x, y = sweep.curves(np.array([[1.0, 1.0, 1.0], [2.0, 0.0, 1.0]]))
    assert x.tolist() == [[5 / 3, 7 / 3, 11 / 3, 5.0], [5 / 3, 3.0, 17 / 3, 20 / 3]]
    assert y.tolist() == [[9.0, 25 / 3, 7.0, 17 / 3], [9.0, 23 / 3, 5.0, 4.0]]


def test_a_sweep_without_a_step_is_its_start() -> None:
    table = HandOffTable(torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]]))
    x, y = once_cost_sweep([[-math.inf, 0.0]], [1], [0, 1], table).curves(np.ones((1, 1)))
    assert (x.tolist(), y.tolist()) == ([[0.0]], [[2.0]])


@pytest.mark.parametrize("by_cost", [False, True])
@given(seed=seeds)
def test_weights_are_repetitions(by_cost: bool, seed: int) -> None:
    """An instance of weight 3 counts as three copies of it."""
    case = Case(seed)
    scores = case.costs() if by_cost else case.integers(4, case.n)
    weights = case.random.integers(0, 4, (3, case.n))
    weights[:, 0] += 1

    def sweep_of(rows: Integers) -> Sweep:
        table = case.table.select(torch.from_numpy(rows))
        if by_cost:
            return once_cost_sweep(scores[rows], case.lengths[rows], case.grid, table)
        return whole_sweep(scores[rows], table)

    x, y = sweep_of(np.arange(case.n)).curves(weights.astype(np.float64))
    for row in range(3):
        copies = np.repeat(np.arange(case.n), weights[row])
        some_x, some_y = sweep_of(copies).curves(np.ones((1, len(copies))))
        points, some = (
            set(zip(*np.round(pair, 9).tolist(), strict=True)) for pair in ((x[row], y[row]), (some_x[0], some_y[0]))
        )
        assert points == some


def test_once_sweep_orders_where_softmax_saturates() -> None:
    """log_softmax of both no-deferral scores is 0 in float64, yet the first is surer to need the expert."""
    table = HandOffTable(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.tensor([[1, 0], [1, 0]]))
    sweep = once_sweep(torch.tensor([[0.0, 800.0], [0.0, 900.0]]), torch.tensor([0, 1]), table)
    assert sweep.curves(np.ones((1, 2)))[1].tolist() == [[1.5, 1.0, 0.0]]


def test_infinite_scores_always_and_never_defer() -> None:
    table = HandOffTable(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.tensor([[1, 0], [1, 0]]))
    x, y = whole_sweep([-math.inf, math.inf], table).curves(np.ones((1, 2)))
    assert (x.tolist(), y.tolist()) == ([[0.0, 0.5, 1.0]], [[1.5, 0.5, 0.0]])


# Curves


@given(seeds)
def test_ends_are_the_predictor_and_the_expert_alone(seed: int) -> None:
    case = Case(seed)
    for curve in (curve_of(case.sweep(), case.ends), random_curve(case.ends)):
        assert curve.points[0] == pytest.approx([0, float(case.table.loss[:, -1].mean())])
        expert = [float(case.table.deferred[:, 0].double().mean()), float(case.table.loss[:, 0].mean())]
        assert curve.points[-1] == pytest.approx(expert)
        assert (np.diff(curve.deferred) >= 0).all()


@given(seeds)
def test_area_does_not_depend_on_the_order_of_instances(seed: int) -> None:
    case = Case(seed)
    scores, order = case.integers(3, case.n, len(case.grid)), case.random.permutation(case.n)
    sweep, grid_sweep = once_sweep(scores, case.grid, case.table), case.grid_sweep()
    table = case.table.select(torch.from_numpy(order))
    moved = once_sweep(scores[order], case.grid, table)
    assert curve_of(moved, Ends.of(table)).area == pytest.approx(curve_of(sweep, case.ends).area)
    thresholds = case.random.permutation(len(grid_sweep.loss))
    moved_grid = GridSweep(grid_sweep.deferred[thresholds][:, order], grid_sweep.loss[thresholds][:, order])
    assert curve_of(moved_grid, Ends.of(table)).area == pytest.approx(curve_of(grid_sweep, case.ends).area)


def test_points_of_one_x_stand_by_falling_loss() -> None:
    ends = Ends([4.0], [0.0], [2])
    for losses in ([3.0, 1.0], [1.0, 3.0]):
        curve = curve_of(GridSweep([[1], [1]], np.array([losses]).T), ends)
        assert curve.points == [[0, 4], [1, 3], [1, 1], [2, 0]]
        assert curve.area == 4.0
        assert curve.at(1.0) == 1


def test_points_beyond_the_expert_are_left_out() -> None:
    """The expert's end stays last, even beside a better point of the same x."""
    curve = curve_of(GridSweep([[3], [2], [1]], [[0.0], [0.5], [2.0]]), Ends([4.0], [1.0], [2]))
    assert curve.points == [[0, 4], [1, 2], [2, 0.5], [2, 1], [2, 1]]


def test_curve_between_and_outside_its_points() -> None:
    curve = Curve(np.array([0.0, 1.0, 1.0, 3.0]), np.array([4.0, 3.0, 2.0, 0.0]))
    assert curve.at([-1, 0, 0.5, 1, 2, 3, 9]).tolist() == [4, 4, 3.5, 2, 1, 0, 0]
    assert float(curve.at(torch.tensor(2.0))) == 1
    assert json.loads(json.dumps(curve.points)) == [[0, 4], [1, 3], [1, 2], [3, 0]]


@given(seeds)
def test_random_improves_by_exactly_nothing(seed: int) -> None:
    line = random_curve(Case(seed).ends)
    assert improvement(line, line) == 0
    assert line.area == pytest.approx(float(line.deferred[-1] * (line.loss[0] + line.loss[-1]) / 2))


def test_improvement_where_there_is_nothing_to_save() -> None:
    flat, bump = Curve(np.array([0.0, 2.0]), np.zeros(2)), Curve(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0]))
    assert improvement(flat, flat) == improvement(bump, flat) == 0
    assert improvement(flat, bump) == 100


def test_tensors_are_welcome() -> None:
    scores = torch.tensor([0.5, 0.25], requires_grad=True)
    column = torch.tensor([1, 1])
    sweep = switch_sweep(scores, keep=(column * 0, column), defer=(column, column * 0))
    assert curve_of(sweep, Ends(column, column * 0, column)).area == 0.5


# The optimum


def brute_force(loss: Floats, deferred: Floats) -> Points:
    """Mean deferred and mean loss of every choice of one decision per instance: D^n of them."""
    n, n_decisions = loss.shape
    rows = np.arange(n)
    choices = [list(choice) for choice in itertools.product(range(n_decisions), repeat=n)]
    return [(float(deferred[rows, c].mean()), float(loss[rows, c].mean())) for c in choices]


@given(seeds, st.booleans())
def test_optimum_against_every_decision(seed: int, whole_numbers: bool) -> None:
    """The relaxation lies below every choice, and each of its vertices is one of the choices."""
    random = np.random.default_rng(seed)
    shape = (int(random.integers(1, 5)), int(random.integers(1, 5)))
    loss = random.integers(0, 6, shape).astype(np.float64) if whole_numbers else random.random(shape)
    loss[:, 1:][random.random(loss[:, 1:].shape) < 0.2] = math.inf  # padding
    deferred = random.integers(0, 5, shape).astype(np.float64)
    curve = optimal_curve(loss, deferred)
    choices = [(x, y) for x, y in brute_force(loss, deferred) if math.isfinite(y)]
    assert all(y >= float(curve.at(x)) - 1e-9 for x, y in choices)
    for x, y in curve.points[:-1]:
        assert min(abs(x - some_x) + abs(y - some_y) for some_x, some_y in choices) < 1e-9
    assert curve.points[-1] == pytest.approx([max(x for x, _ in choices), min(y for _, y in choices)])


@given(seeds)
def test_optimum_never_rises_and_is_convex(seed: int) -> None:
    random = np.random.default_rng(seed)
    curve = optimal_curve(random.random((20, 6)), random.integers(0, 9, (20, 6)))
    assert (np.diff(curve.loss) <= 0).all()
    runs = np.diff(curve.deferred)
    assert (np.diff((np.diff(curve.loss) / runs)[runs > 0]) >= -1e-9).all()


@given(seeds)
def test_nothing_beats_the_optimum(seed: int) -> None:
    case = Case(seed)
    scores, all_kept = case.integers(3, case.n, len(case.grid)), optimal_once(case.table)
    on_grid, whole = optimal_once(case.table, case.grid), optimal_whole(case.table)
    assert all_kept.area <= on_grid.area + 1e-9
    assert on_grid.area <= whole.area + 1e-9
    assert whole.area <= random_curve(case.ends).area + 1e-9
    assert whole.area <= curve_of(whole_sweep(scores[:, 0], case.table), case.ends).area + 1e-9
    assert on_grid.area <= curve_of(once_sweep(scores, case.grid, case.table), case.ends).area + 1e-9
    by_cost = once_cost_sweep(case.costs(), case.lengths, case.grid, case.table)
    assert on_grid.area <= curve_of(by_cost, case.ends).area + 1e-9
    assert all_kept.area <= curve_of(case.sweep(), case.ends).area + 1e-9
    assert all_kept.deferred[-1] == pytest.approx(case.ends.expert_deferred.mean())


@given(seeds)
def test_perfect_scores_reach_the_optimum_of_whole_deferral(seed: int) -> None:
    """Same count of tokens everywhere: deferring by the true gain is optimal until deferring starts to hurt."""
    random = np.random.default_rng(seed)
    loss = random.integers(0, 9, (6, 2)).astype(np.float64)
    table = HandOffTable(torch.from_numpy(loss), torch.tensor([[5, 0]] * 6))
    curve = curve_of(whole_sweep(loss[:, 1] - loss[:, 0], table), Ends.of(table))
    best = optimal_whole(table)
    assert best.at(curve.deferred) == pytest.approx(np.minimum.accumulate(curve.loss))


def test_optimum_is_cut_at_the_expert() -> None:
    loss, deferred = [[4.0, 0.0]], [[0, 4]]
    assert optimal_curve(loss, deferred, until=1).points == [[0, 4], [1, 3]]
    assert optimal_curve(loss, deferred, until=6).points == [[0, 4], [4, 0], [6, 0]]
    assert optimal_curve([[4.0, 9.0]], deferred).points == [[0, 4], [4, 4]]


# The interval


def simulated_run(random: np.random.Generator, n: int) -> Run:
    """Losses uniform on (0, 1), one token, a perfect expert: oracle saves a third of Random's area, coin nothing."""
    loss = random.random(n)
    keep, defer = (np.zeros(n), loss), (np.ones(n), np.zeros(n))
    sweeps = {"oracle": switch_sweep(loss, keep, defer), "coin": switch_sweep(random.random(n), keep, defer)}
    return Run(Ends(loss, np.zeros(n), np.ones(n)), sweeps)


@given(seeds)
def test_unit_weights_give_the_plain_curve(seed: int) -> None:
    case = Case(seed)
    sweep = case.sweep()
    run = Run(case.ends, {"method": sweep})
    plain = improvement(curve_of(sweep, case.ends), random_curve(case.ends))
    assert run.improvements("method", np.ones((2, case.n))) == pytest.approx([plain, plain])


@given(seeds)
def test_weighted_improvement_is_that_of_the_resampled_instances(seed: int) -> None:
    case = Case(seed)
    scores, rows = case.integers(4, case.n), case.random.integers(0, case.n, case.n)
    table = case.table.select(torch.from_numpy(rows))
    resampled = curve_of(whole_sweep(scores[rows], table), Ends.of(table))
    expected = improvement(resampled, random_curve(Ends.of(table)))
    weights = np.bincount(rows, minlength=case.n).astype(np.float64)
    run = Run(case.ends, {"method": whole_sweep(scores, case.table)})
    assert run.improvements("method", weights[None]) == pytest.approx(expected, abs=1e-9)


def test_interval_equals_a_loop_over_resamples() -> None:
    """The same draws, one by one, each on copied instances."""
    random = np.random.default_rng(0)
    runs = [simulated_run(random, n) for n in (7, 9)]
    interval = paired_bootstrap(runs, "oracle", "coin", n_resamples=300, seed=3)
    generator, differences = np.random.default_rng(3), np.zeros((2, 300))
    for row, run in enumerate(runs):
        n = len(run.ends)
        for column, counts in enumerate(generator.multinomial(n, np.full(n, 1 / n), size=300)):
            copies = np.repeat(np.arange(n), counts)
            ends = Ends(run.ends.predictor_loss[copies], run.ends.expert_loss[copies], run.ends.expert_deferred[copies])
            for sign, name in ((1, "oracle"), (-1, "coin")):
                sweep = run.sweeps[name]
                assert isinstance(sweep, StepSweep)
                keep, change = ((x[copies], y[copies]) for x, y in (sweep.start, sweep.change))
                copied = StepSweep(sweep.scores[copies], np.arange(n), change, keep)
                differences[row, column] += sign * improvement(curve_of(copied, ends), random_curve(ends))
    assert [interval.low, interval.high] == pytest.approx(np.percentile(differences.mean(0), [2.5, 97.5]))
    plain = [improvement(curve_of(run.sweeps["oracle"], run.ends), random_curve(run.ends)) for run in runs]
    coin = [improvement(curve_of(run.sweeps["coin"], run.ends), random_curve(run.ends)) for run in runs]
    assert interval.difference == pytest.approx(np.mean(plain) - np.mean(coin))


def test_interval_covers_a_known_difference() -> None:
    """Curve of the oracle: (1 - x)^2 / 2, area 1/6; Random: 1/4. The difference is 100 / 3, on average over samples."""
    random = np.random.default_rng(1)
    intervals = [
        paired_bootstrap([simulated_run(random, 80) for _ in range(2)], "oracle", "coin", n_resamples=200, seed=seed)
        for seed in range(100)
    ]
    covered = [interval.low <= 100 / 3 <= interval.high for interval in intervals]
    assert 0.88 <= np.mean(covered) <= 1
    assert np.mean([interval.difference for interval in intervals]) == pytest.approx(100 / 3, abs=1.5)
    assert all(interval.low < interval.difference < interval.high for interval in intervals)


def test_interval_of_a_method_against_itself_is_nothing() -> None:
    """Only paired resamples can give this: the same instances for both methods."""
    interval = paired_bootstrap([simulated_run(np.random.default_rng(0), 30)], "coin", "coin", n_resamples=50)
    assert (interval.difference, interval.low, interval.high) == (0, 0, 0)


def test_interval_is_the_same_for_the_same_seed() -> None:
    runs = [simulated_run(np.random.default_rng(0), 30)]
    first, second, other = (paired_bootstrap(runs, "oracle", "coin", n_resamples=50, seed=s) for s in (1, 1, 2))
    assert first == second != other


# Errors


def test_errors_say_what_to_do() -> None:
    table = HandOffTable(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(DataError, match="1 scores are NaN"):
        whole_sweep([0.0, math.nan], table)
    with pytest.raises(DataError, match="2 scores are NaN and have no place in the order"):
        once_cost_sweep([[0.0, math.nan], [math.nan, 0.0]], [3, 3], [0, 3], table)
    with pytest.raises(DataError, match=r"same shape: scores \(2,\), deferred \(1,\)"):
        StepSweep([0.0, 1.0], [0, 0], ([1], [1]), ([0], [0]))
    with pytest.raises(DataError, match=r"same shape: start_deferred \(1,\), start_loss \(2,\)"):
        StepSweep([0.0], [0], ([1], [1]), ([0], [0, 0]))
    with pytest.raises(DataError, match=r"same shape: scores \(3,\)"):
        whole_sweep([0.0, 1.0, 2.0], table)
    with pytest.raises(DataError, match=r"same shape: deferred \(1, 2\), loss \(2, 1\)"):
        GridSweep([[1, 2]], [[1.0], [2.0]])
    for grid in ([0, 2], [0, 2, 2, 3], [3], [-1, 3]):
        with pytest.raises(OptionError, match="must rise from 0 or more to 3"):
            once_sweep(np.zeros((2, len(grid))), grid, table)
        with pytest.raises(OptionError, match="must rise from 0 or more to 3"):
            once_cost_sweep(np.zeros((2, len(grid))), [3, 3], grid, table)
    with pytest.raises(DataError, match="no decision of finite loss"):
        optimal_curve([[1.0], [math.inf]], [[0], [0]])
    with pytest.raises(OptionError, match="unknown method 'oracel'; available: coin, oracle"):
        paired_bootstrap([simulated_run(np.random.default_rng(0), 3)], "oracel", "coin")


def test_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(curves).failed == 0


def test_intervals_over_runs_are_those_of_drawing_runs_and_instances() -> None:
    """The slow way: every resample picks runs with their own draws. Runs that agree give the plain interval back."""
    rng = np.random.default_rng(3)
    n, n_resamples = 12, 200

    def run(shift: float) -> Run:
        ends = Ends(rng.uniform(2, 3, n), rng.uniform(0, 1, n), np.full(n, 4.0))
        grid = np.linspace(0, 4, 5)[:, None] * np.ones(n)
        better = (ends.predictor_loss - shift) * (1 - grid / 4) + ends.expert_loss * grid / 4
        worse = ends.predictor_loss * (1 - grid / 4) + ends.expert_loss * grid / 4
        return Run(ends, {"a": GridSweep(grid, better), "b": GridSweep(grid, worse)})

    runs = [run(0.1), run(0.5), run(0.9)]
    found = paired_bootstrap(runs, "a", "b", n_resamples=n_resamples, seed=5, over_runs=True)
    generator, rows = np.random.default_rng(5), []
    for one in runs:
        draws = generator.multinomial(n, np.full(n, 1 / n), size=n_resamples).astype(float)
        rows.append(one.improvements("a", draws) - one.improvements("b", draws))
    picks = generator.integers(3, size=(3, n_resamples))
    means = [np.mean([rows[picks[k, r]][r] for k in range(3)]) for r in range(n_resamples)]
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    plain = paired_bootstrap(runs, "a", "b", n_resamples=n_resamples, seed=5)
    assert found.difference == plain.difference
    assert found.high - found.low > plain.high - plain.low
    same = [runs[0]] * 3
    alike = paired_bootstrap(same, "a", "b", n_resamples=n_resamples, over_runs=True)
    assert alike.low <= alike.difference <= alike.high
