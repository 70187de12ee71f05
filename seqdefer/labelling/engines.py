"""Engines: who does the jobs. All give the same shards; they differ in how many work at once, and where.

    none    this process, one job after the other
    local   processes of this machine (`processes.py`)
    ray     actors on a Ray cluster, or on one that is started here for the time (`on_ray.py`)

Workers load the task themselves, once each, from a `Source`. What they find must be readable to them: on a cluster, the
folders under the same paths on every machine. They send back the bytes of shards, and the driver writes them.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from seqdefer.cores import THREADS, n_cores
from seqdefer.environment import choose_device
from seqdefer.errors import LostWorkerError, OptionError, missing_extra, unknown
from seqdefer.interfaces import Silent, Task, TaskEntry
from seqdefer.labelling.jobs import Job, label
from seqdefer.shards import pack

ENGINES = ("local", "ray")
ATTEMPTS = 3  # of a job whose worker dies


@dataclass(frozen=True)
class Result:
    """A finished job: its place among those given, the bytes of its shard, and what was warned of meanwhile."""

    place: int
    packed: bytes
    warnings: tuple[tuple[str, type[Warning]], ...] = ()


Results = Generator[Result, None, None]


class Engine(Protocol):
    def run(self, jobs: Sequence[Job]) -> Results:
        """The results, in any order. Closing it ends the workers."""
        ...


@dataclass(frozen=True)
class Source:
    """How a worker comes by the task. One thread each is the default: with more, sums may be rounded otherwise."""

    entry: TaskEntry
    options: Any
    folder: Path
    device: str
    threads: int = 1
    home: Path = Path()  # where the paths among the options begin

    @classmethod
    def of(cls, entry: TaskEntry, options: Any, folder: Path, device: str, threads: int) -> Source:
        return cls(entry, options, folder.resolve(), device, threads, Path.cwd())

    def load(self) -> Task:
        os.chdir(self.home)
        os.environ[THREADS] = str(self.threads)
        torch.set_num_threads(self.threads)
        return self.entry.prepare(self.options, self.folder, choose_device(self.device), Silent())


@dataclass(frozen=True)
class EngineSettings:
    """What can be chosen about labelling; the fields are options of the commands that label."""

    engine: str | None = None  # None: this process
    address: str | None = None  # of a Ray cluster; None starts one here
    workers: int | None = None  # None: as many as there are cores, or GPUs
    threads: int = 1  # of each worker
    shard_size: int | None = None  # rows; None: what the models take at once
    labels: Path | None = None  # the store; None: `labels` in the folder of the task

    def __post_init__(self) -> None:
        if self.engine not in (None, *ENGINES):
            raise unknown("engine", self.engine, ENGINES)
        for name in ("workers", "threads", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.address is not None and self.engine != "ray":
            raise OptionError(f"--address is for --engine ray; the engine is {self.engine or 'this process'}")
        if self.engine == "ray" and find_spec("ray") is None:  # told before anything is prepared
            raise missing_extra("ray", "ray", "labelling on a Ray cluster")
        if self.engine is None and self.workers not in (None, 1):
            raise OptionError(f"--workers {self.workers} needs an engine: --engine local, or --engine ray")

    def store_in(self, folder: Path) -> Path:
        return folder / "labels" if self.labels is None else self.labels

    def start(self, entry: TaskEntry, options: Any, folder: Path, device: str) -> Engine | None:
        """The engine for a task that has been prepared in `folder`; what it needs is looked for at once."""
        if self.engine is None:
            return None
        source = Source.of(entry, options, folder, device, self.threads)
        if self.engine == "local":
            from seqdefer.labelling.processes import Processes

            return Processes(source, self.workers or usual_workers(device))
        from seqdefer.labelling.on_ray import OnRay

        return OnRay(source, self.workers, self.address)


def usual_workers(device: str) -> int:
    """One a GPU, or one a core that this process may use."""
    if choose_device(device).type == "cuda":
        return torch.cuda.device_count()
    return n_cores()


@dataclass(frozen=True)
class Failure:
    """An error of a worker, and where it arose."""

    error: Exception | None  # None where it cannot be sent
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        trace = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # whatever its class does: then its words must do
            return cls(None, trace)
        return cls(error, trace)

    def throw(self) -> NoReturn:
        told = RuntimeError(f"in a worker:\n{self.trace}")
        if self.error is None:
            raise told
        raise self.error from told


def lost(what: str, shard: str) -> LostWorkerError:
    """For a job that must not be given out once more."""
    mend = "if memory was short, take fewer --workers or a smaller --shard-size"
    return LostWorkerError(f"a {what} at shard {shard}, {ATTEMPTS} times so far; {mend}")


def attempt(task: Task, place: int, job: Job) -> Result | Failure:
    """One job, for a driver elsewhere: what is warned of goes along."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            packed = pack(job.name, label(task, job))
    except Exception as error:
        return Failure.of(error)
    return Result(place, packed, tuple((str(one.message), one.category) for one in caught))


def in_process(task: Task, jobs: Sequence[Job]) -> Results:
    for place, job in enumerate(jobs):
        yield Result(place, pack(job.name, label(task, job)))
