"""Executors run jobs. All make the same shards; they differ in how many workers they use, and where.

    none    this process, one job after the other
    local   processes on this machine (`processes.py`)
    ray     actors on a Ray cluster, or on a temporary one on this machine (`ray.py`)

Each worker loads the task once, from a `TaskSource`. It must be able to read the data: on a cluster, all machines need
the folders under the same paths. Workers send back the bytes of shards, and the driver writes them.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from seqdefer.environment import THREADS_VARIABLE, choose_device, n_cores
from seqdefer.errors import LostWorkerError
from seqdefer.interfaces import Task, TaskEntry
from seqdefer.labels.jobs import Job, run_job
from seqdefer.progress import Silent
from seqdefer.storage.shards import pack

EXECUTORS = ("local", "ray")
MAX_ATTEMPTS = 3  # at a job whose worker dies


@dataclass(frozen=True)
class JobResult:
    """A finished job: its index, the bytes of its shard, and the warnings it raised."""

    index: int
    packed: bytes
    warnings: tuple[tuple[str, type[Warning]], ...] = ()


JobResults = Generator[JobResult, None, None]


class Executor(Protocol):
    """Runs jobs and yields their results in any order. Closing the generator ends the workers."""

    def run(self, jobs: Sequence[Job]) -> JobResults: ...


@dataclass(frozen=True)
class TaskSource:
    """The task as a worker loads it. The default is one thread: more may round sums differently."""

    entry: TaskEntry
    options: Any
    folder: Path
    device: str
    threads: int = 1
    home: Path = field(default_factory=Path.cwd)  # relative paths among the options start here

    def load(self) -> Task:
        os.chdir(self.home)
        os.environ[THREADS_VARIABLE] = str(self.threads)
        torch.set_num_threads(self.threads)
        return self.entry.prepare(self.options, self.folder, choose_device(self.device), Silent())


def default_workers(device: str) -> int:
    """Return one worker per GPU, or per core that this process may use."""
    return torch.cuda.device_count() if choose_device(device).type == "cuda" else n_cores()


@dataclass(frozen=True)
class JobFailure:
    """An exception in a worker, with its traceback."""

    error: Exception | None  # None if it cannot be pickled
    trace: str

    @classmethod
    def of(cls, error: Exception) -> JobFailure:
        trace = "".join(traceback.format_exception(error))
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:  # its class decides how pickling fails; the traceback must do
            return cls(None, trace)
        return cls(error, trace)

    def throw(self) -> NoReturn:
        cause = RuntimeError(f"in a worker:\n{self.trace}")
        if self.error is None:
            raise cause
        raise self.error from cause


def lost_worker(worker: str, shard: str) -> LostWorkerError:
    """Return the error for a job that has used up its attempts."""
    return LostWorkerError(
        f"a {worker} died on shard {shard} in {MAX_ATTEMPTS} attempts; "
        "if memory ran out, use fewer --workers or a smaller --shard-size"
    )


def try_job(task: Task, index: int, job: Job) -> JobResult | JobFailure:
    """Run a job in a worker; return its result with all warnings, or its failure."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            packed = pack(job.name, run_job(task, job))
    except Exception as error:
        return JobFailure.of(error)
    return JobResult(index, packed, tuple((str(one.message), one.category) for one in caught))


def run_in_process(task: Task, jobs: Sequence[Job]) -> JobResults:
    """Run jobs in this process, one after the other."""
    for index, job in enumerate(jobs):
        yield JobResult(index, pack(job.name, run_job(task, job)))
