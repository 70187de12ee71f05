"""The benchmarks page, from the output of `python -m benchmarks`: docs/results/bench*.json."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from page_parts import machine_of, read_results, table

HEAD = """\
# Benchmarks

Speed is measured as a ratio within one run: our way and the other way alternate, after a check that their results are
equal. The tables show the median over the rounds with minimum and maximum. *Times as fast* is good above 1, *times its
cost* is good near 1 or below. This page is generated from the output files of the benchmarks.

<!-- no-test: measures for minutes; tests/benchmarks runs tiny ones -->
```sh
make bench                                 # all benchmarks, on synthetic data and models
.venv/bin/python -m benchmarks --quick     # smaller, in under three minutes
.venv/bin/python -m benchmarks --only speculation --only server --pair small large --documents news.jsonl  # yours
```
"""
FILES = {  # titles of the sections
    "bench.json": "Labels, training and curves, on a CPU",
    "bench-speculation.json": "Decoding, on a CPU",
    "bench-server.json": "Serving, on a CPU",
    "bench-gpu.json": "Decoding, on a GPU",
    "bench-t5.json": "Decoding with a T5 pair, on a CPU",
    "bench-t5-gpu.json": "Decoding with a T5 pair, on a GPU",
}


def benchmarks_page(folder: Path) -> str:
    """Return the page with one section for each file of results."""
    parts = [HEAD]
    for name, title in FILES.items():
        written = read_results(folder / name)
        parts.append(f"## {title}\n\n{_provenance(written)}\n")
        parts += [
            _section(name, list(rows), written) for name, rows in groupby(written["rows"], lambda row: row["benchmark"])
        ]
    return "\n".join(parts)


def _provenance(written: dict[str, Any]) -> str:
    text = written.get("text", {})
    with_pair = f" Text and server: pair {_pair(text['pair'])}, {text['device']}, {text['dtype']}." if text else ""
    command = f"`{written['command']}`, version {written['version']}, {written['seconds']:.0f} seconds."
    return " ".join(filter(None, (command, f"{machine_of(written)}.{with_pair}", written.get("remark"))))


def _pair(pair: str | list[str]) -> str:
    return "with random weights" if isinstance(pair, str) else " and ".join(Path(one).name for one in pair)


def _section(name: str, rows: list[dict[str, Any]], written: dict[str, Any]) -> str:
    cells = []
    for row in rows:
        spread = "" if row["low"] == row["high"] else f"{number(row['low'])} to {number(row['high'])}"
        remarks = "; ".join(filter(None, (row["same"], row["note"])))
        cells.append((row["what"], f"**{number(row['median'])}** {row['unit']}", spread, remarks))
    head = ("compared with", "median", "minimum to maximum", "equality of results, notes")
    return f"### {name}\n\nOurs: {written['ours'][name]}.\n\n{table(head, cells)}"


def number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
