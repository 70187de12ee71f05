"""Style, panels, legends and colours of all figures of the studies.

pyplot is not used: it keeps figures in a global list and looks for a display. The fonts come with matplotlib.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from seqdefer.errors import import_extra
from seqdefer.evaluation.results import Block
from seqdefer.paper.records import Study
from seqdefer.paper.render.rows import measured_parts, measured_tasks
from seqdefer.recipes import IN_WORDS
from seqdefer.report.style import INK, LIGHT, RULE, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Look = Mapping[str, Any]  # options of matplotlib for a line or a mark

TEXT_WIDTH, COLUMN_WIDTH = 6.9, 3.35  # inches, of a two-column paper
PANELS_PER_ROW = 3
IMPROVEMENT = "% improvement over Random"
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


def make_panels(
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


def panels_of_parts(studies: Sequence[Study], height: float) -> tuple[Figure, list[tuple[Study, str, Axes]]]:
    """Make a panel for each recipe and task, a row of panels for each recipe where they fit into one."""
    parts = measured_parts(studies)
    n_tasks = max(len(measured_tasks([study])) for study in studies)
    titles = [f"{task}, {IN_WORDS[study.recipe]}" for study, task in parts]
    figure, panels = make_panels(titles, height, n_tasks if 1 < n_tasks <= PANELS_PER_ROW else 0)
    return figure, [(study, task, axes) for (study, task), axes in zip(parts, panels, strict=True)]


def is_leftmost(axes: Axes) -> bool:
    place = axes.get_subplotspec()
    return place is not None and place.is_first_col()


def whole_ticks(axes: Axes) -> None:
    """Place x ticks at integers only, for tokens and hand-off points."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=(1, 2, 5, 10)))


def wrapped(text: str, width: int = 32) -> str:
    return "\n".join(textwrap.wrap(text, width))


def key(label: str, **look: Any) -> Line2D:
    """Return an entry of the legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"color": SOFT, **look, "label": label})


def paper_key(studies: Iterable[Study], **look: Any) -> list[Line2D]:
    return [key("the paper", **look)] if any(row.paper for study in studies for row in study.rows) else []


def legend_below(figure: Figure, keys: Sequence[Line2D]) -> None:
    most = 2 if figure.get_figwidth() < TEXT_WIDTH else 4
    figure.legend(handles=list(keys), loc="outside lower center", ncols=min(len(keys), most))


def shade_of(block: Block, rank: int) -> str:
    """Return the colour of a method by its rank in its block; past three shades they repeat, paler."""
    from matplotlib.colors import to_hex, to_rgb

    shades = LIGHT[block]
    strength = 0.5 ** min(rank // len(shades), 2)
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(shades[rank % len(shades)]))
    return to_hex((red, green, blue))
