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

from seqdefer.server.breaker import CircuitBreaker, ExpertUnavailable

THREADS = 8  # for calls of remote experts that cannot be asked without waiting
REQUEST_STATUSES = (400, 413, 422)  # of an endpoint that refuses one request, and answers others
Result = TypeVar("Result")
Call = Callable[[], Result]


class ExpertTimeout(Exception):
    """A call of the expert exceeded its time limit."""


def is_about_one_request(failure: Exception) -> bool:
    """Tell whether a failure says nothing about the next request."""
    return getattr(failure, "status", None) in REQUEST_STATUSES


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
        future = Future[Result]()
        made = cls(future)
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
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
    """Up to `n` threads, which do not keep the process alive. They start when they are needed."""

    def __init__(self, n: int) -> None:
        self.n, self._n_idle = n, 0
        self._calls: queue.SimpleQueue[tuple[Call[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, call: Call[Result]) -> Future[Result]:
        future = Future[Result]()
        with self._lock:
            if self._n_idle <= self._calls.qsize() and len(self._threads) < self.n:
                self._threads.append(threading.Thread(target=self._work, name="seqdefer-expert", daemon=True))
                self._threads[-1].start()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        with torch.no_grad():  # the engine's no_grad holds for its own thread only
            while (item := self._next()) is not None:
                call, future = item
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call())
                    except Exception as error:
                        future.set_exception(error)
                del item, call, future  # else the last states would live until the next call

    def _next(self) -> tuple[Call[Any], Future[Any]] | None:
        with self._lock:
            self._n_idle += 1
        try:
            return self._calls.get()
        finally:
            with self._lock:
                self._n_idle -= 1


class ExpertAccess(ABC):
    """How an expert is called. `report` is told how every call ended: its failure, if any, and its seconds."""

    report: Callable[[Exception | None, float], None] = staticmethod(lambda failure, seconds: None)

    @abstractmethod
    def run(self, call: Call[Result]) -> Result:
        """Do what takes no time where the expert is remote."""

    @abstractmethod
    def start(self, submit: Callable[[], Future[Result] | None], call: Call[Result]) -> ExpertCall[Result]:
        """Ask the expert. `submit` does it without waiting, or returns None; `call` waits for the answer. Fails as the
        returned call."""

    def end(self, call: ExpertCall[Any], failure: Exception | None) -> None:
        """Note how a call ended."""
        self.report(failure, call.seconds)

    def abandon(self, call: ExpertCall[Any]) -> None:
        """Cancel a call whose answer nobody needs."""
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

    def run(self, call: Call[Result]) -> Result:
        return call()

    def start(self, submit: Callable[[], Future[Result] | None], call: Call[Result]) -> ExpertCall[Result]:
        try:
            self.breaker.begin()
            future = submit() or self._pool.submit(call)
        except Exception as error:
            return ExpertCall.answered(_raising(error))
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
            self.breaker.fail()

    def abandon(self, call: ExpertCall[Any]) -> None:
        super().abandon(call)
        self.breaker.forget()

    def close(self) -> None:
        self._pool.close()


class NoCalls(ExpertAccess):
    """Never calls the expert: for requests that need none, and those that begin while the breaker is open."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker = breaker

    def run(self, call: Call[Result]) -> Result:
        return call()

    def start(self, submit: Callable[[], Future[Result] | None], call: Call[Result]) -> ExpertCall[Result]:
        return ExpertCall.answered(_raising(self.breaker.refusal()))


def _raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call
