"""Actors on a Ray cluster, through Ray Data: jobs stream to them, shards stream back, lost actors are replaced.

Each actor loads the task once: one actor per GPU where the device is a GPU, otherwise one per `threads` cores. Without
an address, a cluster of this machine alone runs for the time of the labelling. Ray's own output is shown only if it
fails. Actors read the data, the models and the work folder under the driver's paths and write nothing; the driver must
be on a machine of the cluster.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from seqdefer.environment import choose_device
from seqdefer.errors import OptionError
from seqdefer.labels.executors.base import (
    MAX_ATTEMPTS,
    JobFailure,
    JobResult,
    JobResults,
    TaskSource,
    default_workers,
    lost_worker,
    try_job,
)
from seqdefer.labels.jobs import Job

RESULT = "result"  # the one column: results and failures, as bytes
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # Ray's names: option, resource


class RayExecutor:
    """Runs jobs on `workers` actors; by default as many as the cluster has room for."""

    def __init__(self, source: TaskSource, workers: int | None, address: str | None) -> None:
        self.source, self.workers, self.address = source, workers, address
        self._load()

    def run(self, jobs: Sequence[Job]) -> JobResults:
        ray = self._load()
        with _cluster(ray, self.address, self._local_resources):
            workers = min(len(jobs), self.workers or self._max_workers(ray))
            for received in _stream(ray, self.source, jobs, workers, self._actor_resources):
                if isinstance(received, JobFailure):
                    received.throw()
                yield received

    def _load(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the rest is in its log files
        return import_module("ray")

    @property
    def _actor_resources(self) -> dict[str, float]:
        gpus = {"num_gpus": 1} if choose_device(self.source.device).type == "cuda" else {}
        return {**gpus, "num_cpus": self.source.threads}

    def _max_workers(self, ray: Any) -> int:
        """Return how many actors the cluster has room for."""
        free = ray.cluster_resources()
        counts = [int(free.get(RESOURCES[name], 0) // number) for name, number in self._actor_resources.items()]
        if not min(counts):
            needed = " and ".join(f"{number:g} {RESOURCES[name]}" for name, number in self._actor_resources.items())
            raise OptionError(f"a worker needs {needed}, and no machine of the cluster has that; it has: {dict(free)}")
        return min(counts)

    @property
    def _local_resources(self) -> dict[str, int]:
        """The size of a cluster on this machine."""
        workers = self.workers or default_workers(self.source.device)
        return {"num_cpus": max(workers * self.source.threads, default_workers("cpu"))}


@contextmanager
def _cluster(ray: Any, address: str | None, local_resources: dict[str, int]) -> Iterator[None]:
    """Use the cluster that this process has joined, the one at `address`, or a temporary local one."""
    if ray.is_initialized():
        yield
        return
    local = {"address": "local", "include_dashboard": False, **local_resources}
    where = local if address is None else {"address": address}
    try:
        with _silence_stderr():
            ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"cannot reach a Ray cluster at {address or 'this machine'}: {error}; start one (ray start --head), or "
            "leave --address out"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Hold back what Ray writes to file descriptor 2 while it starts; show it if starting fails."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        before = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(before, captured.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def _stream(
    ray: Any, source: TaskSource, jobs: Sequence[Job], workers: int, actor_resources: dict[str, float]
) -> Iterator[JobResult | JobFailure]:
    data = import_module("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False  # the driver shows its own bar
    context.execution_no_progress_timeout_s = -1  # a shard may take long
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"index": index, "job": bytes(ForkingPickler.dumps(job))} for index, job in enumerate(jobs)]
    # The counter runs beside the driver, so that it is not lost with another machine. Calls wait while it restarts.
    beside_driver = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    lasting = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": beside_driver}
    counter = ray.remote(num_cpus=0, **lasting)(_AttemptCounter).remote()
    # One block per job, and one job at a time per actor: a death loses no more than that. The pool may shrink, so that
    # the jobs of a lost machine find room on another.
    pool = data.ActorPoolStrategy(min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=1)
    results = data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Actor, batch_size=1, compute=pool, fn_constructor_args=(source, counter), **actor_resources
    )
    for row in results.iter_rows():
        yield ForkingPickler.loads(row[RESULT])


class _AttemptCounter:
    """Counts the attempts at each job: Ray would retry one that kills its workers forever."""

    def __init__(self) -> None:
        self.attempts = Counter[int]()

    def begin(self, index: int) -> int:
        self.attempts[index] += 1
        return self.attempts[index]


class _Actor:
    """Loads the task once, then runs jobs."""

    def __init__(self, source: TaskSource, counter: Any) -> None:
        self.ray, self.counter = import_module("ray"), counter
        self.failure: JobFailure | None = None
        try:
            self.task = source.load()
        except Exception as error:  # reported with the first job: Ray would retry the constructor forever
            self.failure = JobFailure.of(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        index, job = int(batch["index"][0]), ForkingPickler.loads(batch["job"][0])
        attempt = self.ray.get(self.counter.begin.remote(index))
        if self.failure is None and attempt > MAX_ATTEMPTS:
            self.failure = JobFailure.of(lost_worker("Ray worker", job.name))
        column = np.empty(1, dtype=object)  # numpy would take bytes for a string and strip trailing zeros
        column[0] = bytes(ForkingPickler.dumps(self.failure or try_job(self.task, index, job)))
        return {RESULT: column}
