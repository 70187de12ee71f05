"""Figures of what a setting does: % improvement along the number of hand-off points, or along alpha_1.

Ours are solid with a bar of one standard deviation, the paper's hollow and dashed; a ring marks what validation data
chose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqdefer.paper.records import Row, Study
from seqdefer.paper.render.drawing import (
    IMPROVEMENT,
    INK,
    MARKERS,
    SOFT,
    is_leftmost,
    key,
    legend_below,
    panels,
    shade,
    whole_ticks,
    wrapped,
)
from seqdefer.paper.render.layouts import MULTIPLE, methods_by_block, of_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PAPER_LOOK: Mapping[str, Any] = {
    "markerfacecolor": "white",
    "linestyle": (0, (3, 2)),
    "linewidth": 0.9,
    "markersize": 3.2,
}
RING: Mapping[str, Any] = {"color": INK, "marker": "o", "markerfacecolor": "none", "markersize": 9, "linestyle": "none"}
RULE_LOOK: Mapping[str, Any] = {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1.0}


@dataclass(frozen=True)
class Sweep:
    """A method along a setting: where its rows stand, and how they look."""

    rows: Sequence[Row]
    places: Sequence[float]
    look: Mapping[str, Any]


def draw_hand_offs(study: Study) -> Figure:
    looks = _method_looks(study)
    tasks = [task for task in study.tasks if of_task(study, task)]
    figure, found = panels(tasks, 2.5)
    for task, axes in found.items():
        reach = [row.varied["hand_offs"] for row in of_task(study, task)]
        for rank, (method, look) in enumerate(looks.items()):
            rows = _sorted(study, task, method, "hand_offs")
            aside = 0.008 * (max(reach) - min(reach)) * (rank - len(looks) / 2)  # bars of one |J| beside each other
            _draw_sweep(axes, Sweep(rows, [row.varied["hand_offs"] + aside for row in rows], look))
        axes.set_xlabel("|J|, hand-off points allowed")
        whole_ticks(axes)
    _finish_sweeps(study, figure, found)
    return figure


def draw_alpha(study: Study) -> Figure:
    looks = _method_looks(study)
    tasks = [task for task in study.tasks if of_task(study, task)]
    figure, found = panels(tasks, 2.5)
    for task, axes in found.items():
        scale = LogScale.of([row.varied["times"] for row in of_task(study, task)])
        for method, look in looks.items():
            rows = _sorted(study, task, method, "times")
            for part in (
                [row for row in rows if not row.varied["times"]],
                [row for row in rows if row.varied["times"]],
            ):
                _draw_sweep(axes, Sweep(part, [scale.place(row.varied["times"]) for row in part], look))
        for times in {row.varied["times"] for row in of_task(study, task) if row.is_default}:
            axes.axvline(scale.place(times), **RULE_LOOK)
        axes.set_xticks(*scale.ticks())
        axes.set_xlabel(f"α₁, {MULTIPLE}")
    _finish_sweeps(study, figure, found, key("rule of thumb", **RULE_LOOK))
    return figure


@dataclass(frozen=True)
class LogScale:
    """Decades beside each other; zero, which has no place among them, stands left of them with a tick of its own."""

    low: float  # exponent of the least that is not zero
    high: float
    has_zero: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> LogScale:
        exponents = [math.log10(value) for value in values if value > 0] or [0.0]
        return cls(min(exponents), max(exponents), 0 in values)

    def place(self, value: float) -> float:
        return math.log10(value) if value > 0 else self.low - 0.25 * max(self.high - self.low, 1)

    def ticks(self) -> tuple[list[float], list[str]]:
        whole = range(math.ceil(self.low - 0.01), math.floor(self.high + 0.01) + 1)
        zero = [self.place(0)] if self.has_zero else []
        return zero + list(map(float, whole)), ["0"] * len(zero) + [f"{10.0**exponent:g}" for exponent in whole]


def _method_looks(study: Study) -> dict[str, dict[str, Any]]:
    """By the order in which methods come, the same in every panel."""
    return {
        method: {"color": shade(block, rank), "marker": MARKERS[rank % len(MARKERS)]}
        for block, methods in methods_by_block(study.rows).items()
        for rank, method in enumerate(methods)
    }


def _sorted(study: Study, task: str, method: str, setting: str) -> list[Row]:
    return sorted((row for row in of_task(study, task) if row.method == method), key=lambda row: row.varied[setting])


def _draw_sweep(axes: Axes, sweep: Sweep) -> None:
    pairs = list(zip(sweep.rows, sweep.places, strict=True))
    means, stds = [row.improvement_mean for row in sweep.rows], [row.improvement_std for row in sweep.rows]
    axes.errorbar(sweep.places, means, yerr=stds if any(stds) else None, elinewidth=0.7, **sweep.look)
    papers = [(place, row.paper.improvement) for row, place in pairs if row.paper]
    if papers:
        axes.plot(*zip(*papers, strict=True), **sweep.look, **PAPER_LOOK)
    chosen = [(place, row.improvement_mean) for row, place in pairs if row.is_chosen]
    if chosen:
        axes.plot(*zip(*chosen, strict=True), **RING)


def _finish_sweeps(study: Study, figure: Figure, found: Mapping[str, Axes], *more: Line2D) -> None:
    for axes in found.values():
        axes.axhline(0, color=SOFT, linewidth=0.8, zorder=1)
        if is_leftmost(axes):
            axes.set_ylabel(wrapped(IMPROVEMENT, 14))
    keys = [key(method, **look) for method, look in _method_looks(study).items()]
    if any(row.paper for row in study.rows):
        keys.append(key("paper", marker="o", **PAPER_LOOK))
    if any(row.is_chosen for row in study.rows):
        keys.append(key("chosen by validation data", **RING))
    legend_below(figure, [*keys, *more])
