"""Processes on this machine: each loads the task once, then runs one job after the other.

A process that dies is replaced, and its job is run again. Each has its own pipe to the driver: a process killed while
holding a shared lock would block all others. When the driver dies, so do the processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from seqdefer.environment import choose_device
from seqdefer.labels.executors.base import (
    MAX_ATTEMPTS,
    JobFailure,
    JobResult,
    JobResults,
    TaskSource,
    lost_worker,
    try_job,
)
from seqdefer.labels.jobs import Job

JOIN_SECONDS = 5  # for a process to end before it is killed


class LostWorkerWarning(UserWarning):
    """A labelling process died; it is replaced, and its shard is made again."""


class ProcessExecutor:
    """Runs jobs in up to `workers` processes."""

    def __init__(self, source: TaskSource, workers: int) -> None:
        self.source, self.workers = source, workers

    def run(self, jobs: Sequence[Job]) -> JobResults:
        pool = _Pool(self.source, jobs)
        try:
            for number in range(min(self.workers, len(jobs))):
                pool.start_worker(number)
            yield from pool.results()
        finally:
            for worker in pool.workers:
                worker.end()


class _Worker:
    """A process, its pipe, and the index of its current job."""

    def __init__(self, source: TaskSource, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of this process hold
        self.pipe: Connection[Any, Any]
        self.pipe, remote = context.Pipe()
        self.number, self.index = number, -1
        self.process = context.Process(target=_work, args=(_assign_gpu(source, number), remote), daemon=True)
        with block_ctrl_c():
            self.process.start()
        remote.close()  # else the process's end of the pipe would never close here

    def send(self, index: int, job: Job) -> None:
        self.index = index
        with suppress(OSError):  # it died, which reading the pipe shows too
            self.pipe.send((index, job))

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(JOIN_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Pool:
    """The workers, and the jobs that are left."""

    def __init__(self, source: TaskSource, jobs: Sequence[Job]) -> None:
        self.source, self.jobs = source, jobs
        self.waiting, self.deaths = deque(range(len(jobs))), Counter[int]()
        self.workers: list[_Worker] = []

    def start_worker(self, number: int) -> None:
        worker = _Worker(self.source, number)
        self.workers.append(worker)
        self._send_next(worker)

    def _send_next(self, worker: _Worker) -> None:
        if self.waiting:
            index = self.waiting.popleft()
            worker.send(index, self.jobs[index])
        else:
            self.workers.remove(worker)
            worker.end()

    def results(self) -> Iterator[JobResult]:
        while self.workers:
            ready = wait([worker.pipe for worker in self.workers])
            for worker in [one for one in self.workers if one.pipe in ready]:
                try:
                    received = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker)
                    continue
                if isinstance(received, JobFailure):
                    received.throw()
                self._send_next(worker)  # it works on while this result is written
                yield received

    def _replace(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.end()
        index, shard = worker.index, self.jobs[worker.index].name
        self.deaths[index] += 1
        status = worker.process.exitcode or 0
        name = f"worker ({f'signal {-status}' if status < 0 else f'status {status}'})"
        if self.deaths[index] == MAX_ATTEMPTS:
            raise lost_worker(name, shard)
        message = f"a {name} died on shard {shard}; it is replaced, and the shard is made again"
        warnings.warn(message, LostWorkerWarning, stacklevel=2)
        self.waiting.appendleft(index)
        self.start_worker(worker.number)


def _assign_gpu(source: TaskSource, number: int) -> TaskSource:
    """Spread workers over the GPUs where the device is `cuda`."""
    is_any_gpu = choose_device(source.device) == torch.device("cuda")
    return replace(source, device=f"cuda:{number % torch.cuda.device_count()}") if is_any_gpu else source


@contextmanager
def block_ctrl_c() -> Iterator[None]:
    """Start processes that ignore Ctrl-C: a terminal signals all processes at once, and the driver ends its workers."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # when the first process starts it, it unblocks the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(source: TaskSource, pipe: Connection[Any, Any]) -> None:
    threading.Thread(target=exit_with_driver, daemon=True).start()
    try:
        task = source.load()
    except Exception as error:
        pipe.send(JobFailure.of(error))
        return
    while True:
        try:
            index, job = pipe.recv()
        except EOFError:  # the driver is done
            return
        pipe.send(try_job(task, index, job))


def exit_with_driver() -> None:
    """Exit even mid-job: no driver is left to receive the result."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)
