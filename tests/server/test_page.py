"""The page in a real browser, against the real server: it shows what the model writes."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsers import Browser
from servers import (
    IGNORE_BUDGETS,
    NumberCodec,
    RunningServer,
    SlowPredictor,
    metric,
    running,
    slow_model,
    toy_model,
    until,
    with_parts,
)

from seqdefer.budgets.caps import Cap
from seqdefer.budgets.prices import Prices, Rates
from seqdefer.budgets.quality import QualityPromise
from seqdefer.engine.speculative import SHOWN_SECONDS
from seqdefer.server import request

pytestmark = [pytest.mark.browser, IGNORE_BUDGETS]


# -- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [0, 30, 100])
def test_page_shows_what_the_model_writes(server: RunningServer, browser: Browser, percent: int) -> None:
    written = toy_model().generate(["7932"], percent / 100)
    browser.open(server)
    browser.write("7932", percent)
    assert browser.text("#tokens") == written.outputs[0]
    assert browser.authors == written.sources[0]
    n, by_expert, switches = len(written.sources[0]), written.expert_tokens[0], written.switches[0]
    stats = browser.text("#stats")
    assert f"{by_expert} of {n}{switches} switch" in stats
    assert f"share{100 * by_expert / n:.1f} %budget {percent} %" in stats
    spent = f"this one spent {100 * by_expert / n:.1f} % ({by_expert} of {n} tokens) at a budget of {percent} %"
    assert browser.text("#average") == f"This is one input: {spent}. Budgets hold on average over many inputs."
    status = browser.text("#status")
    assert status.startswith(f"Done: the expert wrote {by_expert} of {n} tokens ({100 * by_expert / n:.1f} %)")
    rows = browser.js(
        "[...document.querySelectorAll('#rows tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[2] for row in rows] == written.sources[0]
    assert [row[3] for row in rows] == [f"{float(score):.3f}".replace("-", "−") for score in written.scores[0, :n]]


def test_authors_differ_with_and_without_colour(server: RunningServer, browser: Browser) -> None:
    browser.open(server)
    browser.write("7932", 50)
    assert {"predictor", "expert"} == set(browser.authors)
    style = "(({color, fontWeight, textDecorationLine}) => [color, fontWeight, textDecorationLine])"
    (colour, weight, line), (expert_colour, expert_weight, expert_line) = (
        browser.js(f"{style}(getComputedStyle(document.querySelector('#tokens .{author} .word')))")
        for author in ("predictor", "expert")
    )
    assert colour != expert_colour
    assert int(weight) < int(expert_weight)
    assert (line, expert_line) == ("none", "underline")


def test_scores_by_pointer_and_keyboard(server: RunningServer, browser: Browser) -> None:
    from selenium.webdriver import ActionChains, Keys

    written = toy_model().generate(["7932"], 0.5)
    scores = [f"score {float(score):.3f}".replace("-", "−") for score in written.scores[0]]
    browser.open(server)
    browser.write("7932", 50)
    tokens = browser.driver.find_elements("css selector", "#tokens .token")
    ActionChains(browser.driver).move_to_element(tokens[3]).perform()
    expected = f"Token 4: {written.outputs[0][3]} · written by the {written.sources[0][3]} · {scores[3]}"
    assert browser.text("#readout").startswith(expected)
    ActionChains(browser.driver).move_to_element(browser.find("h1")).perform()
    assert browser.text("#readout").startswith("Hover over a token")
    browser.js("document.querySelector('#tokens [tabindex=\"0\"]').focus()")
    for place in (0, 1, 2):
        assert scores[place] in browser.text("#readout")
        assert scores[place] in browser.driver.switch_to.active_element.get_attribute("aria-label")
        browser.press(Keys.ARROW_RIGHT)
    browser.press(Keys.END, Keys.ARROW_RIGHT)
    assert f"Token {len(tokens)}:" in browser.text("#readout")
    browser.press(Keys.HOME)
    assert "Token 1:" in browser.text("#readout")
    assert browser.js("document.querySelectorAll('#tokens [tabindex=\"0\"]').length") == 1


@contextmanager
def four_tokens(browser: Browser) -> Iterator[tuple[RunningServer, SlowPredictor]]:
    """Show four tokens of 7932 at a budget of 50 %, with more to come. A step takes so long that it is shown."""
    model, slow = slow_model(SHOWN_SECONDS * 1.2, pause_after=4)
    slow.gate.clear()
    with running(model) as server:
        browser.open(server)
        browser.find("#text").send_keys("7932")
        browser.slide(50)
        browser.find("#run").click()
        browser.wait("document.querySelectorAll('#tokens .token').length === 4")
        yield server, slow


def test_tokens_appear_one_by_one_and_stop_ends_the_work(browser: Browser) -> None:
    with four_tokens(browser) as (server, slow):
        assert not browser.find("#run").is_enabled()
        assert browser.text("#status") == ""
        browser.find("#stop").click()
        browser.wait_until_done()
        assert browser.text("#status").startswith("Stopped after 4 tokens: the expert wrote ")
        until(lambda: metric(server, 'seqdefer_requests_total{path="/v1/deferral/complete",status="200"}') == 1)
        slow.gate.set()
        server.wait_until_idle()
        assert slow.calls == 5
        assert browser.runs[0]["words"].endswith("stopped")
        browser.run()
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.5).outputs[0]


def test_comments_in_a_stream_are_skipped(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "SILENT_SECONDS", 0.01)
    results: list[bool] = []
    has_next = request.ActiveRequest.has_next

    async def recorded(active: request.ActiveRequest) -> bool:
        results.append(await has_next(active))
        return results[-1]

    monkeypatch.setattr(request.ActiveRequest, "has_next", recorded)
    with four_tokens(browser) as (_, slow):
        n = len(results)
        until(lambda: len(results) > n + 3)
        slow.gate.set()
        browser.wait_until_done()
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.5).outputs[0]


def test_page_works_with_the_keyboard(server: RunningServer, browser: Browser) -> None:
    from selenium.webdriver import Keys

    browser.open(server)
    browser.js("document.body.focus()")

    def tab_to(name: str) -> None:
        for _ in range(30):
            browser.press(Keys.TAB)
            if browser.driver.switch_to.active_element.get_attribute("id") == name:
                return
        pytest.fail(f"{name} is not reached")

    tab_to("text")
    browser.press("7932")
    tab_to("budget")
    browser.press(Keys.HOME, *[Keys.ARROW_RIGHT] * 25)
    tab_to("run")
    browser.press(Keys.ENTER)
    browser.wait_until_done()
    written = toy_model().generate(["7932"], 0.25)
    assert browser.text("#tokens") == written.outputs[0]
    assert browser.driver.switch_to.active_element.get_attribute("id") == "run"
    tab_to("price-expert")
    browser.press(Keys.CONTROL, "a", Keys.NULL, "2")
    assert f"instead of {2 * len(written.sources[0])} for" in browser.text("#stats")


# -- budgets and runs ----------------------------------------------------------------------------------------------


def test_point_on_the_curve_is_the_budget(server: RunningServer, browser: Browser) -> None:
    from selenium.webdriver import ActionChains, Keys

    browser.open(server)
    setting = toy_model().setting(0.3)
    browser.slide(30)
    before, budget = browser.curve_point
    assert budget == "30"
    assert browser.text("#budget-shown") == "30 %"
    interval = f"[{100 * setting.low:.1f}, {100 * setting.high:.1f}]"
    assert browser.text("#spent") == f"On average, this spends {100 * setting.share:.1f} % {interval} of the tokens."
    browser.slide(60)
    after, budget = browser.curve_point
    assert (budget, after > before) == ("60", True)
    point = browser.find(".point")
    point.send_keys(Keys.ARROW_RIGHT, Keys.PAGE_DOWN)
    assert browser.value("#budget") == "51"
    point.send_keys(Keys.HOME)
    assert browser.curve_point[1] == "0"
    ActionChains(browser.driver).move_to_element(browser.find(".curve svg")).click().perform()
    assert 40 <= int(browser.value("#budget")) <= 55


def test_sweep_runs_can_be_compared(server: RunningServer, browser: Browser) -> None:
    browser.open(server)
    browser.find("#text").send_keys("7932")
    browser.run(button="#sweep")
    budgets = [0.0, 0.1, 0.2, 0.5, 1.0]
    written = [toy_model().generate(["7932"], budget) for budget in budgets]
    assert [run["budget"] for run in browser.runs] == [f"{100 * budget:.0f} %" for budget in budgets]
    assert [run["shown"] for run in browser.runs] == [one.outputs[0] for one in written]
    assert [int(run["words"].split()[0]) for run in browser.runs] == [one.expert_tokens[0] for one in written]
    browser.find("#text").clear()
    browser.driver.find_elements("css selector", ".lines button")[3].click()
    assert (browser.value("#text"), browser.value("#budget")) == ("7932", "50")
    assert browser.authors == written[3].sources[0]
    browser.find("#forget").click()
    assert browser.runs == []


def test_earlier_runs_do_not_slow_down_later_ones(server: RunningServer, browser: Browser) -> None:
    """Every token once serialized the inputs of all runs to compare them, which took seconds for long inputs."""
    browser.open(server)
    browser.find("#text").send_keys("7932")
    counted = "JSON.stringify = (...given) => { made += given[0] === '7932'; return make(...given); }"
    browser.js(f"(window.made = 0, window.make = JSON.stringify, {counted})")
    browser.run()
    alone = browser.js("window.made")
    browser.run(button="#sweep")
    browser.js("window.made = 0")
    browser.run()
    assert browser.js("window.made") == alone


@pytest.mark.parametrize(("button", "nearest"), [("#sweep", 20), ("#alone", 0)])
def test_budget_stays_where_the_user_left_it(
    server: RunningServer, browser: Browser, button: str, nearest: int
) -> None:
    """Regression: after a sweep it stood at 100 %, the last budget of the sweep."""
    browser.open(server)
    browser.find("#text").send_keys("7932")
    browser.slide(30)
    browser.run(button=button)
    assert browser.value("#budget") == "30"
    assert browser.text("#budget-shown") == "30 %"
    assert browser.curve_point[1] == "30"
    assert '"budget":0.3}' in browser.text("#as-curl")
    assert f"budget {nearest} %" in browser.text("#stats")
    assert browser.authors == toy_model().generate(["7932"], nearest / 100).sources[0]


def test_page_says_what_the_model_does_and_offers_examples(browser: Browser) -> None:
    class WordCodec(NumberCodec):
        about, hint, examples = "reads a number <b> and writes letters", "13", ("7932", "8" * 60)

    with running(with_parts(toy_model(), codec=WordCodec())) as server:
        browser.open(server)
        assert browser.text("#about").startswith("This model reads a number <b> and writes letters. A cheap predictor")
        assert browser.find("#text").get_attribute("placeholder") == "For example: 13"
        first, second = browser.driver.find_elements("css selector", "#examples button")
        assert second.text == f"{'8' * 40}…"
        box = browser.find("#text").rect["height"]
        assert 40 < box < 90  # two lines: inputs are short
        first.click()
        assert browser.value("#text") == "7932"
        assert "7932" in browser.text("#as-curl")
        browser.run()
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.2).outputs[0]


def test_prices_are_remembered(server: RunningServer, browser: Browser) -> None:
    browser.open(server)
    browser.find("#price-expert").clear()
    browser.find("#price-expert").send_keys("4")
    browser.open(server)
    assert browser.value("#price-expert") == "4"
    browser.write("7932", 50)
    written = toy_model().generate(["7932"], 0.5)
    n = len(written.sources[0])
    assert f"{written.cost(4, 1)[0]:.4g} instead of {4 * n} for the expert alone" in browser.text("#stats")


def test_snippets_run(server: RunningServer, browser: Browser) -> None:
    browser.open(server)
    browser.find("#text").send_keys("7932")
    browser.slide(30)
    written = toy_model().generate(["7932"], 0.3)
    ran = subprocess.run([sys.executable, "-c", browser.text("#as-python")], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0] == written.outputs[0]
    browser.find("#text").send_keys(' it\'s \\ "$HOME" `x`')
    print_body = f"curl() {{ printf '%s' \"${{@: -1}}\"; }}; {browser.text('#as-curl')}"
    ran = subprocess.run(["bash", "-c", print_body], capture_output=True, text=True, check=True)
    body = {"model": "toy", "input": '7932 it\'s \\ "$HOME" `x`', "deferral": {"budget": 0.3}}
    assert json.loads(ran.stdout) == body


# -- tours ---------------------------------------------------------------------------------------------------------

EDGES = "[...document.querySelectorAll('#field .edge')].map(edge => edge.getAttribute('class').replace('edge ', ''))"


def length_of(server: RunningServer, cities: Any, tour: Any) -> float:
    return float(server.model.served.codec.facts(cities, tour)["length"])


def test_losses_are_drawn_if_known(tour_server: RunningServer, browser: Browser) -> None:
    curve = tour_server.model.curve
    assert curve is not None
    browser.open(tour_server)
    assert browser.text("#curve-title") == "Deferral curve"
    assert curve.unit in browser.text("#curve-note")
    for percent, point in ((0, curve.points[0]), (100, curve.points[-1])):
        browser.slide(percent)
        assert browser.text(".value") == f"{point.loss:.2f}"


def test_the_promise_and_what_was_served_are_drawn(browser: Browser) -> None:
    model = toy_model()
    assert model.calibration is not None
    with running(model) as server:
        browser.open(server)
        assert browser.js("document.querySelectorAll('#promise .served').length") == 0
        browser.write("7932", 30)
        until(lambda: browser.js("document.querySelectorAll('#promise .served').length") == 1)
        served = server.get("/v1/deferral").json()["served"]
        assert served == [{"budget": 0.3, "inputs": 1, "share": pytest.approx(model.generate(["7932"], 0.3).share)}]
        band = browser.js("document.querySelector('#promise .band').getAttribute('d')")
        assert len(re.findall("[ML]", band)) == 101 + 2
        heights = [float(point.split(" ")[1]) for point in re.split("[ML]", band.rstrip("Z"))[1:]]
        limits = [model.calibration.limit(one) for one in model.calibration.settings]
        base, top = heights[-1], heights[limits.index(1.0)]
        for height, limit in zip(heights, limits, strict=False):
            assert (base - height) / (base - top) == pytest.approx(limit, abs=0.001)
        (dot,) = browser.js("[...document.querySelectorAll('#promise .served')].map(one => one.getAttribute('cy'))")
        assert (base - float(dot)) / (base - top) == pytest.approx(served[0]["share"], abs=0.001)
        assert "what 1 input spent since the server started" in browser.js(
            "document.querySelector('#promise-note').textContent"
        )


def test_a_promised_quality_is_the_default(browser: Browser) -> None:
    """Regression: the page asked for its share as a budget, rounded to a percent, which is another setting."""
    model = toy_model()
    assert model.calibration is not None
    threshold = model.calibration.for_budget(0.6).threshold
    quality = QualityPromise(threshold, 0.083, 2.0, 1.5, 60, 1.0, 0.9, "loss", model.rejector.fingerprint)
    promised, rounded = model.generate(["7932"], threshold=threshold), model.generate(["7932"], 0.08)
    assert promised.sources != rounded.sources
    with running(model, quality=quality) as server:
        browser.open(server)
        assert browser.text("#budget-shown") == "8.3 %"
        assert browser.text("#spent") == f"Default: {quality.in_words()}."
        browser.find("#text").send_keys("7932")
        assert '"input":"7932"}' in browser.text("#as-curl")
        assert 'model="toy",' in browser.text("#as-python")
        browser.run()
        assert browser.authors == promised.sources[0]
        assert "budget default, expected 8.3 %" in browser.text("#stats")
        assert "at the default setting" in browser.text("#average")
        browser.slide(8)
        browser.run()
        assert browser.authors == rounded.sources[0]
        first, second = browser.driver.find_elements("css selector", ".lines button")
        assert (first.text, second.text) == ("default", "8 %")
        first.click()
        assert browser.authors == promised.sources[0]
        assert browser.text("#budget-shown") == "8.3 %"


@pytest.mark.parametrize("percent", [0, 50, 100])
def test_tours_are_drawn(tour_server: RunningServer, cities: list[Any], browser: Browser, percent: int) -> None:
    generate, given = tour_server.model.generate, cities[0]
    written = generate([given], percent / 100)
    browser.open(tour_server)
    browser.paste(json.dumps(given))
    browser.slide(percent)
    browser.run()
    assert browser.text("#tokens") == " ".join(map(str, written.outputs[0]))
    assert browser.authors == written.sources[0]
    assert browser.js(EDGES) == [*written.sources[0][1:], written.sources[0][-1]]
    assert f"length{length_of(tour_server, given, written.outputs[0]):.4g}" in browser.text("#stats")
    browser.run(button="#alone")
    predictor, expert = (length_of(tour_server, given, generate([given], budget).outputs[0]) for budget in (0.0, 1.0))
    assert f"predictor alone {predictor:.4g}, expert alone {expert:.4g}" in browser.text("#stats")


def test_short_tours_have_significant_digits(tour_server: RunningServer, cities: list[Any], browser: Browser) -> None:
    given = [[x / 2_000_000, y / 2_000_000] for x, y in cities[0]]
    length = length_of(tour_server, given, tour_server.model.generate([given], 0.2).outputs[0])
    browser.open(tour_server)
    browser.paste(json.dumps(given))
    browser.slide(20)
    browser.run()
    assert length < 0.0005  # 0.000 with three decimals
    assert f"length{length:.4g}" in browser.text("#stats")
    assert browser.runs[0]["words"].startswith(f"length {length:.4g} · ")


def test_cities_are_added_moved_and_removed(tour_server: RunningServer, browser: Browser) -> None:
    from selenium.webdriver import ActionChains

    browser.open(tour_server)
    n = tour_server.model.served.spec.length
    assert browser.text("#text-note") == f"{n} of {n} cities"  # random at first
    browser.find("#clear").click()
    field = browser.find("#field svg")
    for place in (-60, 0, 60):
        ActionChains(browser.driver).move_to_element_with_offset(field, place, place).click().perform()
    assert browser.text("#text-note") == f"3 of {n} cities"
    browser.run()
    assert browser.text("#trouble") == f"There are 3 cities, but this model needs {n}: click to add one."
    before = json.loads(browser.value("#text"))
    dot = browser.driver.find_elements("css selector", "#field .city")[1]
    ActionChains(browser.driver).drag_and_drop_by_offset(dot, 50, 0).perform()
    after = json.loads(browser.value("#text"))
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1][0] > before[1][0]
    ActionChains(browser.driver).double_click(browser.find("#field .city")).perform()
    assert json.loads(browser.value("#text")) == after[1:]
    browser.find("#text").send_keys("x")
    browser.run()
    assert "cannot be read" in browser.text("#trouble")
    browser.find("#random").click()
    browser.run()
    assert len(browser.js(EDGES)) == n


# -- phones and pictures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "tour"])
def test_page_fits_a_phone(server: RunningServer, tour_server: RunningServer, browser: Browser, kind: str) -> None:
    browser.use_phone()
    browser.open(tour_server if kind == "tour" else server)
    if kind == "tokens":
        browser.find("#text").send_keys("7932")
    browser.run(button="#sweep")
    browser.find("#table-part summary").click()
    assert not browser.is_wider_than_phone
    heights = "[...document.querySelectorAll('#table-part th, #table-part td')].map(cell => cell.clientHeight)"
    assert max(browser.js(heights)) < 45  # one line: words are not broken


@pytest.mark.slow
def test_screenshot(chromium: Browser, tour_task: tuple[Any, Path], cities: list[Any], tmp_path: Path) -> None:
    script, picture = Path(__file__).parents[2] / "tools" / "screenshot.py", tmp_path / "page.png"
    subprocess.run([sys.executable, script, tour_task[1], json.dumps(cities[0]), "--out", picture], check=True)
    assert min(struct.unpack(">II", picture.read_bytes()[16:24])) > 1000


def test_a_server_with_prices_shows_money_and_caps(browser: Browser) -> None:
    """What the server counts takes the place of prices that users set."""
    model = with_parts(toy_model())
    model.use_prices(Prices(Rates(output=1e5), Rates(output=1e6, call=0.5), "EUR"))
    with running(model, caps=(Cap(tokens=2),)) as server:
        browser.open(server)
        browser.write("7932", 100)
        assert not browser.find("#prices").is_displayed()
        written = model.generate(["7932"], 1.0, cap=Cap(tokens=2))
        assert written.bills is not None
        bill = written.bills[0]
        assert f"spent{bill.spent:.4g} EUR" in browser.text("#stats")
        assert f"{'lost' if bill.saved < 0 else 'saved'}{abs(bill.saved):.4g} EUR" in browser.text("#stats")
        assert f"The cap kept {written.capped[0]} tokens from the expert." in browser.text("#remarks")  # type: ignore[index]
