"""Curves as SVG: sampling, axes, what is drawn, and what is written to files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_report import SAG, Walk

from seqdefer.errors import InputError, OptionError
from seqdefer.evaluation.results import MethodResult, Results, SeedResult, Units, summarise
from seqdefer.report.drawn_curves import STEPS, default_names, extent, mean_curves, sample
from seqdefer.report.html import render_report
from seqdefer.report.markup import number
from seqdefer.report.style import BLOCKS
from seqdefer.report.svg import curves_svg, fit_axes, tick_labels, ticks, write_plots


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
