"""The options, numbers, table and provenance that both commands share."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.service.pair import LAYERS, LENGTH, WIDTH
from seqdefer import __version__
from seqdefer.environment import machine


def parser_of(program: str, description: str, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options of both commands."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description, allow_abbrev=False)
    parser.add_argument("--device", default="cpu", help="where the server computes (cpu)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of PyTorch (1)")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="FILE", help=f"output file ({out})")
    return parser


def use_threads(n: int) -> None:
    """Set the threads of PyTorch, here and in processes to come."""
    os.environ["OMP_NUM_THREADS"] = str(n)
    torch.set_num_threads(n)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def provenance(module: str, arguments: list[str], chosen: argparse.Namespace, begun: float) -> dict[str, Any]:
    """Return what the results depend on. The command is shown without --out, which does not affect them."""
    shown = [one for place, one in enumerate(arguments) if "--out" not in (one, *arguments[max(place - 1, 0) : place])]
    return {
        "version": __version__,
        "command": " ".join(["python -m", module, *shown]),
        "machine": {**machine(torch.device(chosen.device)), "threads": str(chosen.threads)},
        "pair": {"width": WIDTH, "layers": LAYERS, "tokens": LENGTH},
        "took_seconds": round(time.perf_counter() - begun, 1),
    }


def summary(outcome: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the numbers of one group of clients."""
    times = 1000 * np.array([taken for _, taken in outcome["times"]] or [np.nan])
    return {
        "requests": len(outcome["times"]),
        "requests_per_second": round(len(outcome["times"]) / seconds, 1),
        **{f"p{percent}_ms": round(float(np.percentile(times, percent)), 2) for percent in (50, 99)},
        "longest_ms": round(float(times.max()), 2),
        "degraded": outcome["degraded"],
        "errors": sum(outcome["errors"].values()),
        "wrong": outcome["wrong"],
        **({"examples": outcome["examples"]} if outcome["examples"] else {}),
    }


def cell(row: Mapping[str, Any], column: str) -> str:
    """Return a cell of the table; of figures, before, at most, and after."""
    if column in row:
        return row[column] if isinstance(row[column], str) else f"{row[column]:,}"
    name = column.removesuffix("_mb")
    return " ".join(f"{row['figures'][when][name]:,.0f}" for when in ("before", "most", "after"))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    lines = [list(columns)] + [[cell(row, column) for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
