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
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from seqdefer.environment import THREADS_VARIABLE, choose_device, n_cores
from seqdefer.errors import LostWorkerError
from seqdefer.interfaces import Task, TaskEntry
from seqdefer.labels.jobs import Job, label
from seqdefer.progress import Silent
from seqdefer.storage.shards import pack

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
        os.environ[THREADS_VARIABLE] = str(self.threads)
        torch.set_num_threads(self.threads)
        return self.entry.prepare(self.options, self.folder, choose_device(self.device), Silent())


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
