"""docs/service.md, from what `python -m benchmarks.service` and two tests measured: docs/results/service-*.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page_parts import machine_of, read_results, table

PAGE = """\
# The server under load and failure

What a running server was put through, and what came out. Every answer was compared with that of `generate`, so *wrong*
counts answers that were mixed up, changed or incomplete. This page is generated from the files of the measurements; all
of them can be repeated:

<!-- no-test: measures for minutes -->
```sh
python -m benchmarks.service.load                 # needs the extras server and text
python -m benchmarks.service.soak                 # needs remote too
python -m benchmarks.service.dashboard            # needs prometheus and matplotlib
export SEQDEFER_TEST_OUT=docs/results             # where the tests write what this page shows
SEQDEFER_TEST_FUZZ=10000 pytest tests/server/test_fuzz.py
SEQDEFER_TEST_KILLS=1000 pytest tests/labels/test_kills.py -k random_moments
```

## Load

A real `seqdefer serve` with a small text pair of random weights ({pair}).
Clients are in another process; each sends its next request when it has an answer. Half of the requests are streams;
budgets are 0, 0.2, 0.5 and 1. Memory, threads and descriptors are those before the load, the most during it, and those
after it.

{load}
{load_source}

## An expert that dies

{n_clients} clients, {n_free} of them at budget 0. The expert is behind an endpoint, in a process that is killed with
SIGKILL every {every:g} seconds and started again {down:g} seconds later. {n_answers:,} answers, {n_degraded:,} of them
degraded, {n_wrong:,} wrong, {n_errors:,} errors, {deaths} deaths.

{soak}
Requests at budget 0 need no expert. Their 99th percentile while the expert died, as a multiple of that of quiet phases
of the same server:

{slower}
Requests that need no expert come first: those that may ask it, and those that are degraded while the breaker is open,
are other batches, which get half of the time that the first take. Against the same clients alone they are still slower:
they share the interpreter with the parsing of all requests and with the calls of the expert.

{soak_source}

## Fuzzed requests

{fuzz_n:,} requests: valid ones of every endpoint, uploads of sound included, whose fields, bytes, headers, methods or
ends were changed at random; streams; wrong and capped keys; clients that left in the middle. {fuzz_reached:,} reached
the models, and {fuzz_5xx} were answered by a 5xx. The test fails if one hangs, if something is left behind, or if an
error is logged. By status (*left*: the client did not wait for it; *none*: the connection was closed, as for bytes that
are not HTTP):

{fuzz}
## Killed labelling runs

{kills:,} runs of a small labelling job were killed with SIGKILL, and resumed until {finished:,} had finished, in
{seconds:.0f} seconds. After each death, all finished files were those of a run that nobody killed, byte for byte;
{lost} were lost.

{deaths_table}
## The dashboard

![All panels of the dashboard, with data of the run with an expert that dies](images/dashboard.png)

The queries of `deploy/grafana/seqdefer.json`, answered by a real Prometheus that watched a server whose expert died,
drawn by `python -m benchmarks.service.dashboard`. It fails if a panel has no data. Grafana itself was not tried.
"""
LOAD = {
    "clients": "clients",
    "requests": "requests",
    "requests_per_second": "a second",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "errors": "errors",
    "wrong": "wrong",
}
FIGURES = {"memory": "memory, MB", "threads": "threads", "descriptors": "descriptors"}
SOAK = {"phase": "phase", "group": "clients at", **LOAD, "degraded": "degraded"}
PHASES = {
    "alone": "the same clients at budget 0, alone",
    "all at 0": "as many clients in all, every one at budget 0",
    "healthy": "the same clients, with an expert that lives",
}


def service_page(folder: Path) -> str:
    """Return the page."""
    load, soak, kills = (read_results(folder / f"service-{name}.json") for name in ("load", "soak", "kills"))
    fuzz = [read_results(folder / f"service-fuzz-{name}.json") for name in ("requests", "uploads")]
    statuses = sorted(sum((Counter(one["statuses"]) for one in fuzz), Counter[str]()).items())
    dying = [row for row in soak["rows"] if row["phase"] == "dying"]
    pair = load["pair"]
    slower = [[PHASES[phase], f"{times:.2f}"] for phase, times in soak["slower"].items()]
    return PAGE.format(
        pair=f"{pair['layers']['predictor']} and {pair['layers']['expert']} layers, {pair['tokens']} tokens an answer",
        load=table([*LOAD.values(), *FIGURES.values()], [[*_cells(row, LOAD), *_figures(row)] for row in load["rows"]]),
        load_source=_source(load),
        soak=table([*SOAK.values()], [_cells(row, SOAK) for row in soak["rows"]]),
        soak_source=_source(soak),
        slower=table(["against", "times"], slower),
        **{name: soak[name] for name in ("every", "down", "deaths")},
        n_clients=sum(row["clients"] for row in dying),
        n_free=dying[0]["clients"],
        n_answers=sum(row["requests"] for row in dying),
        **{f"n_{name}": sum(row[name] for row in dying) for name in ("degraded", "wrong", "errors")},
        fuzz_n=sum(n for _, n in statuses),
        fuzz_reached=sum(one["reached"] for one in fuzz),
        fuzz_5xx=sum(n for status, n in statuses if status.startswith("5")),
        fuzz=table([name for name, _ in statuses], [[f"{n:,}" for _, n in statuses]]),
        **{name: kills[name] for name in ("kills", "finished", "seconds", "lost")},
        deaths_table=table(["killed", "times"], [[name, f"{n:,}"] for name, n in sorted(kills["deaths"].items())]),
    )


def _cells(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    return [row[name] if isinstance(row[name], str) else f"{row[name]:,}" for name in columns]


def _figures(row: Mapping[str, Any]) -> list[str]:
    moments = [row["figures"][when] for when in ("before", "most", "after")]
    return [", ".join(f"{one[name]:,.0f}" for one in moments) for name in FIGURES]


def _source(written: Mapping[str, Any]) -> str:
    said = f"`{written['command']}`, version {written['version']}, {written['took_seconds']:.0f} seconds"
    return f"{said}; {machine_of(written)}. {written.get('remark', '')}".rstrip()
