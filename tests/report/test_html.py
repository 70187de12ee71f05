"""The page of a report: well formed, self-contained, safe with hostile names, working in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browsers import chromium
from fake_report import HOSTILE, SAG, Walk, against, timed
from labelling_toy import until

from seqdefer.evaluation.results import Comparison, CostCurve, MethodResult, Results, SeedResult, Units, summarise
from seqdefer.report.drawn_curves import STEPS, default_names, mean_curves
from seqdefer.report.html import render_report, write_report
from seqdefer.report.panels import Panel
from seqdefer.report.style import HEADROOM
from seqdefer.report.svg import curves_svg, write_plots
from seqdefer.report.terminal import results_table
from seqdefer.tasks.common.token_drawing import TokenDrawing, TokenExample, draw_tokens


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


def test_page_shows_passes_where_they_were_counted(results: Results, page: str) -> None:
    """A second figure and table, as safe and self-contained as the rest."""
    assert "Loss against expert passes" not in page
    counted = against(results, "passes", "expert passes in chunks", half_price)
    made = render_report(counted)
    test_page_needs_nothing_from_outside(made)
    text = " ".join("".join(Walk(made).text).split())
    assert "Loss against expert passes" in text
    assert "Expert passes in chunks" in text
    assert "+3.21 [1.00, 5.00]" in text
    found = counted.by_cost("passes")
    assert found is not None
    assert f"{found.summary['TokenwiseModel'].improvement_mean:.2f}" in text


def test_page_shows_seconds_where_the_pair_was_timed(results: Results, page: str) -> None:
    """Derived lines and measured dots are told apart, and the machine and the batch are named."""
    assert "Loss against seconds" not in page
    made = render_report(timed(results))
    test_page_needs_nothing_from_outside(made)
    text = " ".join("".join(Walk(made).text).split())
    for words in (
        "Loss against seconds", "cpu (abacus), 3 cores, with 64 test inputs, 32 at once", "+3.21 [1.00, 5.00]",
        "Lines are derived", "Dots are measured", "1 of 2 measured settings takes longer than the expert alone",
        "10 %13 s12 s1.08",
    ):  # fmt: skip
        assert words in text
    assert made.count("<circle") == 1  # the other is beyond the expert alone


def test_page_says_where_there_is_no_time_to_save(results: Results) -> None:
    timing = timed(results).timing
    assert timing is not None
    for predictor, words in (
        (30.0, "The expert takes no longer than the predictor"),
        (10.0, "every setting of every method"),
    ):
        made = render_report(replace(results, timing=replace(timing, predictor=predictor)))
        assert words in " ".join("".join(Walk(made).text).split())
        assert "<circle" not in made


def test_seconds_begin_with_those_of_the_predictor(results: Results, tmp_path: Path) -> None:
    by_second = timed(results).by_cost("seconds")
    assert by_second is not None
    drawn, plain = mean_curves(by_second)["TokenwiseModel"], mean_curves(results)["TokenwiseModel"]
    assert drawn.mean == pytest.approx(plain.mean)  # the same curve on another axis
    figure = " ".join(ElementTree.fromstring(curves_svg(by_second)).itertext())
    assert "Seconds per sequence" in figure
    assert "From the predictor alone to the expert alone" in figure
    assert [path.name for path in write_plots(timed(results), tmp_path)][-1] == "curves-seconds.svg"


def half_price(row: MethodResult) -> CostCurve:
    return CostCurve(row.audc / 2, 50 + row.improvement / 2, tuple((x / 2, y) for x, y in row.curve))


def test_page_holds_the_numbers(results: Results, page: str) -> None:
    text = " ".join("".join(Walk(page).text).split())
    row = results.summary["TokenwiseModel"]
    assert f"{row.audc_mean:.3f} ({row.audc_std:.3f})" in text
    assert f"{row.improvement_mean:.2f} ({row.improvement_std:.2f})" in text
    assert "25.78 (1.33)" in text
    assert "At a budget of 20 % of the tokens, TokenwiseModel has the lowest loss, " in text
    assert "+27.40 [22.10, 32.90]" in text
    assert "−10.20 [−16.00, −4.10]" in text
    for words in ("one example", "4 063 360", "4 min 02 s", "seqdefer run weather", "64 decisions", "[64, 64]"):
        assert words in text


def test_headline_names_the_best_method_at_its_budget() -> None:
    """Regression: it named the method with the smallest area, which may be second best at that budget."""
    early = MethodResult("token", 8.5, 0.0, ((0.0, 2.0), (1.2, 0.9), (6.0, 1.0)))
    late = MethodResult("once", 6.0, 0.0, ((0.0, 2.0), (1.2, 1.1), (3.0, 0.1), (6.0, 1.0)))
    seed = SeedResult(0, {"Early": early, "Late": late})
    text = "".join(Walk(render_report(Results("toy", "smoke", 6, (seed,), summarise([seed])))).text)
    assert "At a budget of 20\xa0% of the tokens, Early has the lowest loss, 0.90;" in text
    assert "Over all budgets together, Late is the best." in text


def test_page_names_the_pair_and_the_data_at_its_top(results: Results) -> None:
    found = replace(results.provenance, data={"data": "eight years of Jena"})
    text = "".join(Walk(render_report(replace(results, provenance=found))).text)
    top = text[: text.index("At a budget of")]
    for words in (found.models["predictor"], found.models["expert"], found.data["data"]):
        assert words in top


def test_methods_explain_themselves(results: Results) -> None:
    walk = Walk(render_report(replace(results, about={"ChowSum": "Sums <up> doubts."})))
    assert [tag for tag, found in walk.tags if found.get("title") == "Sums <up> doubts."] == ["button", "th"]


def test_shares_above_100_are_explained_wherever_they_are_printed(results: Results) -> None:
    assert "Above 100 %" in HEADROOM
    walk = Walk(render_report(results))
    assert [tag for tag, found in walk.tags if found.get("title") == HEADROOM] == ["th"]
    assert HEADROOM in "".join(walk.text)
    assert HEADROOM in str(results_table(results).caption)
    docs = Path(__file__).parents[2] / "docs"
    for page in ("concepts/curves.md", "speech.md", "results.md"):
        assert HEADROOM in " ".join((docs / page).read_text("utf-8").replace("\n> ", "\n").split()), page


def test_page_offers_its_card_to_other_sites(results: Results) -> None:
    found = [
        attributes
        for card in ("", "card.png")
        for _, attributes in Walk(render_report(results, card=card)).tags
        if attributes.get("property") == "og:image"
    ]
    assert [one["content"] for one in found] == ["card.png"]


def test_one_run_has_no_standard_deviation(results: Results) -> None:
    one = replace(results, seeds=results.seeds[:1], summary=summarise(results.seeds[:1]))
    text = " ".join("".join(Walk(render_report(one)).text).split())
    row = one.summary["TokenwiseModel"]
    assert f"{row.improvement_mean:.2f} (–)" in text
    cells = [str(cell) for column in results_table(one).columns[1:3] for cell in column.cells]
    assert any(f"{row.audc_mean:.3f} (–)" in cell for cell in cells)
    assert not any("(0" in cell for cell in cells)


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
def test_files_and_the_link_hold_what_is_shown(results: Results, driver: Any, tmp_path: Path) -> None:
    path = write_report(results, tmp_path / "report.html")
    driver.get(f"{path.as_uri()}#budget=35&show=Random,ChowSum,NoSuchMethod")
    curves = mean_curves(results)
    rows = driver.execute_script(READOUT)
    assert [row.split()[0] for row in rows] == ["ChowSum", "Random"]
    assert f"{curves['ChowSum'].mean[35]:.2f}" in rows[0]
    driver.find_element("xpath", "//button[contains(., 'ChowMean')]").click()
    assert driver.current_url.endswith("#budget=35&show=Random,ChowMean,ChowSum")

    driver.execute_script(
        "window.saved = []; URL.createObjectURL = blob => { saved.push(blob); return 'blob:null/x' };"
        "HTMLAnchorElement.prototype.click = () => {}"
    )
    for kind in ("csv", "png"):
        driver.find_element("css selector", f"[data-save={kind}]").click()
    until(lambda: driver.execute_script("return saved.length") == 2)
    text, image = driver.execute_async_script(
        "const done = arguments[0]; Promise.all([saved[0].text(), createImageBitmap(saved[1])])"
        ".then(([text, image]) => done([text, [image.width, image.height]]))"
    )
    assert image == [1640, 960]
    head, *lines = [line.split(",") for line in text.splitlines()]
    assert len(lines) == STEPS + 1
    column = head.index('"ChowSum mean"')
    assert float(lines[20][0]) == 0.2
    assert [float(line[column]) for line in lines] == pytest.approx(curves["ChowSum"].mean, rel=1e-4)
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


@pytest.mark.browser
def test_clips_of_examples_can_be_played(results: Results, driver: Any, tmp_path: Path) -> None:
    """The policy of the page allows sound that is part of it."""
    pytest.importorskip("soundfile", reason="needs the extra 'speech'")
    from seqdefer.tasks.speech.audio import to_flac

    tone = np.sin(np.arange(24_000) / 8).astype(np.float32) / 2
    words = TokenDrawing([" one", " two"], [False, True], [-1.0, 1.0], "budget 50 %")
    panel = Panel("Examples", draw_tokens([TokenExample("clip.wav", "one two", [words], to_flac(tone))]))
    driver.get(write_report(results, tmp_path / "report.html", panels=[panel]).as_uri())
    sound = "(sound => [sound.readyState, sound.duration])(document.querySelector('audio'))"
    until(lambda: driver.execute_script(f"return {sound}")[0] == 4)  # enough is there to play it to its end
    assert driver.execute_script(f"return {sound}")[1] == 1.5
    assert driver.get_log("browser") == []
