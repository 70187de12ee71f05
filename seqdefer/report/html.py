"""One self-contained page for a run: curves, table, comparisons, provenance.

    write_report(load_results("runs/weather"), Path("runs/weather/report.html"))

The page is drawn here, whole: it reads and prints without a script. `assets/report.js` only adds the toggles and the
budget slider. Every string from the results goes through `plots.element`, which escapes it; nothing is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from seqdefer.evaluation.results import Block, Results
from seqdefer.report.markup import NBSP, Markup, element, join, number
from seqdefer.report.sections import (
    colour,
    comparisons_section,
    methods_section,
    notes_section,
    percent,
    provenance_section,
    scrolling,
    section,
    tick,
)
from seqdefer.report.style import BLOCKS, DARK, LIGHT
from seqdefer.report.svg import (
    STEPS,
    Axes,
    DrawnCurve,
    Frame,
    band_path,
    default_names,
    deferred_title,
    extent,
    fit_axes,
    line_path,
    loss_title,
    mean_curves,
    names_by_block,
    tick_labels,
)
from seqdefer.storage.files import write_text

PICTURES = "examples.html"  # what a task has drawn of a run
HEADLINE = 20  # the budget, in percent, that the page opens at
_CANVAS = Frame(0, 0, 1000, 1000)  # stretched to the plot's box by the page, so one drawing fits phone and desk
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Panel:
    """A section that a task adds, such as its tours. `html` is put in as it is: it must come from our own code."""

    title: str
    html: str


@dataclass(frozen=True)
class _Page:
    """What the sections share."""

    results: Results
    curves: Mapping[str, DrawnCurve]
    shown: frozenset[str]
    axes: Axes

    @property
    def has_spread(self) -> bool:
        return len(self.results.seeds) > 1

    @property
    def unit(self) -> str:
        """The loss's unit where its title ends in one: 'squared error (°C²)' does, '100 × (1 − ROUGE-1)' does not."""
        found = re.search(r"\(([^\s()]{1,8})\)$", self.results.units.loss)
        return f"{NBSP}{found[1]}" if found else ""

    def loss(self, value: float) -> str:
        return number(value, self.axes.decimals)


def panels_of(folder: Path) -> list[Panel]:
    """The drawings that a run left in its folder. Those that could do more than be looked at are not ours: left out."""
    path = folder / PICTURES
    html = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [Panel("Examples along the budget", html)] if html and is_harmless(html) else []


def is_harmless(html: str) -> bool:
    """Whether a fragment draws and writes only: no scripts, no handlers, no links, nothing fetched or embedded.

    Only the markup that `report.markup` writes is read, because browsers mend all other, each parser in its own way.
    What a style might fetch is not looked for: the page's content security policy forbids it.
    """
    place, open_tags = 0, list[str]()
    while place < len(html):
        token = _TOKEN.match(html, place)
        if token is None or not _is_plain(token, open_tags):
            return False
        place = token.end()
    return not open_tags


# Text, a style whole, a start tag with attributes in double quotes, an end tag.
_TOKEN = re.compile(
    r'[^<]+|(?P<style><style>[^<]*</style>)|<(?P<start>[a-z]+)(?P<attributes>(?: [a-zA-Z0-9-]+="[^"<>]*")*)>'
    r"|</(?P<end>[a-z]+)>"
)
_TEXT_TAGS = re.compile(
    "div|section|p|span|b|i|em|strong|small|mark|code|br|ul|ol|li|dl|dt|dd|table|thead|tbody|tr|th|td|figure|figcaption"
)
_DRAWING_TAGS = re.compile("g|path|circle|rect|line|polyline|polygon|text|tspan|title|desc")
# No `id` and no `data-...`: the page's script finds its own parts by them.
_ATTRIBUTES = re.compile(
    r"class|style|role|aria-[a-z]+|lang|dir|hidden|scope|colspan|rowspan|width|height|viewBox|preserveAspectRatio|xmlns"
    r"|d|points|pathLength|transform|[cdr]?[xy][12]?|r|opacity|visibility|(?:fill|stroke|font|text|letter|word)(?:-[a-z]+)*"
    r"|dominant-baseline|vector-effect|paint-order|shape-rendering"
)


def _is_plain(token: re.Match[str], open_tags: list[str]) -> bool:
    """Whether a token may stand where it does; what it opens or closes is noted. Inside a drawing browsers read a style
    as tags and leave the drawing at a tag of text; outside they read a title to its end as text."""
    is_in_drawing = "svg" in open_tags
    start, end = token["start"], token["end"]
    if end:
        return bool(open_tags) and open_tags.pop() == end
    if token["style"]:
        return not is_in_drawing
    if not start:
        return True
    is_at_home = start == "svg" or (_DRAWING_TAGS if is_in_drawing else _TEXT_TAGS).fullmatch(start)
    names = re.findall(r' ([a-zA-Z0-9-]+)="', token["attributes"])
    is_inside_words = open_tags[-1:] in (["title"], ["desc"])
    if start != "br":
        open_tags.append(start)
    return bool(is_at_home) and not is_inside_words and all(_ATTRIBUTES.fullmatch(name) for name in names)


def write_report(results: Results, path: Path | str, *, panels: Sequence[Panel] = ()) -> Path:
    """The page of a run, in one file that needs no other."""
    return write_text(Path(path), render_report(results, panels=panels))


def render_report(results: Results, *, panels: Sequence[Panel] = ()) -> str:
    curves = mean_curves(results)
    axes = fit_axes(curves.values(), extent(results))
    page = _Page(results, curves, frozenset(default_names(results, curves)), axes)
    body = element(
        "main",
        _header(page),
        _curves_section(page),
        methods_section(results),
        comparisons_section(results.comparisons),
        join(section(panel.title, Markup(panel.html)) for panel in panels),
        notes_section(results.notes),
        provenance_section(results.provenance),
    )
    return f"<!doctype html>\n{element('html', _head(results), element('body', body, _scripts(page)), lang='en')}\n"


# --- head, scripts ---------------------------------------------------------------------------------------------------


def _head(results: Results) -> Markup:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{results.task}: partial deferral, seqdefer"),
        element("style", Markup(_palette() + _asset("report.css"))),
    )


def _palette() -> str:
    light, dark = _variables(LIGHT), _variables(DARK)
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _variables(palette: Mapping[Block, tuple[str, ...]]) -> str:
    shades = [(block, index, shade) for block, row in palette.items() for index, shade in enumerate(row)]
    return "".join(f"--{block}-{index}:{shade};" for block, index, shade in shades)


def _asset(name: str) -> str:
    return files("seqdefer.report").joinpath("assets", name).read_text(encoding="utf-8")


def _scripts(page: _Page) -> Markup:
    series = [
        {"name": curve.name, "mean": _digits(curve.mean), "std": _digits(curve.std)} for curve in page.curves.values()
    ]
    axes = {"end": page.axes.end, "low": page.axes.low, "high": page.axes.high, "decimals": page.axes.decimals}
    data = _safe_json({**axes, "has_spread": page.has_spread, "series": series})
    script = element("script", Markup(_asset("report.js")))
    return join([element("script", Markup(data), type="application/json", id="data"), script])


def _digits(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _safe_json(value: Any) -> str:
    """JSON that cannot end its script element, whatever the names hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- header ----------------------------------------------------------------------------------------------------------


def _header(page: _Page) -> Markup:
    results = page.results
    n_seeds = len(results.seeds)
    facts = [
        f"preset {results.preset}",
        f"{n_seeds} seed" + "s" * (n_seeds != 1),
        f"sequences of up to {results.length} tokens",
    ]
    if results.provenance.version:
        facts.append(f"seqdefer {results.provenance.version}")
    title = element("h1", "Partial deferral: ", element("span", results.task, class_="task"))
    return element("header", title, element("p", " · ".join(facts), class_="facts"), _headline(page))


def _headline(page: _Page) -> Markup:
    """The one sentence to remember: the best method at a fifth of the budget, between its two ends."""
    methods = [curve for curve in page.curves.values() if curve.block != "reference"] or list(page.curves.values())
    best = min(methods, key=lambda curve: page.results.summary[curve.name].audc_mean)
    loss, alone, expert = best.mean[HEADLINE], best.mean[0], best.mean[STEPS]
    share = (alone - loss) / (alone - expert) if alone > expert else 0.0
    return element(
        "p",
        f"At a budget of {_in_percent(HEADLINE)} of the tokens, ",
        element("b", best.name),
        " has a loss of ",
        element("b", page.loss(loss) + page.unit),
        f"; the predictor alone has {page.loss(alone)}, the expert alone {page.loss(expert)}.",
        f" That is {_in_percent(100 * share)} of what the expert can gain." if 0 < share <= 1 else "",
        class_="lead",
    )


def _in_percent(value: float) -> str:
    return f"{value:.0f}{NBSP}%"


# --- curves ----------------------------------------------------------------------------------------------------------


def _curves_section(page: _Page) -> Markup:
    spread = f" The bands are ±{NBSP}1 standard deviation over the seeds." if page.has_spread else ""
    curves = (
        "Each curve shows what becomes of the loss as the expert writes more of the tokens; the closer to the lower "
        f"left, the better.{spread}"
    )
    audc = (
        f"AUDC is the area under such a curve, the loss summed over all budgets: lower is better. %{NBSP}improvement "
        "says how much smaller it is than that of Random, which defers by the flip of a coin."
    )
    figure = element("figure", _plot(page), _readout(page), _legend(page), class_="curves", id="curves")
    return section("Loss against budget", element("p", curves), element("p", audc), figure, _values_table(page))


def _plot(page: _Page) -> Markup:
    axes = page.axes
    y_ticks = zip(axes.y_ticks, tick_labels(axes.y_ticks), strict=True)
    x_ticks = zip(axes.x_ticks, tick_labels(axes.x_ticks), strict=True)
    slider = element(
        "input",
        type="range",
        min=0,
        max=STEPS,
        value=HEADLINE,
        class_="slider",
        aria_label="Budget in percent of the tokens",
    )
    return element(
        "div",
        element("p", loss_title(page.results), class_="y-title"),
        element("p", "Budget, share of the tokens", class_="top-title"),
        element(
            "div", join(tick(f"left:{value}%", _in_percent(value)) for value in range(0, 101, 20)), class_="scale top"
        ),
        element(
            "div",
            join(tick(f"bottom:{percent(axes.y_share(value))}", text) for value, text in y_ticks),
            class_="scale left",
        ),
        element("div", _drawing(page), element("div", class_="cross", hidden=True), class_="box"),
        element(
            "div",
            join(tick(f"left:{percent(value / axes.end)}", text) for value, text in x_ticks),
            class_="scale bottom",
        ),
        slider,
        element("p", deferred_title(page.results), class_="x-title"),
        class_="plot",
    )


def _drawing(page: _Page) -> Markup:
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


def _series(page: _Page, index: int, curve: DrawnCurve) -> Markup:
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
    """The curve's stroke, as its name's companion in legend and readout."""
    line = element("path", d="M0 4H26", class_="line", stroke_dasharray=curve.dash or None)
    return element(
        "svg", line, class_="key", viewBox="0 0 26 8", style=colour(curve.block, curve.shade), aria_hidden="true"
    )


def _readout(page: _Page) -> Markup:
    tokens = number(page.axes.end * HEADLINE / STEPS, 1)
    visible = [curve for curve in page.curves.values() if curve.name in page.shown]
    rows = []
    for curve in sorted(visible, key=lambda curve: curve.mean[HEADLINE]):
        spread = f"±{NBSP}{page.loss(curve.std[HEADLINE])}" if page.has_spread else ""
        cells = [_key(curve), element("span", curve.name, class_="name"), element("b", page.loss(curve.mean[HEADLINE]))]
        rows.append(element("li", *cells, element("small", spread)))
    title = f"Loss at {_in_percent(HEADLINE)} budget ({tokens} tokens)"
    return element("div", element("p", title, class_="at"), element("ol", *rows), _bands_switch(page), class_="readout")


def _bands_switch(page: _Page) -> Markup:
    if not any(band_path(curve, page.axes, _CANVAS) for curve in page.curves.values()):
        return Markup()
    box = element("input", type="checkbox", checked=True)
    return element("div", element("label", box, "Bands of ± 1 standard deviation"), class_="bands")


def _legend(page: _Page) -> Markup:
    order = {name: index for index, name in enumerate(page.curves)}
    groups = []
    for block, names in names_by_block(page.results).items():
        buttons = [_toggle(page, order[name], page.curves[name]) for name in names if name in order]
        title = element("p", BLOCKS[block], id=f"legend-{block}")
        groups.append(element("div", title, *buttons, role="group", aria_labelledby=f"legend-{block}"))
    return element("div", *groups, class_="legend")


def _toggle(page: _Page, index: int, curve: DrawnCurve) -> Markup:
    pressed = "true" if curve.name in page.shown else "false"
    name = element("span", curve.name, class_="name")
    return element("button", _key(curve), name, type="button", aria_pressed=pressed, data_series=index)


def _values_table(page: _Page) -> Markup:
    steps = range(0, STEPS + 1, 10)
    head = element(
        "tr", element("th", "Method", scope="col"), *(element("th", _in_percent(s), scope="col") for s in steps)
    )
    rows = [
        element(
            "tr",
            element("th", curve.name, scope="row"),
            *(element("td", page.loss(curve.mean[step])) for step in steps),
        )
        for curve in page.curves.values()
    ]
    caption = element("caption", f"{loss_title(page.results)}, mean over the seeds, at each budget")
    table = element("table", caption, element("thead", head), element("tbody", *rows), class_="values")
    return element("details", element("summary", "Curve values"), scrolling(table, "Curve values"))
