"""Curves against slow versions; the optimum against every decision there is; the interval against a known truth."""

from __future__ import annotations

import doctest
import itertools
import json
import math

import numpy as np
import pytest
import torch
from hand_off_cases import HandOffCase, Points, whole_sweep
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.sweeps import GridSweep, StepSweep, hand_off_sweep, switch_sweep
from seqdefer.errors import DataError, OptionError
from seqdefer.evaluation import curves
from seqdefer.evaluation.curves import (
    Curve,
    Ends,
    Run,
    curve_of,
    free_curve,
    improvement,
    optimal_curve,
    optimal_once,
    optimal_whole,
    paired_bootstrap,
    random_curve,
)
from seqdefer.types import HandOffTable

seeds = st.integers(0, 2**32 - 1)


# -- curves ------------------------------------------------------------------------------------------------------


@given(seeds)
def test_ends_are_the_predictor_and_the_expert_alone(seed: int) -> None:
    case = HandOffCase(seed)
    for curve in (curve_of(case.sweep(), case.ends), random_curve(case.ends)):
        assert curve.points[0] == pytest.approx([0, float(case.table.loss[:, -1].mean())])
        expert = [float(case.table.deferred[:, 0].double().mean()), float(case.table.loss[:, 0].mean())]
        assert curve.points[-1] == pytest.approx(expert)
        assert (np.diff(curve.deferred) >= 0).all()


@given(seeds)
def test_area_does_not_depend_on_the_order_of_instances(seed: int) -> None:
    case = HandOffCase(seed)
    scores, order = case.integers(3, case.n, len(case.grid)), case.random.permutation(case.n)
    scored, grid_sweep = case.scored(scores, "odds"), case.grid_sweep()
    table = case.table.select(torch.from_numpy(order))
    sweep, moved = hand_off_sweep(scored, case.table), hand_off_sweep(case.scored(scores[order], "odds"), table)
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
    line = random_curve(HandOffCase(seed).ends)
    assert improvement(line, line) == 0
    assert line.area == pytest.approx(float(line.deferred[-1] * (line.loss[0] + line.loss[-1]) / 2))


@pytest.mark.parametrize("seed", range(5))
def test_a_free_expert_has_its_loss_at_every_budget(seed: int) -> None:
    ends = HandOffCase(seed).ends
    free, p, e = free_curve(ends), ends.predictor_loss.mean(), ends.expert_loss.mean()
    assert free.at([0.0, 0.3, float(free.deferred[-1])]).tolist() == [pytest.approx(e)] * 3
    assert improvement(free, random_curve(ends)) == pytest.approx(100 * (p - e) / (p + e))


def test_improvement_where_there_is_nothing_to_save() -> None:
    flat, bump = Curve(np.array([0.0, 2.0]), np.zeros(2)), Curve(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0]))
    assert improvement(flat, flat) == improvement(bump, flat) == 0
    assert improvement(flat, bump) == 100


# -- the optimum --------------------------------------------------------------------------------------------------


def brute_force(loss: Floats, deferred: Floats) -> Points:
    """Return mean deferred and mean loss of every choice of one decision per instance: D^n of them."""
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
    case = HandOffCase(seed)
    scores, all_kept = case.integers(3, case.n, len(case.grid)), optimal_once(case.table)
    on_grid, whole = optimal_once(case.table, case.grid), optimal_whole(case.table)
    assert all_kept.area <= on_grid.area + 1e-9
    assert on_grid.area <= whole.area + 1e-9
    assert whole.area <= random_curve(case.ends).area + 1e-9
    assert whole.area <= curve_of(whole_sweep(scores[:, 0], case.table), case.ends).area + 1e-9
    assert on_grid.area <= curve_of(case.once_sweep(scores, "odds"), case.ends).area + 1e-9
    assert on_grid.area <= curve_of(case.once_sweep(case.costs(), "cost"), case.ends).area + 1e-9
    assert all_kept.area <= curve_of(case.sweep(), case.ends).area + 1e-9
    assert all_kept.deferred[-1] == pytest.approx(case.ends.expert_deferred.mean())


@given(seeds)
def test_perfect_scores_reach_the_optimum_of_whole_deferral(seed: int) -> None:
    """With one count of tokens, deferring by the true gain is optimal until deferring starts to hurt."""
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


# -- the interval -------------------------------------------------------------------------------------------------


def simulated_run(random: np.random.Generator, n: int) -> Run:
    """Losses uniform on (0, 1), one token, a perfect expert: oracle saves a third of Random's area, coin nothing."""
    loss = random.random(n)
    keep, defer = (np.zeros(n), loss), (np.ones(n), np.zeros(n))
    sweeps = {"oracle": switch_sweep(loss, keep, defer), "coin": switch_sweep(random.random(n), keep, defer)}
    return Run(Ends(loss, np.zeros(n), np.ones(n)), sweeps)


@given(seeds)
def test_unit_weights_give_the_plain_curve(seed: int) -> None:
    case = HandOffCase(seed)
    sweep = case.sweep()
    run = Run(case.ends, {"method": sweep})
    plain = improvement(curve_of(sweep, case.ends), random_curve(case.ends))
    assert run.improvements("method", np.ones((2, case.n))) == pytest.approx([plain, plain])


@given(seeds)
def test_weighted_improvement_is_that_of_the_resampled_instances(seed: int) -> None:
    case = HandOffCase(seed)
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


def test_intervals_over_runs_are_those_of_drawing_runs_and_instances() -> None:
    """Each resample picks runs with their own draws. Runs that agree give the plain interval back."""
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


def test_bad_input_is_named() -> None:
    with pytest.raises(DataError, match=r"no decision of finite loss; return finite numbers .*check_task"):
        optimal_curve([[1.0], [math.inf]], [[0], [0]])
    with pytest.raises(OptionError, match="unknown method 'oracel'; available: coin, oracle"):
        paired_bootstrap([simulated_run(np.random.default_rng(0), 3)], "oracel", "coin")


def test_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(curves).failed == 0


def test_a_run_in_passes_has_the_same_ends_and_what_was_counted() -> None:
    ends = Ends([4.0, 0.0], [0.0, 0.0], [3, 3])
    whole = switch_sweep([0.9, 0.1], keep=([0, 0], [4.0, 0.0]), defer=([3, 3], [0.0, 0.0]))
    token = GridSweep([[0, 0], [2, 2], [3, 3]], [[4.0, 0.0], [1.0, 0.0], [0.0, 0.0]], [[0, 0], [1, 1], [2, 1]])
    run = Run(ends, {"whole": whole, "token": token, "uncounted": GridSweep(token.deferred, token.loss)})
    by_pass = run.in_passes()
    assert set(by_pass.sweeps) == {"whole", "token"}
    assert by_pass.sweeps["whole"] is whole  # a pass for each token that the expert writes
    assert curve_of(by_pass.sweeps["token"], ends).points == [
        [0.0, 2.0], [0.0, 2.0], [1.0, 0.5], [1.5, 0.0], [3.0, 0.0],
    ]  # fmt: skip
    better = paired_bootstrap([by_pass], "token", "whole", n_resamples=20).difference
    assert better > paired_bootstrap([run], "token", "whole", n_resamples=20).difference
