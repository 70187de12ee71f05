"""The figure of a study by all its recipes, as PDF and SVG. The paper's figures are hollow and dashed.

    files = figure_files([load_study("runs/reproduce/ours/table-handoffs.json")])
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

from seqdefer.errors import import_extra, look_up
from seqdefer.evaluation.results import FREE, Block
from seqdefer.paper.records import Line, Row, Study
from seqdefer.paper.render.tables import (
    MULTIPLE,
    PSI_NAMES,
    measured_parts,
    measured_tasks,
    methods_by_block,
    network_of,
    rows_of_task,
)
from seqdefer.recipes import IN_WORDS
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
PAPER_DOT: Look = {"markerfacecolor": "white", "linestyle": "none"}
RECIPE_LOOKS: Mapping[str, Look] = {"published": {"alpha": 0.45, "linestyle": "none"}, "ours": {"linestyle": "none"}}
ROW_HEIGHT = 0.24  # inches, room for the marks of a row above each other
DOT_OFFSETS = (-0.27, 0.0, 0.27)  # in rows, so that the marks of a row do not hide each other; the paper's is last
PAPER_LOOK: Look = {"markerfacecolor": "white", "linestyle": (0, (3, 2)), "linewidth": 0.9, "markersize": 3.2}
RING: Look = {"color": INK, "marker": "o", "markerfacecolor": "none", "markersize": 9, "linestyle": "none"}
RULE_OF_THUMB, RECIPES_OWN = "rule of thumb", "the recipe's alpha"
ODD_LOOKS: Mapping[str, Look] = {
    RULE_OF_THUMB: {"color": INK, "linestyle": (0, (1, 1.5)), "linewidth": 1.0, "marker": "."},
    RECIPES_OWN: {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.0, "marker": "."},
}
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
        "table-handoffs": _draw_hand_offs,
        "figure-alpha": _draw_alphas,
        "table-psi": _draw_psis,
        "table-ablation": _draw_ablation,
    }
    return look_up("study", studies[0].name, drawings)(studies)


def require_matplotlib() -> None:
    """Raise MissingExtraError where matplotlib is missing; call it before long work that ends in figures."""
    import_extra("matplotlib", "figures", "a figure for print", "go without figures: --no-figures")


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


def _panels(
    titles: Sequence[str], height: float, n_columns: int = 0, *, share_rows: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a panel for each title, `height` inches per row of panels. A single panel fills one column of the paper."""
    from matplotlib.figure import Figure

    n_columns = n_columns or min(len(titles), PANELS_PER_ROW)
    n_rows = -(-len(titles) // n_columns)
    size = (COLUMN_WIDTH if n_columns == 1 else TEXT_WIDTH, height * n_rows)
    figure = Figure(figsize=size, layout="constrained")
    cells = list(figure.subplots(n_rows, n_columns, squeeze=False, sharey=share_rows).flat)
    for empty in cells[len(titles) :]:
        empty.set_axis_off()
    for title, axes in zip(titles, cells, strict=False):
        axes.set_title(title, loc="left")
    return figure, cells[: len(titles)]


def _panels_of_parts(studies: Sequence[Study], height: float) -> tuple[Figure, list[tuple[Study, str, Axes]]]:
    """Make a panel for each recipe and task, a row of panels for each recipe where they fit into one."""
    parts = measured_parts(studies)
    n_tasks = max(len(measured_tasks([study])) for study in studies)
    titles = [f"{task}, {IN_WORDS[study.recipe]}" for study, task in parts]
    figure, panels = _panels(titles, height, n_tasks if 1 < n_tasks <= PANELS_PER_ROW else 0)
    return figure, [(study, task, axes) for (study, task), axes in zip(parts, panels, strict=True)]


def _is_leftmost(axes: Axes) -> bool:
    place = axes.get_subplotspec()
    return place is not None and place.is_first_col()


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


def _paper_key(studies: Iterable[Study], **look: Any) -> list[Line2D]:
    return [_key("the paper", **look)] if any(row.paper for study in studies for row in study.rows) else []


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
    figure, panels = _panels(tasks, ROW_HEIGHT * len(rows) + 1.0, share_rows=True)
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
        if _is_leftmost(axes):  # the others share its rows
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_yticks(range(len(rows)), [label or title for title, label in rows])
            for (_, label), text in zip(rows, axes.get_yticklabels(), strict=True):
                text.set(fontweight="normal" if label else "bold", color=INK)
    keys = [_key(IN_WORDS[study.recipe], marker="o", **RECIPE_LOOKS[study.recipe]) for study in studies]
    _legend_below(figure, [*keys, *_paper_key(studies, marker="o", **PAPER_DOT)])
    return figure


# --- deferral curves -------------------------------------------------------------------------------------------------


def _draw_curves(studies: Sequence[Study]) -> Figure:
    figure, panels = _panels_of_parts(studies, 3.4)
    for study, task, axes in panels:
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


def _draw_hand_offs(studies: Sequence[Study]) -> Figure:
    looks = {
        method: {"color": _shade(block, rank), "marker": MARKERS[rank % len(MARKERS)]}
        for block, methods in methods_by_block(row for study in reversed(studies) for row in study.rows).items()
        for rank, method in enumerate(methods)
    }
    figure, panels = _panels_of_parts(studies, 2.5)
    for study, task, axes in panels:
        rows = _by_size(rows_of_task(study, task))
        _draw_over_sizes(axes, {method: [row for row in rows if row.method == method] for method in looks}, looks)
    keys = [_key(method, **look) for method, look in looks.items()] + _paper_key(studies, marker="o", **PAPER_LOOK)
    _legend_below(figure, keys + _choice_key(studies))
    return figure


def _draw_alphas(studies: Sequence[Study]) -> Figure:
    """Draw lines over |J|, one for each alpha_1, as the paper does; over alpha_1 where J has one size.

    Lines over |J| have no bars: those of ten lines would hide them. The table has the standard deviations."""
    figure, panels = _panels_of_parts(studies, 2.9)
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
    keys = [_key(f"{one:g} {MULTIPLE}", **looks[one]) for one in times if one in drawn]
    keys += [_key(name, **look) for name, look in drawn.items() if isinstance(name, str)]
    _legend_below(figure, keys + _choice_key(studies))
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
    return [_key("chosen by validation data", **RING)] if is_chosen else []


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
    _whole_ticks(axes)
    _finish_sweep(axes)


def _draw_over_alphas(axes: Axes, rows: Sequence[Row]) -> dict[str | float, Look]:
    """Draw a line over alpha_1 and return what the legend must explain."""
    scale, look = LogScale.of([row.varied["times"] for row in rows]), {"color": _shade("once", 0), "marker": "o"}
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
    if _is_leftmost(axes):
        axes.set_ylabel(_wrapped(IMPROVEMENT, 14))


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
