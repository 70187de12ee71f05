"""A real browser, and what users do and see on the server's page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from labelling_toy import until

if TYPE_CHECKING:
    from servers import RunningServer

PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}


@contextmanager
def chromium(profile: Path, *, microphone: Path | None = None) -> Iterator[Any]:
    """Start Chromium without a window, or skip the test. `microphone`: a WAV file that it hears."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("needs chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    flags += "disable-component-update disable-sync disable-dev-shm-usage window-size=1280,1000 "
    flags += f"user-data-dir={profile}"
    if microphone is not None:
        flags += " use-fake-device-for-media-stream use-fake-ui-for-media-stream "
        flags += f"use-file-for-fake-audio-capture={microphone}"
    for flag in flags.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


class Browser:
    """The page in Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.servers = driver, set[str]()

    def open(self, server: RunningServer, *, has_key: bool = True) -> None:
        self.servers.add(f"{server.address}/")
        self.driver.get(server.address)
        if has_key:
            self.wait("!document.getElementById('board').hidden")

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.find(selector).get_attribute("textContent")).replace("\xa0", " ")

    def value(self, selector: str) -> str:
        return str(self.find(selector).get_attribute("value"))

    def js(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {code}", *arguments)

    def wait(self, code: str) -> None:
        until(lambda: self.js(code))

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def slide(self, percent: int) -> None:
        from selenium.webdriver import Keys

        self.find("#budget").send_keys(Keys.HOME, Keys.ARROW_RIGHT * percent)

    def paste(self, text: str) -> None:
        self.js("document.getElementById('text').value = arguments[0]", text)
        self.js("document.getElementById('text').dispatchEvent(new Event('input'))")

    def run(self, *, button: str = "#run") -> None:
        found = self.find(button)  # scrolled to, so that the banner of an error is not above it
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()
        self.wait_until_done()

    def wait_until_done(self) -> None:
        message = "['status', 'trouble'].some(id => document.getElementById(id).textContent)"
        self.wait(f"document.getElementById('stop').disabled && {message}")

    def write(self, text: str, percent: int) -> None:
        self.find("#text").clear()
        self.find("#text").send_keys(text)
        self.slide(percent)
        self.run()

    def give_key(self, key: str) -> None:
        self.wait("!document.getElementById('key-form').hidden")
        self.find("#key").send_keys(key)
        self.find("#key-form button").click()

    def use_phone(self) -> None:
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)

    @property
    def is_wider_than_phone(self) -> bool:
        self.js("document.querySelectorAll('details').forEach(part => { part.open = true })")
        return int(self.js("document.documentElement.scrollWidth")) > PHONE["width"]

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

    @property
    def curve_point(self) -> tuple[float, str]:
        """The x coordinate of the point on the curve, and its budget in percent."""
        x, budget = self.js(
            "(point => [Number(point.getAttribute('cx')), point.getAttribute('aria-valuenow')])"
            "(document.querySelector('.point'))"
        )
        return x, budget

    def log(self) -> list[str]:
        """Return the messages on the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested_urls(self) -> set[str]:
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return {url for url in sent if not url.startswith(("data:", "blob:", "chrome:", "about:"))}
