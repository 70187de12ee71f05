"""The page when something goes wrong: failing experts and servers, API keys, hostile text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from browsers import Browser
from servers import (
    IGNORE_BUDGETS,
    FaultyExpert,
    NumberCodec,
    RunningServer,
    fail,
    running,
    slow_model,
    toy_model,
    with_parts,
)
from toy_pair import LetterCodec

from seqdefer.engine.speculative import SHOWN_SECONDS
from seqdefer.server.http import Limits
from seqdefer.server.keys import KeyRing

pytestmark = [pytest.mark.browser, IGNORE_BUDGETS]
COLOURS = "['#remarks li', '#trouble'].map(part => getComputedStyle(document.querySelector(part)).color)"
SAVED_KEY = "sessionStorage.getItem('seqdefer.key')"


def test_empty_input(server: RunningServer, browser: Browser) -> None:
    browser.open(server)
    browser.run()
    assert browser.text("#trouble") == "The input is empty. Type or paste one."


def test_failing_expert(browser: Browser) -> None:
    with running(with_parts(toy_model(), expert=FaultyExpert(toy_model().served.expert, fail))) as server:
        browser.open(server)
        browser.write("7932", 100)
        assert "The expert failed, and the predictor finished: " in browser.text("#remarks .failed")
        assert len(set(browser.js(COLOURS))) == 1
        assert set(browser.authors) == {"predictor"}


def test_unattainable_budget_is_no_error(browser: Browser) -> None:
    with running(toy_model("OneTimeModel")) as server:
        browser.open(server)
        browser.write("7932", 100)
        assert browser.text("#spent").startswith("This budget cannot be met. On average, the nearest spends ")
        assert "cannot be met" in browser.text("#remarks")
        assert len(set(browser.js(COLOURS))) == 2


def test_error_within_a_stream(browser: Browser) -> None:
    model, slow = slow_model(SHOWN_SECONDS * 1.2, pause_after=4)
    slow.gate.clear()
    with running(model, limits=Limits(request_seconds=1.0, grace_seconds=0.5)) as server:
        browser.open(server)
        browser.find("#text").send_keys("7932")
        browser.find("#run").click()
        browser.wait("!document.getElementById('trouble').hidden")
        assert "not finished within 1 seconds" in browser.text("#trouble")
        slow.gate.set()
        browser.log()  # if no token was ready in time, the browser logs the status


def test_server_that_is_gone(browser: Browser) -> None:
    with running(toy_model()) as server:
        browser.open(server)
    browser.find("#text").send_keys("7932")
    browser.run()
    assert browser.text("#trouble").startswith(f"The server cannot be reached at {server.address}/v1.")
    assert "ERR_CONNECTION_REFUSED" in browser.log()[0]  # browsers log failed requests themselves


def test_server_restarted_with_another_model(browser: Browser) -> None:
    with running(toy_model()) as server:
        browser.open(server)
    browser.find("#text").send_keys("7932")
    with running(toy_model(), name="other", port=int(server.address.rsplit(":", 1)[1])):
        browser.run()
    message = browser.text("#trouble")
    assert message.startswith("unknown model 'toy'; available: 'other'")
    assert message.endswith("The server now has another model; reload the page.")
    assert " 404 " in browser.log()[0]


# -- API keys ------------------------------------------------------------------------------------------------------


def test_key_is_asked_for_once_and_saved_in_the_tab(browser: Browser) -> None:
    with running(toy_model(), api_key="secret") as server:
        browser.open(server, has_key=False)
        browser.wait("!document.getElementById('key-form').hidden")
        assert not browser.find("#board").is_displayed()
        assert not browser.find("#trouble").is_displayed()  # nobody has given a wrong key yet
        browser.give_key("wrong")
        browser.wait("document.getElementById('trouble').textContent.startsWith('wrong or missing API key')")
        browser.give_key("secret")
        browser.wait("!document.getElementById('board').hidden")
        assert not browser.find("#trouble").is_displayed()
        browser.open(server)
        browser.write("7932", 30)
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.3).outputs[0]
        assert "$SEQDEFER_API_KEY" in browser.text("#as-curl")
        assert "secret" not in browser.js("document.documentElement.outerHTML")
        assert browser.js("JSON.stringify(localStorage)").count("secret") == 0
    assert all(" 401 " in message for message in browser.log())


def test_only_accepted_keys_are_saved(browser: Browser) -> None:
    """A key with characters that headers cannot carry once looked like a server that is gone."""
    invalid = dict.fromkeys(("ключ", "s3crét", "two words", ""), "This is not a valid API key")
    with running(toy_model(), api_key="secret") as server:
        browser.open(server, has_key=False)
        for key, message in {**invalid, "wrong": "wrong or missing API key"}.items():
            browser.give_key(key)
            browser.wait("!document.getElementById('key-form').hidden")
            assert message in browser.text("#trouble")
            assert browser.js(SAVED_KEY) is None
        browser.give_key("secret")
        browser.wait("!document.getElementById('board').hidden")
        assert browser.js(SAVED_KEY) == "secret"
        browser.js("sessionStorage.setItem('seqdefer.key', 'ключ')")  # by an older page
        browser.open(server, has_key=False)
        browser.wait("!document.getElementById('key-form').hidden")
        assert not browser.find("#trouble").is_displayed()
    assert all(" 401 " in message for message in browser.log())


def test_key_that_changes_while_the_page_is_open(browser: Browser) -> None:
    with running(toy_model(), api_key="secret") as server:
        browser.open(server, has_key=False)
        browser.js("sessionStorage.setItem('seqdefer.key', 'secret')")
        browser.open(server)
        browser.find("#text").send_keys("7932")
        server.gateway.keys = KeyRing(api_key="another")
        browser.run()
        for key in ("wrong", "another"):
            browser.give_key(key)
        browser.wait(f"{SAVED_KEY} === 'another'")
        browser.run()
        assert browser.text("#tokens") == toy_model().generate(["7932"], 0.2).outputs[0]
    assert all(" 401 " in message for message in browser.log())


# -- hostile text --------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>document.title='x'</script>",
    "<img src=x onerror=alert(1)>",
    "שלום ",
    "W" * 400,
    "\u202eabc",
    "&amp;",
)


class HostileCodec(NumberCodec):
    """Tokens that try to become HTML."""

    hint = HOSTILE[0]

    def encode(self, inputs: Sequence[Any]) -> Any:
        return LetterCodec().encode([len(one) for one in inputs])

    def text(self, tokens: Sequence[Any]) -> str:
        return "".join(HOSTILE[token % len(HOSTILE)] for token in tokens)


def test_hostile_text_stays_text(browser: Browser) -> None:
    model, text = with_parts(toy_model(), codec=HostileCodec()), "".join(HOSTILE)
    written = model.generate([text], 0.5)
    with running(model) as server:
        browser.use_phone()
        browser.open(server)
        browser.paste(text)
        browser.slide(50)
        browser.run()
        assert browser.text("#tokens") == written.outputs[0]
        assert browser.runs[0]["shown"] == written.outputs[0]
        assert browser.js("document.title") == "toy · seqdefer"
        assert browser.js("document.querySelectorAll('main script, main img').length") == 0
        assert not browser.is_wider_than_phone
    with running(toy_model()) as server:  # the error message quotes it
        browser.open(server)
        browser.write(HOSTILE[0], 50)
        assert HOSTILE[0] in browser.text("#trouble")
        assert browser.js("document.title") == "toy · seqdefer"
        assert " 400 " in browser.log()[0]
