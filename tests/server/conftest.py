"""Servers and a browser for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def use_one_thread(one_thread: None) -> None:
    """Run every test of the server on one thread of torch."""


@pytest.fixture(autouse=True)
def no_foreign_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what other tests read: `seqdefer serve` refuses variables that it does not know."""
    monkeypatch.delenv("SEQDEFER_WHISPER", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from servers import running, toy_model

    with running(toy_model()) as started:
        yield started


@pytest.fixture(scope="module")
def text_server() -> Iterator[Any]:
    from servers import running, text_model

    with running(text_model()) as started:
        yield started


@pytest.fixture(scope="module")
def speech_server() -> Iterator[Any]:
    from servers import running, speech_model

    with running(speech_model()) as started:
        yield started


@pytest.fixture(scope="module")
def tour_task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Options of a small TSP task whose predictor is untrained, and the folder of a pair fitted on it."""
    from servers import N_CITIES
    from tours import fitted_pair

    return fitted_pair(tmp_path_factory.mktemp("tours"), N_CITIES)


@pytest.fixture(scope="module")
def tour_server(tour_task: tuple[Any, Path]) -> Iterator[Any]:
    from servers import running

    from seqdefer.model.deferring_model import DeferringModel

    with running(DeferringModel.from_pretrained(tour_task[1], device="cpu")) as started:
        yield started


@pytest.fixture(scope="session")
def cities() -> list[Any]:
    """Six instances far from the origin, in large units."""
    from servers import N_CITIES

    from seqdefer.tasks.tsp.data import gaussian_instances

    found: list[Any] = (1000 + 50 * gaussian_instances(6, N_CITIES, seed=3, stream="test").double()).tolist()
    return found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import browsers

    with browsers.chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield browsers.Browser(driver)


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """A browser that must log no error and load nothing from other sites, whatever the test does."""
    chromium.driver.get("about:blank")
    chromium.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.log(), chromium.requested_urls()
    yield chromium
    assert chromium.log() == []
    assert [url for url in chromium.requested_urls() if not url.startswith(tuple(chromium.servers))] == []
