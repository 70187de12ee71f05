"""The interactive figure of the report: curves, budget slider, readout, legend, table of values.

It reads and prints without the script: `assets/report.js` only adds the toggles and the slider.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from seqdefer.evaluation.results import Results
from seqdefer.report.drawn_curves import (
    STEPS,
    DrawnCurve,
    default_names,
    deferred_title,
    extent,
    loss_title,
    mean_curves,
    names_by_block,
)
from seqdefer.report.markup import NBSP, Markup, colour, element, folded_table, join, number, percent, section
from seqdefer.report.style import BLOCKS
from seqdefer.report.svg import Axes, Frame, band_path, fit_axes, line_path, tick_labels

OPENING_BUDGET = 20  # percent: the budget of the headline, and where the slider starts
_CANVAS = Frame(0, 0, 1000, 1000)  # the page stretches it to the box of the plot, on phones and desktops


@dataclass(frozen=True)
class ReportCurves:
    """The curves of a run, with what their figure and the headline share."""

    results: Results
    curves: Mapping[str, DrawnCurve]
    shown: frozenset[str]
    axes: Axes

    @classmethod
    def of(cls, results: Results) -> ReportCurves:
        curves = mean_curves(results)
        shown = frozenset(default_names(results, curves))
        return cls(results, curves, shown, fit_axes(curves.values(), extent(results)))

    @property
    def has_spread(self) -> bool:
        return len(self.results.seeds) > 1

    @property
    def unit(self) -> str:
        """The unit at the end of the loss title: 'squared error (°C²)' has one, '100 × (1 − ROUGE-1)' has none."""
        found = re.search(r"\(([^\s()]{1,8})\)$", self.results.units.loss)
        return f"{NBSP}{found[1]}" if found else ""

    def loss(self, value: float) -> str:
        return number(value, self.axes.decimals)


def in_percent(value: float) -> str:
    return f"{value:.0f}{NBSP}%"


def curves_section(page: ReportCurves) -> Markup:
    spread = f" The bands are ±{NBSP}1 standard deviation over the seeds." if page.has_spread else ""
    curves = (
        "Each curve shows the loss as the expert writes more of the tokens; closer to the lower left is better."
        f"{spread}"
    )
    audc = (
        f"AUDC is the area under the curve, the loss summed over all budgets: lower is better. %{NBSP}improvement is "
        "the reduction of this area against Random, which flips a coin."
    )
    figure = element("figure", _plot(page), _readout(page), _legend(page), class_="curves", id="curves")
    return section(
        "Loss against budget", element("p", curves), element("p", audc), figure, _downloads(), _values_table(page)
    )


def _downloads() -> Markup:
    """Return the buttons of `assets/download.js`, which shows them."""
    labels = {
        "csv": "Download the curves (CSV)",
        "png": "Download the figure (PNG)",
        "link": "Copy a link to this view",
    }
    buttons = [element("button", text, type="button", data_save=kind) for kind, text in labels.items()]
    return element("p", *buttons, class_="downloads", hidden=True)


def _plot(page: ReportCurves) -> Markup:
    axes = page.axes
    y_ticks = zip(axes.y_ticks, tick_labels(axes.y_ticks), strict=True)
    x_ticks = zip(axes.x_ticks, tick_labels(axes.x_ticks), strict=True)
    label = "Budget in percent of the tokens"
    slider = element("input", type="range", min=0, max=STEPS, value=OPENING_BUDGET, class_="slider", aria_label=label)
    return element(
        "div",
        element("p", loss_title(page.results), class_="y-title"),
        element("p", "Budget, share of the tokens", class_="top-title"),
        _scale("top", ((f"left:{value}%", in_percent(value)) for value in range(0, 101, 20))),
        _scale("left", ((f"bottom:{percent(axes.y_share(value))}", text) for value, text in y_ticks)),
        element("div", _drawing(page), element("div", class_="cross", hidden=True), class_="box"),
        _scale("bottom", ((f"left:{percent(value / axes.end)}", text) for value, text in x_ticks)),
        slider,
        element("p", deferred_title(page.results), class_="x-title"),
        class_="plot",
    )


def _scale(side: str, ticks: Iterable[tuple[str, str]]) -> Markup:
    return element("div", *(element("span", text, style=style) for style, text in ticks), class_=f"scale {side}")


def _drawing(page: ReportCurves) -> Markup:
    label = "Deferral curves; their values are in the table 'Curve values' below."
    lines = [f"M0 {round(1000 * (1 - page.axes.y_share(value)), 1):g}H1000" for value in page.axes.y_ticks]
    return element(
        "svg",
        element("path", d="".join(lines), class_="grid"),
        join(_series(page, index, curve) for index, curve in enumerate(page.curves.values())),
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )


def _series(page: ReportCurves, index: int, curve: DrawnCurve) -> Markup:
    classes = ["series", *(["reference"] if curve.block == "reference" else [])]
    classes += [] if curve.name in page.shown else ["off"]
    band = band_path(curve, page.axes, _CANVAS)
    return element(
        "g",
        element("path", d=band, class_="band") if band else "",
        element("path", d=line_path(curve, page.axes, _CANVAS), class_="line", stroke_dasharray=curve.dash or None),
        class_=" ".join(classes),
        data_series=index,
        style=colour(curve.block, curve.shade),
    )


def _key(curve: DrawnCurve) -> Markup:
    """Return the stroke of a curve, shown beside its name in legend and readout."""
    line = element("path", d="M0 4H26", class_="line", stroke_dasharray=curve.dash or None)
    return element(
        "svg", line, class_="key", viewBox="0 0 26 8", style=colour(curve.block, curve.shade), aria_hidden="true"
    )


def _readout(page: ReportCurves) -> Markup:
    tokens = number(page.axes.end * OPENING_BUDGET / STEPS, 1)
    visible = [curve for curve in page.curves.values() if curve.name in page.shown]
    rows = []
    for curve in sorted(visible, key=lambda curve: curve.mean[OPENING_BUDGET]):
        loss, std = page.loss(curve.mean[OPENING_BUDGET]), page.loss(curve.std[OPENING_BUDGET])
        numbers = [element("b", loss), element("small", f"±{NBSP}{std}" if page.has_spread else "")]
        rows.append(element("li", _key(curve), element("span", curve.name, class_="name"), *numbers))
    title = f"Loss at {in_percent(OPENING_BUDGET)} budget ({tokens} tokens)"
    return element("div", element("p", title, class_="at"), element("ol", *rows), _bands_switch(page), class_="readout")


def _bands_switch(page: ReportCurves) -> Markup:
    if not any(band_path(curve, page.axes, _CANVAS) for curve in page.curves.values()):
        return Markup()
    box = element("input", type="checkbox", checked=True)
    return element("div", element("label", box, "Bands of ± 1 standard deviation"), class_="bands")


def _legend(page: ReportCurves) -> Markup:
    order = {name: index for index, name in enumerate(page.curves)}
    groups = []
    for block, names in names_by_block(page.results).items():
        buttons = [_toggle(page, order[name], page.curves[name]) for name in names if name in order]
        title = element("p", BLOCKS[block], id=f"legend-{block}")
        groups.append(element("div", title, *buttons, role="group", aria_labelledby=f"legend-{block}"))
    return element("div", *groups, class_="legend")


def _toggle(page: ReportCurves, index: int, curve: DrawnCurve) -> Markup:
    pressed = "true" if curve.name in page.shown else "false"
    name = element("span", curve.name, class_="name")
    about = page.results.about.get(curve.name) or None
    return element("button", _key(curve), name, type="button", aria_pressed=pressed, data_series=index, title=about)


def _values_table(page: ReportCurves) -> Markup:
    steps = range(0, STEPS + 1, 10)
    rows = [(curve.name, *(page.loss(curve.mean[step]) for step in steps)) for curve in page.curves.values()]
    caption = f"{loss_title(page.results)}, mean over the seeds, at each budget"
    return folded_table("Curve values", caption, ("Method", *map(in_percent, steps)), rows)
