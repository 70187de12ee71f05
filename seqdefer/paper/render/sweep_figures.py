"""Figures of sweeps: % improvement along the number of hand-off points, or along alpha_1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqdefer.paper.records import Row, Study
from seqdefer.paper.render.panels import (
    IMPROVEMENT,
    Look,
    is_leftmost,
    key,
    legend_below,
    panels_of_parts,
    paper_key,
    shade_of,
    whole_ticks,
    wrapped,
)
from seqdefer.paper.render.rows import MULTIPLE, methods_by_block, rows_of_task
from seqdefer.report.style import INK, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PAPER_LOOK: Look = {"markerfacecolor": "white", "linestyle": (0, (3, 2)), "linewidth": 0.9, "markersize": 3.2}
RING: Look = {"color": INK, "marker": "o", "markerfacecolor": "none", "markersize": 9, "linestyle": "none"}
RULE_OF_THUMB, RECIPES_OWN = "rule of thumb", "the recipe's alpha"
ODD_LOOKS: Mapping[str, Look] = {
    RULE_OF_THUMB: {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1.0, "marker": "."},
    RECIPES_OWN: {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.0, "marker": "."},
}


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis with a place for zero, to the left of the decades."""

    low: float  # exponent of the least value above zero
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


def draw_hand_offs(studies: Sequence[Study]) -> Figure:
    looks = {
        method: {"color": shade_of(block, rank), "marker": MARKERS[rank % len(MARKERS)]}
        for block, methods in methods_by_block(row for study in reversed(studies) for row in study.rows).items()
        for rank, method in enumerate(methods)
    }
    figure, panels = panels_of_parts(studies, 2.5)
    for study, task, axes in panels:
        rows = _by_size(rows_of_task(study, task))
        _draw_over_sizes(axes, {method: [row for row in rows if row.method == method] for method in looks}, looks)
    keys = [key(method, **look) for method, look in looks.items()] + paper_key(studies, marker="o", **PAPER_LOOK)
    legend_below(figure, keys + _choice_key(studies))
    return figure


def draw_alphas(studies: Sequence[Study]) -> Figure:
    """Draw lines over |J|, one for each alpha_1, as the paper does; over alpha_1 where J has one size.

    Lines over |J| have no bars: those of ten lines would hide them. The table has the standard deviations."""
    figure, panels = panels_of_parts(studies, 2.9)
    times = sorted({one for study in studies for row in study.rows if isinstance(one := _alpha_name(row), float)})
    looks: dict[str | float, Look] = {one: _alpha_look(rank, len(times)) for rank, one in enumerate(times)}
    looks.update(ODD_LOOKS)
    drawn: dict[str | float, Look] = {}
    for study, task, axes in panels:
        rows = _by_size(rows_of_task(study, task))
        if len({row.varied["hand_offs"] for row in rows}) > 1:
            lines = {name: [row for row in rows if _alpha_name(row) == name] for name in looks}
            _draw_over_sizes(axes, lines, looks, has_bars=False)
            drawn.update({name: looks[name] for name, its_rows in lines.items() if its_rows})
        else:
            drawn.update(_draw_over_alphas(axes, sorted(rows, key=lambda row: row.varied["times"])))
    keys = [key(f"{one:g} {MULTIPLE}", **looks[one]) for one in times if one in drawn]
    keys += [key(name, **look) for name, look in drawn.items() if isinstance(name, str)]
    legend_below(figure, keys + _choice_key(studies))
    return figure


def _alpha_name(row: Row) -> str | float:
    """Return what names alpha_1 in the legend: a multiple of the plan, the rule of thumb, or the recipe's own."""
    if row.varied["is_own"]:
        return RULE_OF_THUMB if row.varied["is_rule"] else RECIPES_OWN
    return float(round(row.varied["times"], 6))


def _by_size(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.varied["hand_offs"])


def _choice_key(studies: Iterable[Study]) -> list[Line2D]:
    is_chosen = any(row.is_chosen for study in studies for row in study.rows)
    return [key("chosen by validation data", **RING)] if is_chosen else []


def _alpha_look(rank: int, count: int) -> Look:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return {
        "color": to_hex(colormaps["viridis"](0.9 * rank / max(count - 1, 1))),
        "marker": MARKERS[rank % len(MARKERS)],
    }


def _draw_over_sizes(
    axes: Axes, lines: Mapping[Any, Sequence[Row]], looks: Mapping[Any, Look], *, has_bars: bool = True
) -> None:
    sizes = [row.varied["hand_offs"] for rows in lines.values() for row in rows]
    for rank, (name, rows) in enumerate(lines.items()):
        # The bars of one |J| stand side by side.
        shift = 0.008 * (max(sizes) - min(sizes)) * (rank - len(lines) / 2) if has_bars else 0
        _draw_sweep(axes, [(row.varied["hand_offs"] + shift, row) for row in rows], looks[name], has_bars=has_bars)
    axes.set_xlabel("|J|, hand-off points allowed")
    whole_ticks(axes)
    _finish_sweep(axes)


def _draw_over_alphas(axes: Axes, rows: Sequence[Row]) -> dict[str | float, Look]:
    """Draw a line over alpha_1 and return what the legend must explain."""
    scale, look = LogScale.of([row.varied["times"] for row in rows]), {"color": shade_of("once", 0), "marker": "o"}
    places = [(scale.place(row.varied["times"]), row) for row in rows]
    _draw_sweep(axes, [(x, row) for x, row in places if not row.varied["times"]], look)  # no line from zero
    _draw_sweep(axes, [(x, row) for x, row in places if row.varied["times"]], look)
    drawn: dict[str | float, Look] = {"OneTimeModel": look}
    for row in rows:
        if row.is_default or row.varied["is_rule"]:
            name = RULE_OF_THUMB if row.varied["is_rule"] else RECIPES_OWN
            drawn[name] = ODD_LOOKS[name]
            axes.axvline(scale.place(row.varied["times"]), color=INK, linestyle=ODD_LOOKS[name]["linestyle"])
    axes.set_xticks(*scale.ticks())
    axes.set_xlabel(f"α₁, {MULTIPLE}")
    _finish_sweep(axes)
    return drawn


def _finish_sweep(axes: Axes) -> None:
    axes.axhline(0, color=SOFT, linewidth=0.8, zorder=1)
    if is_leftmost(axes):
        axes.set_ylabel(wrapped(IMPROVEMENT, 14))


def _draw_sweep(axes: Axes, places: Sequence[tuple[float, Row]], look: Look, *, has_bars: bool = True) -> None:
    """Draw our means with bars of one standard deviation, the paper's, and a ring around the variant chosen."""
    means, stds = [row.improvement_mean for _, row in places], [row.improvement_std for _, row in places]
    axes.errorbar([x for x, _ in places], means, yerr=stds if has_bars and any(stds) else None, elinewidth=0.7, **look)
    papers = [(x, row.paper.improvement) for x, row in places if row.paper]
    if papers:
        axes.plot(*zip(*papers, strict=True), **look, **PAPER_LOOK)
    chosen = [(x, row.improvement_mean) for x, row in places if row.is_chosen]
    if chosen:
        axes.plot(*zip(*chosen, strict=True), **RING)
