"""The report of a run: one self-contained page with curves, methods, comparisons and provenance.

    write_report(load_results("runs/weather"), Path("runs/weather/report.html"))

The page is complete without its script. `report.markup` escapes every string from the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from seqdefer.budgets.prices import Prices
from seqdefer.evaluation.results import Provenance, Results
from seqdefer.report.comparisons import comparisons_section, methods_section
from seqdefer.report.costs import money_section, passes_section, seconds_section
from seqdefer.report.curve_figure import OPENING_BUDGET, ReportCurves, curves_section, in_percent
from seqdefer.report.drawn_curves import STEPS
from seqdefer.report.markup import Markup, element, join, percent, section
from seqdefer.report.panels import Panel
from seqdefer.report.promise_figure import promise_section
from seqdefer.report.style import DARK, LIGHT
from seqdefer.storage.files import write_text

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; media-src data:"


def write_report(
    results: Results,
    path: Path | str,
    *,
    panels: Sequence[Panel] = (),
    card: Path | None = None,
    prices: Prices | None = None,
) -> Path:
    """Write the page of a run as one file without external parts. `card` is a picture beside it, which sites show where
    somebody links to the page (`report.figure.write_card`). With prices, it says what shares of the tokens cost."""
    name = "" if card is None else card.name
    return write_text(Path(path), render_report(results, panels=panels, card=name, prices=prices))


def render_report(
    results: Results, *, panels: Sequence[Panel] = (), card: str = "", prices: Prices | None = None
) -> str:
    page = ReportCurves.of(results)
    body = element(
        "main",
        _header(page),
        curves_section(page),
        methods_section(results),
        comparisons_section(results.comparisons),
        passes_section(results),
        seconds_section(results),
        promise_section(results),
        money_section(results, prices),
        join(section(panel.title, Markup(panel.html)) for panel in panels),
        _notes_section(results.notes),
        _provenance_section(results.provenance),
    )
    head = _head(results, headline(page), card)
    return f"<!doctype html>\n{element('html', head, element('body', body, _scripts(page)), lang='en')}\n"


# --- head, scripts ---------------------------------------------------------------------------------------------------


def _head(results: Results, words: str, card: str) -> Markup:
    title = f"{results.task}: partial deferral, seqdefer"
    described = {"og:type": "article", "og:title": title, "og:description": words, "og:image": card}
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("meta", name="description", content=words),
        join(element("meta", property=name, content=text) for name, text in described.items() if text),
        element("style", Markup(_palette() + _asset("report.css"))),
    )


def _palette() -> str:
    light, dark = (
        "".join(
            f"--{block}-{index}:{shade};" for block, shades in palette.items() for index, shade in enumerate(shades)
        )
        for palette in (LIGHT, DARK)
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _asset(name: str) -> str:
    return files("seqdefer.report").joinpath("assets", name).read_text(encoding="utf-8")


def _scripts(page: ReportCurves) -> Markup:
    def rounded(values: Sequence[float]) -> list[float]:
        return [float(f"{value:.5g}") for value in values]

    curves = page.curves.values()
    series = [{"name": curve.name, "mean": rounded(curve.mean), "std": rounded(curve.std)} for curve in curves]
    axes = {"end": page.axes.end, "low": page.axes.low, "high": page.axes.high, "decimals": page.axes.decimals}
    data = {**axes, "has_spread": page.has_spread, "series": series}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for char in "&<>":  # names must not close the script element
        text = text.replace(char, f"\\u{ord(char):04x}")
    script = element("script", Markup(_asset("report.js") + _asset("download.js")))
    return join([element("script", Markup(text), type="application/json", id="data"), script])


# --- header ----------------------------------------------------------------------------------------------------------


def _header(page: ReportCurves) -> Markup:
    results = page.results
    n_seeds = len(results.seeds)
    facts = [
        f"recipe {results.recipe_in_words}",
        f"preset {results.preset}",
        f"{n_seeds} seed" + "s" * (n_seeds != 1),
        f"sequences of up to {results.length} tokens",
    ]
    if results.provenance.version:
        facts.append(f"seqdefer {results.provenance.version}")
    title = element("h1", "Partial deferral: ", element("span", results.task, class_="task"))
    lead = element("p", headline(page), class_="lead")
    return element("header", title, element("p", " · ".join(facts), class_="facts"), _sources(results), lead)


def _sources(results: Results) -> Markup:
    """Name the pair and the data, as far as the task describes them."""
    found = results.provenance
    named = {**{role: found.models.get(role) for role in ("predictor", "expert")}, "data": found.data.get("data")}
    rows = [element("span", element("b", f"{role}: "), text) for role, text in named.items() if text]
    return element("p", *rows, class_="facts sources") if rows else Markup()


def headline(page: ReportCurves) -> str:
    """Return the sentence on the best method at the opening budget, between predictor and expert."""
    methods = [curve for curve in page.curves.values() if curve.block != "reference"] or list(page.curves.values())
    best = min(methods, key=lambda curve: (curve.mean[OPENING_BUDGET], page.results.summary[curve.name].audc_mean))
    loss, alone, expert = best.mean[OPENING_BUDGET], best.mean[0], best.mean[STEPS]
    share = (alone - loss) / (alone - expert) if alone > expert else 0.0
    gain = f" That is {in_percent(100 * share)} of the expert's gain." if 0 < share <= 1 else ""
    least = min(methods, key=lambda curve: page.results.summary[curve.name].audc_mean)
    over_all = f" Over all budgets together, {least.name} is the best." if least is not best else ""
    return (
        f"At a budget of {in_percent(OPENING_BUDGET)} of the tokens, {best.name} has the lowest loss, "
        f"{page.loss(loss)}{page.unit}; the predictor alone has {page.loss(alone)}, the expert alone "
        f"{page.loss(expert)}.{gain}{over_all}"
    )


# --- notes, provenance -----------------------------------------------------------------------------------------------


def _notes_section(notes: Sequence[str]) -> Markup:
    return section("Notes", element("ul", *(element("li", note) for note in notes))) if notes else Markup()


def _provenance_section(provenance: Provenance) -> Markup:
    calls = {"made": provenance.expert_calls.made, "saved": provenance.expert_calls.saved}
    settings = {key: one if isinstance(one, str) else json.dumps(one) for key, one in provenance.settings.items()}
    blocks = [
        _fact("Command", element("code", provenance.command)) if provenance.command else "",
        _fact("Seeds", ", ".join(map(str, provenance.seeds))) if provenance.seeds else "",
        _pairs("Data", provenance.data),
        _pairs("Models", provenance.models),
        _pairs("Machine", provenance.machine),
        _bars("Seconds per stage", provenance.seconds, _seconds),
        _bars("Expert calls", calls, lambda value: f"{value:,.0f}".replace(",", " ")),
        _pairs("Settings", settings),
    ]
    details = element("details", element("summary", "Where these numbers come from"), element("dl", *blocks))
    return element("section", element("h2", "Provenance"), details, class_="provenance")


def _fact(name: str, *value: str) -> Markup:
    return element("div", element("dt", name), element("dd", *value))


def _pairs(name: str, values: Mapping[str, str]) -> Markup:
    rows = [element("tr", element("th", key, scope="row"), element("td", value)) for key, value in values.items()]
    return _fact(name, element("table", element("tbody", *rows))) if rows else Markup()


def _bars(name: str, values: Mapping[str, float], text: Callable[[float], str]) -> Markup:
    longest = max(values.values(), default=0)
    if longest <= 0:
        return Markup()
    rows = []
    for key, value in values.items():
        fill = element("i", class_="fill", style=f"left:0;right:{percent(1 - value / longest)}")
        bar = element("td", element("span", fill, class_="bar", aria_hidden="true"), class_="wide")
        rows.append(element("tr", element("th", key, scope="row"), element("td", text(value), class_="amount"), bar))
    return _fact(name, element("table", element("tbody", *rows)))


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
