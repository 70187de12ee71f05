"""Servers and a browser for the tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def use_one_thread(one_thread: None) -> None:
    """Run every test of the server on one thread of torch."""


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
def tour_task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Options of a small TSP task whose predictor is untrained, and the folder of a pair fitted on it."""
    pytest.importorskip("numba", reason="needs the extra tsp")
    from servers import N_CITIES

    from seqdefer.evaluation.settings import experiment_settings
    from seqdefer.model.fitting import fit_model
    from seqdefer.tasks.tsp.pointer import PointerNet, save_pointer
    from seqdefer.tasks.tsp.task import ENTRY, TSPOptions

    folder = tmp_path_factory.mktemp("tours")
    torch.manual_seed(0)
    save_pointer(PointerNet(6), folder / "pointer", {})
    sizes = {"train": 24, "validation": 12, "test": 1}
    options = TSPOptions(cities=N_CITIES, expert="search", predictor=str(folder / "pointer"), **sizes)
    fit_model(ENTRY, options, experiment_settings(ENTRY, "quick"), folder / "model", device="cpu")
    return options, folder / "model"


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
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    from browsers import Browser

    from tests.report.test_report import find_browser

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
def browser(chromium: Any) -> Iterator[Any]:
    """A browser that must log no error and load nothing from other sites, whatever the test does."""
    chromium.driver.get("about:blank")
    chromium.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.log(), chromium.requested_urls()
    yield chromium
    assert chromium.log() == []
    assert [url for url in chromium.requested_urls() if not url.startswith(tuple(chromium.servers))] == []
