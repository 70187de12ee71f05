"""Deferral curves as standalone SVG: mean over the seeds, a band of one standard deviation, axes and a legend.

Path("curves.svg").write_text(curves_svg(load_results("runs/weather")))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from seqdefer.evaluation.results import Cost, Results, TimedSetting
from seqdefer.report.drawn_curves import (
    STEPS,
    DrawnCurve,
    beginning,
    deferred_title,
    extent,
    loss_title,
    mean_curves,
    shown_curves,
)
from seqdefer.report.markup import Markup, element, join, number
from seqdefer.report.style import BLOCKS, INK, LIGHT, RULE, SOFT
from seqdefer.storage.files import write_text

MAX_NAME_LENGTH = 18  # in the legend
ORACLES = {"whole": "Whole", "once": "OneTime", "token": "Token"}  # how the names of oracles end


@dataclass(frozen=True)
class Axes:
    """The data window, x from `begin` to `end` deferred tokens (or another cost) and y from `low` to `high`, and its
    ticks."""

    begin: float
    end: float
    low: float
    high: float
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    decimals: int  # of a printed loss

    def x_share(self, cost: float) -> float:
        """Return 0 at the left of the plot, 1 at its right."""
        return (cost - self.begin) / (self.end - self.begin)

    def y_share(self, loss: float) -> float:
        """Return 0 at the bottom of the plot, 1 at its top."""
        return (loss - self.low) / (self.high - self.low)


# --- axes ------------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, count: int = 6, factors: Sequence[float] = (1, 2, 2.5, 5, 10)) -> tuple[float, ...]:
    """Return about `count` round numbers within [low, high]: multiples of a factor times a power of ten."""
    rough = max((high - low) / count, 1e-300)  # smaller numbers have no logarithm
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in factors if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(index * step, 12) for index in range(first, last + 1))


def fit_axes(curves: Iterable[DrawnCurve], end: float, begin: float = 0.0) -> Axes:
    """Fit a window around all curves and bands. It starts at zero, unless that wastes more than half of the height."""
    pairs = [pair for curve in curves for pair in zip(curve.mean, curve.std, strict=True)]
    low, high = min(mean - std for mean, std in pairs), max(mean + std for mean, std in pairs)
    lowest = min(mean for mean, _ in pairs)
    if lowest >= 0 and lowest < 0.5 * high:  # a band may dip below zero where a loss cannot
        low = 0.0
    if high - low < 1e-9 * max(abs(high), 1.0):  # every curve is level
        half = max(0.5, 0.05 * abs(high))  # half a unit vanishes beside a large number
        low, high = low - half, high + half
    pad = 0.04 * (high - low)
    low, high = low if low == 0 else low - pad, high + pad
    decimals = min(max(2 - math.floor(math.log10(high - low)), 0), 6)
    x_ticks = ticks(begin, end, factors=(1, 2, 5, 10))  # whole tokens
    return Axes(begin, end, low, high, x_ticks, ticks(low, high, 5), decimals)


def tick_labels(values: Sequence[float]) -> list[str]:
    """Format all ticks with the decimals that the finest needs."""
    decimals = max((len(f"{value:.6f}".rstrip("0").partition(".")[2]) for value in values), default=0)
    return [number(value, decimals) for value in values]


# --- paths -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The rectangle of the plot on the canvas."""

    left: float
    top: float
    width: float
    height: float

    def place(self, axes: Axes, step: float, loss: float) -> str:
        x = self.left + self.width * step / STEPS
        y = self.top + self.height * (1 - axes.y_share(loss))
        return f"{round(x, 1):g} {round(y, 1):g}"


def line_path(curve: DrawnCurve, axes: Axes, frame: Frame) -> str:
    return "M" + "L".join(frame.place(axes, step, loss) for step, loss in enumerate(curve.mean))


def band_path(curve: DrawnCurve, axes: Axes, frame: Frame) -> str:
    """Return the outline of mean ± one standard deviation; empty where there is no spread."""
    if curve.block == "reference" or not any(curve.std):
        return ""
    pairs = list(enumerate(zip(curve.mean, curve.std, strict=True)))
    above = [frame.place(axes, step, min(mean + std, axes.high)) for step, (mean, std) in pairs]
    below = [frame.place(axes, step, max(mean - std, axes.low)) for step, (mean, std) in reversed(pairs)]
    return "M" + "L".join(above + below) + "Z"


# --- the standalone figure -------------------------------------------------------------------------------------------

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_FRAME = Frame(left=64, top=84, width=560, height=330)
_SIZE = (820, 480)
_NAME_SPACE = "http://www.w3.org/2000/svg"


def curves_svg(results: Results, methods: Sequence[str] | None = None) -> str:
    """Return an SVG of the mean curves; by default the best of each granularity, Random and the strongest oracle."""
    return _draw(results, shown_curves(results, methods))


def inline_svg(results: Results, methods: Sequence[str]) -> Markup:
    """Return `curves_svg` for a page of HTML, which needs no name space."""
    return Markup(curves_svg(results, methods).replace(f' xmlns="{_NAME_SPACE}"', ""))


def write_plots(results: Results, directory: Path | str) -> list[Path]:
    """Write `curves.svg`, and for each granularity `curves-NAME.svg` with its methods, Random and its oracle."""
    folder, curves = Path(directory), mean_curves(results)
    paths = [write_text(folder / "curves.svg", curves_svg(results))]
    for block, ending in ORACLES.items():
        names = [curve.name for curve in curves.values() if curve.block == block]
        if names:
            bounds = [name for name in ("Random", f"Optimal{ending}") if name in curves]
            paths.append(write_text(folder / f"curves-{block}.svg", curves_svg(results, names + bounds)))
    costs: tuple[Cost, ...] = ("passes", "seconds")
    for cost in costs:
        by_cost = results.by_cost(cost)
        if by_cost is not None:
            paths.append(write_text(folder / f"curves-{cost}.svg", curves_svg(by_cost)))
    return paths


def _share_title(results: Results) -> str:
    if results.cost == "seconds":
        return "From the predictor alone to the expert alone"
    if results.cost is not None:
        return f"Share of the {results.cost} of the expert alone"
    return "Budget: share of the tokens the expert writes"


def _draw(results: Results, curves: Sequence[DrawnCurve]) -> str:
    axes = fit_axes(curves, extent(results), beginning(results))
    timed = results.timing.methods if results.cost == "seconds" and results.timing else {}
    title = f"Deferral curves of the task {results.task}"
    width, height = _SIZE
    return element(
        "svg",
        element("title", title),
        element("rect", width=width, height=height, fill="#ffffff", rx=6),
        _svg_axes(results, axes),
        join(_svg_curve(curve, axes, min(0.13, 0.6 / len(curves))) for curve in curves),  # the more bands, the fainter
        join(_svg_dots(curve, timed.get(curve.name, ()), axes) for curve in curves),
        _svg_legend(curves),
        xmlns=_NAME_SPACE,
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        font_family=_FONT,
        font_size=12,
        fill=INK,
    )


def _svg_axes(results: Results, axes: Axes) -> Markup:
    left, top, right, bottom = _FRAME.left, _FRAME.top, _FRAME.left + _FRAME.width, _FRAME.top + _FRAME.height
    parts = [
        element("text", loss_title(results), x=16, y=28, font_size=13, font_weight=600),
        element("text", f"{deferred_title(results)}  →", x=right, y=bottom + 44, text_anchor="end", font_weight=600),
        element("text", _share_title(results), x=right, y=top - 32, text_anchor="end", fill=SOFT),
    ]
    for value, label in zip(axes.y_ticks, tick_labels(axes.y_ticks), strict=True):
        y = round(bottom - _FRAME.height * axes.y_share(value), 1)
        parts += [
            element("path", d=f"M{left} {y}H{right}", stroke=RULE),
            element("text", label, x=left - 10, y=y + 4, text_anchor="end", fill=SOFT),
        ]
    for value, label in zip(axes.x_ticks, tick_labels(axes.x_ticks), strict=True):
        x = round(left + _FRAME.width * axes.x_share(value), 1)
        parts += [
            element("path", d=f"M{x} {bottom}v5", stroke=SOFT),
            element("text", label, x=x, y=bottom + 20, text_anchor="middle", fill=SOFT),
        ]
    for percent in range(0, 101, 20):
        x = round(left + _FRAME.width * percent / 100, 1)
        parts += [
            element("path", d=f"M{x} {top}v-5", stroke=SOFT),
            element("text", f"{percent} %", x=x, y=top - 11, text_anchor="middle", fill=SOFT),
        ]
    parts.append(element("path", d=f"M{left} {bottom}H{right}", stroke=SOFT))
    return join(parts)


def _svg_curve(curve: DrawnCurve, axes: Axes, opacity: float) -> Markup:
    colour = LIGHT[curve.block][curve.shade]
    band = band_path(curve, axes, _FRAME)
    return element(
        "g",
        element("title", curve.name),
        element("path", d=band, fill=colour, fill_opacity=round(opacity, 3)) if band else "",
        _svg_line(line_path(curve, axes, _FRAME), curve),
    )


def _svg_dots(curve: DrawnCurve, timed: Sequence[TimedSetting], axes: Axes) -> Markup:
    """Draw measured seconds, as far as they are on the axis."""
    places = [
        _FRAME.place(axes, STEPS * axes.x_share(one.measured), one.loss).split()
        for one in timed
        if axes.begin <= one.measured <= axes.end and axes.low <= one.loss <= axes.high
    ]
    colour = LIGHT[curve.block][curve.shade]
    return join(element("circle", cx=x, cy=y, r=4, fill=colour, stroke="#ffffff") for x, y in places)


def _svg_line(path: str, curve: DrawnCurve) -> Markup:
    width = 1.6 if curve.block == "reference" else 2.2
    colour = LIGHT[curve.block][curve.shade]
    dash = curve.dash or None
    return element(
        "path", d=path, fill="none", stroke=colour, stroke_width=width, stroke_dasharray=dash, stroke_linejoin="round"
    )


def _svg_legend(curves: Sequence[DrawnCurve]) -> Markup:
    """Draw the legend at the right: the curves meet at both ends, where labels would collide."""
    x, y = _FRAME.left + _FRAME.width + 28, _FRAME.top + 4.0
    parts = []
    for block, title in BLOCKS.items():
        members = [curve for curve in curves if curve.block == block]
        if members:
            parts.append(element("text", title, x=x, y=y + 4, fill=SOFT, font_size=11, font_weight=600))
        for curve in members:
            y += 18
            parts += [_svg_line(f"M{x} {y}h24", curve), element("text", _shorten(curve.name), x=x + 32, y=y + 4)]
        y += 26 if members else 0
    return join(parts)


def _shorten(name: str) -> str:
    """Shorten a long name; the title of the curve holds the whole name."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
