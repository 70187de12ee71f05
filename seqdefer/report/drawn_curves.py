"""The curves that figures draw: the mean over the seeds, and which of them to show first.

The seeds of a method do not share their x values, so curves are sampled on a common grid of budgets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seqdefer.errors import InputError, require_known
from seqdefer.evaluation.results import FREE, Block, Point, Results, mean_and_std
from seqdefer.report.style import DASHES, LIGHT, REFERENCE_DASHES, group_by_block

STEPS = 100  # the grid of budgets: one step is one percent


@dataclass(frozen=True)
class DrawnCurve:
    """The curve of a method on the common grid: STEPS + 1 budgets from none to all of the tokens."""

    name: str
    block: Block
    rank: int  # 0 is the best of its block
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shade(self) -> int:
        return self.rank % len(LIGHT[self.block])

    @property
    def dash(self) -> str:
        if self.block == "reference":
            return REFERENCE_DASHES[self.rank % len(REFERENCE_DASHES)]
        return DASHES[self.rank // len(LIGHT[self.block]) % len(DASHES)]


def names_by_block(results: Results) -> dict[Block, list[str]]:
    return group_by_block((name, row.granularity) for name, row in results.summary.items())


def mean_curves(results: Results) -> dict[str, DrawnCurve]:
    """Return the curve of every method that has one, averaged over the seeds."""
    begin, end = beginning(results), extent(results)
    curves = {}
    for block, names in names_by_block(results).items():
        drawn = [name for name in names if _points(results, name)]
        for rank, name in enumerate(_ranked(results, block, drawn)):
            sampled = [sample(points, end, begin) for points in _points(results, name)]
            mean, std = zip(*(mean_and_std(column) for column in zip(*sampled, strict=True)), strict=True)
            curves[name] = DrawnCurve(name, block, rank, mean, std)
    if not curves:
        raise InputError(f"the results of task {results.task!r} hold no curve to draw")
    return {name: curves[name] for names in names_by_block(results).values() for name in names if name in curves}


def _points(results: Results, name: str) -> list[tuple[Point, ...]]:
    rows = [seed.methods[name] for seed in results.seeds if name in seed.methods]
    return [row.curve for row in rows if row.curve]


def _ranked(results: Results, block: Block, names: Sequence[str]) -> list[str]:
    """Sort the best first. References keep their order, so that their dashes mean the same in every report."""
    return list(names) if block == "reference" else sorted(names, key=lambda name: results.summary[name].audc_mean)


def beginning(results: Results) -> float:
    """Return the start of the x axis: the predictor alone defers nothing, but it takes seconds."""
    return results.timing.predictor if results.cost == "seconds" and results.timing else 0.0


def extent(results: Results) -> float:
    """Return the end of the x axis: L, or the mean length of the expert's sequences where they end before L; the
    seconds of the expert alone."""
    longest = max((x for seed in results.seeds for row in seed.methods.values() for x, _ in row.curve), default=0.0)
    if results.cost == "seconds":
        return longest if longest > beginning(results) else beginning(results) + 1.0
    is_drawn = longest > 1e-6 * results.length  # otherwise nothing was deferred
    return longest if is_drawn and abs(longest - results.length) > 0.01 * results.length else float(results.length)


def sample(points: Sequence[Point], end: float, begin: float = 0.0) -> list[float]:
    """Return the loss at each step of the grid. Past its last point a curve is level: a budget need not be spent."""
    ordered = sorted(points, key=lambda point: point[0])
    xs = [x for x, _ in ordered]
    return [_interpolate(ordered, xs, begin + (end - begin) * step / STEPS) for step in range(STEPS + 1)]


def _interpolate(points: Sequence[Point], xs: Sequence[float], x: float) -> float:
    after = bisect_right(xs, x)
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def default_names(results: Results, curves: Mapping[str, DrawnCurve]) -> list[str]:
    """Return the curves to show first: the best of each granularity, Random, and the strongest oracle."""
    best = [curve.name for curve in curves.values() if curve.block != "reference" and curve.rank == 0]
    oracles = [name for name in curves if name.startswith("Optimal") and name != FREE]
    strongest = sorted(oracles, key=lambda name: results.summary[name].audc_mean)[:1]
    return best + [name for name in ("Random", *strongest) if name in curves]


def shown_curves(results: Results, methods: Sequence[str] | None) -> list[DrawnCurve]:
    """Return the curves of these methods; by default those of `default_names`."""
    curves = mean_curves(results)
    for name in methods or ():
        require_known("method", name, curves)
    shown = set(default_names(results, curves) if methods is None else methods)
    return [curve for curve in curves.values() if curve.name in shown]


def loss_title(results: Results) -> str:
    return f"Loss: {results.units.loss}"


def deferred_title(results: Results) -> str:
    unit = results.units.deferred
    return f"Deferred {unit}" if results.cost is None else f"{unit[:1].upper()}{unit[1:]}"
