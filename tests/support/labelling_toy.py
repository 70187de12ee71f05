"""A toy task whose workers tests can block, kill and count; and a driver to start as a process.

`Gate` is a folder named in the environment, so that neither shard names nor manifests depend on it. A process that
labels the example `stop` leaves a mark there and waits until the gate opens.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import DataError
from seqdefer.evaluation.splits import label_task
from seqdefer.interfaces import TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.label_store import LabellingResult
from seqdefer.progress import Meter
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Sequences

GATE = "SEQDEFER_TEST_GATE"
HAND_OFFS, TREES = 12, 8  # shards: 20 examples per split by fives; trees of train and validation
RAY_TOKEN = secrets.token_hex(32)
WAIT_SECONDS = 180  # until a test that waits fails


@dataclass(frozen=True)
class ToyOptions:
    n: int = 20
    length: int = 14
    fails: str = ""  # at the first validation example: "error", "warning", "death"; or "exits"


class HeldToy(ToyTask):
    """A toy task that passes the gate, if there is one, before it measures a loss."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(n=options.n, length=options.length)
        self.options = options
        self.expert.fingerprint = "toy expert"
        self.expert.batch_size = self.predictor.batch_size = 5

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        if GATE in os.environ:
            Gate(Path(os.environ[GATE])).enter(examples.ids)
        if self.options.fails == "exits":
            Gate(Path(os.environ[GATE])).exit_once(examples.ids)
        elif self.options.fails and self.options.n in examples.ids:
            _fail(self.options.fails)
        return super().sequence_loss(examples, sequences)


def _fail(how: str) -> None:
    if how == "error":
        raise DataError("the first validation example cannot be measured; give another")
    if how == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    warnings.warn("the first validation example is odd", UserWarning, stacklevel=2)


def prepare(options: ToyOptions, folder: Path, device: torch.device, meter: Meter) -> HeldToy:
    return HeldToy(options)


ENTRY = TaskEntry(name="toy", summary="a toy for tests", presets={"quick": ToyOptions()}, prepare=prepare)


@dataclass(frozen=True)
class Gate:
    """A folder that blocks labelling processes, and collects their marks."""

    folder: Path

    @classmethod
    def closed(cls, folder: Path, stop: int) -> Gate:
        folder.mkdir()
        (folder / "stop").write_text(str(stop))
        return cls(folder)

    def enter(self, ids: Tensor) -> None:
        first = int(ids.min())
        (self.folder / f"at-{first}-{os.getpid()}").touch()
        while int((self.folder / "stop").read_text()) == first and not (self.folder / "open").exists():
            (self.folder / f"waits-{os.getpid()}").touch()
            time.sleep(0.01)

    def exit_once(self, ids: Tensor) -> None:
        """Exit the first process that labels these examples."""
        mark = self.folder / f"exit-{int(ids.min())}"
        if not mark.exists():
            mark.touch()
            os._exit(3)

    def open(self) -> None:
        (self.folder / "open").touch()

    def waiting(self) -> list[int]:
        """Wait for the first blocked process; return the ids of all."""
        found = until(lambda: [path.name for path in self.folder.glob("waits-*")])
        return [int(name.split("-")[1]) for name in found]

    def attempts(self) -> list[int]:
        """Return the first example of each hand-off shard, once per attempt."""
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("at-*"))

    def processes(self) -> set[int]:
        return {int(path.name.split("-")[2]) for path in self.folder.glob("at-*")}


def until(ask: Callable[[], Any]) -> Any:
    """Call `ask` until it returns something true; return that. The limit is far off, for machines that are busy."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := ask()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
    return found


def is_gone(process: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def label_toy(out: Path, options: ToyOptions = ENTRY.presets["quick"], **how: Any) -> list[LabellingResult]:
    return label_task(
        ENTRY, options, out, ("train", "validation", "test"), ExecutorSettings(**how),
        seeds=1, instances=20, rollouts=3, device="cpu",
    )  # fmt: skip


def files_in(folder: Path) -> dict[str, bytes]:
    """Read the shards and manifests, but no partial files."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@contextmanager
def started(out: Path, engine: str, workers: int, gate: Gate, address: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a driver in its own process group, as a terminal would; kill it at the end."""
    code = "import labelling_toy; labelling_toy.main()"
    command = [sys.executable, "-c", code, str(out), engine, str(workers), address]
    with subprocess.Popen(
        command, env=environment(gate), start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as driver:
        try:
            yield driver
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)


def end_of(driver: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit status and stderr of a driver."""
    errors = driver.communicate(timeout=WAIT_SECONDS)[1]
    return driver.returncode, errors


def environment(gate: Gate) -> dict[str, str]:
    """Return the environment of drivers and Ray nodes.

    A token of our own keeps other clusters apart: Ray would use one from the home folder.
    """
    own = {"PYTHONPATH": str(Path(__file__).parent), GATE: str(gate.folder), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}


def main() -> None:
    out, engine, workers, address = sys.argv[1:]
    label_toy(Path(out), engine=engine, workers=int(workers), address=address or None)
