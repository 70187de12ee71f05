"""Take a screenshot of the page with a fitted pair.

    python tools/screenshot.py models/news "A long article ..."

Writes docs/images/page.png. Needs the extra 'server', selenium, and chromium with chromedriver on the path.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.app import create_app
from seqdefer.server.http import Limits
from seqdefer.server.serve import in_background

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "page.png"
WIDTH, SCALE = 1200, 1.5
WAIT_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a screenshot of the page.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder written by `seqdefer fit`")
    parser.add_argument("text", metavar="INPUT", help="the input to generate for")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="output file (docs/images/page.png)")
    chosen = parser.parse_args()
    with open_browser() as driver, serve_model(chosen.folder) as address:
        screenshot(driver, address, chosen.text, chosen.out)


def serve_model(folder: Path) -> AbstractContextManager[str]:
    limits, model = Limits(), DeferringModel.from_pretrained(folder)
    return in_background(create_app(model, folder.resolve().name, limits=limits), limits)


def screenshot(driver: Any, address: str, text: str, path: Path) -> None:
    set_size(driver, WIDTH, 900)
    driver.get(address)
    wait(driver, "!document.getElementById('board').hidden")
    driver.execute_script("document.getElementById('text').value = arguments[0]", text)
    driver.execute_script("document.getElementById('text').dispatchEvent(new Event('input'))")
    driver.execute_script("document.getElementById('sweep').click()")  # no mouse pointer in the picture
    wait(driver, "document.getElementById('stop').disabled && document.getElementById('status').textContent")
    driver.execute_script("document.querySelectorAll('.lines button')[2].click()")  # the run at 20 %
    driver.execute_script("document.querySelector('#tokens .expert, #tokens .token').focus()")
    set_size(driver, WIDTH, driver.execute_script("return document.documentElement.scrollHeight"))
    wait(driver, "document.getAnimations().length === 0")
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))


def set_size(driver: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": SCALE, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wait(driver: Any, code: str) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not driver.execute_script(f"return {code}"):
        if time.monotonic() > end:
            error = driver.execute_script("return document.getElementById('trouble').textContent")
            sys.exit(f"the page did not reach the state {code!r} in {WAIT_SECONDS:.0f} s; it shows {error!r}")
        time.sleep(0.05)


@contextmanager
def open_browser() -> Iterator[Any]:
    try:
        from selenium import webdriver
    except ImportError:
        sys.exit("selenium is missing; install it with: pip install selenium")
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.exit("chromium or chromedriver is not on the path; install both")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = (
            "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking hide-scrollbars "
        )
        for flag in f"{flags} disable-dev-shm-usage user-data-dir={profile}".split():
            options.add_argument(f"--{flag}")
        opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            yield opened
        finally:
            opened.quit()


if __name__ == "__main__":
    main()
