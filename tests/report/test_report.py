"""The report and its charts: well formed, self-contained, safe with hostile names, working in a browser."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from browsers import chromium
from rich.console import Console

from seqdefer.errors import InputError, OptionError
from seqdefer.evaluation.results import (
    Block,
    Comparison,
    ExpertCalls,
    MethodResult,
    PaperFigure,
    Provenance,
    Results,
    SeedResult,
    Units,
    summarise,
)
from seqdefer.report.html import render_report, write_report
from seqdefer.report.markup import Markup, element, number
from seqdefer.report.panels import Panel, is_harmless, panels_of
from seqdefer.report.style import BLOCKS
from seqdefer.report.svg import (
    STEPS,
    curves_svg,
    default_names,
    extent,
    fit_axes,
    mean_curves,
    sample,
    tick_labels,
    ticks,
    write_plots,
)
from seqdefer.report.terminal import results_table
from seqdefer.tasks.tsp.drawing import TourDrawing, draw_gallery

LENGTH = 6
# How far the curve of each method sags below the straight line of Random; negative: worse than Random.
SAG: dict[str, tuple[Block, float]] = {
    "Random": ("reference", 0.0),
    "OptimalWhole": ("reference", 1.6),
    "OptimalOneTime": ("reference", 2.2),
    "OptimalToken": ("reference", 5.0),
    "ChowMean": ("whole", 0.36),
    "ChowSum": ("whole", 0.24),
    "ChowQuantile0.0": ("whole", 0.10),
    "ChowQuantile0.4": ("whole", 0.18),
    "ChowQuantile0.8": ("whole", 0.20),
    "ChowQuantile1.0": ("whole", 0.14),
    "WholeModelEmbed": ("whole", -0.12),
    "OneTimeModel": ("once", 0.45),
    "OneTimeScore": ("once", 0.22),
    "OneTimeEntropy": ("once", 0.12),
    "TokenwiseModel": ("token", 1.1),
    "TokenwiseScore": ("token", -0.30),
    "TokenwiseEntropy": ("token", 0.55),
}
HOSTILE = "<script>alert(1)</script>\"'&</script>\x00\ud800"


def fake_method(name: str, rng: random.Random, ends: tuple[float, float]) -> MethodResult:
    granularity, sag = SAG[name]
    sag += 0 if granularity == "reference" else rng.gauss(0, 0.08)
    inner = sorted(rng.uniform(0, LENGTH) for _ in range(98))
    points = []
    for x in [0.0, *inner, float(LENGTH)]:
        share = x / LENGTH
        bend = (1 - math.exp(-sag * 2 * share)) / (1 - math.exp(-sag * 2)) if sag else share
        wobble = 0 if granularity == "reference" else 0.015 * math.sin(9 * share + sag * 40) * share * (1 - share) * 4
        points.append((x, ends[0] + (ends[1] - ends[0]) * (bend + wobble)))
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
    straight = LENGTH * sum(ends) / 2
    return MethodResult(granularity, area, 100 * (1 - area / straight), tuple(points))


def fake_results(n_seeds: int = 5) -> Results:
    """Make the results of a full weather run: 17 methods of 100 points each."""
    rng = random.Random(0)
    seeds = []
    for seed in range(n_seeds):
        ends = (1.9 + rng.gauss(0, 0.12), 0.24 + rng.gauss(0, 0.01))
        seeds.append(SeedResult(seed, {name: fake_method(name, rng, ends) for name in SAG}))
    paper = {"ChowMean": (5.26, 9.92), "OneTimeModel": (7.23, 11.80), "TokenwiseModel": (25.78, 1.33)}
    paper |= {"TokenwiseScore": (-28.50, 6.20), "WholeModelEmbed": (-5.28, 15.09), "Random": (0.0, 0.0)}
    return Results(
        task="weather",
        preset="full",
        length=LENGTH,
        seeds=tuple(seeds),
        summary=summarise(seeds),
        comparisons=(
            Comparison("TokenwiseModel", "ChowMean", 27.4, 22.1, 32.9),
            Comparison("TokenwiseModel", "TokenwiseScore", 38.9, 30.2, 47.7),
            Comparison("OneTimeModel", "ChowMean", 5.3, -1.6, 11.9),
            Comparison("WholeModelEmbed", "ChowMean", -10.2, -16.0, -4.1),
        ),
        paper={name: PaperFigure(None, None, mean, std) for name, (mean, std) in paper.items()},
        units=Units("squared error of the sequence (°C²)", "tokens per sequence"),
        notes=(
            "The noise of the simulated human is not given in the paper; here its standard deviation is 0.2 °C.",
            "OptimalToken is exact: all 64 decisions of a sequence are enumerated.",
        ),
        provenance=Provenance(
            version="0.1.0",
            command="seqdefer run weather --preset full --seeds 5 --out runs/weather",
            data={"jena": "sha256:5d41402abc4b2a76, 420 551 rows, 2009-01-01 to 2016-12-31"},
            models={"predictor": "LSTM 64, 18 000 parameters, a94f5374fce5", "expert": "truth + N(0, 0.2²)"},
            seeds=tuple(range(n_seeds)),
            machine={
                "cpu": "AMD EPYC 7763, 8 cores",
                "gpu": "NVIDIA A100-SXM4-40GB",
                "torch": "2.13.0",
                "os": "Linux 6.8",
            },
            seconds={"data": 3.2, "predictor": 95.0, "labels": 12.6, "rejectors": 241.8, "curves": 5.4},
            expert_calls=ExpertCalls(made=420_480, saved=4_063_360),
            settings={"epochs": 20, "learning_rate": 0.001, "surrogate": "logistic", "hidden": [64, 64]},
        ),
    )


@pytest.fixture(scope="module")
def results() -> Results:
    return fake_results()


@pytest.fixture(scope="module")
def page(results: Results) -> str:
    return render_report(results, panels=[Panel("Examples", "<p class='example'>one example</p>")])


class Walk(HTMLParser):
    """A parser that checks that tags are closed in order, and collects text, tags and scripts."""

    VOID = frozenset({"input", "meta", "link", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"duplicate attribute in <{tag}>"
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.text).append(data)


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_sampling_sorts_interpolates_and_is_level_past_the_end() -> None:
    losses = sample([(2.0, 2.0), (0.0, 4.0), (2.0, 1.0), (3.0, 0.0)], end=4.0)
    assert len(losses) == STEPS + 1
    assert losses[0] == 4.0
    assert losses[25] == pytest.approx(3.0)
    assert losses[50] == 1.0  # the lower end of a vertical step
    assert losses[75] == losses[100] == 0.0


def test_mean_and_spread_of_the_curves_by_hand() -> None:
    seeds = [
        SeedResult(0, {"ChowSum": MethodResult("whole", 1, 0, ((0.0, 1.0), (2.0, 1.0)))}),
        SeedResult(1, {"ChowSum": MethodResult("whole", 3, 0, ((0.0, 3.0), (1.0, 1.0), (2.0, -1.0)))}),
    ]
    curve = mean_curves(Results("toy", "p", 2, tuple(seeds), summarise(seeds)))["ChowSum"]
    assert (curve.mean[0], curve.mean[50], curve.mean[100]) == (2.0, 1.0, 0.0)
    assert curve.std[0] == pytest.approx(math.sqrt(2))
    assert curve.std[50] == 0


def test_default_curves_are_the_best_random_and_the_strongest_oracle(results: Results) -> None:
    names = default_names(results, mean_curves(results))
    assert set(names) == {"ChowMean", "OneTimeModel", "TokenwiseModel", "Random", "OptimalToken"}


def test_every_curve_looks_different(results: Results, page: str) -> None:
    curves = mean_curves(results)
    looks = [(curve.block, curve.shade, curve.dash) for curve in curves.values()]
    assert len(set(looks)) == len(SAG)
    for block in BLOCKS:
        ranked = sorted((curve for curve in curves.values() if curve.block == block), key=lambda curve: curve.rank)
        areas = [results.summary[curve.name].audc_mean for curve in ranked]
        in_order = [name for name, (granularity, _) in SAG.items() if granularity == block]
        assert areas == sorted(areas) if block != "reference" else [curve.name for curve in ranked] == in_order
        assert all(f"--c:var(--{block}-{curve.shade})" in page for curve in ranked)


def test_axis_ends_where_sequences_do() -> None:
    seed = SeedResult(0, {"Random": MethodResult("reference", 1, 0, ((0.0, 1.0), (14.5, 0.5)))})
    results = Results("text", "p", 20, (seed,), summarise([seed]))
    assert extent(results) == 14.5
    assert extent(replace(results, length=14)) == 14.5  # never cuts a curve


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 6, (0, 1, 2, 3, 4, 5, 6)), (0, 50, (0, 10, 20, 30, 40, 50)), (-0.3, 0.7, (-0.2, 0, 0.2, 0.4, 0.6))],
)
def test_ticks(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_a_tiny_range() -> None:
    assert ticks(0, 5e-324) == (0,)


@pytest.mark.parametrize(("title", "words"), [("error (°C²)", "1.25 °C²;"), ("100 × (1 − ROUGE-1)", "1.25;")])
def test_headline_has_a_unit_where_the_title_ends_in_one(results: Results, title: str, words: str) -> None:
    page = render_report(replace(results, units=Units(title)))
    assert words in " ".join("".join(Walk(page).text).split())


def test_tick_labels_share_their_decimals() -> None:
    assert tick_labels((-0.5, 0.0, 0.25)) == ["−0.50", "0.00", "0.25"]
    assert number(-0.001, 2) == "0.00"


def test_axes_fit_level_and_negative_curves(results: Results) -> None:
    curve = mean_curves(results)["Random"]
    level = replace(curve, mean=(3.0,) * (STEPS + 1), std=(0.0,) * (STEPS + 1))
    axes = fit_axes([level], 6)
    assert axes.low <= 3 <= axes.high
    assert axes.low < axes.high
    assert axes.x_ticks == (0, 1, 2, 3, 4, 5, 6)
    deep = fit_axes([replace(level, mean=tuple(-i / 10 for i in range(STEPS + 1)))], 6)
    assert deep.low <= -10
    assert deep.high >= 0
    lows = [fit_axes([replace(level, mean=(lowest, *[1.0] * STEPS))], 6).low for lowest in (0.0, 0.4, 0.6)]
    assert lows == [0, 0, pytest.approx(0.6 - 0.04 * 0.4)]  # from zero, unless half of the height stays empty


@pytest.mark.parametrize("point", [(0.0, 1e50), (0.0, -9e99), (5e-324, 1.0), (-3.0, 1.0), (9e99, 0.0)])
def test_extreme_curves_are_drawn(point: tuple[float, float]) -> None:
    """Half a unit around a level curve vanished beside a large loss, and an axis that ended near 0 had no ticks."""
    seed = SeedResult(0, {"ChowSum": MethodResult("whole", 1.0, 0.0, (point, point))})
    ElementTree.fromstring(curves_svg(Results("toy", "p", 2, (seed,), summarise([seed]))))


def test_terminal_table_has_blocks_and_unparsed_names(results: Results) -> None:
    seeds = [SeedResult(0, {"[/red] mine": results.seeds[0].methods["ChowSum"], **results.seeds[0].methods})]
    table = results_table(replace(results, summary=summarise(seeds), units=Units("error [K]")))
    out = StringIO()
    Console(file=out, width=120).print(table)
    for words in (*BLOCKS.values(), "[/red] mine", "error [K]"):
        assert words in out.getvalue()


def test_terminal_table_marks_the_best_and_quotes_the_paper(results: Results) -> None:
    best = {"ChowMean", "OneTimeModel", "TokenwiseModel"}
    for paper in (results.paper, {}):
        columns = results_table(replace(results, paper=paper)).columns
        bold = {cell for cell in columns[1].cells if "[bold]" in str(cell)}
        assert bold == {f"[bold]{row.audc_mean:.4g} ({row.audc_std:.2g})[/bold]"
                        for name, row in results.summary.items() if name in best}  # fmt: skip
        assert ["paper" in str(column.header) for column in columns] == [False] * 4 + [True] * bool(paper)


def test_svg_is_well_formed_and_complete(results: Results) -> None:
    root = ElementTree.fromstring(curves_svg(results))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join(root.itertext())
    for expected in ("TokenwiseModel", "squared error of the sequence (°C²)", "Deferred tokens per sequence", "20 %"):
        assert expected in words
    assert "ChowSum" not in words


def test_svg_of_chosen_methods_and_of_an_unknown_one(results: Results) -> None:
    words = " ".join(ElementTree.fromstring(curves_svg(results, ["ChowSum"])).itertext())
    assert "ChowSum" in words
    assert "TokenwiseModel" not in words
    with pytest.raises(OptionError, match="unknown method 'Chow'; available: ChowMean"):
        curves_svg(results, ["Chow"])


def test_write_plots(results: Results, tmp_path: Path) -> None:
    paths = write_plots(results, tmp_path)
    assert [path.name for path in paths] == ["curves.svg", "curves-whole.svg", "curves-once.svg", "curves-token.svg"]
    whole = " ".join(ElementTree.parse(paths[1]).getroot().itertext())
    assert "ChowQuantile0.4" in whole
    assert "OptimalWhole" in whole
    assert "OptimalToken" not in whole


def test_results_without_curves_fail() -> None:
    with pytest.raises(InputError, match="hold no curve to draw"):
        render_report(Results("toy", "p", 2, (), {}))


# --- the page --------------------------------------------------------------------------------------------------------


def test_page_is_well_formed_and_small(page: str) -> None:
    walk = Walk(page)
    identifiers = [attributes["id"] for _, attributes in walk.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert len(page.encode()) < 300_000


def test_page_needs_nothing_from_outside(page: str) -> None:
    for tag, attributes in Walk(page).tags:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not {"src", "href", "srcset", "xlink:href"} & attributes.keys()
    assert not re.search(r"https?:|url\(|@import", page)


def test_page_holds_the_numbers(results: Results, page: str) -> None:
    text = " ".join("".join(Walk(page).text).split())
    row = results.summary["TokenwiseModel"]
    assert f"{row.audc_mean:.3f} ({row.audc_std:.3f})" in text
    assert f"{row.improvement_mean:.2f} ({row.improvement_std:.2f})" in text
    assert "25.78 (1.33)" in text
    assert "At a budget of 20 % of the tokens, TokenwiseModel has a loss of " in text
    assert "+27.40 [22.10, 32.90]" in text
    assert "−10.20 [−16.00, −4.10]" in text
    for words in ("one example", "4 063 360", "4 min 02 s", "seqdefer run weather", "64 decisions", "[64, 64]"):
        assert words in text


def test_best_of_each_block_is_bold_and_references_are_not(page: str) -> None:
    bold = set(re.findall(r'<th scope="row"><b>(.*?)</b></th>', page))
    assert bold == {"ChowMean", "OneTimeModel", "TokenwiseModel"}


def test_readout_has_the_shown_curves_at_the_opening_budget(results: Results, page: str) -> None:
    curves = mean_curves(results)
    shown = sorted(default_names(results, curves), key=lambda name: curves[name].mean[20])
    readout = page[page.index('class="readout"') : page.index('class="legend"')]
    assert "(1.2 tokens)" in readout
    assert re.findall(r'class="name">(.*?)</span><b>(.*?)</b><small>±\xa0(.*?)<', readout) == [
        (name, f"{curves[name].mean[20]:.2f}", f"{curves[name].std[20]:.2f}") for name in shown
    ]
    pressed = re.findall(r'aria-pressed="true".*?class="name">(.*?)<', page)
    off = [int(index) for index in re.findall(r'class="series(?: reference)? off" data-series="(\d+)"', page)]
    assert set(pressed) == set(shown) == {name for index, name in enumerate(curves) if index not in off}


def test_dots_and_whiskers_of_comparisons_by_hand(results: Results, page: str) -> None:
    """The axis goes from -16 to 47.7."""
    dots = re.findall(
        r'class="whisker" style="left:(.*?)%;right:(.*?)%"></i><i class="(.*?)" style="left:(.*?)%"', page
    )
    for row, (left, right, look, at) in zip(results.comparisons, dots, strict=True):
        places = [float(left), 100 - float(right), float(at)]
        assert places == pytest.approx([100 * (x + 16) / 63.7 for x in (row.low, row.high, row.difference)], abs=0.01)
        assert look == ("dot" if row.low < 0 < row.high else "dot clear")


def test_embedded_json_is_finite_and_complete(page: str) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(name)

    data = json.loads(Walk(page).scripts[0], parse_constant=refuse)
    assert [len(series["mean"]) for series in data["series"]] == [STEPS + 1] * len(SAG)


def hostile_results(results: Results) -> Results:
    """Replace every string of a run by one that tries to break out of the page."""
    seeds = tuple(
        SeedResult(seed.seed, {name + HOSTILE: row for name, row in seed.methods.items()}) for seed in results.seeds
    )
    strings = {HOSTILE: HOSTILE}
    calls = replace(results.provenance, version=HOSTILE, command=HOSTILE, data=strings, models=strings, machine=strings)
    return replace(
        results,
        task=HOSTILE,
        preset=HOSTILE,
        seeds=seeds,
        summary=summarise(seeds),
        comparisons=(Comparison(HOSTILE, HOSTILE, 1.0, 0.5, 2.0),),
        paper={name + HOSTILE: figure for name, figure in results.paper.items()},
        units=Units(HOSTILE, HOSTILE),
        notes=(HOSTILE,),
        provenance=replace(calls, seconds={HOSTILE: 1.0}, settings={HOSTILE: [HOSTILE]}),
    )


def test_hostile_strings_stay_text(results: Results, tmp_path: Path) -> None:
    hostile = hostile_results(results)
    path = write_report(hostile, tmp_path / "report.html", panels=[Panel(HOSTILE, "<p>ours</p>")])
    walk = Walk(path.read_text(encoding="utf-8"))
    assert [tag for tag, _ in walk.tags].count("script") == 2  # the data and our own
    assert "<script>alert(1)</script>" in "".join(walk.text)
    assert not [name for _, attributes in walk.tags for name in attributes if name.startswith("on")]
    names = [series["name"] for series in json.loads(walk.scripts[0])["series"]]
    assert "ChowMean" + HOSTILE in names
    ElementTree.fromstring(curves_svg(hostile))


def test_markup_escapes_children_and_attributes() -> None:
    assert element("b", "<i>", title='"') == '<b title="&quot;">&lt;i&gt;</b>'
    assert element("b", Markup("<i></i>"), hidden=True, id=None, tabindex=0) == '<b hidden="" tabindex="0"><i></i></b>'


def gallery() -> str:
    """Draw tours with titles that try to break out of the page."""
    generator = torch.Generator().manual_seed(0)
    drawings = []
    for kept in (0, 3, 8):
        cities, order = torch.rand(8, 2, generator=generator), torch.randperm(8, generator=generator)
        authors, own = torch.arange(8) >= kept, torch.arange(8)
        drawings.append(TourDrawing(cities, order, authors, own, 12.5, kept / 8, title=HOSTILE if kept else "plain"))
    return str(draw_gallery(drawings))


GALLERY = gallery()
HARMLESS = {
    "the gallery of tours": GALLERY,
    "nothing": "",
    "words": "a &lt; b &amp; c > d — ±",
    "what markup writes": str(element("p", "a", element("br"), element("mark", "<b>", class_="expert"), hidden=True)),
    "a table": '<table><tbody><tr><th scope="row">a</th><td colspan="2">1</td></tr></tbody></table>',
    "a drawing in a drawing": '<svg viewBox="0 0 1 1"><g><svg><title>a</title><path d="M0 0"></path></svg></g></svg>',
    "a style for the page": "<style>.a > b { color: red }</style><p>a</p>",
}


@pytest.mark.parametrize("html", HARMLESS.values(), ids=HARMLESS)
def test_drawings_and_text_are_harmless(html: str) -> None:
    assert is_harmless(html)
    Walk(html)


HOSTILE_TAGS = (
    "script iframe object embed base meta link form input button select textarea template noscript noembed xmp "
    "plaintext listing frameset frame img image video audio source picture a area map canvas dialog details math "
    "marquee body html head nobr font foreignObject use animate animateTransform animateMotion set handler x-custom "
    "filter feImage mask pattern linearGradient marker symbol defs view switch metadata"
)
HOSTILE_ATTRIBUTES = (
    "onclick onload ONCLICK onClick onbegin on onfocus href xlink:href src srcset action formaction background data id "
    "name ping poster manifest style- xml:base data-series tabindex autofocus contenteditable accesskey popover slot "
    "is begin attributeName values to from http-equiv content srcdoc target download usemap"
)
HOSTILE_HTML = {
    **{f"<{tag}>": f"<p>a</p><{tag}>a</{tag}>" for tag in HOSTILE_TAGS.split()},
    **{f"<{tag}> in a drawing": f"<svg><{tag}>a</{tag}></svg>" for tag in HOSTILE_TAGS.split()},
    **{f"{name}=": f'<p {name}="alert(1)">a</p>' for name in HOSTILE_ATTRIBUTES.split()},
    **{f"{name}= in a drawing": f'<svg {name}="alert(1)"></svg>' for name in HOSTILE_ATTRIBUTES.split()},
    "a script in capitals": "<SCRIPT>alert(1)</SCRIPT>",
    "a link to a script": '<a href="javascript:alert(1)">a</a>',
    "a link in a drawing": '<svg><a xlink:href="javascript:alert(1)"><text>a</text></a></svg>',
    "a style in a drawing": "<svg><style>a{}</style></svg>",
    "a comment": "<!-- a -->",
    "a comment that ends early": "<!--><script>alert(1)</script>-->",
    "a comment that ends oddly": "<!-- --!><script>alert(1)</script> -->",
    "a doctype": "<!doctype html>",
    "a processing instruction": "<?xml version='1.0'?>",
    "character data": "<svg><![CDATA[<script>alert(1)</script>]]></svg>",
    "character data outside of drawings": "<![CDATA[x><script>alert(1)</script>]]>",
    "a drawing that stays open": "<svg><g></g>",
    "a paragraph that stays open": "<p>a",
    "an end that closes nothing": "</div></section><p>a</p>",
    "ends in the wrong order": "<div><p></div></p>",
    "an end with attributes": '<p></p onclick="a">',
    "half a tag": "<p>a</p><scr",
    "half an attribute": '<p class="',
    "a lone bracket": "a < b",
    "no quotes": "<p class=a>a</p>",
    "single quotes": "<p class='a'>a</p>",
    "no value": "<p hidden>a</p>",
    "a slash for a space": '<p/onclick="alert(1)">a</p>',
    "a line end for a space": '<p\nonclick="alert(1)">a</p>',
    "a form feed for a space": '<p\x0conclick="alert(1)">a</p>',
    "no space between attributes": '<p class="a"onclick="alert(1)">a</p>',
    "a null in a name": '<p on\x00click="alert(1)">a</p>',
    "a tag that closes itself": "<div/><p>a</p>",
    # Python's parser reads these in one way and browsers in another.
    "two equals signs": '<p class=="><script>alert(1)</script>">a</p>',
    "a title that browsers read to its end": '<title><b class="</title><script>alert(1)</script>"></b></title>',
    "a title in a title": '<svg><title><title><b class="</title><script>alert(1)</script>"></b></title></title></svg>',
    "a title after text has left the drawing": (
        '<svg><p></p><title><b class="</title><script>alert(1)</script>"></b></title></svg>'
    ),
    "a style that is in a drawing after all": (
        '<svg><desc><div></svg></div></desc><style><img src="x" onerror="alert(1)"></style>'
    ),
    "a style in the words of a drawing": "<svg><desc><style>a</style></desc></svg>",
    "tags in a style": "<style><script>alert(1)</script></style>",
    "a style that ends early": "<style></style ><script>alert(1)</script></style>",
    "a drawing in the words of a drawing": "<svg><title><svg></svg></title></svg>",
    "text in a drawing": "<svg><g><div>a</div></g></svg>",
    "shapes outside of a drawing": '<path d="M0 0"></path>',
    "brackets in an attribute": '<p class="<script>">a</p>',
}  # fmt: skip


@pytest.mark.parametrize("html", HOSTILE_HTML.values(), ids=HOSTILE_HTML)
def test_other_markup_is_not_harmless(html: str) -> None:
    """Alone, and after a harmless fragment."""
    assert not is_harmless(html)
    assert not is_harmless(GALLERY + html)


def test_the_policy_of_the_page_forbids_fetching(page: str) -> None:
    """CSS has too many ways to write an address, so the policy tells the browser to fetch nothing."""
    assert is_harmless('<p style="background:url(http://localhost/a.png)">a</p><style>@import "a.css";</style>')
    policies = [tag["content"] for name, tag in Walk(page).tags if tag.get("http-equiv") == "Content-Security-Policy"]
    allowed = dict(part.strip().split(" ", 1) for part in str(policies[0]).split(";"))
    assert allowed.pop("default-src") == "'none'"
    assert allowed == {"style-src": "'unsafe-inline'", "script-src": "'unsafe-inline'", "img-src": "data:"}
    assert page.index("Content-Security-Policy") < page.index("<style") < page.index("<body")


def test_panels_of_a_folder(tmp_path: Path, results: Results) -> None:
    assert panels_of(tmp_path) == []
    pictures = tmp_path / "examples.html"
    pictures.write_text(GALLERY, encoding="utf-8")
    (panel,) = panels_of(tmp_path)
    assert panel.html == GALLERY
    assert Walk(render_report(results, panels=[panel])).tags.count(("figure", {})) == 3
    for hostile in (GALLERY + "<script>alert(1)</script>", GALLERY[:-1], ""):
        pictures.write_text(hostile, encoding="utf-8")
        assert panels_of(tmp_path) == []
    pictures.write_bytes(b"<p>\xff\xfe</p>")  # not UTF-8: once a traceback
    assert [panel.html for panel in panels_of(tmp_path)] == ["<p>\ufffd\ufffd</p>"]


@pytest.mark.parametrize("names", [["Random"], ["Plugin"], ["TokenwiseModel", "Random"]])
def test_small_runs_are_drawn_too(names: list[str]) -> None:
    """One seed, no paper, no comparisons, an unknown method, no spread."""
    for last, gain in ((0.5, ["20"]), (1.0, []), (1.5, [])):
        row = MethodResult("token", 1.0, 0.0, ((0.0, 1.0), (2.0, last)))
        seed = SeedResult(0, dict.fromkeys(names, row))
        page = render_report(Results("toy", "smoke", 2, (seed,), summarise([seed])))
        text = "".join(Walk(page).text)
        assert "1 seed ·" in text
        assert "±" not in text
        assert "Comparisons" not in text
        assert re.findall(r"That is (\d+)\s% of the expert's gain", text) == gain


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Any]:
    with chromium(tmp_path / "profile") as opened:
        yield opened


READOUT = "return [...document.querySelectorAll('.readout li')].map(row => row.innerText.replace(/\\s+/g, ' '))"


@pytest.mark.browser
def test_toggles_pointer_and_slider(results: Results, driver: Any, tmp_path: Path) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    path = write_report(results, tmp_path / "report.html")
    driver.get(path.as_uri())
    before = driver.execute_script(READOUT)
    curves = mean_curves(results)
    assert len(before) == 5
    assert before[0].startswith("OptimalToken")
    button = driver.find_element("xpath", "//button[contains(., 'ChowSum')]")
    series = driver.find_element("css selector", f".series[data-series='{button.get_attribute('data-series')}']")
    assert not series.is_displayed()
    button.send_keys(webdriver.Keys.ENTER)  # by keyboard
    assert button.get_attribute("aria-pressed") == "true"
    assert series.is_displayed()

    box = driver.find_element("css selector", ".box")
    webdriver.ActionChains(driver).move_to_element_with_offset(box, 0, 0).perform()  # the centre: half of the budget
    rows = driver.execute_script(READOUT)
    assert f"ChowSum {curves['ChowSum'].mean[50]:.2f} ± {curves['ChowSum'].std[50]:.2f}" in rows
    assert "Loss at 50 % budget (3.0 tokens)" in driver.find_element("css selector", ".at").text

    slider = driver.find_element("css selector", ".slider")
    slider.send_keys(webdriver.Keys.ARROW_RIGHT)
    spoken = slider.get_attribute("aria-valuetext")
    assert spoken.startswith("51 percent")
    assert "ChowSum" in spoken
    button.click()
    assert len(driver.execute_script(READOUT)) == 5
    assert [entry for entry in driver.get_log("browser") if entry["level"] != "INFO"] == []


@pytest.mark.browser
def test_page_fits_a_phone_and_hostile_names_do_nothing(results: Results, driver: Any, tmp_path: Path) -> None:
    for name, run in {"plain": results, "hostile": hostile_results(results)}.items():
        path = write_report(run, tmp_path / f"{name}.html")
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(path.as_uri())
        driver.execute_script("document.querySelectorAll('details').forEach(part => { part.open = true })")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        assert [entry for entry in driver.get_log("browser") if entry["level"] != "INFO"] == []
