"""The sections of the report that compare methods: the table of methods, and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from seqdefer.evaluation.results import Block, Comparison, PaperFigure, Results, Summary
from seqdefer.report.drawn_curves import names_by_block
from seqdefer.report.markup import NBSP, Markup, colour, element, join, number, percent, scrolling, section
from seqdefer.report.style import BLOCKS, HEADROOM, decimals_for
from seqdefer.report.svg import tick_labels, ticks

HEADINGS = ("Method", "AUDC", f"%{NBSP}improvement", f"%{NBSP}of headroom")
HOVER = {HEADINGS[-1]: HEADROOM}


def methods_section(results: Results) -> Markup:
    table = MethodTable.of(results)
    spread = f"Mean (standard deviation{'' if table.has_spread else ', which one run does not have'}) over the seeds. "
    mark = " The bar is measured, the vertical mark is the paper's." if table.has_paper else ""
    words = f"{spread}AUDC: lower is better. {HEADROOM} Bold: best of its block.{mark}"
    return section("Methods", element("p", words), scrolling(table.draw(), "Methods"))


@dataclass(frozen=True)
class _Scale:
    """A horizontal axis for bars and whiskers that always includes zero."""

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
class MethodTable:
    """The paper's table for one task: a block per granularity, bars on a common scale."""

    results: Results
    scale: _Scale
    decimals: int  # of AUDC
    has_paper: bool
    has_spread: bool

    @classmethod
    def of(cls, results: Results) -> MethodTable:
        paper = {name: figure for name, figure in results.paper.items() if name in results.summary}
        # Oracles have no bars: they would shrink all others.
        names = [name for block, row in names_by_block(results).items() if block != "reference" for name in row]
        ours = [results.summary[name].improvement_mean for name in names]
        scale = _Scale.around(ours + [paper[name].improvement for name in names if name in paper])
        decimals = decimals_for(row.audc_mean for row in results.summary.values())
        return cls(results, scale, decimals, bool(paper), len(results.seeds) > 1)

    def draw(self) -> Markup:
        cells = [element("th", name, scope="col", title=HOVER.get(name)) for name in HEADINGS]
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
            element("th", element("b", name) if audc == best[0] else name, scope="row", title=self.about(name)),
            element("td", _bold_if(audc == best[0], audc), self._spread(audc_std)),
            element("td", _bold_if(improvement == best[1], improvement), self._spread(improvement_std)),
            self._headroom(name),
            element("td", self._bar(row, paper) if best[0] else "", class_="bars"),
            _paper_cell(paper) if self.has_paper else "",
        )

    def about(self, name: str) -> str | None:
        return self.results.about.get(name) or None

    def _headroom(self, name: str) -> Markup:
        share = self.results.headroom(name)
        if share is None:
            return element("td", "–")
        return element("td", number(share[0], 0), self._spread(number(share[1], 0)))

    def _audc(self, value: float) -> str:
        return number(value, self.decimals)

    def _spread(self, std: str) -> Markup:
        return element("small", f" ({std if self.has_spread else '–'})")

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
    words = (
        f"Difference in points of %{NBSP}improvement, with its paired 95{NBSP}% bootstrap interval. Right of zero the "
        "first method is better; a filled dot marks an interval that excludes zero."
    )
    return section("Comparisons", element("p", words), forest(comparisons))


def forest(comparisons: Sequence[Comparison]) -> Markup:
    if not comparisons:
        return Markup()
    scale = _Scale.around([value for row in comparisons for value in (row.low, row.high)])
    marks = ticks(scale.low, scale.high, 5)
    axis = [element("span", text, style=scale.at(value)) for value, text in zip(marks, tick_labels(marks), strict=True)]
    rows = [_forest_row(row, scale) for row in comparisons]
    foot = element("li", element("span", *axis, class_="scale"), class_="axis", aria_hidden="true")
    return element("ul", *rows, foot, class_="forest")


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
