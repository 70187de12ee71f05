"""A server whose expert is killed over and over: python -m benchmarks.service.soak [--seconds 600].

32 clients, 8 of them at budget 0; the expert is a process that is killed (SIGKILL) every 30 seconds and started again 5
seconds later. Every answer is checked: with the expert, it is that of `generate`; without, it says so, and the
predictor has written the rest. Requests at budget 0 need no expert, so its death must not slow them down. Before,
nothing dies:

alone          the 8 clients at budget 0
all at 0       32 clients at budget 0
healthy        the same 32 clients as in the soak
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.service.clients import Case, Group
from benchmarks.service.pair import cases_of, documents, make_pair
from benchmarks.service.processes import ExpertProcess, ServeProcess, serve
from benchmarks.service.report import log, parser_of, print_table, provenance, summary, use_threads
from benchmarks.text import quiet
from seqdefer.model.calibrated_pair import BudgetWarning
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.storage.files import write_json

N_PROMPTS, WARM_UP_SECONDS = 16, 2.0
N_FREE, N_ASKING = 8, 24
ASKING_BUDGETS = (0.2, 0.5, 1.0)
FREE, ASKING = "budget 0", "other budgets"
COLUMNS = (
    "phase",
    "group",
    "clients",
    "requests",
    "requests_per_second",
    "p50_ms",
    "p99_ms",
    "degraded",
    "errors",
    "wrong",
)


def groups_of(free: Sequence[Case], asking: Sequence[Case]) -> dict[str, list[Group]]:
    """Return the clients of each phase."""
    mixed = [Group(FREE, N_FREE, free), Group(ASKING, N_ASKING, asking)]
    return {
        "alone": mixed[:1],
        "all at 0": [Group(FREE, N_FREE + N_ASKING, free)],
        "healthy": mixed,
        "dying": mixed,
    }


def measure(server: ServeProcess, expert: ExpertProcess, groups: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all phases."""
    rows, found = [], dict[str, Any]()
    server.load(WARM_UP_SECONDS, groups["healthy"])
    for phase, some in groups.items():
        seconds = chosen.seconds if phase == "dying" else chosen.quiet_seconds
        log(f"{phase}: {sum(one.n_clients for one in some)} clients for {seconds:g} seconds")
        if phase == "dying":
            with expert.dying(chosen.every, chosen.down) as deaths:
                seen = server.load(seconds, some)
            found |= {"deaths": len(deaths), "figures": seen["figures"]}
        else:
            seen = server.load(seconds, some)
        for group in some:
            numbers = summary(seen["outcomes"][group.name], seen["seconds"])
            rows.append({"phase": phase, "group": group.name, "clients": group.n_clients, **numbers})
    return found | {"rows": rows, "slower": _slower(rows)}


def _slower(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how many times the 99th percentile of requests at budget 0 is that of each quiet phase."""
    p99 = {row["phase"]: row["p99_ms"] for row in rows if row["group"] == FREE}
    return {phase: round(p99["dying"] / quiet, 2) for phase, quiet in p99.items() if phase != "dying"}


@contextmanager
def prepared(folder: Path, device: str) -> Iterator[tuple[ServeProcess, ExpertProcess, dict[str, list[Group]]]]:
    """Make a pair, its answers, an expert and a server; the context is these and the clients of each phase."""
    expert = ExpertProcess()
    expert.start()
    try:
        log("making and fitting a pair")
        fitted = make_pair(folder, device, expert.url)
        with quiet(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            model, prompts = DeferringModel.from_pretrained(fitted, device=device), documents(N_PROMPTS, seed=2)
            free = cases_of(model, prompts, 0.0)
            asking = [one for budget in ASKING_BUDGETS for one in cases_of(model, prompts, budget, may_fail=True)]
        with serve(fitted, device) as server:
            yield server, expert, groups_of(free, asking)
    finally:
        expert.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of(
        "benchmarks.service.soak", "Kill the expert of a server under load, again and again.", "service-soak.json"
    )
    parser.add_argument("--seconds", type=float, default=600.0, metavar="X", help="with an expert that dies (600)")
    parser.add_argument("--quiet-seconds", type=float, default=60.0, metavar="X", help="of each phase before (60)")
    parser.add_argument("--every", type=float, default=30.0, metavar="X", help="seconds between deaths (30)")
    parser.add_argument("--down", type=float, default=5.0, metavar="X", help="seconds until it is started again (5)")
    chosen, begun = parser.parse_args(arguments), time.perf_counter()
    use_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder, prepared(Path(folder), chosen.device) as parts:
        found = measure(*parts, chosen)
    options = {name: getattr(chosen, name) for name in ("seconds", "quiet_seconds", "every", "down")}
    write_json(chosen.out, provenance("benchmarks.service.soak", arguments, chosen, begun) | options | found)
    print_table(found["rows"], COLUMNS)
    print(f"{found['deaths']} deaths; the p99 at budget 0 is {found['slower']} times that of the quiet phases")
    return int(any(row["errors"] or row["wrong"] for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
