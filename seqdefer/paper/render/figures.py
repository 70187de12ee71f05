"""The figure of each study, for print and screen: ours filled and solid, the paper's hollow and dashed.

    files = figure_files(load_study("runs/reproduce/table-handoffs.json"))
    Path("table-handoffs.pdf").write_bytes(files[".pdf"])

One hue a granularity, as in `report.html`; marks and dashes say the same again for grey print and colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from seqdefer.errors import unknown
from seqdefer.evaluation.results import Block
from seqdefer.paper.records import Line, Row, Study
from seqdefer.paper.render.drawing import (
    IMPROVEMENT,
    INK,
    MARKERS,
    SOFT,
    dashes,
    house_style,
    is_leftmost,
    key,
    legend_below,
    panels,
    save_pdf,
    save_svg,
    shade,
    whole_ticks,
    wrapped,
)
from seqdefer.paper.render.layouts import STRATEGIES, inputs_of, methods_by_block, of_task
from seqdefer.paper.render.sweeps import draw_alpha, draw_hand_offs
from seqdefer.report.svg import BLOCKS, DASHES, LIGHT, REFERENCE_DASHES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

BLOCK_MARKERS: Mapping[Block, str] = {"whole": "s", "once": "o", "token": "^"}
BLOCK_DASHES: Mapping[Block, str] = {"whole": DASHES[3], "once": DASHES[1], "token": DASHES[0]}
PAPERS = ("OneTimeModel", "TokenwiseModel")
HOLLOW: Mapping[str, Any] = {"markerfacecolor": "white", "linestyle": "none"}


def figure_files(study: Study) -> dict[str, bytes]:
    """What goes into NAME.pdf and NAME.svg, by ending."""
    with house_style():
        figure = draw_study(study)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, the same in both
        return {".pdf": save_pdf(figure), ".svg": save_svg(figure)}


def draw_study(study: Study) -> Figure:
    """To be drawn and saved within `house_style`."""
    if study.name not in _DRAWINGS:
        raise unknown("study", study.name, _DRAWINGS)
    return _DRAWINGS[study.name](study)


# --- dots: a row for each method -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """A figure in the row that the title of its block and its own label name."""

    place: tuple[str, str]
    mean: float
    std: float
    look: Mapping[str, Any]
    offset: float  # of a row's height, so that the marks of a row do not hide each other


def _draw_table1(study: Study) -> Figure:
    blocks = methods_by_block(study.rows)
    blocks.pop("reference", None)  # Random is the line at 0, and the oracles would press all others against it

    def dots(task: str) -> Iterator[Dot]:
        for row in of_task(study, task):
            if row.method in blocks.get(row.granularity, ()):
                place = (BLOCKS[row.granularity], row.method)
                look = {"color": LIGHT[row.granularity][0], "marker": BLOCK_MARKERS[row.granularity]}
                yield from _dots(place, row, look, (-0.16, 0.16))

    keys = [key("ours, ± 1 standard deviation", marker="o"), *_paper_key(study, marker="o", **HOLLOW)]
    return _dot_plot(study, {BLOCKS[block]: names for block, names in blocks.items()}, dots, keys)


def _draw_ablation(study: Study) -> Figure:
    titled: dict[str, list[str]] = {}
    for title, label in dict.fromkeys(map(_ablated, study.rows)):
        titled.setdefault(title, []).append(label)
    inputs = inputs_of(study.rows)
    looks = [{"color": shade("token", rank), "marker": MARKERS[rank]} for rank in range(len(inputs))]
    paper = {"color": INK, "marker": "D", **HOLLOW}
    offsets = [0.5 * rank / max(len(inputs), 1) - 0.25 for rank in range(len(inputs) + 1)]

    def dots(task: str) -> Iterator[Dot]:
        for row in of_task(study, task):
            rank = inputs.index(row.varied["inputs"]) if row.varied else 0
            look = looks[rank] if row.varied else {"color": SOFT, "marker": "v"}
            ours, *papers = _dots(_ablated(row), row, look, (offsets[rank], offsets[-1]))
            yield ours
            yield from (replace(dot, look=paper) for dot in papers)  # which knows of no inputs

    keys = [key(f"inputs: {name}", **look) for name, look in zip(inputs, looks, strict=True)]
    return _dot_plot(study, titled, dots, [*keys, *_paper_key(study, **paper)])


def _ablated(row: Row) -> tuple[str, str]:
    if not row.varied:
        return "By confidence", row.method
    strategy = str(row.varied["strategy"])
    return str(row.varied["architecture"]).upper(), STRATEGIES.get(strategy, strategy)


def _dots(place: tuple[str, str], row: Row, look: Mapping[str, Any], offsets: tuple[float, float]) -> Iterator[Dot]:
    """Ours, and the paper's where there is one."""
    yield Dot(place, row.improvement_mean, row.improvement_std, look, offsets[0])
    if row.paper:
        yield Dot(place, row.paper.improvement, 0, {**look, **HOLLOW}, offsets[1])


def _dot_plot(
    study: Study,
    titled: Mapping[str, Sequence[str]],
    dots: Callable[[str], Iterable[Dot]],
    keys: Sequence[Line2D],
) -> Figure:
    """Labels in blocks down the side, each block under its title, a panel for each task."""
    rows = [(title, label) for title, labels in titled.items() for label in ("", *labels)]
    heights = {place: height for height, place in enumerate(rows)}
    figure, found = panels(list(study.tasks), 0.165 * len(rows) + 0.85, share_rows=True)
    for task, axes in found.items():
        drawn = list(dots(task))
        means = [dot.mean for dot in drawn]
        if means and min(means) < 0.5 * max(means):  # elsewhere, zero would take more room than the dots
            axes.axvline(0, color=SOFT, linewidth=0.8)
        for dot in drawn:
            height = heights[dot.place] + dot.offset
            axes.errorbar([dot.mean], [height], xerr=[dot.std] if dot.std else None, elinewidth=0.9, **dot.look)
        axes.set_xlabel(IMPROVEMENT)
        axes.tick_params(axis="y", length=0)
        if is_leftmost(axes):  # the others share its rows
            _label_rows(axes, rows)
    legend_below(figure, keys)
    return figure


def _paper_key(study: Study, **look: Any) -> list[Line2D]:
    return [key("paper", **look)] if any(row.paper for row in study.rows) else []


def _label_rows(axes: Axes, rows: Sequence[tuple[str, str]]) -> None:
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [label or title for title, label in rows])
    for (_, label), text in zip(rows, axes.get_yticklabels(), strict=True):
        text.set(fontweight="normal" if label else "bold", color=INK)


# --- lines -----------------------------------------------------------------------------------------------------------


def _draw_curves(study: Study) -> Figure:
    tasks = [task for task in study.tasks if any(line.task == task for line in study.lines)]
    figure, found = panels(tasks, 3.0)
    for task, axes in found.items():
        for line, look in _curves_shown(study, task):
            axes.plot(line.deferred, line.mean, label=line.method, **look)
            if line.granularity != "reference" and any(line.std):
                low, high = zip(*((m - s, m + s) for m, s in zip(line.mean, line.std, strict=True)), strict=True)
                axes.fill_between(line.deferred, low, high, color=look["color"], alpha=0.14, linewidth=0)
        axes.set_xlabel(wrapped(f"deferred {study.tasks[task].deferred_unit}"))
        axes.set_ylabel(wrapped(study.tasks[task].loss_unit))
        axes.margins(x=0)
        whole_ticks(axes)
        # The curves meet at both ends: only below them there is always room.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4)
    return figure


def _curves_shown(study: Study, task: str) -> list[tuple[Line, dict[str, Any]]]:
    """Random, the strongest oracle, the best method of each granularity, and the paper's where ours is another."""
    lines = {line.method: line for line in study.lines if line.task == task}
    areas = {row.method: row.audc_mean for row in of_task(study, task)}
    shown: list[tuple[Line, dict[str, Any]]] = []
    for block, names in methods_by_block(lines.values()).items():
        others = [name for name in names if name != "Random"]
        best = min(others, key=areas.__getitem__, default=None)
        shown += [
            (lines[name], _curve_look(block, is_first=name == "Random" or (name == best and block != "reference")))
            for name in names
            if name in ("Random", best, *PAPERS)
        ]
    return shown


def _curve_look(block: Block, *, is_first: bool) -> dict[str, Any]:
    is_reference = block == "reference"
    pattern = BLOCK_DASHES.get(block, REFERENCE_DASHES[0]) if is_first else REFERENCE_DASHES[1]
    width = 1.0 if is_reference else 1.5
    colour = LIGHT[block][0 if is_first or is_reference else 2]
    return {"color": colour, "linestyle": dashes(pattern, 1.6 * width), "linewidth": width}


_DRAWINGS = {
    "table1": _draw_table1,
    "figure-curves": _draw_curves,
    "table-handoffs": draw_hand_offs,
    "figure-alpha": draw_alpha,
    "table-ablation": _draw_ablation,
}
