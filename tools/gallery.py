"""Take pictures of reports for docs/gallery.md.

    python tools/gallery.py runs/weather runs/tsp

Writes docs/images/report-NAME.webp for each folder of a run: the top of its report, as far as `--height` says. Needs
selenium, and chromium with chromedriver on the path.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path
from typing import Any

from screenshot import open_browser, wait

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT, QUALITY = 1120, 1030, 82


def main() -> None:
    parser = argparse.ArgumentParser(description="Take pictures of reports.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="folders written by `seqdefer run`")
    parser.add_argument("--height", type=int, default=HEIGHT, metavar="N", help="pixels of the page (%(default)s)")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR", help="output folder (docs/images)")
    chosen = parser.parse_args()
    with open_browser() as driver:
        for folder in chosen.folders:
            take(driver, folder / "report.html", chosen.out / f"report-{folder.name}.webp", chosen.height)


def take(driver: Any, report: Path, picture: Path, height: int) -> None:
    """Write a picture of the top of a report."""
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1.25, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(report.resolve().as_uri())
    wait(driver, "document.documentElement.classList.contains('js')")
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    picture.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
