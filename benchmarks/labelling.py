"""Benchmark of labelling engines: the speed-up of two workers over one, and the memory for more examples.

One process, two processes, and two actors on a local Ray label tours with the local search, timed from the start of the
workers to the manifest. Their files must be equal. Memory is the peak of a driver and of its largest worker, in
separate processes, for 1, 4 and 16 times as many examples.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import ResultsDifferError, Row, race
from benchmarks.weather import Bench, Benchmarks
from seqdefer.errors import MissingExtraError
from seqdefer.evaluation.splits import label_task
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.tasks.tsp.task import ENTRY, TSPOptions

MEMORY_FACTORS = (1, 4, 16)
TIMED_SHARDS = 16
REPEATS = 3  # at most: each starts the workers anew
MEMORY_SHARD_SIZE = 128

# A driver that prints its own peak and that of its largest worker. ru_maxrss of a finished process is no substitute: it
# starts at the memory of the parent process.
DRIVER = """
import json, sys, threading, time
import multiprocessing
from pathlib import Path
from seqdefer.cli import main

peaks = {}

def peak(process):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def watch():
    while True:
        for worker in multiprocessing.active_children():
            try:
                peaks[worker.pid] = peak(worker.pid)
            except (OSError, StopIteration):  # it has exited
                pass
        time.sleep(0.02)

if __name__ == "__main__":
    threading.Thread(target=watch, daemon=True).start()
    status = main(sys.argv[1:])
    print(json.dumps([status, peak("self"), max(peaks.values())]))
"""


def labelling(bench: Bench) -> list[Row]:
    """Time one and two workers, and measure their memory if /proc is available."""
    rows = _timed(bench)
    return rows + _memory(bench) if Path("/proc/self/status").exists() else rows


def _timed(bench: Bench) -> list[Row]:
    n, folder, number = bench.sizes.n_labelled, bench.folder / "labelling", count()
    options = replace(_options(n, bench.sizes.n_tour_cities), effort=None)

    def by(engine: str, workers: int) -> Callable[[], dict[str, bytes]]:
        def way() -> dict[str, bytes]:
            store = folder / f"labels-{next(number)}"
            how = ExecutorSettings(engine, workers=workers, shard_size=max(1, n // TIMED_SHARDS), labels=store)
            label_task(ENTRY, options, folder, ["train"], how, seeds=1, instances=1, rollouts=2, device="cpu")
            return {path.name: path.read_bytes() for path in store.iterdir()}

        return way

    ways = {"one": by("local", 1), "two": by("local", 2)}
    bench.log("comparing")
    made = {name: way() for name, way in ways.items()}
    if bench.sizes.ray:
        try:
            made["ray"] = by("ray", 2)()
            ways["ray"] = by("ray", 2)
        except MissingExtraError as error:
            bench.log(f"Ray skipped: {error}")
    for name, files in made.items():
        if files != made["one"]:
            raise ResultsDifferError(f"one worker and {name!r} made different files; please report this")
    seconds: dict[str, Any] = race(ways, min(REPEATS, bench.sizes.repeats), bench.sizes.least_seconds, bench.log)
    what = {
        "two": f"one process; ours two ({n} tours by the local search)",
        "ray": "the same; ours a Ray of two actors",
    }
    same = f"{len(made['one'])} files equal"
    return [
        Row.faster("labelling", what[name], seconds[name], seconds["one"], same, _note(seconds[name]))
        for name in ways
        if name != "one"
    ]


def _note(seconds: Any) -> str:
    return f"{np.median(seconds):.3g} s, including the start of the workers"


def _options(n: int, cities: int) -> TSPOptions:
    return TSPOptions(expert="search", train=n, validation=1, test=1, cities=cities, effort=0)


def _memory(bench: Bench) -> list[Row]:
    n, cities = bench.sizes.n_memory, bench.sizes.n_tour_cities
    peaks = []
    for times in MEMORY_FACTORS:
        bench.log(f"memory of {times * n} examples")
        peaks.append(_peaks(bench.folder / f"memory-{times}", times * n, cities))
    rows = []
    for who, values in zip(("driver", "worker"), np.array(peaks).T, strict=True):
        listed = ", ".join(f"{times}x: {value:.0f} MB" for times, value in zip(MEMORY_FACTORS, values, strict=True))
        note = f"{listed}; 16x is {values[-1] / values[0]:.2f} times 1x"
        rows.append(Row.of("labelling", f"peak memory of a {who}, 1x is {n} examples", "MB", values, note=note))
    return rows


def _peaks(folder: Path, n: int, cities: int) -> tuple[float, float]:
    """Return the peak memory of the driver and of the larger of two workers, in MB."""
    folder.mkdir()
    script = folder / "measured.py"
    script.write_text(DRIVER)
    sizes = ["--train", str(n), "--validation", "1", "--test", "1", "--cities", str(cities), "--expert", "search"]
    how = ["--engine", "local", "--workers", "2", "--shard-size", str(MEMORY_SHARD_SIZE), "--splits", "train"]
    command = ["label", "tsp", *sizes, *how, "--effort", "0", "--out", str(folder / "out"), "--quiet", "--json"]
    ran = subprocess.run([sys.executable, str(script), *command], capture_output=True, text=True, check=True)
    _, driver, worker = json.loads(ran.stdout.splitlines()[-1])
    return driver / 1e3, worker / 1e3


BENCHMARKS: Benchmarks = {"labelling": (labelling, "labels of tours by two workers")}
