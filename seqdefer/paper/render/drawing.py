"""What all figures share: style, panels, marks and files that do not change from one machine to the next.

No pyplot: it keeps figures in a global list and looks for a screen. The fonts are the ones matplotlib brings along.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from seqdefer.errors import MissingExtraError, missing_extra
from seqdefer.evaluation.results import Block
from seqdefer.report.svg import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

TEXT_WIDTH, COLUMN_WIDTH = 6.9, 3.35  # inches, of a two-column paper
ACROSS = 3  # panels beside each other, at most
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
IMPROVEMENT = "% improvement over Random"
INK, SOFT, RULE = "#1f2733", "#5b6675", "#e3e7ec"
STYLE: dict[str, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # the first is drawn with; browsers take the next
    "figure.constrained_layout.w_pad": 0.05,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "errorbar.capsize": 1.5,
    "pdf.fonttype": 42,  # TrueType: journals take no Type 3
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "seqdefer",  # its names of clips and markers are random otherwise
}


def require_matplotlib() -> None:
    """Before the work whose figures it shall draw."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        missing = missing_extra("matplotlib", "figures", "a figure for print")
        raise MissingExtraError(f"{missing}; or go without figures: --no-figures") from error


@contextmanager
def house_style() -> Iterator[None]:
    """Whatever the user's own settings of matplotlib are; it must last until the figure is saved."""
    require_matplotlib()
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def save_pdf(figure: Figure) -> bytes:
    return _saved(figure, "pdf", {"CreationDate": None, "Creator": "seqdefer", "Producer": "matplotlib"})


def save_svg(figure: Figure) -> bytes:
    return _saved(figure, "svg", {"Date": None, "Creator": "seqdefer"})


def _saved(figure: Figure, kind: str, metadata: Mapping[str, str | None]) -> bytes:
    """The hour, the version and the machine stay out, so that an equal figure has equal bytes."""
    buffer = io.BytesIO()
    # Constrained layout leaves long labels a hair too little room; a tight box never cuts them.
    figure.savefig(buffer, format=kind, metadata=dict(metadata), bbox_inches="tight", pad_inches=0.03)
    return buffer.getvalue()


def panels(tasks: Sequence[str], height: float, *, share_rows: bool = False) -> tuple[Figure, dict[str, Axes]]:
    """A panel for each task, `height` inches a row of them; one alone takes one column of the paper."""
    from matplotlib.figure import Figure

    across = min(len(tasks), ACROSS)
    down = -(-len(tasks) // ACROSS)
    size = (COLUMN_WIDTH if across == 1 else TEXT_WIDTH, height * down)
    figure = Figure(figsize=size, layout="constrained")
    cells = list(figure.subplots(down, across, squeeze=False, sharey=share_rows).flat)
    for empty in cells[len(tasks) :]:
        empty.set_axis_off()
    drawn = dict(zip(tasks, cells, strict=False))
    for task, axes in drawn.items():
        axes.set_title(task, loc="left")
    return figure, drawn


def is_leftmost(axes: Axes) -> bool:
    place = axes.get_subplotspec()
    return place is None or place.is_first_col()


def whole_ticks(axes: Axes) -> None:
    """Along x: tokens and hand-off points come whole."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=(1, 2, 5, 10)))


def wrapped(text: str, letters: int = 32) -> str:
    return "\n".join(textwrap.wrap(text, letters))


def shade(block: Block, rank: int) -> str:
    """The hue of a granularity; past its three shades they come again, paler."""
    from matplotlib.colors import to_hex, to_rgb

    hues = LIGHT[block]
    colour, times = hues[rank % len(hues)], rank // len(hues)
    kept = 0.5 ** min(times, 2)
    red, green, blue = (1 - kept * (1 - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))


def dashes(pattern: str, width: float) -> tuple[float, tuple[float, ...]] | str:
    """A pattern of `plots`, in its pixels for a line of `width`, as matplotlib's, in widths of the line."""
    return (0, tuple(float(part) / width for part in pattern.split())) if pattern else "solid"


def key(label: str, **look: Any) -> Line2D:
    """A line of the legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"color": SOFT, **look, "label": label})


def legend_below(figure: Figure, keys: Sequence[Line2D], columns: int | None = None) -> None:
    across = 2 if figure.get_figwidth() < TEXT_WIDTH else 4
    figure.legend(handles=list(keys), loc="outside lower center", ncols=columns or min(len(keys), across))
