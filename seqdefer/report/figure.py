"""Deferral curves as a matplotlib figure, and the card that sites show where somebody links to a report.

    figure = plot_curves(load_results("runs/weather"))
    figure.axes[0].set_ylim(0, 2)
    figure.savefig("curves.pdf")

matplotlib is optional (the extra `figures`). pyplot is not used: it keeps figures in a global list and looks for a
display.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from seqdefer.errors import MissingExtraError, import_extra
from seqdefer.evaluation.results import Results
from seqdefer.report.curve_figure import ReportCurves
from seqdefer.report.drawn_curves import STEPS, DrawnCurve, beginning, deferred_title, extent, loss_title, shown_curves
from seqdefer.report.html import headline
from seqdefer.report.style import INK, LIGHT, RULE, SOFT
from seqdefer.storage.files import write_aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CARD_FILE = "card.png"
CARD_SIZE, CARD_DPI = (12.0, 6.3), 100  # 1200 x 630 pixels, what sites that show cards ask for


def plot_curves(results: Results, methods: Sequence[str] | None = None) -> Figure:
    """Draw mean curves with bands of one standard deviation; by default the best of each granularity, Random and the
    strongest oracle."""
    figure = _new_figure((7.0, 4.2))
    _draw(figure.subplots(), results, methods)
    return figure


def write_card(results: Results, folder: Path) -> Path | None:
    """Write card.png, the headline above the curves; None where matplotlib is not installed."""
    try:
        figure = _new_figure(CARD_SIZE)
    except MissingExtraError:
        return None
    words = headline(ReportCurves.of(results)).split(";")[0]
    figure.suptitle(f"{results.task}: partial deferral\n{words}", fontsize=17, color=INK, wrap=True)
    _draw(figure.subplots(), results, None, size=14)
    figure.text(0.995, 0.01, "seqdefer", ha="right", color=SOFT, fontsize=12)

    def write(aside: Path) -> None:
        figure.savefig(aside, format="png", dpi=CARD_DPI, metadata={"Software": None})

    return write_aside(folder / CARD_FILE, write)


def _new_figure(size: tuple[float, float]) -> Figure:
    """Return a figure that notebooks show where a cell ends with it; by themselves they show those of pyplot alone."""
    import_extra("matplotlib.figure", "figures", "a figure of curves")
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png", dpi=CARD_DPI)
            return picture.getvalue()

    return ShownFigure(figsize=size, layout="constrained", facecolor="white")


def _draw(axes: Axes, results: Results, methods: Sequence[str] | None, size: float = 9) -> None:
    begin, end = beginning(results), extent(results)
    places = [begin + (end - begin) * step / STEPS for step in range(STEPS + 1)]
    for curve in shown_curves(results, methods):
        _draw_curve(axes, places, curve)
    axes.set_xlabel(_plain(deferred_title(results)), fontsize=size)
    axes.set_ylabel(_plain(loss_title(results)), fontsize=size)
    axes.set_xlim(begin, end)
    axes.tick_params(labelsize=size - 1, colors=SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=RULE)
    axes.legend(fontsize=size - 1, frameon=False)


def _draw_curve(axes: Axes, places: Sequence[float], curve: DrawnCurve) -> None:
    colour, dash = LIGHT[curve.block][curve.shade], curve.dash
    style = (0, tuple(float(part) for part in dash.split())) if dash else "solid"
    width = 1.2 if curve.block == "reference" else 1.8
    axes.plot(places, curve.mean, color=colour, linestyle=style, linewidth=width, label=_plain(curve.name))
    if curve.block != "reference" and any(curve.std):
        low, high = ([mean + sign * std for mean, std in zip(curve.mean, curve.std, strict=True)] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)


def _plain(text: str) -> str:
    """Keep matplotlib from reading a dollar sign as mathematics, and a leading underscore as "no entry"."""
    return text.replace("$", r"\$").lstrip("_")
