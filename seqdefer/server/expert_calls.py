"""Calls of the expert: with a time limit, and without blocking the thread that owns the models where it is remote.

A local expert is called at once (`LocalCalls`). A remote one (`Expert.waits`) is asked without waiting (`RemoteCalls`):
over its client's event loop where it has one, else in one of a few threads. The batch that asked goes on when the
answer is there, and the thread that owns the models serves others meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from seqdefer.server.breaker import ABSENT_STRIKES, CircuitBreaker, ExpertUnavailable

THREADS = 8  # for calls of remote experts that cannot be asked without waiting
REQUEST_STATUSES = (400, 413, 422)  # of an endpoint that refuses one request, and answers others
Result = TypeVar("Result")
Call = Callable[[], Result]


class ExpertTimeout(Exception):
    """A call of the expert exceeded its time limit."""


def is_about_one_request(failure: Exception) -> bool:
    """Tell whether a failure says nothing about the next request."""
    return getattr(failure, "status", None) in REQUEST_STATUSES


def is_absent(failure: Exception) -> bool:
    """Tell whether the expert could not be reached, or did not answer in time."""
    return isinstance(failure, ExpertTimeout) or bool(getattr(failure, "is_unreachable", False))


class ExpertCall(Generic[Result]):
    """A call that was made, and may be answered later. `seconds`: until it was answered, or given up."""

    def __init__(self, future: Future[Result], limit: float | None = None) -> None:
        self.future, self.limit, self.started = future, limit, time.perf_counter()
        self.deadline = None if limit is None else self.started + limit
        self._answered: float | None = None
        future.add_done_callback(self._note_time)

    @classmethod
    def answered(cls, call: Call[Result]) -> ExpertCall[Result]:
        """Make a call at once."""
        made = cls(Future[Result]())
        _settle(made.future, call)
        return made

    @classmethod
    def failed(cls, error: Exception) -> ExpertCall[Result]:
        made = cls(Future[Result]())
        made.future.set_exception(error)
        return made

    @property
    def is_over(self) -> bool:
        """Whether `result` returns at once."""
        return self.future.done() or (self.deadline is not None and time.perf_counter() >= self.deadline)

    @property
    def seconds(self) -> float:
        return (self._answered or time.perf_counter()) - self.started

    def result(self) -> Result:
        """Return the answer. Raises ExpertTimeout if there is none in time, and what the expert raised."""
        if not self.future.done():
            self.cancel()
            raise ExpertTimeout(f"the expert did not answer within {self.limit:g} seconds")
        return self.future.result()

    def cancel(self) -> None:
        self.future.cancel()

    def _note_time(self, _: Future[Result]) -> None:
        self._answered = time.perf_counter()


class DaemonPool:
    """Threads that do not keep the process alive. Every call starts one, until there are `n`."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._calls: queue.SimpleQueue[tuple[Call[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Call[Result]) -> Future[Result]:
        future = Future[Result]()
        if len(self._threads) < self.n:
            self._threads.append(threading.Thread(target=self._work, name="seqdefer-expert", daemon=True))
            self._threads[-1].start()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        with torch.no_grad():  # the engine's no_grad holds for its own thread only
            while (item := self._calls.get()) is not None:
                call, future = item
                if future.set_running_or_notify_cancel():
                    _settle(future, call)
                del item, call, future  # else the last states would live until the next call


class ExpertAccess(ABC):
    """How an expert is called. `report` is told how every call ended: its failure, if any, and its seconds."""

    report: Callable[[Exception | None, float], None] = staticmethod(lambda failure, seconds: None)

    def run(self, call: Call[Result]) -> Result:
        """Do what takes no time where the expert is remote."""
        return call()

    @abstractmethod
    def start(self, submit: Callable[[], Future[Result] | None], call: Call[Result]) -> ExpertCall[Result]:
        """Ask the expert. `submit` does it without waiting, or returns None; `call` waits for the answer. Fails as the
        returned call."""

    def end(self, call: ExpertCall[Any], failure: Exception | None) -> None:
        """Note how a call ended."""
        self.report(failure, call.seconds)

    def abandon(self, call: ExpertCall[Any]) -> None:
        """Cancel a call whose answer is no longer needed."""
        call.cancel()


class LocalCalls(ExpertAccess):
    """Calls with a time limit. With a limit, they run in a separate thread. A call that hangs keeps this thread: until
    it returns, every further call fails immediately instead of waiting again."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._pool, self._last = DaemonPool(1), Future[Any]()
        self._last.set_result(None)

    def run(self, call: Call[Result]) -> Result:
        if self.seconds is None:
            return call()
        if not self._last.done():
            raise ExpertTimeout("the expert is still busy with a call that took too long")
        self._last = future = self._pool.submit(call)
        try:
            return future.result(self.seconds)
        except TimeoutError as error:
            if future.done():  # the expert raised it
                raise
            raise ExpertTimeout(f"the expert did not answer within {self.seconds:g} seconds") from error

    def start(self, submit: Callable[[], Future[Result] | None], call: Call[Result]) -> ExpertCall[Result]:
        return ExpertCall.answered(lambda: self.run(call))

    def close(self) -> None:
        self._pool.close()


class RemoteCalls(ExpertAccess):
    """Calls that wait elsewhere for up to `seconds`, behind a circuit breaker. `wake` is called from any thread when
    one is answered."""

    def __init__(self, seconds: float, breaker: CircuitBreaker, wake: Callable[[], None]) -> None:
        self.seconds, self.breaker, self.wake = seconds, breaker, wake
        self._pool = DaemonPool(THREADS)

    def start(self, submit: Callable[[], Future[Result] | None], call: Call[Result]) -> ExpertCall[Result]:
        try:
            self.breaker.begin()
            future = submit() or self._pool.submit(call)
        except Exception as error:
            return ExpertCall.failed(error)
        made = ExpertCall(future, self.seconds)
        future.add_done_callback(lambda _: self.wake())
        return made

    def end(self, call: ExpertCall[Any], failure: Exception | None) -> None:
        super().end(call, failure)
        if failure is None:
            self.breaker.succeed()
        elif is_about_one_request(failure):
            self.breaker.forget()
        elif not isinstance(failure, ExpertUnavailable):
            self.breaker.fail(ABSENT_STRIKES if is_absent(failure) else 1)

    def abandon(self, call: ExpertCall[Any]) -> None:
        super().abandon(call)
        self.breaker.forget()

    def close(self) -> None:
        self._pool.close()


class NoCalls(ExpertAccess):
    """Never calls the expert: for requests that need none, and those that begin while the breaker is open."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker = breaker

    def start(self, submit: Callable[[], Future[Result] | None], call: Call[Result]) -> ExpertCall[Result]:
        return ExpertCall.failed(self.breaker.refusal())


def _settle(future: Future[Result], call: Call[Result]) -> None:
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
