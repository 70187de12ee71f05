"""Actors on a Ray cluster, through Ray Data: jobs stream to them, shards stream back, lost actors are replaced.

Each actor loads the task once: one a GPU where the device is a GPU, otherwise one for each `threads` cores. Without an
address a cluster of this machine alone is started, and ended with the labelling. What Ray has to say is shown when
something fails. Actors read the data, the models and the work folder under the same paths as the driver; they write
nothing, and the driver needs to be on a machine of the cluster.
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
from seqdefer.labels.executors.base import ATTEMPTS, Failure, Result, Results, Source, attempt, lost, usual_workers
from seqdefer.labels.jobs import Job

TOLD = "told"  # the one column: results and failures, as bytes


class OnRay:
    """`workers` actors; as many as the cluster has room for where None is given."""

    def __init__(self, source: Source, workers: int | None, address: str | None) -> None:
        self.source, self.workers, self.address = source, workers, address
        self._load()

    def run(self, jobs: Sequence[Job]) -> Results:
        ray = self._load()
        with _cluster(ray, self.address, self._room):
            workers = min(len(jobs), self.workers or self._most(ray))
            for told in _stream(ray, self.source, jobs, workers, self._needs):
                if isinstance(told, Failure):
                    told.throw()
                yield told

    def _load(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # the rest is in its log files
        return import_module("ray")

    @property
    def _needs(self) -> dict[str, float]:
        """Of one actor."""
        if choose_device(self.source.device).type == "cuda":
            return {"num_gpus": 1, "num_cpus": self.source.threads}
        return {"num_cpus": self.source.threads}

    def _most(self, ray: Any) -> int:
        """Actors that the cluster has room for."""
        free = ray.cluster_resources()
        counts = [int(free.get(_RESOURCE[name], 0) // number) for name, number in self._needs.items()]
        if not min(counts):
            needed = " and ".join(f"{number:g} {_RESOURCE[name]}" for name, number in self._needs.items())
            raise OptionError(f"no machine of the cluster has the {needed} that a worker needs; it has: {dict(free)}")
        return min(counts)

    @property
    def _room(self) -> dict[str, int]:
        """Of a cluster that is started here."""
        workers = self.workers or usual_workers(self.source.device)
        return {"num_cpus": max(workers * self.source.threads, usual_workers("cpu"))}


_RESOURCE = {"num_cpus": "CPU", "num_gpus": "GPU"}  # as Ray calls what it counts


@contextmanager
def _cluster(ray: Any, address: str | None, room: dict[str, int]) -> Iterator[None]:
    """The one that this process has joined already, the one at `address`, or a new one for the time."""
    if ray.is_initialized():
        yield
        return
    where = {"address": "local", "include_dashboard": False, **room} if address is None else {"address": address}
    try:
        with _hushed():
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
def _hushed() -> Iterator[None]:
    """What Ray writes past Python as it starts is shown only where that fails."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        before = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(before, said.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def _stream(
    ray: Any, source: Source, jobs: Sequence[Job], workers: int, needs: dict[str, float]
) -> Iterator[Result | Failure]:
    data = import_module("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False  # there is a bar of our own
    context.execution_no_progress_timeout_s = -1  # a shard may take long
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"place": place, "job": bytes(ForkingPickler.dumps(job))} for place, job in enumerate(jobs)]
    # Beside the driver: with any other machine it might be lost. Then it begins anew, and calls wait until it does.
    here = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    lasting = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
    tally = ray.remote(num_cpus=0, **lasting)(_Tally).remote()
    # One block a job, and one job at a time for each actor: whatever dies takes no more than that along. The pool may
    # shrink, so that what was lost with a machine finds room on another.
    pool = data.ActorPoolStrategy(min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=1)
    results = data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Actor, batch_size=1, compute=pool, fn_constructor_args=(source, tally), **needs
    )
    for row in results.iter_rows():
        yield ForkingPickler.loads(row[TOLD])


class _Tally:
    """How often each job was begun: Ray would give one that kills its workers to others for ever."""

    def __init__(self) -> None:
        self.begun = Counter[int]()

    def begin(self, place: int) -> int:
        self.begun[place] += 1
        return self.begun[place]


class _Actor:
    """Loads the task once."""

    def __init__(self, source: Source, tally: Any) -> None:
        self.ray, self.tally = import_module("ray"), tally
        self.failure: Failure | None = None
        try:
            self.task = source.load()
        except Exception as error:  # told with the first job: Ray would try again and again
            self.failure = Failure.of(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        place, job = int(batch["place"][0]), ForkingPickler.loads(batch["job"][0])
        begun = self.ray.get(self.tally.begin.remote(place))
        if self.failure is None and begun > ATTEMPTS:
            self.failure = Failure.of(lost("worker of Ray died", job.name))
        column = np.empty(1, dtype=object)  # numpy would take bytes for a text, and cut its zeros off
        column[0] = bytes(ForkingPickler.dumps(self.failure or attempt(self.task, place, job)))
        return {TOLD: column}
