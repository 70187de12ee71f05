"""Deferral curves: loss against deferred tokens as a setting moves, the area (AUDC), Random, Optimal, intervals.

numpy in float64 throughout; tensors are accepted. n test instances, T thresholds, R weightings of the
instances (a bootstrap resample is a weighting). x is the mean number of deferred tokens per sequence, y the mean loss.
Every curve of a test set runs from x = 0, the predictor alone, to the x of the expert alone, so that areas compare.

>>> from seqdefer.budgets.sweeps import switch_sweep
>>> ends = Ends(predictor_loss=[4.0, 0.0], expert_loss=[0.0, 0.0], expert_deferred=[3, 3])
>>> sweep = switch_sweep([0.9, 0.1], keep=([0, 0], [4.0, 0.0]), defer=([3, 3], [0.0, 0.0]))
>>> curve, random = curve_of(sweep, ends), random_curve(ends)
>>> curve.area, random.area, improvement(curve, random)
(1.5, 3.0, 50.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seqdefer.budgets.convex_hull import Floats, first_vertices, hull_edges
from seqdefer.budgets.hand_off_rules import Values, to_floats
from seqdefer.budgets.sweeps import Sweep, require_same_shape
from seqdefer.errors import DataError, require_known
from seqdefer.types import HandOffTable

RESAMPLES_AT_ONCE = 128  # weighed together: enough to vectorise, small enough for thousands of instances


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean loss against mean deferred tokens, from the predictor alone to the expert alone, sorted by deferred."""

    deferred: Floats  # (P,)
    loss: Floats  # (P,)

    @property
    def area(self) -> float:
        """AUDC: the area under the straight lines between the points; lower is better."""
        return float(_areas(self.deferred, self.loss))

    def at(self, deferred: Values) -> Floats:
        """Return the loss at a mean number of deferred tokens; between two points they are mixed. Any shape.

        Where points share an x: the last of them, in the order of `curve_of`. Outside the ends: the nearer end.
        """
        return np.asarray(np.interp(to_floats(deferred), self.deferred, self.loss))

    @property
    def points(self) -> list[list[float]]:
        """[[x, y], ...] for JSON."""
        points: list[list[float]] = np.stack([self.deferred, self.loss], 1).tolist()
        return points


def _areas(x: Floats, y: Floats) -> Floats:
    """Trapezoids along the last dimension. (..., P) -> (...)"""
    return np.asarray(((y[..., 1:] + y[..., :-1]) / 2 * np.diff(x)).sum(-1))


@dataclass(frozen=True, eq=False, init=False)
class Ends:
    """The two exact ends of every curve: the predictor alone (which defers nothing) and the expert alone."""

    predictor_loss: Floats  # (n,)
    expert_loss: Floats  # (n,)
    expert_deferred: Floats  # (n,) tokens the expert writes on its own

    def __init__(self, predictor_loss: Values, expert_loss: Values, expert_deferred: Values) -> None:
        object.__setattr__(self, "predictor_loss", to_floats(predictor_loss))
        object.__setattr__(self, "expert_loss", to_floats(expert_loss))
        object.__setattr__(self, "expert_deferred", to_floats(expert_deferred))
        require_same_shape(**vars(self))

    def __len__(self) -> int:
        return len(self.predictor_loss)

    @classmethod
    def of(cls, table: HandOffTable) -> Ends:
        return cls(table.loss[:, -1], table.loss[:, 0], table.deferred[:, 0])

    def means(self, weights: Floats) -> tuple[Floats, Floats, Floats]:
        """Return weighted means of the three, each (R, 1). weights: (R, n)"""
        columns = np.stack([self.predictor_loss, self.expert_loss, self.expert_deferred], 1)
        means = weights @ columns / weights.sum(1, keepdims=True)  # (R, 3)
        return means[:, 0:1], means[:, 1:2], means[:, 2:3]


def curve_of(sweep: Sweep, ends: Ends) -> Curve:
    """Return the curve of a method: the sweep's points sorted by x, between the two exact ends.

    Points that share an x stand in the order of falling loss, so the curve does not depend on the order of thresholds
    or instances; the exact ends stay outermost. A point that defers more than the expert alone (its tokens make the
    predictor ramble on) is left out: the expert alone is the better choice there, and areas need one common range.
    """
    x, y = _full_curves(sweep, ends, np.ones((1, len(ends))))
    return Curve(x[0], y[0])


def _full_curves(sweep: Sweep, ends: Ends, weights: Floats) -> tuple[Floats, Floats]:
    """Return `curve_of` for R weightings at once. Each (R, T + 2)"""
    x, y = sweep.curves(weights)
    first_y, last_y, last_x = ends.means(weights)
    beyond = x > last_x  # moved onto the expert's end, behind all others there: as good as left out
    x, y = np.where(beyond, last_x, x), np.where(beyond, last_y, y)
    order = np.lexsort((-y, beyond, x), axis=-1)
    x, y = np.take_along_axis(x, order, -1), np.take_along_axis(y, order, -1)
    return np.hstack([np.zeros_like(last_x), x, last_x]), np.hstack([first_y, y, last_y])


def random_curve(ends: Ends) -> Curve:
    """Return Random, which defers whole sequences by a biased coin: the straight line between the ends."""
    first_y, last_y, last_x = ends.means(np.ones((1, len(ends))))
    return Curve(np.append(0.0, last_x), np.append(first_y, last_y))


def free_curve(ends: Ends) -> Curve:
    """Return what an expert that costs nothing would give: its loss at every budget. Its improvement over Random is
    100 (p - e) / (p + e), with p and e the losses of both models alone: the headroom of a pair."""
    _, last_y, last_x = ends.means(np.ones((1, len(ends))))
    return Curve(np.append(0.0, last_x), np.append(last_y, last_y))


def improvement(curve: Curve, random: Curve) -> float:
    """Return the per cent of Random's area that a curve saves: 100 (1 - AUDC / AUDC of Random).

    0 where Random's area is 0: neither model ever errs, or the expert writes nothing, and there is nothing to save.
    """
    return float(_improvements(np.asarray(curve.area), np.asarray(random.area)))


def _improvements(areas: Floats, random: Floats) -> Floats:
    shares = np.divide(areas, random, out=np.ones_like(areas), where=random != 0)
    return np.asarray(100 * (1 - shares))


def optimal_curve(loss: Values, deferred: Values, until: float | None = None) -> Curve:
    """Return the least mean loss at every budget, over all decisions of each instance: loss, deferred (n, D).

    An infinite loss marks padding. Choosing one decision per instance under a budget of tokens is a multiple-choice
    knapsack; its linear relaxation takes the edges of all the instances' lower convex hulls, steepest first. The
    relaxation is exact at its vertices, and between them it mixes two policies, as every curve here does.

    A budget need not be spent: the curve never rises, and runs flat to `until`, the x of the expert alone (the mean
    of the most each instance can defer, unless given; a curve that reaches further is cut there).
    """
    loss, deferred = to_floats(loss), to_floats(deferred)
    require_same_shape(loss=loss, deferred=deferred)
    usable = np.isfinite(loss)
    if not usable.any(1).all():
        raise DataError(
            "an instance has no decision of finite loss; return finite numbers from sequence_loss "
            "(seqdefer.testing.check_task finds what is wrong)"
        )
    start, edges = _falling_hulls(loss, deferred)
    edges = edges[np.argsort(edges[:, 1] / edges[:, 0], kind="stable")]
    path = np.cumsum(np.vstack([start, edges]), 0) / len(loss)  # (P, 2)
    if until is None:
        until = float(np.where(usable, deferred, -np.inf).max(1).mean())
    inside = np.append(True, path[1:, 0] < until)
    last = np.interp(until, path[:, 0], path[:, 1])
    return Curve(np.append(path[inside, 0], until), np.append(path[inside, 1], last))


def _falling_hulls(loss: Floats, deferred: Floats) -> tuple[Floats, Floats]:
    """Return the falling part of each row's lower convex hull.

    Returns the sum of the rows' leftmost points (2,), and all rows' edges (E, 2), each as (more deferred, loss change).
    """
    rows, first, edges = np.arange(len(loss)), first_vertices(deferred, loss), [np.empty((0, 2))]
    for row, here, there in hull_edges(deferred, loss):
        edge = np.stack([deferred[row, there] - deferred[row, here], loss[row, there] - loss[row, here]], 1)
        edges.append(edge[edge[:, 1] < 0])
    return np.array([deferred[rows, first].sum(), loss[rows, first].sum()]), np.vstack(edges)


def optimal_whole(table: HandOffTable) -> Curve:
    """Return the best that whole deferral can do."""
    return optimal_once(table, [0, table.loss.shape[1] - 1])


def optimal_once(table: HandOffTable, grid: Sequence[int] | None = None) -> Curve:
    """Return the best that one-time deferral can do, with all hand-offs or those of a grid."""
    deferred, loss = to_floats(table.deferred), to_floats(table.loss)
    columns = slice(None) if grid is None else list(grid)
    return optimal_curve(loss[:, columns], deferred[:, columns], until=float(deferred[:, 0].mean()))


@dataclass(frozen=True)
class Run:
    """One seed: its test instances' ends, and the sweep of each method over the same instances in the same order."""

    ends: Ends
    sweeps: Mapping[str, Sweep]

    def in_passes(self) -> Run:
        """Return the same run with the expert's passes in the place of deferred tokens, for methods where they were
        counted. Both ends stay: on its own the expert takes a pass for each token."""
        counted = {name: sweep.in_passes() for name, sweep in self.sweeps.items()}
        return Run(self.ends, {name: sweep for name, sweep in counted.items() if sweep is not None})

    def improvements(self, method: str, weights: Floats) -> Floats:
        """Return % improvement over Random under R weightings of the instances. weights (R, n) -> (R,)"""
        require_known("method", method, self.sweeps)
        first_y, last_y, last_x = self.ends.means(weights)
        random = _areas(np.hstack([np.zeros_like(last_x), last_x]), np.hstack([first_y, last_y]))
        return _improvements(_areas(*_full_curves(self.sweeps[method], self.ends, weights)), random)


@dataclass(frozen=True)
class Interval:
    """A difference in % improvement, and the interval that holds 95 % of its resamples."""

    difference: float
    low: float
    high: float


def paired_bootstrap(
    runs: Sequence[Run],
    method_a: str,
    method_b: str,
    *,
    n_resamples: int = 1000,
    seed: int = 0,
    over_runs: bool = False,
) -> Interval:
    """Return how much better a is than b, in points of % improvement averaged over the runs, with an interval.

    Each resample draws the instances of every run anew, the same ones for both methods and for Random: that is
    the uncertainty about these very rejectors. `over_runs` draws the runs anew as well: the uncertainty about the way
    they are trained, which another seed may turn out better or worse.
    """
    generator = np.random.default_rng(seed)
    plain, resampled = [], []
    for run in runs:
        n = len(run.ends)
        draws = generator.multinomial(n, np.full(n, 1 / n), size=n_resamples).astype(np.float64)
        blocks = [
            np.ones((1, n)),
            *(draws[i : i + RESAMPLES_AT_ONCE] for i in range(0, n_resamples, RESAMPLES_AT_ONCE)),
        ]
        differences = [run.improvements(method_a, block) - run.improvements(method_b, block) for block in blocks]
        plain.append(differences[0][0])
        resampled.append(np.concatenate(differences[1:]))
    table = np.array(resampled)  # (runs, resamples)
    if over_runs:
        table = np.take_along_axis(table, generator.integers(len(runs), size=table.shape), 0)
    low, high = np.percentile(table.mean(0), [2.5, 97.5])
    return Interval(float(np.mean(plain)), float(low), float(high))
