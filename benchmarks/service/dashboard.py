"""Draw the dashboard of deploy/grafana with data of a real Prometheus, which watches a server under load.

    python -m benchmarks.service.dashboard

Writes docs/images/dashboard.png. Needs `prometheus` on the path and matplotlib. This is not Grafana: it reads the same
file, runs the same queries, and draws each panel in its place. A panel without data is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.service.processes import free_port, is_listening, until
from benchmarks.service.report import log, use_threads
from benchmarks.service.soak import prepared

ROOT = Path(__file__).parents[2]
BOARD, PICTURE = ROOT / "deploy" / "grafana" / "seqdefer.json", ROOT / "docs" / "images" / "dashboard.png"
SCRAPE_SECONDS, RATE_INTERVAL, STEP_SECONDS = 1, "15s", 2
FACTORS = {
    "s": (1000, "ms"),
    "bytes": (1e-6, "MB"),
    "percentunit": (100, "%"),
    "reqps": (1, "a second"),
    "ops": (1, "a second"),
}
NOTE = "python -m benchmarks.service.dashboard: the queries of deploy/grafana/seqdefer.json, the data of Prometheus"
Series = dict[str, tuple[list[float], list[float]]]  # by legend: times and values


@contextmanager
def prometheus(address: str, folder: Path) -> Iterator[str]:
    """Run Prometheus, which scrapes one server; the context is its address."""
    target, port = urllib.parse.urlsplit(address).netloc, free_port()
    scrape = {"job_name": "seqdefer", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"])
    try:
        until(lambda: is_listening(port), 60.0, "the start of Prometheus")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def query(address: str, expression: str, legend: str, span: tuple[float, float]) -> Series:
    """Return what Prometheus knows about an expression, by legend."""
    asked = {"query": expression.replace("$__rate_interval", RATE_INTERVAL), "start": span[0], "end": span[1]}
    url = f"{address}/api/v1/query_range?{urllib.parse.urlencode(asked | {'step': STEP_SECONDS})}"
    with urllib.request.urlopen(url, timeout=30) as response:
        found = json.load(response)["data"]["result"]
    series: Series = {}
    for one in found:
        name = re.sub(r"\{\{(\w+)\}\}", lambda label, one=one: one["metric"].get(label[1], ""), legend)
        points = [(when - span[0], float(value)) for when, value in one["values"] if value != "NaN"]
        if points:
            series[name] = ([when for when, _ in points], [value for _, value in points])
    return series


def ask(address: str, panels: list[Mapping[str, Any]], span: tuple[float, float]) -> dict[str, Series]:
    """Return the data of each panel, by its title. Raises SystemExit for panels without data."""
    found: dict[str, Series] = {}
    for panel in panels:
        series: Series = {}
        for target in panel["targets"]:
            series |= query(address, target["expr"], target["legendFormat"], span)
        found[panel["title"]] = series
    empty = [title for title, series in found.items() if not series]
    if empty:
        raise SystemExit(f"Prometheus has no data for: {', '.join(empty)}")
    return found


def draw(panels: list[Mapping[str, Any]], data: Mapping[str, Series], title: str, out: Path) -> None:
    """Draw all panels in their places."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from PIL import Image  # comes with matplotlib

    rows = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels)
    rows += 2  # for the title
    figure = pyplot.figure(figsize=(13, 0.27 * rows))
    figure.suptitle(title, x=0.02, y=0.995, ha="left", fontsize=12)
    figure.text(0.99, 0.99, NOTE, ha="right", va="top", fontsize=7, color="gray")
    for panel in panels:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        place = ((x + 0.8) / 24, 1 - (y + height + 1) / rows, (width - 1.2) / 24, (height - 2.4) / rows)
        _draw_panel(figure.add_axes(place), panel, data[panel["title"]])
    figure.savefig(out, dpi=75)
    with Image.open(out) as drawn:
        drawn.convert("P", palette=Image.Palette.ADAPTIVE, colors=48).save(out, optimize=True)


def _draw_panel(axes: Any, panel: Mapping[str, Any], series: Series) -> None:
    factor, unit = FACTORS.get(panel["fieldConfig"]["defaults"]["unit"], (1, ""))
    axes.set_title(panel["title"] + (f" ({unit})" if unit else ""), fontsize=8, loc="left")
    if panel["type"] == "stat":
        axes.axis("off")
        last = {name: values[1][-1] for name, values in series.items()}
        shown = next(iter(last)) if not unit else f"{factor * next(iter(last.values())):.1f} {unit}"
        if panel["title"].startswith("Breaker"):  # every state that it was in has a series
            shown = max(series, key=lambda name: series[name][0][-1])
        axes.text(0.5, 0.5, shown.replace(", ", ",\n"), ha="center", va="center", fontsize=13)
        return
    for name, (times, values) in sorted(series.items()):
        axes.plot(times, [factor * value for value in values], label=name, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, loc="upper left", ncols=2, framealpha=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service.dashboard", description="Draw the dashboard.")
    parser.add_argument("--seconds", type=float, default=90.0, metavar="X", help="of load (90)")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="output (docs/images/dashboard.png)")
    chosen, board = parser.parse_args(), json.loads(BOARD.read_text(encoding="utf-8"))
    if shutil.which("prometheus") is None:
        raise SystemExit("no `prometheus` on the path; install it: apt-get install prometheus")
    use_threads(1)
    with (
        tempfile.TemporaryDirectory() as name,
        prepared(Path(name), "cpu") as (server, expert, groups),
        prometheus(server.address, Path(name)) as address,
    ):
        log(f"{chosen.seconds:g} seconds of load")
        begun = time.time()
        with expert.dying(every=chosen.seconds / 3, down=5.0):
            server.load(chosen.seconds, groups["dying"])
        data = ask(address, board["panels"], (begun, time.time()))
    draw(board["panels"], data, board["title"], chosen.out)
    log(f"written: {chosen.out}, {len(data)} panels with data")


if __name__ == "__main__":
    sys.exit(main())
