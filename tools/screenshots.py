"""Take screenshots of the page and the terminal with a fitted pair.

    python tools/screenshots.py models/news "A long article ..."

Writes page.png, page-dark.png and terminal.png to docs/images. Needs the extra 'server', selenium, and chromium with
chromedriver on the path.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.app import create_app
from seqdefer.server.http import Limits
from seqdefer.server.serve import in_background

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BUDGET = 0.2
WIDTH, SCALE, COLUMNS = 1200, 1.5, 96
WAIT_SECONDS = 120.0
INK, PAPER = (230, 234, 240), (20, 23, 28)
COLOURS = [
    (60, 68, 80), (255, 123, 123), (126, 211, 153), (255, 171, 110), (108, 180, 255), (205, 160, 255), (110, 214, 214),
    (214, 220, 228),
]  # fmt: skip
TERMINAL = """\
<!doctype html><meta charset="utf-8"><style>{stylesheet}
body {{ margin: 0; background: transparent; }}
figure {{ margin: 0; width: max-content; padding: 18px 22px 20px; border-radius: 12px; background: {background}; }}
i {{ display: inline-block; width: 12px; height: 12px; margin: 0 7px 14px 0; border-radius: 50%; background: #4a5361; }}
pre {{ margin: 0; color: {foreground}; font: 15px/1.55 "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
</style><figure><i></i><i></i><i></i><pre>{code}</pre></figure>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Take screenshots of the page and the terminal.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder written by `seqdefer fit`")
    parser.add_argument("text", metavar="INPUT", help="the input to generate for")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR", help="output folder (docs/images)")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with open_browser() as driver:
        screenshot_terminal(driver, chosen.folder, chosen.text, chosen.out / "terminal.png")
        with serve_model(chosen.folder) as address:
            for scheme, name in (("light", "page.png"), ("dark", "page-dark.png")):
                screenshot_page(driver, address, chosen.text, scheme, chosen.out / name)


# -- the terminal --------------------------------------------------------------------------------------------------


def screenshot_terminal(driver: Any, folder: Path, text: str, path: Path) -> None:
    beginning = text if len(text) <= 48 else f"{text[:48].rstrip()} ..."
    shown = Text.assemble(
        ("$ ", "bold"), f'seqdefer generate {folder.resolve().name} "{beginning}" --budget {BUDGET}\n\n'
    )
    shown.append_text(Text.from_ansi(output_of("generate", str(folder), text, "--budget", str(BUDGET), "--quiet")))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(shown)
    html = console.export_html(theme=TerminalTheme(PAPER, INK, COLOURS, COLOURS), code_format=TERMINAL)
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary) / "terminal.html"
        page.write_text(html, encoding="utf-8")
        set_size(driver, WIDTH, 800)
        driver.execute_cdp_cmd("Emulation.setDefaultBackgroundColorOverride", {"color": dict.fromkeys("rgba", 0)})
        driver.get(page.as_uri())
        path.write_bytes(driver.find_element("css selector", "figure").screenshot_as_png)
        driver.execute_cdp_cmd("Emulation.setDefaultBackgroundColorOverride", {})


def output_of(*arguments: str) -> str:
    """Return what a command prints to a terminal, with colours."""
    master, slave = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", "seqdefer", *arguments]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment) as process:
        os.close(slave)
        output = b"".join(iter(lambda: read_some(master), b""))
        _, errors = process.communicate()
    os.close(master)
    if process.returncode:
        sys.exit(f"seqdefer {arguments[0]} exited with {process.returncode}: {errors.decode(errors='replace').strip()}")
    return output.decode().replace("\r\n", "\n").rstrip("\n")


def read_some(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # on Linux: the other end is closed
        return b""


# -- the page ------------------------------------------------------------------------------------------------------


def serve_model(folder: Path) -> AbstractContextManager[str]:
    limits, model = Limits(), DeferringModel.from_pretrained(folder)
    return in_background(create_app(model, folder.resolve().name, limits=limits), limits)


def screenshot_page(driver: Any, address: str, text: str, scheme: str, path: Path) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
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
