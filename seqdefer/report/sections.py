"""The report's sections below the curves: methods, comparisons, notes, provenance; and what all sections share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from seqdefer.evaluation.results import Block, Comparison, PaperFigure, Provenance, Results, Summary
from seqdefer.report.markup import NBSP, Markup, element, join, number
from seqdefer.report.style import BLOCKS, decimals_for
from seqdefer.report.svg import names_by_block, tick_labels, ticks


def section(title: str, *children: str) -> Markup:
    return element("section", element("h2", title), *children)


def scrolling(table: Markup, label: str) -> Markup:
    """A box that scrolls by itself, so that the page never does; focusable, so that the keyboard can scroll it."""
    return element("div", table, class_="scrolling", tabindex=0, role="region", aria_label=label)


def tick(style: str, text: str) -> Markup:
    return element("span", text, style=style)


def percent(share: float) -> str:
    return f"{round(100 * share, 2):g}%"


def colour(block: str, shade: int = 0) -> str:
    return f"--c:var(--{block}-{shade})"


# --- table -----------------------------------------------------------------------------------------------------------


def methods_section(results: Results) -> Markup:
    table = _MethodTable.of(results)
    spread = "Mean (standard deviation) over the seeds. " if table.has_spread else ""
    mark = " The bar is ours, the upright mark the paper's." if table.has_paper else ""
    words = f"{spread}AUDC: lower is better. Bold: best of its block.{mark}"
    return section("Methods", element("p", words), scrolling(table.draw(), "Methods"))


@dataclass(frozen=True)
class _Scale:
    """A line of numbers from `low` to `high` that bars and whiskers are placed on, zero always on it."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Iterable[float]) -> _Scale:
        reach = [0.0, *values]
        low, high = min(reach), max(reach)
        return cls(low, high if high > low else low + 1)

    def share(self, value: float) -> float:
        return min(max((value - self.low) / (self.high - self.low), 0), 1)

    def at(self, value: float) -> str:
        return f"left:{percent(self.share(value))}"

    def span(self, start: float, stop: float) -> str:
        first, last = sorted((start, stop))
        return f"{self.at(first)};right:{percent(1 - self.share(last))}"


@dataclass(frozen=True)
class _MethodTable:
    """The paper's table for one task: a block per granularity, in-cell bars on one common scale."""

    results: Results
    scale: _Scale
    decimals: int  # of AUDC, the same in every row
    has_paper: bool
    has_spread: bool

    @classmethod
    def of(cls, results: Results) -> _MethodTable:
        paper = {name: figure for name, figure in results.paper.items() if name in results.summary}
        # The oracles would shrink every other bar, so they have none, and no say in the scale.
        names = [name for block, row in names_by_block(results).items() if block != "reference" for name in row]
        ours = [results.summary[name].improvement_mean for name in names]
        scale = _Scale.around(ours + [paper[name].improvement for name in names if name in paper])
        decimals = decimals_for(row.audc_mean for row in results.summary.values())
        return cls(results, scale, decimals, bool(paper), len(results.seeds) > 1)

    def draw(self) -> Markup:
        cells = [element("th", name, scope="col") for name in ("Method", "AUDC", f"%{NBSP}improvement")]
        cells.append(element("td"))  # above the bars
        cells += [element("th", f"Paper, %{NBSP}improvement", scope="col")] if self.has_paper else []
        bodies = [self._block(block, names, len(cells)) for block, names in names_by_block(self.results).items()]
        return element("table", element("thead", element("tr", *cells)), *bodies, class_="methods")

    def _block(self, block: Block, names: Sequence[str], width: int) -> Markup:
        title = element("tr", element("th", BLOCKS[block], scope="rowgroup", colspan=width), class_="block")
        rows = [self.results.summary[name] for name in names]
        best = ("", "")
        if block != "reference":  # compared as printed, so that ties are bold, as in the paper
            best = (self._audc(min(row.audc_mean for row in rows)), _points(max(row.improvement_mean for row in rows)))
        return element("tbody", title, *(self._row(name, best) for name in names), style=colour(block))

    def _row(self, name: str, best: tuple[str, str]) -> Markup:
        row, paper = self.results.summary[name], self.results.paper.get(name)
        audc, improvement = self._audc(row.audc_mean), _points(row.improvement_mean)
        audc_std, improvement_std = self._audc(row.audc_std), _points(row.improvement_std)
        return element(
            "tr",
            element("th", element("b", name) if audc == best[0] else name, scope="row"),
            element("td", _bold_if(audc == best[0], audc), self._spread(audc_std)),
            element("td", _bold_if(improvement == best[1], improvement), self._spread(improvement_std)),
            element("td", self._bar(row, paper) if best[0] else "", class_="bars"),
            _paper_cell(paper) if self.has_paper else "",
        )

    def _audc(self, value: float) -> str:
        return number(value, self.decimals)

    def _spread(self, std: str) -> Markup:
        return element("small", f" ({std})") if self.has_spread else Markup()

    def _bar(self, row: Summary, paper: PaperFigure | None) -> Markup:
        fill = element("i", class_="fill", style=self.scale.span(0, row.improvement_mean))
        zero = element("i", class_="zero", style=self.scale.at(0))
        mark = element("i", class_="mark", style=self.scale.at(paper.improvement)) if paper else ""
        return element("span", fill, zero, mark, class_="bar", aria_hidden="true")


def _points(value: float) -> str:
    return number(value, 2)


def _bold_if(condition: bool, text: str) -> str:
    return element("b", text) if condition else text


def _paper_cell(paper: PaperFigure | None) -> Markup:
    if paper is None:
        return element("td", "–")
    spread = "" if paper.improvement_std is None else element("small", f" ({_points(paper.improvement_std)})")
    return element("td", _points(paper.improvement), spread)


# --- comparisons -----------------------------------------------------------------------------------------------------


def comparisons_section(comparisons: Sequence[Comparison]) -> Markup:
    if not comparisons:
        return Markup()
    scale = _Scale.around([value for row in comparisons for value in (row.low, row.high)])
    words = (
        f"Difference in %{NBSP}improvement, in points, with its paired 95{NBSP}% bootstrap interval. Right of zero "
        "the first method is better; a filled dot marks an interval that leaves zero out."
    )
    marks = ticks(scale.low, scale.high, 5)
    axis = [tick(scale.at(value), text) for value, text in zip(marks, tick_labels(marks), strict=True)]
    rows = [_forest_row(row, scale) for row in comparisons]
    foot = element("li", element("span", *axis, class_="scale"), class_="axis", aria_hidden="true")
    return section("Comparisons", element("p", words), element("ul", *rows, foot, class_="forest"))


def _forest_row(row: Comparison, scale: _Scale) -> Markup:
    clear = row.low > 0 or row.high < 0
    sign = "+" if row.difference > 0 else ""
    text = join(
        [
            element("b", f"{sign}{_points(row.difference)}"),
            element("small", f" [{_points(row.low)}, {_points(row.high)}]"),
        ]
    )
    line = element(
        "span",
        element("i", class_="zero", style=scale.at(0)),
        element("i", class_="whisker", style=scale.span(row.low, row.high)),
        element("i", class_="dot clear" if clear else "dot", style=scale.at(row.difference)),
        class_="line",
        aria_hidden="true",
    )
    names = element("span", row.method, element("small", " against "), row.against, class_="names")
    return element("li", names, line, element("span", text, class_="figure"))


# --- notes, provenance -----------------------------------------------------------------------------------------------


def notes_section(notes: Sequence[str]) -> Markup:
    return section("Notes", element("ul", *(element("li", note) for note in notes))) if notes else Markup()


def provenance_section(provenance: Provenance) -> Markup:
    calls = provenance.expert_calls
    blocks = [
        _fact("Command", element("code", provenance.command)) if provenance.command else "",
        _fact("Seeds", ", ".join(map(str, provenance.seeds))) if provenance.seeds else "",
        _pairs("Data", provenance.data),
        _pairs("Models", provenance.models),
        _pairs("Machine", provenance.machine),
        _bars("Seconds per stage", provenance.seconds, _seconds),
        _bars(
            "Expert calls", {"made": calls.made, "saved": calls.saved}, lambda value: f"{value:,.0f}".replace(",", " ")
        ),
        _pairs("Settings", {key: _setting(value) for key, value in provenance.settings.items()}),
    ]
    details = element("details", element("summary", "Where these numbers come from"), element("dl", *blocks))
    return element("section", element("h2", "Provenance"), details, class_="provenance")


def _fact(name: str, *value: str) -> Markup:
    return element("div", element("dt", name), element("dd", *value))


def _pairs(name: str, values: Mapping[str, str]) -> Markup:
    rows = [element("tr", element("th", key, scope="row"), element("td", value)) for key, value in values.items()]
    return _fact(name, element("table", element("tbody", *rows))) if rows else Markup()


def _bars(name: str, values: Mapping[str, float], words: Callable[[float], str]) -> Markup:
    longest = max(values.values(), default=0)
    if longest <= 0:
        return Markup()
    rows = []
    for key, value in values.items():
        fill = element("i", class_="fill", style=f"left:0;right:{percent(1 - value / longest)}")
        bar = element("td", element("span", fill, class_="bar", aria_hidden="true"), class_="wide")
        rows.append(element("tr", element("th", key, scope="row"), element("td", words(value), class_="amount"), bar))
    return _fact(name, element("table", element("tbody", *rows)))


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
