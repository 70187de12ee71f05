"""The figure of a study by all its recipes, as PDF and SVG. The paper's figures are hollow and dashed.

    files = figure_files([load_study("runs/reproduce/ours/table-handoffs.json")])
    Path("table-handoffs.pdf").write_bytes(files[".pdf"])

One hue per granularity, as in `report.html`; markers and dashes repeat it for grey print and colour-blind readers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from seqdefer.errors import look_up
from seqdefer.evaluation.results import FREE, Block
from seqdefer.paper.records import Line, Row, Study
from seqdefer.paper.render.panels import (
    IMPROVEMENT,
    Look,
    figure_style,
    is_leftmost,
    key,
    legend_below,
    make_panels,
    panels_of_parts,
    paper_key,
    whole_ticks,
    wrapped,
)
from seqdefer.paper.render.rows import PSI_NAMES, measured_tasks, methods_by_block, network_of, rows_of_task
from seqdefer.paper.render.sweep_figures import draw_alphas, draw_hand_offs
from seqdefer.recipes import IN_WORDS
from seqdefer.report.style import BLOCKS, DASHES, INK, LIGHT, REFERENCE_DASHES, SOFT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_METHODS = ("OneTimeModel", "TokenwiseModel")
BLOCK_MARKERS: Mapping[Block, str] = {"whole": "s", "once": "o", "token": "^"}
BLOCK_DASHES: Mapping[Block, str] = {"whole": DASHES[3], "once": DASHES[1], "token": DASHES[0]}
PAPER_DOT: Look = {"markerfacecolor": "white", "linestyle": "none"}
RECIPE_LOOKS: Mapping[str, Look] = {"published": {"alpha": 0.45, "linestyle": "none"}, "ours": {"linestyle": "none"}}
ROW_HEIGHT = 0.24  # inches, room for the marks of a row above each other
DOT_OFFSETS = (-0.27, 0.0, 0.27)  # in rows, so that the marks of a row do not hide each other; the paper's is last
# Without the date and the version, equal figures have equal bytes.
METADATA: Mapping[str, dict[str, str | None]] = {
    "pdf": {"CreationDate": None, "Creator": "seqdefer", "Producer": "matplotlib"},
    "svg": {"Date": None, "Creator": "seqdefer"},
}


def figure_files(studies: Sequence[Study]) -> dict[str, bytes]:
    """Return the contents of NAME.pdf and NAME.svg by suffix."""
    with figure_style():
        figure = draw_studies(studies)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # one layout for both files
        return {f".{kind}": _save(figure, kind) for kind in METADATA}


def draw_studies(studies: Sequence[Study]) -> Figure:
    """Draw the studies of one name by several recipes. Call it, and save the figure, within `figure_style`."""
    drawings = {
        "table1": _draw_table1,
        "figure-curves": _draw_curves,
        "table-handoffs": draw_hand_offs,
        "figure-alpha": draw_alphas,
        "table-psi": _draw_psis,
        "table-ablation": _draw_ablation,
    }
    return look_up("study", studies[0].name, drawings)(studies)


def _save(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Constrained layout leaves slightly too little room for long labels; a tight box never cuts them.
    figure.savefig(buffer, format=kind, metadata=dict(METADATA[kind]), bbox_inches="tight", pad_inches=0.03)
    return buffer.getvalue()


# --- dots: a row for each method -------------------------------------------------------------------------------------


def _draw_table1(studies: Sequence[Study]) -> Figure:
    blocks = methods_by_block(row for study in reversed(studies) for row in study.rows)
    blocks.pop("reference", None)  # Random is the line at 0; the oracles would squeeze all others together

    def place_of(row: Row) -> tuple[str, str] | None:
        block = row.granularity
        return (BLOCKS[block], row.method) if row.method in blocks.get(block, ()) else None

    def look_of(row: Row) -> Look:
        return {"color": LIGHT[row.granularity][0], "marker": BLOCK_MARKERS[row.granularity]}

    return _dot_plot(studies, {BLOCKS[block]: names for block, names in blocks.items()}, place_of, look_of)


def _draw_ablation(studies: Sequence[Study]) -> Figure:
    def place_of(row: Row) -> tuple[str, str]:
        return network_of(row) if row.varied else ("By confidence", row.method)

    titled: dict[str, list[str]] = {}
    for title, label in dict.fromkeys(place_of(row) for study in studies for row in study.rows):
        titled.setdefault(title, []).append(label)
    return _dot_plot(studies, titled, place_of, lambda _: {"color": LIGHT["token"][0], "marker": "^"})


def _draw_psis(studies: Sequence[Study]) -> Figure:
    names = list(dict.fromkeys(row.varied["psi"] for study in studies for row in study.rows))
    titled = {"OneTimeModel": [PSI_NAMES.get(name, name) for name in names]}

    def place_of(row: Row) -> tuple[str, str]:
        return "OneTimeModel", PSI_NAMES.get(row.varied["psi"], row.varied["psi"])

    return _dot_plot(studies, titled, place_of, lambda _: {"color": LIGHT["once"][0], "marker": "o"})


def _dot_plot(
    studies: Sequence[Study],
    titled: Mapping[str, Sequence[str]],
    place_of: Callable[[Row], tuple[str, str] | None],
    look_of: Callable[[Row], Look],
) -> Figure:
    """Draw a panel for each task: a row for each label, its block under a title, with a mark for each recipe and one
    for the paper."""
    rows = [(title, label) for title, labels in titled.items() for label in ("", *labels)]
    heights = {place: height for height, place in enumerate(rows)}
    tasks = measured_tasks(studies)
    figure, panels = make_panels(tasks, ROW_HEIGHT * len(rows) + 1.0, share_rows=True)
    has_bars = any(row.improvement_std for study in studies for row in study.rows)
    for task, axes in zip(tasks, panels, strict=True):
        means, papers = list[float](), dict[int, tuple[float, Look]]()
        for rank, study in enumerate(studies):
            recipe_look = RECIPE_LOOKS[study.recipe]
            for row in rows_of_task(study, task):
                if (place := place_of(row)) is None:
                    continue
                height, look = heights[place], look_of(row)
                bars = [row.improvement_std] if row.improvement_std else None
                at = height + DOT_OFFSETS[rank]
                axes.errorbar([row.improvement_mean], [at], xerr=bars, elinewidth=0.9, **{**look, **recipe_look})
                means.append(row.improvement_mean)
                if row.paper:
                    papers[height] = row.paper.improvement, {**look, **PAPER_DOT}  # the same in all recipes
        for height, (published, look) in papers.items():
            axes.plot([published], [height + DOT_OFFSETS[-1]], **look)
            means.append(published)
        if means and min(means) < 0.5 * max(means):  # elsewhere zero would take more room than the dots
            axes.axvline(0, color=SOFT, linewidth=0.8)
        axes.set_xlabel(IMPROVEMENT + "\n± 1 standard deviation" * has_bars)
        axes.tick_params(axis="y", length=0)
        if is_leftmost(axes):  # the others share its rows
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_yticks(range(len(rows)), [label or title for title, label in rows])
            for (_, label), text in zip(rows, axes.get_yticklabels(), strict=True):
                text.set(fontweight="normal" if label else "bold", color=INK)
    keys = [key(IN_WORDS[study.recipe], marker="o", **RECIPE_LOOKS[study.recipe]) for study in studies]
    legend_below(figure, [*keys, *paper_key(studies, marker="o", **PAPER_DOT)])
    return figure


# --- deferral curves -------------------------------------------------------------------------------------------------


def _draw_curves(studies: Sequence[Study]) -> Figure:
    figure, panels = panels_of_parts(studies, 3.4)
    for study, task, axes in panels:
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


def _curves_shown(study: Study, task: str) -> Iterator[tuple[Line, Look]]:
    """Yield Random, the strongest oracle whose expert has a cost, the best method of each granularity, and the paper's
    methods."""
    lines = {line.method: line for line in study.lines if line.task == task}
    areas = {row.method: row.audc_mean for row in rows_of_task(study, task)}
    for block, names in methods_by_block(lines.values()).items():
        best = min((name for name in names if name not in ("Random", FREE)), key=areas.__getitem__, default=None)
        for name in names:
            if name in ("Random", best, *PAPER_METHODS):
                is_first = name == "Random" or (name == best and block != "reference")
                yield lines[name], _curve_look(block, is_first=is_first)


def _curve_look(block: Block, *, is_first: bool) -> Look:
    is_reference = block == "reference"
    pattern = BLOCK_DASHES.get(block, REFERENCE_DASHES[0]) if is_first else REFERENCE_DASHES[1]
    width = 1.0 if is_reference else 1.5
    # The patterns are in pixels of a line of 1.6; matplotlib counts in widths of the line.
    dashes = (0, tuple(float(part) / (1.6 * width) for part in pattern.split())) if pattern else "solid"
    return {"color": LIGHT[block][0 if is_first or is_reference else 2], "linestyle": dashes, "linewidth": width}
