"""Load on a real server: python -m benchmarks.service.load [--seconds 60] [--out service-load.json].

For 1, 8, 32 and 64 clients: requests a second, percentiles of their times, errors, wrong answers, and what the server
takes of memory, threads and descriptors. Half of the requests are streams, at four budgets; every answer is compared
with that of `generate`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.service.clients import Group
from benchmarks.service.pair import cases_of, documents, make_pair
from benchmarks.service.processes import serve
from benchmarks.service.report import log, parser_of, print_table, provenance, summary, use_threads
from benchmarks.text import quiet
from seqdefer.model.calibrated_pair import BudgetWarning
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.storage.files import write_json

CLIENTS, BUDGETS = (1, 8, 32, 64), (0.0, 0.2, 0.5, 1.0)
N_PROMPTS, WARM_UP_SECONDS = 32, 2.0
COLUMNS = (
    "clients", "requests", "requests_per_second", "p50_ms", "p99_ms", "errors", "wrong", "memory_mb", "threads",
    "descriptors",
)  # fmt: skip


def measure(folder: Path, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each number of clients."""
    log("making and fitting a pair")
    fitted = make_pair(folder, chosen.device)
    with quiet(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        model, prompts = DeferringModel.from_pretrained(fitted, device=chosen.device), documents(N_PROMPTS, seed=2)
        cases = [case for budget in BUDGETS for case in cases_of(model, prompts, budget)]
    rows = []
    with serve(fitted, chosen.device) as server:
        server.load(WARM_UP_SECONDS, [Group("warm-up", 8, cases)])
        for n in chosen.clients:
            log(f"{n} clients for {chosen.seconds:g} seconds")
            seen = server.load(chosen.seconds, [Group("load", n, cases)])
            numbers = summary(seen["outcomes"]["load"], seen["seconds"])
            rows.append({"clients": n, **numbers, "figures": seen["figures"]})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of(
        "benchmarks.service.load", "Put load on a real server and check every answer.", "service-load.json"
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="X", help="for each number of clients (60)")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, metavar="N", help="(1 8 32 64)")
    chosen, begun = parser.parse_args(arguments), time.perf_counter()
    use_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), chosen)
    write_json(
        chosen.out,
        provenance("benchmarks.service.load", arguments, chosen, begun) | {"seconds": chosen.seconds, "rows": rows},
    )
    print_table(rows, COLUMNS)
    return int(any(row["errors"] or row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
