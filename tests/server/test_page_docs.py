"""/docs in a real browser: every route and type of the OpenAPI description, from this server alone."""

from __future__ import annotations

import pytest
from browsers import Browser
from servers import RunningServer, running, toy_model

pytestmark = pytest.mark.browser


def test_every_route_and_type_is_shown(server: RunningServer, browser: Browser) -> None:
    described = server.get("/openapi.json").json()
    browser.servers.add(f"{server.address}/")
    browser.driver.get(f"{server.address}/docs#CompletionRequest")
    browser.wait("document.querySelector('#schemas details')")
    routes = browser.js("[...document.querySelectorAll('#routes summary code')].map(one => one.textContent)")
    assert routes == [f"{method.upper()} {path}" for path, one in described["paths"].items() for method in one]
    types = browser.js("[...document.querySelectorAll('#schemas details')].map(one => one.id)")
    assert types == list(described["components"]["schemas"])
    rows = "[...document.querySelectorAll('#CompletionRequest tbody tr')]"
    fields = browser.js(f"{rows}.map(row => row.cells[0].textContent)")
    assert fields == list(described["components"]["schemas"]["CompletionRequest"]["properties"])
    assert browser.js("document.getElementById('CompletionRequest').open")


def test_a_key_is_asked_for(browser: Browser) -> None:
    with running(toy_model(), api_key="secret") as server:
        browser.servers.add(f"{server.address}/")
        browser.driver.get(f"{server.address}/docs")
        browser.give_key("secret")
        browser.wait("document.querySelector('#schemas details')")
        assert browser.js("document.getElementById('key-form').hidden")
    assert all(" 401 " in message for message in browser.log())
