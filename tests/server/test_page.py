"""The page in a real browser, against the real server: it shows what the model writes, to everybody, and obeys."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from toy_pair import LetterCodec

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("openai", reason="needs the official client: pip install openai")

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server import working
from seqdefer.server.gate import Gate
from seqdefer.server.limits import Limits
from seqdefer.server.pages import HEADERS, TYPES
from tests.report.test_report import find_browser
from tests.server.test_app import NumberCodec, Running, metric, running, toy_model, until, with_parts
from tests.server.test_deferral import N_CITIES, cities, home, model_of, tours  # noqa: F401, fixtures
from tests.server.test_faults import Faulty

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning"),
]
FILES = sorted(path.name for path in resources.files("seqdefer.server").joinpath("page").iterdir())
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}


# -- the files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(toy_model()) as server:
        yield server


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_files_come_with_types_and_a_strict_policy(served: Running, path: str) -> None:
    answer = served.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(TYPES[Path(path).suffix or ".html"])
    assert answer.headers.items() >= HEADERS.items()
    for given in (answer.headers["etag"], f'"other", W/{answer.headers["etag"]}'):
        again = served.get(path, headers={"if-none-match": given})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == answer.headers["etag"]
    assert served.get(path, headers={"if-none-match": '"other"'}).content == answer.content
    head = served.http.head(f"{served.address}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("name", ["nothing.js", "../pages.py", "..%2fpages.py", "%00"])
def test_there_are_no_other_files(served: Running, name: str) -> None:
    answer = served.get(f"/page/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_a_missing_file_says_which_there_are(served: Running) -> None:
    message = served.get("/page/pgae.js").json()["error"]["message"]
    assert message == f"the page has no file 'pgae.js'; there are {', '.join(FILES)}"


@pytest.mark.parametrize("name", FILES)
def test_files_load_nothing_from_elsewhere_and_write_no_html(name: str) -> None:
    text = resources.files("seqdefer.server").joinpath("page", name).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text)
    if name.endswith(".html"):
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def brightness(colour: str) -> float:
    """WCAG's relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out(scheme: str) -> None:
    text = resources.files("seqdefer.server").joinpath("page", "page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", text.split("color-scheme: ")[1 if scheme == "light" else 3]))
    pairs = {
        "paper": ("ink", "soft", "predictor", "expert", "accent"), "ground": ("ink", "soft", "predictor", "expert"),
        "field": ("ink", "soft", "trouble"), "expert-ground": ("expert",), "accent": ("on-accent",),
        "trouble-ground": ("trouble",),
    }  # fmt: skip
    for ground, words in pairs.items():
        for word in words:
            dark, light = sorted((brightness(colours[word]), brightness(colours[ground])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{word} on {ground}"


# -- a browser -----------------------------------------------------------------------------------------------------


class Browser:
    """What somebody does with the page, and what he sees."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.servers = driver, set[str]()

    def open(self, server: Running, *, has_key: bool = True) -> None:
        self.servers.add(f"{server.address}/")
        self.driver.get(server.address)
        if has_key:
            self.wait("!document.getElementById('board').hidden")

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.find(selector).get_attribute("textContent")).replace("\xa0", " ")

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {code}", *arguments)

    def wait(self, code: str) -> None:
        until(lambda: self.js(code), 10)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def slide(self, percent: int) -> None:
        from selenium.webdriver import Keys

        slider = self.find("#budget")
        slider.send_keys(Keys.HOME, Keys.ARROW_RIGHT * percent)

    def run(self, *, button: str = "#run") -> None:
        self.find(button).click()
        self.wait_until_done()

    def wait_until_done(self) -> None:
        said = "['status', 'trouble'].some(id => document.getElementById(id).textContent)"
        self.wait(f"document.getElementById('stop').disabled && {said}")

    def write(self, text: str, percent: int) -> None:
        self.find("#text").clear()
        self.find("#text").send_keys(text)
        self.slide(percent)
        self.run()

    @property
    def authors(self) -> list[str]:
        classes = self.js("[...document.querySelectorAll('#tokens .token')].map(token => token.className)")
        return [name.removeprefix("token ") for name in classes]

    @property
    def runs(self) -> list[dict[str, str]]:
        lines = "[...document.querySelectorAll('.lines > li')].map(line => ({budget: line.children[0].textContent, "
        lines += "shown: line.children[1].textContent, words: line.children[2].textContent}))"
        found: list[dict[str, str]] = self.js(lines)
        return [{name: value.replace("\xa0", " ") for name, value in line.items()} for line in found]

    def is_too_wide_for_a_phone(self) -> bool:
        self.js("document.querySelectorAll('details').forEach(part => { part.open = true })")
        return int(self.js("document.documentElement.scrollWidth")) > PHONE["width"]

    def logged(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked_for(self) -> set[str]:
        """Addresses of everything that was fetched."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return {url for url in sent if not url.startswith(("data:", "chrome:", "about:"))}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    found = find_browser()
    if found is None:
        pytest.skip("needs chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    flags += "disable-component-update disable-sync disable-dev-shm-usage window-size=1280,1000 "
    flags += f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    for flag in flags.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    yield Browser(driver)
    driver.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Whatever a test does, the page complains of nothing and asks nobody else."""
    chromium.driver.get("about:blank")
    chromium.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.logged(), chromium.asked_for()
    yield chromium
    assert chromium.logged() == []
    assert [url for url in chromium.asked_for() if not url.startswith(tuple(chromium.servers))] == []


# -- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize("percent", [0, 30, 100])
def test_what_is_shown_is_what_the_model_writes(served: Running, browser: Browser, percent: int) -> None:
    written = toy_model().generate(["7932"], percent / 100)
    browser.open(served)
    browser.write("7932", percent)
    assert browser.text("#tokens") == written.outputs[0]
    assert browser.authors == written.sources[0]
    n, by_expert, switches = len(written.sources[0]), written.expert_tokens[0], written.switches[0]
    stats = browser.text("#stats")
    assert f"{by_expert} of {n}{switches} switch" in stats
    assert f"share{100 * by_expert / n:.1f} %asked {percent} %" in stats
    said = browser.text("#status")
    assert said.startswith(f"Done: the expert wrote {by_expert} of {n} tokens ({100 * by_expert / n:.1f} %)")
    rows = browser.js(
        "[...document.querySelectorAll('#rows tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[2] for row in rows] == written.sources[0]
    scores = [f"{float(score):.3f}".replace("-", "−") for score in written.scores[0, :n]]
    assert [row[3] for row in rows] == scores


@pytest.mark.browser
def test_authors_differ_in_colour_and_without(served: Running, browser: Browser) -> None:
    browser.open(served)
    browser.write("7932", 50)
    assert {"predictor", "expert"} == set(browser.authors)
    look = "(({color, fontWeight, textDecorationLine}) => [color, fontWeight, textDecorationLine])"
    shown = [
        browser.js(f"{look}(getComputedStyle(document.querySelector('#tokens .{author} .word')))")
        for author in ("predictor", "expert")
    ]
    (quiet, light, nothing), (strong, heavy, line) = shown
    assert quiet != strong
    assert int(light) < int(heavy)
    assert (nothing, line) == ("none", "underline")


@pytest.mark.browser
def test_scores_are_shown_to_pointers_and_keys(served: Running, browser: Browser) -> None:
    from selenium.webdriver import ActionChains, Keys

    written = toy_model().generate(["7932"], 0.5)
    scores = [f"score {float(score):.3f}".replace("-", "−") for score in written.scores[0]]
    browser.open(served)
    browser.write("7932", 50)
    tokens = browser.driver.find_elements("css selector", "#tokens .token")
    ActionChains(browser.driver).move_to_element(tokens[3]).perform()
    readout = browser.text("#readout")
    assert readout.startswith(
        f"Token 4: {written.outputs[0][3]} · written by the {written.sources[0][3]} · {scores[3]}"
    )
    ActionChains(browser.driver).move_to_element(browser.find("h1")).perform()
    assert browser.text("#readout").startswith("Point at a token")
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


class Pausing:
    """A predictor that proposes four times, and then waits."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked, self.may_go = inner, 0, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: Any) -> Any:
        self.asked += 1
        if self.asked > 4:
            assert self.may_go.wait(60)
        return self.inner.propose(state)


def pausing_model() -> tuple[DeferringModel, Pausing]:
    pausing = Pausing(toy_model().served.predictor)
    return with_parts(toy_model(), predictor=pausing), pausing


@contextmanager
def four_tokens_of(browser: Browser) -> Iterator[tuple[Running, Pausing]]:
    """A page that shows so many of 7932 at half a budget, and waits for more."""
    model, pausing = pausing_model()
    with running(model) as server:
        browser.open(server)
        browser.find("#text").send_keys("7932")
        browser.slide(50)
        browser.find("#run").click()
        browser.wait("document.querySelectorAll('#tokens .token').length === 4")
        yield server, pausing


@pytest.mark.browser
def test_tokens_appear_as_they_are_written_and_stop_ends_the_work(browser: Browser) -> None:
    with four_tokens_of(browser) as (server, pausing):
        assert not browser.find("#run").is_enabled()
        assert browser.text("#status") == ""  # said once, at the end
        browser.find("#stop").click()
        browser.wait_until_done()
        assert browser.text("#status").startswith("Stopped after 4 tokens: the expert wrote ")
        until(lambda: metric(server, 'seqdefer_requests_total{path="/v1/deferral/complete",status="200"}') == 1)
        pausing.may_go.set()
        server.wait_until_idle()
        assert pausing.asked == 5
        assert browser.runs[0]["words"].endswith("stopped")
        browser.run()
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.5).outputs[0]


@pytest.mark.browser
def test_a_server_that_waits_is_waited_for(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says meanwhile is no token."""
    monkeypatch.setattr(working, "QUIET", 0.01)
    said: list[bool] = []
    is_there = working.Work.is_there

    async def noted(work: working.Work) -> bool:
        said.append(await is_there(work))
        return said[-1]

    monkeypatch.setattr(working.Work, "is_there", noted)
    with four_tokens_of(browser) as (_, pausing):
        n = len(said)
        until(lambda: len(said) > n + 3)
        pausing.may_go.set()
        browser.wait_until_done()
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.5).outputs[0]


@pytest.mark.browser
def test_the_whole_page_works_by_keys(served: Running, browser: Browser) -> None:
    from selenium.webdriver import Keys

    browser.open(served)
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
    assert f"against {2 * len(written.sources[0])} for" in browser.text("#stats")


# -- budgets -------------------------------------------------------------------------------------------------------

POINT = "(point => [Number(point.getAttribute('cx')), point.getAttribute('aria-valuenow')])"
POINT += "(document.querySelector('.point'))"


@pytest.mark.browser
def test_the_point_on_the_curve_is_the_budget(served: Running, browser: Browser) -> None:
    from selenium.webdriver import ActionChains, Keys

    browser.open(served)
    setting = toy_model().setting(0.3)
    browser.slide(30)
    before, now = browser.js(POINT)
    assert now == "30"
    assert browser.text("#budget-shown") == "30 %"
    assert browser.text("#spent") == (
        f"On average it spends {100 * setting.share:.1f} % [{100 * setting.low:.1f}, {100 * setting.high:.1f}] of "
        "the tokens."
    )
    browser.slide(60)
    after, now = browser.js(POINT)
    assert (now, after > before) == ("60", True)
    point = browser.find(".point")
    point.send_keys(Keys.ARROW_RIGHT, Keys.PAGE_DOWN)
    assert browser.find("#budget").get_attribute("value") == "51"
    point.send_keys(Keys.HOME)
    assert browser.js(POINT)[1] == "0"
    ActionChains(browser.driver).move_to_element(browser.find(".curve svg")).click().perform()
    assert 40 <= int(browser.find("#budget").get_attribute("value")) <= 55


@pytest.mark.browser
def test_losses_are_drawn_where_they_are_known(tours: Running, browser: Browser) -> None:  # noqa: F811
    model = model_of(tours)
    assert model.curve is not None
    browser.open(tours)
    assert browser.text("#curve-title") == "Deferral curve"
    assert model.curve.unit in browser.text("#curve-note")
    for percent, point in ((0, model.curve.points[0]), (100, model.curve.points[-1])):
        browser.slide(percent)
        assert browser.text(".value") == f"{point.loss:.2f}"


@pytest.mark.browser
def test_runs_are_kept_to_compare(served: Running, browser: Browser) -> None:
    browser.open(served)
    browser.find("#text").send_keys("7932")
    browser.run(button="#sweep")
    budgets = [0.0, 0.1, 0.2, 0.5, 1.0]
    written = [toy_model().generate(["7932"], budget) for budget in budgets]
    assert [run["budget"] for run in browser.runs] == [f"{100 * budget:.0f} %" for budget in budgets]
    assert [run["shown"] for run in browser.runs] == [one.outputs[0] for one in written]
    assert [int(run["words"].split()[0]) for run in browser.runs] == [one.expert_tokens[0] for one in written]
    browser.find("#text").clear()
    browser.driver.find_elements("css selector", ".lines button")[3].click()
    assert browser.find("#text").get_attribute("value") == "7932"
    assert browser.find("#budget").get_attribute("value") == "50"
    assert browser.authors == written[3].sources[0]
    browser.find("#forget").click()
    assert browser.runs == []


@pytest.mark.browser
def test_runs_do_not_slow_down_those_to_come(served: Running, browser: Browser) -> None:
    """At every token the inputs of all runs were written as JSON to compare them: long ones took seconds."""
    browser.open(served)
    browser.find("#text").send_keys("7932")
    counted = "JSON.stringify = (...given) => { made += given[0] === '7932'; return make(...given); }"
    browser.js(f"(window.made = 0, window.make = JSON.stringify, {counted})")
    browser.run()
    alone = browser.js("window.made")
    browser.run(button="#sweep")
    browser.js("window.made = 0")
    browser.run()
    assert browser.js("window.made") == alone


@pytest.mark.browser
@pytest.mark.parametrize("button", ["#sweep", "#alone"])
def test_the_budget_is_that_of_the_run_that_is_shown(served: Running, browser: Browser, button: str) -> None:
    browser.open(served)
    browser.find("#text").send_keys("7932")
    browser.slide(30)
    browser.run(button=button)
    assert "asked 100 %" in browser.text("#stats")
    assert set(browser.authors) == {"expert"}
    assert browser.find("#budget").get_attribute("value") == "100"
    assert browser.text("#budget-shown") == "100 %"
    assert browser.js(POINT)[1] == "100"
    assert '"budget":1}' in browser.text("#as-curl")


@pytest.mark.browser
def test_prices_are_remembered(served: Running, browser: Browser) -> None:
    browser.open(served)
    browser.find("#price-expert").clear()
    browser.find("#price-expert").send_keys("4")
    browser.open(served)
    assert browser.find("#price-expert").get_attribute("value") == "4"
    browser.write("7932", 50)
    written = toy_model().generate(["7932"], 0.5)
    n = len(written.sources[0])
    assert f"{written.cost(4, 1)[0]:.4g} against {4 * n} for the expert alone" in browser.text("#stats")


@pytest.mark.browser
def test_the_request_can_be_taken_home(served: Running, browser: Browser) -> None:
    browser.open(served)
    browser.find("#text").send_keys("7932")
    browser.slide(30)
    written = toy_model().generate(["7932"], 0.3)
    ran = subprocess.run([sys.executable, "-c", browser.text("#as-python")], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[0] == written.outputs[0]
    browser.find("#text").send_keys(' it\'s \\ "$HOME" `x`')
    ran = subprocess.run(["bash", "-c", f"curl() {{ printf '%s' \"${{@: -1}}\"; }}; {browser.text('#as-curl')}"],
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert json.loads(ran.stdout) == {
        "model": "toy", "input": "7932 it's \\ \"$HOME\" `x`", "deferral": {"budget": 0.3}
    }  # fmt: skip


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_nothing_is_said_plainly(served: Running, browser: Browser) -> None:
    browser.open(served)
    browser.run()
    assert browser.text("#trouble") == "There is no input yet. Type or paste one."


COLOURS = "['#remarks li', '#trouble'].map(part => getComputedStyle(document.querySelector(part)).color)"


def refuse() -> None:
    raise RuntimeError("no")


@pytest.mark.browser
def test_an_expert_that_fails_is_told(browser: Browser) -> None:
    with running(with_parts(toy_model(), expert=Faulty(toy_model().served.expert, refuse))) as server:
        browser.open(server)
        browser.write("7932", 100)
        assert "The expert failed, and the predictor wrote in its place: " in browser.text("#remarks .failed")
        assert browser.js(COLOURS)[0] == browser.js(COLOURS)[1]
        assert set(browser.authors) == {"predictor"}


@pytest.mark.browser
def test_a_budget_that_cannot_be_met_is_told(browser: Browser) -> None:
    with running(toy_model("OneTimeModel")) as server:
        browser.open(server)
        browser.write("7932", 100)
        assert browser.text("#spent").startswith("It cannot be met. On average the nearest spends ")
        assert "cannot be met" in browser.text("#remarks")
        said, trouble = browser.js(COLOURS)
        assert said != trouble  # nothing went wrong


@pytest.mark.browser
def test_an_error_within_a_stream_is_told(browser: Browser) -> None:
    model, pausing = pausing_model()
    with running(model, limits=Limits(request_seconds=1.0, grace_seconds=0.5)) as server:
        browser.open(server)
        browser.find("#text").send_keys("7932")
        browser.find("#run").click()
        browser.wait("!document.getElementById('trouble').hidden")
        assert "not finished within 1 seconds" in browser.text("#trouble")
        pausing.may_go.set()
        browser.logged()  # where not a token was ready in time, browsers log the status


@pytest.mark.browser
def test_a_server_that_is_gone_is_told(browser: Browser) -> None:
    with running(toy_model()) as server:
        browser.open(server)
    browser.find("#text").send_keys("7932")
    browser.run()
    assert browser.text("#trouble").startswith(f"The server cannot be reached at {server.address}/v1.")
    assert "ERR_CONNECTION_REFUSED" in browser.logged()[0]  # which browsers log themselves


@pytest.mark.browser
def test_a_server_that_came_back_with_another_model_is_told(browser: Browser) -> None:
    with running(toy_model()) as server:
        browser.open(server)
    browser.find("#text").send_keys("7932")
    with running(toy_model(), name="other", port=int(server.address.rsplit(":", 1)[1])):
        browser.run()
    said = browser.text("#trouble")
    assert said.startswith("there is no model 'toy'; there is 'other'")
    assert said.endswith("Reload the page: something else is served by now.")
    assert " 404 " in browser.logged()[0]  # which browsers log themselves


@pytest.mark.browser
def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    with running(toy_model(), api_key="secret") as server:
        browser.open(server, has_key=False)
        browser.wait("!document.getElementById('key-form').hidden")
        assert not browser.find("#board").is_displayed()
        assert "wrong or missing API key" in browser.text("#trouble")
        for key in ("wrong", "secret"):
            browser.wait("!document.getElementById('key-form').hidden")
            browser.find("#key").send_keys(key)
            browser.find("#key-form button").click()
        browser.wait("!document.getElementById('board').hidden")
        assert not browser.find("#trouble").is_displayed()
        browser.open(server)  # it is asked for once
        browser.write("7932", 30)
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.3).outputs[0]
        assert "$SEQDEFER_API_KEY" in browser.text("#as-curl")
        assert "secret" not in browser.js("document.documentElement.outerHTML")
        assert browser.js("JSON.stringify(localStorage)").count("secret") == 0
    assert all(" 401 " in message for message in browser.logged())  # browsers log these themselves


@pytest.mark.browser
def test_a_key_is_kept_only_when_it_opens(browser: Browser) -> None:
    """One with letters that no header carries looked like a server that is gone, for as long as the tab was open."""
    kept = "sessionStorage.getItem('seqdefer.key')"

    def give(key: str, words: str) -> None:
        browser.wait("!document.getElementById('key-form').hidden")
        browser.find("#key").send_keys(key)
        browser.find("#key-form button").click()
        browser.wait("!document.getElementById('key-form').hidden")
        assert words in browser.text("#trouble")
        assert browser.js(kept) is None

    with running(toy_model(), api_key="secret") as server:
        browser.open(server, has_key=False)
        for key in ("ключ", "s3crét", "two words", ""):
            give(key, "This is no API key")
        give("wrong", "wrong or missing API key")
        browser.find("#key").send_keys("secret")
        browser.find("#key-form button").click()
        browser.wait("!document.getElementById('board').hidden")
        assert browser.js(kept) == "secret"
        browser.js("sessionStorage.setItem('seqdefer.key', 'ключ')")  # of an older page
        browser.open(server, has_key=False)
        browser.wait("!document.getElementById('key-form').hidden")
        assert "wrong or missing API key" in browser.text("#trouble")
    assert all(" 401 " in message for message in browser.logged())  # browsers log these themselves


@pytest.mark.browser
def test_a_key_that_is_wanted_in_the_middle_is_tried(browser: Browser) -> None:
    with running(toy_model(), api_key="secret") as server:
        browser.open(server, has_key=False)
        browser.js("sessionStorage.setItem('seqdefer.key', 'secret')")
        browser.open(server)
        browser.find("#text").send_keys("7932")
        gate = server.app.middleware_stack
        while not isinstance(gate, Gate):
            gate = gate.app
        gate.key = "another"
        browser.run()
        for key in ("wrong", "another"):
            browser.wait("!document.getElementById('key-form').hidden")
            browser.find("#key").send_keys(key)
            browser.find("#key-form button").click()
        browser.wait("sessionStorage.getItem('seqdefer.key') === 'another'")
        browser.run()
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.2).outputs[0]
    assert all(" 401 " in message for message in browser.logged())


HOSTILE = (
    "<script>document.title='x'</script>",
    "<img src=x onerror=alert(1)>",
    "שלום ",
    "W" * 400,
    "\u202eabc",
    "&amp;",
)


class HostileCodec(NumberCodec):
    """Letters that try to get out."""

    hint = HOSTILE[0]

    def encode(self, inputs: Sequence[Any]) -> Any:
        return LetterCodec().encode([len(one) for one in inputs])

    def text(self, tokens: Sequence[Any]) -> str:
        return "".join(HOSTILE[token % len(HOSTILE)] for token in tokens)


@pytest.mark.browser
def test_hostile_words_stay_words(browser: Browser) -> None:
    model, given = with_parts(toy_model(), codec=HostileCodec()), "".join(HOSTILE)
    written = model.generate([given], 0.5)
    with running(model) as server:
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        browser.open(server)
        browser.js("document.getElementById('text').value = arguments[0]", given)
        browser.slide(50)
        browser.run()
        assert browser.text("#tokens") == written.outputs[0]
        assert browser.runs[0]["shown"] == written.outputs[0]
        assert browser.js("document.title") == "toy · seqdefer"
        assert browser.js("document.querySelectorAll('main script, main img').length") == 0
        assert not browser.is_too_wide_for_a_phone()
    with running(toy_model()) as server:  # the server's complaint quotes it
        browser.open(server)
        browser.write(HOSTILE[0], 50)
        assert HOSTILE[0] in browser.text("#trouble")
        assert browser.js("document.title") == "toy · seqdefer"
        assert " 400 " in browser.logged()[0]


# -- tours ---------------------------------------------------------------------------------------------------------

EDGES = "[...document.querySelectorAll('#field .edge')].map(edge => edge.getAttribute('class').replace('edge ', ''))"


@pytest.mark.browser
@pytest.mark.parametrize("percent", [0, 50, 100])
def test_tours_are_drawn(tours: Running, browser: Browser, percent: int) -> None:  # noqa: F811
    (given,) = cities(1)
    written = model_of(tours).generate([given], percent / 100)
    browser.open(tours)
    browser.find("#clear").click()
    browser.find("#text").clear()
    browser.find("#text").send_keys(json.dumps(given))
    browser.slide(percent)
    browser.run()
    assert browser.text("#tokens") == " ".join(map(str, written.outputs[0]))
    assert browser.authors == written.sources[0]
    assert browser.js(EDGES) == [*written.sources[0][1:], written.sources[0][-1]]
    length = model_of(tours).served.codec.facts(given, written.outputs[0])["length"]
    assert f"length{length:.4g}" in browser.text("#stats")
    browser.run(button="#alone")
    alone = [model_of(tours).generate([given], budget).outputs[0] for budget in (0.0, 1.0)]
    short, long = (model_of(tours).served.codec.facts(given, tour)["length"] for tour in alone)
    assert f"predictor alone {short:.4g}, expert alone {long:.4g}" in browser.text("#stats")


@pytest.mark.browser
def test_short_tours_have_a_length(tours: Running, browser: Browser) -> None:  # noqa: F811
    given = [[x / 2_000_000, y / 2_000_000] for x, y in cities(1)[0]]
    tour = model_of(tours).generate([given], 0.2).outputs[0]
    browser.open(tours)
    browser.js("document.getElementById('text').value = arguments[0]", json.dumps(given))
    browser.js("document.getElementById('text').dispatchEvent(new Event('input'))")
    browser.slide(20)
    browser.run()
    length = model_of(tours).served.codec.facts(given, tour)["length"]
    assert length < 0.0005  # which three places would show as nothing
    assert f"length{length:.4g}" in browser.text("#stats")
    assert browser.runs[0]["words"].startswith(f"length {length:.4g} · ")


@pytest.mark.browser
def test_cities_are_added_moved_and_removed(tours: Running, browser: Browser) -> None:  # noqa: F811
    from selenium.webdriver import ActionChains

    browser.open(tours)
    assert browser.text("#text-note") == f"{N_CITIES} of {N_CITIES} cities"  # random ones, to begin with
    browser.find("#clear").click()
    field = browser.find("#field svg")
    for place in (-60, 0, 60):
        ActionChains(browser.driver).move_to_element_with_offset(field, place, place).click().perform()
    assert browser.text("#text-note") == f"3 of {N_CITIES} cities"
    browser.run()
    assert browser.text("#trouble") == f"There are 3 cities, and this model wants {N_CITIES}: click to add."
    before = json.loads(browser.find("#text").get_attribute("value"))
    dot = browser.driver.find_elements("css selector", "#field .city")[1]
    ActionChains(browser.driver).drag_and_drop_by_offset(dot, 50, 0).perform()
    after = json.loads(browser.find("#text").get_attribute("value"))
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1][0] > before[1][0]
    ActionChains(browser.driver).double_click(browser.find("#field .city")).perform()
    assert json.loads(browser.find("#text").get_attribute("value")) == after[1:]
    browser.find("#text").send_keys("x")
    browser.run()
    assert "cannot be read" in browser.text("#trouble")
    browser.find("#random").click()
    browser.run()
    assert len(browser.js(EDGES)) == N_CITIES


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["tokens", "tour"])
def test_a_phone_is_wide_enough(served: Running, tours: Running, browser: Browser, kind: str) -> None:  # noqa: F811
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    browser.open(tours if kind == "tour" else served)
    if kind == "tokens":
        browser.find("#text").send_keys("7932")
    browser.run(button="#sweep")
    assert not browser.is_too_wide_for_a_phone()


@pytest.mark.browser
@pytest.mark.slow
def test_pictures_are_taken(chromium: Browser, home: Path, tmp_path: Path) -> None:  # noqa: F811
    script = Path(__file__).parents[2] / "tools" / "screenshots.py"
    (given,) = cities(1)
    command = [sys.executable, script, home / "model", json.dumps(given), "--out", tmp_path]
    subprocess.run(command, check=True)
    sizes = {path.name: struct.unpack(">II", path.read_bytes()[16:24]) for path in tmp_path.glob("*.png")}
    assert sizes.keys() == {"page.png", "page-dark.png", "terminal.png"}
    assert sizes["page.png"] == sizes["page-dark.png"]
    assert min(min(size) for size in sizes.values()) > 100
