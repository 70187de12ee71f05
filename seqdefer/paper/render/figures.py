"""The figure of each study, as PDF and SVG: ours filled and solid, the paper's hollow and dashed.

    files = figure_files(load_study("runs/reproduce/table-handoffs.json"))
    Path("table-handoffs.pdf").write_bytes(files[".pdf"])

One hue per granularity, as in `report.html`; markers and dashes repeat it for grey print and colour-blind readers.
pyplot is not used: it keeps figures in a global list and looks for a display. The fonts come with matplotlib.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqdefer.errors import MissingExtraError, missing_extra, unknown
from seqdefer.evaluation.results import Block
from seqdefer.paper.records import Line, Row, Study
from seqdefer.paper.render.tables import MULTIPLE, inputs_of, measured_tasks, methods_by_block, network_of, rows_of_task
from seqdefer.report.style import BLOCKS, DASHES, INK, LIGHT, REFERENCE_DASHES, RULE, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Look = Mapping[str, Any]

TEXT_WIDTH, COLUMN_WIDTH = 6.9, 3.35  # inches, of a two-column paper
PANELS_PER_ROW = 3
PAPER_METHODS = ("OneTimeModel", "TokenwiseModel")
IMPROVEMENT = "% improvement over Random"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BLOCK_MARKERS: Mapping[Block, str] = {"whole": "s", "once": "o", "token": "^"}
BLOCK_DASHES: Mapping[Block, str] = {"whole": DASHES[3], "once": DASHES[1], "token": DASHES[0]}
HOLLOW: Look = {"markerfacecolor": "white", "linestyle": "none"}
PAPER_LOOK: Look = {"markerfacecolor": "white", "linestyle": (0, (3, 2)), "linewidth": 0.9, "markersize": 3.2}
RING: Look = {"color": INK, "marker": "o", "markerfacecolor": "none", "markersize": 9, "linestyle": "none"}
RULE_OF_THUMB_LOOK: Look = {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1.0}
STYLE: dict[str, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # matplotlib draws the first; browsers use the others
    "font.size": 8, "text.color": INK, "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.titlesize": 8, "axes.titleweight": "bold", "axes.titlecolor": INK,
    "axes.labelsize": 8, "axes.labelcolor": INK, "axes.edgecolor": SOFT, "axes.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": RULE, "grid.linewidth": 0.6,
    "xtick.color": SOFT, "xtick.labelsize": 7.5, "xtick.major.width": 0.6,
    "ytick.color": SOFT, "ytick.labelsize": 7.5, "ytick.major.width": 0.6,
    "legend.fontsize": 7.5, "legend.frameon": False, "legend.handlelength": 2.6,
    "lines.linewidth": 1.4, "lines.markersize": 4, "errorbar.capsize": 1.5, "figure.constrained_layout.w_pad": 0.05,
    "pdf.fonttype": 42,  # TrueType: journals reject Type 3
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "seqdefer",  # the ids of clips and markers are random otherwise
}  # fmt: skip
# Without the date and the version, equal figures have equal bytes.
METADATA: Mapping[str, dict[str, str | None]] = {
    "pdf": {"CreationDate": None, "Creator": "seqdefer", "Producer": "matplotlib"},
    "svg": {"Date": None, "Creator": "seqdefer"},
}


def figure_files(study: Study) -> dict[str, bytes]:
    """Return the contents of NAME.pdf and NAME.svg by suffix."""
    with figure_style():
        figure = draw_study(study)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # one layout for both files
        return {f".{kind}": _save(figure, kind) for kind in METADATA}


def draw_study(study: Study) -> Figure:
    """Draw a study. Call it, and save the figure, within `figure_style`."""
    drawings = {
        "table1": _draw_table1,
        "figure-curves": _draw_curves,
        "table-handoffs": _draw_sweeps,
        "figure-alpha": _draw_sweeps,
        "table-ablation": _draw_ablation,
    }
    if study.name not in drawings:
        raise unknown("study", study.name, drawings)
    return drawings[study.name](study)


def require_matplotlib() -> None:
    """Raise MissingExtraError where matplotlib is missing; call it before long work that ends in figures."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        missing = missing_extra("matplotlib", "figures", "a figure for print")
        raise MissingExtraError(f"{missing}; or go without figures: --no-figures") from error


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply our style in place of the user's matplotlib settings, until the figure is saved."""
    require_matplotlib()
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def _save(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Constrained layout leaves slightly too little room for long labels; a tight box never cuts them.
    figure.savefig(buffer, format=kind, metadata=dict(METADATA[kind]), bbox_inches="tight", pad_inches=0.03)
    return buffer.getvalue()


# --- panels, legends, looks ------------------------------------------------------------------------------------------


def _panels(tasks: Sequence[str], height: float, *, share_rows: bool = False) -> tuple[Figure, dict[str, Axes]]:
    """Make a panel for each task, `height` inches per row of panels. A single panel fills one column of the paper."""
    from matplotlib.figure import Figure

    n_columns, n_rows = min(len(tasks), PANELS_PER_ROW), -(-len(tasks) // PANELS_PER_ROW)
    size = (COLUMN_WIDTH if n_columns == 1 else TEXT_WIDTH, height * n_rows)
    figure = Figure(figsize=size, layout="constrained")
    cells = list(figure.subplots(n_rows, n_columns, squeeze=False, sharey=share_rows).flat)
    for empty in cells[len(tasks) :]:
        empty.set_axis_off()
    panels = dict(zip(tasks, cells, strict=False))
    for task, axes in panels.items():
        axes.set_title(task, loc="left")
    return figure, panels


def _leftmost(panels: Mapping[str, Axes]) -> list[Axes]:
    return list(panels.values())[::PANELS_PER_ROW]


def _whole_ticks(axes: Axes) -> None:
    """Place x ticks at integers only, for tokens and hand-off points."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=(1, 2, 5, 10)))


def _wrapped(text: str, width: int = 32) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _key(label: str, **look: Any) -> Line2D:
    """Return an entry of the legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"color": SOFT, **look, "label": label})


def _paper_key(study: Study, **look: Any) -> list[Line2D]:
    return [_key("paper", **look)] if any(row.paper for row in study.rows) else []


def _legend_below(figure: Figure, keys: Sequence[Line2D]) -> None:
    most = 2 if figure.get_figwidth() < TEXT_WIDTH else 4
    figure.legend(handles=list(keys), loc="outside lower center", ncols=min(len(keys), most))


def _shade(block: Block, rank: int) -> str:
    """Return the colour of a method by its rank in its block; past three shades they repeat, paler."""
    from matplotlib.colors import to_hex, to_rgb

    shades = LIGHT[block]
    strength = 0.5 ** min(rank // len(shades), 2)
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(shades[rank % len(shades)]))
    return to_hex((red, green, blue))


# --- dots: a row for each method -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dot:
    """A mark in the row that the title of its block and its own label name."""

    place: tuple[str, str]
    mean: float
    std: float
    look: Look
    offset: float  # in rows, so that the marks of a row do not hide each other


def _draw_table1(study: Study) -> Figure:
    blocks = methods_by_block(study.rows)
    blocks.pop("reference", None)  # Random is the line at 0; the oracles would squeeze all others together

    def dots(task: str) -> Iterator[Dot]:
        for row in rows_of_task(study, task):
            if row.method in blocks.get(row.granularity, ()):
                place = (BLOCKS[row.granularity], row.method)
                look = {"color": LIGHT[row.granularity][0], "marker": BLOCK_MARKERS[row.granularity]}
                yield from _dots(place, row, look, {**look, **HOLLOW}, (-0.16, 0.16))

    keys = [_key("ours, ± 1 standard deviation", marker="o"), *_paper_key(study, marker="o", **HOLLOW)]
    return _dot_plot(study, {BLOCKS[block]: names for block, names in blocks.items()}, dots, keys)


def _draw_ablation(study: Study) -> Figure:
    def place_of(row: Row) -> tuple[str, str]:
        return network_of(row) if row.varied else ("By confidence", row.method)

    titled: dict[str, list[str]] = {}
    for title, label in dict.fromkeys(map(place_of, study.rows)):
        titled.setdefault(title, []).append(label)
    inputs = inputs_of(study.rows)
    looks = [{"color": _shade("token", rank), "marker": MARKERS[rank]} for rank in range(len(inputs))]
    paper = {"color": INK, "marker": "D", **HOLLOW}
    offsets = [0.5 * rank / max(len(inputs), 1) - 0.25 for rank in range(len(inputs) + 1)]

    def dots(task: str) -> Iterator[Dot]:
        for row in rows_of_task(study, task):
            rank = inputs.index(row.varied["inputs"]) if row.varied else 0
            look = looks[rank] if row.varied else {"color": SOFT, "marker": "v"}
            yield from _dots(place_of(row), row, look, paper, (offsets[rank], offsets[-1]))

    keys = [_key(f"inputs: {name}", **look) for name, look in zip(inputs, looks, strict=True)]
    return _dot_plot(study, titled, dots, [*keys, *_paper_key(study, **paper)])


def _dots(place: tuple[str, str], row: Row, ours: Look, papers: Look, offsets: tuple[float, float]) -> Iterator[Dot]:
    yield Dot(place, row.improvement_mean, row.improvement_std, ours, offsets[0])
    if row.paper:
        yield Dot(place, row.paper.improvement, 0, papers, offsets[1])


def _dot_plot(
    study: Study, titled: Mapping[str, Sequence[str]], dots: Callable[[str], Iterable[Dot]], keys: Sequence[Line2D]
) -> Figure:
    """Draw a panel for each task; the labels stand at the left, each block under its title."""
    rows = [(title, label) for title, labels in titled.items() for label in ("", *labels)]
    heights = {place: height for height, place in enumerate(rows)}
    figure, panels = _panels(list(study.tasks), 0.165 * len(rows) + 0.85, share_rows=True)
    for task, axes in panels.items():
        drawn = list(dots(task))
        means = [dot.mean for dot in drawn]
        if means and min(means) < 0.5 * max(means):  # elsewhere zero would take more room than the dots
            axes.axvline(0, color=SOFT, linewidth=0.8)
        for dot in drawn:
            height = heights[dot.place] + dot.offset
            axes.errorbar([dot.mean], [height], xerr=[dot.std] if dot.std else None, elinewidth=0.9, **dot.look)
        axes.set_xlabel(IMPROVEMENT)
        axes.tick_params(axis="y", length=0)
        if axes in _leftmost(panels):  # the others share its rows
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_yticks(range(len(rows)), [label or title for title, label in rows])
            for (_, label), text in zip(rows, axes.get_yticklabels(), strict=True):
                text.set(fontweight="normal" if label else "bold", color=INK)
    _legend_below(figure, keys)
    return figure


# --- deferral curves -------------------------------------------------------------------------------------------------


def _draw_curves(study: Study) -> Figure:
    figure, panels = _panels(measured_tasks(study), 3.0)
    for task, axes in panels.items():
        for line, look in _curves_shown(study, task):
            axes.plot(line.deferred, line.mean, label=line.method, **look)
            if line.granularity != "reference" and any(line.std):
                low, high = zip(*((m - s, m + s) for m, s in zip(line.mean, line.std, strict=True)), strict=True)
                axes.fill_between(line.deferred, low, high, color=look["color"], alpha=0.14, linewidth=0)
        axes.set_xlabel(_wrapped(f"deferred {study.tasks[task].deferred_unit}"))
        axes.set_ylabel(_wrapped(study.tasks[task].loss_unit))
        axes.margins(x=0)
        _whole_ticks(axes)
        # The curves meet at both ends: only below them there is always room.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4)
    return figure


def _curves_shown(study: Study, task: str) -> Iterator[tuple[Line, Look]]:
    """Yield Random, the strongest oracle, the best method of each granularity, and the paper's methods."""
    lines = {line.method: line for line in study.lines if line.task == task}
    areas = {row.method: row.audc_mean for row in rows_of_task(study, task)}
    for block, names in methods_by_block(lines.values()).items():
        best = min((name for name in names if name != "Random"), key=areas.__getitem__, default=None)
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


# --- sweeps: % improvement along the number of hand-off points, or along alpha_1 -------------------------------------


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


def _draw_sweeps(study: Study) -> Figure:
    is_alpha = study.name == "figure-alpha"
    setting = "times" if is_alpha else "hand_offs"
    looks = {
        method: {"color": _shade(block, rank), "marker": MARKERS[rank % len(MARKERS)]}
        for block, methods in methods_by_block(study.rows).items()
        for rank, method in enumerate(methods)
    }
    figure, panels = _panels(measured_tasks(study), 2.5)
    for task, axes in panels.items():
        rows = sorted(rows_of_task(study, task), key=lambda row: row.varied[setting])
        (_draw_alpha if is_alpha else _draw_hand_offs)(axes, rows, looks)
        axes.axhline(0, color=SOFT, linewidth=0.8, zorder=1)
        if axes in _leftmost(panels):
            axes.set_ylabel(_wrapped(IMPROVEMENT, 14))
    keys = [_key(method, **look) for method, look in looks.items()] + _paper_key(study, marker="o", **PAPER_LOOK)
    keys += [_key("chosen by validation data", **RING)] if any(row.is_chosen for row in study.rows) else []
    _legend_below(figure, keys + ([_key("rule of thumb", **RULE_OF_THUMB_LOOK)] if is_alpha else []))
    return figure


def _draw_hand_offs(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    sizes = [row.varied["hand_offs"] for row in rows]
    for rank, (method, look) in enumerate(looks.items()):
        shift = 0.008 * (max(sizes) - min(sizes)) * (rank - len(looks) / 2)  # the bars of one |J| side by side
        _draw_sweep(axes, [(row.varied["hand_offs"] + shift, row) for row in rows if row.method == method], look)
    axes.set_xlabel("|J|, hand-off points allowed")
    _whole_ticks(axes)


def _draw_alpha(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look]) -> None:
    scale = LogScale.of([row.varied["times"] for row in rows])
    for method, look in looks.items():
        places = [(scale.place(row.varied["times"]), row) for row in rows if row.method == method]
        _draw_sweep(axes, [(x, row) for x, row in places if not row.varied["times"]], look)  # no line from zero
        _draw_sweep(axes, [(x, row) for x, row in places if row.varied["times"]], look)
    for times in {row.varied["times"] for row in rows if row.is_default}:
        axes.axvline(scale.place(times), **RULE_OF_THUMB_LOOK)
    axes.set_xticks(*scale.ticks())
    axes.set_xlabel(f"α₁, {MULTIPLE}")


def _draw_sweep(axes: Axes, places: Sequence[tuple[float, Row]], look: Look) -> None:
    """Draw our means with bars of one standard deviation, the paper's, and a ring around the variant chosen."""
    means, stds = [row.improvement_mean for _, row in places], [row.improvement_std for _, row in places]
    axes.errorbar([x for x, _ in places], means, yerr=stds if any(stds) else None, elinewidth=0.7, **look)
    papers = [(x, row.paper.improvement) for x, row in places if row.paper]
    if papers:
        axes.plot(*zip(*papers, strict=True), **look, **PAPER_LOOK)
    chosen = [(x, row.improvement_mean) for x, row in places if row.is_chosen]
    if chosen:
        axes.plot(*zip(*chosen, strict=True), **RING)
