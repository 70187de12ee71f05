"""Processes of this machine: each loads the task once, then takes one job after the other.

A process that dies is replaced, and its job is given out again. Each has a line of its own to the driver, because one
that is killed while it holds what all share would keep all others waiting. When the driver dies, so do they.
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
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from seqdefer.environment import choose_device
from seqdefer.labels.executors.base import ATTEMPTS, Failure, Result, Results, Source, attempt, lost
from seqdefer.labels.jobs import Job

PATIENCE = 5  # seconds that a process gets to end


class LostWorkerWarning(UserWarning):
    """A process that labels died: it is replaced, and what it was at is made again."""


class Processes:
    """`workers` of them; no more than there are jobs."""

    def __init__(self, source: Source, workers: int) -> None:
        self.source, self.workers = source, workers

    def run(self, jobs: Sequence[Job]) -> Results:
        crew = _Crew(self.source, jobs)
        try:
            crew.hire(min(self.workers, len(jobs)))
            yield from crew.results()
        finally:
            crew.dismiss()


class _Worker:
    def __init__(self, source: Source, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of this process hold
        self.line: Connection[Any, Any]
        self.line, far = context.Pipe()
        self.number, self.place = number, -1  # of the job it is at
        self.process = context.Process(target=_work, args=(_on_its_device(source, number), far), daemon=True)
        with _deaf_to_ctrl_c():
            self.process.start()
        far.close()  # or its end would not be seen here

    def give(self, place: int, job: Job) -> None:
        self.place = place
        with suppress(OSError):  # it died: its line says so, too
            self.line.send((place, job))

    def end(self) -> None:
        self.line.close()
        self.process.terminate()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Crew:
    """The workers, and the jobs that are left."""

    def __init__(self, source: Source, jobs: Sequence[Job]) -> None:
        self.source, self.jobs = source, jobs
        self.waiting, self.deaths = deque(range(len(jobs))), Counter[int]()
        self.workers: list[_Worker] = []

    def hire(self, n: int) -> None:
        for number in range(n):
            self._hire(number)

    def _hire(self, number: int) -> None:
        worker = _Worker(self.source, number)
        self.workers.append(worker)
        self._give_next(worker)

    def _give_next(self, worker: _Worker) -> None:
        if self.waiting:
            place = self.waiting.popleft()
            worker.give(place, self.jobs[place])
        else:
            self.workers.remove(worker)
            worker.end()

    def results(self) -> Iterator[Result]:
        while self.workers:
            ready = wait([worker.line for worker in self.workers])
            for worker in [one for one in self.workers if one.line in ready]:
                try:
                    told = worker.line.recv()
                except (EOFError, OSError):
                    self._replace(worker)
                    continue
                if isinstance(told, Failure):
                    told.throw()
                self._give_next(worker)  # it works on while this result is written
                yield told

    def _replace(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.end()
        place = worker.place
        self.deaths[place] += 1
        died, shard = f"worker died ({_how(worker.process.exitcode)})", self.jobs[place].name
        if self.deaths[place] == ATTEMPTS:
            raise lost(died, shard)
        told = f"a {died} at shard {shard}; it is replaced, and the shard is made again"
        warnings.warn(told, LostWorkerWarning, stacklevel=2)
        self.waiting.appendleft(place)
        self._hire(worker.number)

    def dismiss(self) -> None:
        for worker in self.workers:
            worker.end()


def _how(exitcode: int | None) -> str:
    return f"signal {-exitcode}" if exitcode is not None and exitcode < 0 else f"status {exitcode}"


def _on_its_device(source: Source, number: int) -> Source:
    """GPUs are dealt out."""
    if choose_device(source.device) != torch.device("cuda"):
        return source
    return replace(source, device=f"cuda:{number % torch.cuda.device_count()}")


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """What is started inside does not hear Ctrl-C: a terminal tells all processes at once, and the driver ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(source: Source, line: Connection[Any, Any]) -> None:
    threading.Thread(target=_end_with_driver, daemon=True).start()
    try:
        task = source.load()
    except Exception as error:
        line.send(Failure.of(error))
        return
    while True:
        try:
            place, job = line.recv()
        except EOFError:  # the driver is done
            return
        line.send(attempt(task, place, job))


def _end_with_driver() -> None:
    """Also amid a job, of which nobody would hear."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)
