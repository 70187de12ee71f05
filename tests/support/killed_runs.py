"""Labelling that is killed and resumed many times: python killed_runs.py KILLS FOLDER prints what happened as JSON.

This process imports everything once and starts no thread; each run is a fork of it, which takes milliseconds. Half of
the runs are killed at a random moment, the others by themselves in the middle of writing a file. After every death,
finished files must be those of a run that nobody killed, and those that were there before must still be there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from labelling_toy import ToyOptions, files_in, label_toy

SMALL, TINY = ToyOptions(length=4), ToyOptions(length=3)
STEPS = ("half a file", "before the sync", "before the rename", "after the rename")
MOST_WRITES = 16  # of a run, about


def fork(run: Callable[[], object]) -> int:
    """Start a run in a child; return its process id."""
    threads = Path("/proc/self/task")  # those of PyTorch too; not on every system
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a fork of several threads can hang"
    if child := os.fork():
        return child
    try:
        run()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def die_at(step: str, n_before: int) -> None:
    """Let this process die at a step of writing a file, after so many whole files."""
    left = iter(range(n_before))

    def replaced(real: Any, last: Callable[..., object]) -> Any:
        return lambda *given, **named: real(*given, **named) if next(left, None) is not None else last(*given, **named)

    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        die()

    def whole(*names: Any) -> None:
        rename(*names)
        die()

    rename, write, sync = os.replace, Path.write_bytes, os.fsync
    if step == "half a file":
        Path.write_bytes = replaced(write, half)  # type: ignore[method-assign]
    elif step == "before the sync":
        os.fsync = replaced(sync, die)
    else:
        os.replace = replaced(rename, die if step == "before the rename" else whole)


def status_after(child: int, seconds: float | None) -> int:
    """Kill a child after some seconds, unless it has ended; return minus its signal, or its exit status."""
    end = None if seconds is None else time.perf_counter() + seconds
    while end is not None and time.perf_counter() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    if end is not None:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def labels_in(out: Path) -> dict[str, bytes]:
    return files_in(out / "labels") if (out / "labels").exists() else {}


def killed_runs(n_kills: int, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Kill runs until `n_kills` have died; then let the last one finish."""
    label_toy(folder / "imports", TINY)  # what is imported on use is imported here, once
    begun, chance = time.perf_counter(), random.Random(seed)
    assert status_after(fork(lambda: label_toy(folder / "fresh", SMALL)), None) == 0
    fresh, seconds = labels_in(folder / "fresh"), time.perf_counter() - begun
    deaths, n_finished = Counter[str](), 0
    while sum(deaths.values()) < n_kills or not n_finished:
        out, kept = folder / f"run-{n_finished}", dict[str, bytes]()
        while True:
            is_last = sum(deaths.values()) >= n_kills
            step = "" if is_last or chance.random() < 0.5 else chance.choice(STEPS)
            moment = chance.uniform(0, seconds)
            n_before = chance.randrange(MOST_WRITES)

            def run(out: Path = out, step: str = step, n_before: int = n_before) -> None:
                if step:
                    die_at(step, n_before)
                label_toy(out, SMALL)

            status = status_after(fork(run), None if is_last or step else moment)
            labels = labels_in(out)
            assert kept.items() <= labels.items() <= fresh.items(), f"{out} has lost or changed files"
            kept = labels
            if status == 0:
                break
            assert status == -signal.SIGKILL, f"a run ended with {status}"
            deaths[step or "at a random moment"] += 1
        assert kept == fresh, f"{out} differs from a run that nobody killed"
        n_finished += 1
    taken = round(time.perf_counter() - begun, 1)
    return {"kills": sum(deaths.values()), "finished": n_finished, "lost": 0, "deaths": deaths, "seconds": taken}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(killed_runs(int(sys.argv[1]), Path(sys.argv[2]))) + "\n")
