"""Fallback to the predictor when an expert fails or takes too long, and experts that wait without blocking others.

`FallbackExpert` wraps the expert for one cohort. It changes nothing while the expert works. After the first failure it
no longer calls the expert and returns what the predictor proposes; `reason` says why.

Only one thread at a time may use the models. A remote expert (`Expert.waits`) uses none of them while it waits for its
response, but the engine calls it in the middle of a step. A cohort with such an expert therefore runs in a
`CooperativeThread`, which gives other cohorts a turn while it waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from seqdefer.interfaces import Expert, NextTokenExpert
from seqdefer.remote.cancellation import CancelScope
from seqdefer.types import Draft, Examples, Proposal, Sequences, SequenceSpec

Result = TypeVar("Result")


class ExpertTimeout(Exception):
    """A call of the expert exceeded its time limit."""


class ExpertCaller:
    """Calls the expert with a time limit per call.

    With a limit, calls run in a separate thread. A call that hangs keeps this thread: until it returns, every further
    call fails immediately instead of waiting again."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None

    def __call__(self, call: Callable[[], Result]) -> Result:
        if self.seconds is None:
            return call()
        if self._last is not None and not self._last.done():
            raise ExpertTimeout("the expert is still busy with a call that took too long")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="seqdefer-expert", daemon=True)
            self._thread.start()
        self._last = future = Future[Result]()
        self._calls.put((call, future))
        try:
            return future.result(self.seconds)
        except TimeoutError as error:
            if future.done():  # the expert raised it
                raise
            raise ExpertTimeout(f"the expert did not answer within {self.seconds:g} seconds") from error

    def close(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        with torch.no_grad():  # the engine's no_grad holds for its own thread only
            while (item := self._calls.get()) is not None:
                call, future = item
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
                del item, call, future  # else the last states would live until the next call


class FallbackExpert(NextTokenExpert[Any]):
    """The expert of one cohort, replaced by the predictor after the first failure.

    The fallback of `next` is `proposed` (B,), the predictor's tokens of the active rows; the fallback of `complete` is
    `drafted`, the predictor's whole sequences."""

    def __init__(self, expert: Expert, call: ExpertCaller) -> None:
        self.expert, self.call = expert, call
        self.proposed: Tensor | None = None
        self.drafted: Sequences | None = None
        self.error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return self.error is not None

    @property
    def reason(self) -> str | None:
        """Why the expert failed, without the text of its exception, which may be confidential."""
        if self.error is None or isinstance(self.error, ExpertTimeout):
            return None if self.error is None else str(self.error)
        return f"the expert failed ({type(self.error).__name__})"

    def note(self, written: Proposal | Draft) -> None:
        """Keep what the predictor would write, for where the expert fails."""
        if isinstance(written, Draft):
            self.drafted = written.sequences
        else:
            self.proposed = written.tokens

    def start(self, examples: Examples) -> Any:
        return self._try(lambda: self._by_token.start(examples), None)

    def next(self, state: Any, rows: Tensor) -> tuple[Tensor, Any]:
        assert self.proposed is not None
        return self._try(lambda: self._by_token.next(state, rows), (self.proposed[rows], None))

    def append(self, state: Any, tokens: Tensor) -> Any:
        return self._try(lambda: self._by_token.append(state, tokens), None)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self._try(lambda: self._by_token.select(state, rows), None)

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        """Complete the prefixes; `examples.ids` are the indices of the rows in the cohort."""
        assert self.drafted is not None
        drafts = self.drafted.select(examples.ids.to(self.drafted.lengths.device))
        return self._try(lambda: self.expert.complete(examples, prefixes, spec), drafts)

    def _try(self, call: Callable[[], Result], fallback: Result) -> Result:
        if self.has_failed:
            return fallback
        try:
            return self.call(call)
        except Exception as error:
            self.error = error.with_traceback(None)  # the frames would keep the caches alive
            self.error.__cause__ = self.error.__context__ = None
            return fallback

    @property
    def _by_token(self) -> NextTokenExpert[Any]:
        assert isinstance(self.expert, NextTokenExpert)  # the engine asks for one
        return self.expert


# -- experts that wait ---------------------------------------------------------------------------------------------


class Cancelled(BaseException):
    """Unwinds work whose cohort was closed."""


class CooperativeThread:
    """A thread that runs only during its turns.

    `run` gives it a turn. `wait`, called by the work itself, ends the turn for the duration of a call. `wake` is called
    from this thread when the work can go on."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.is_waiting = False
        self._wake, self._is_closed = wake, False
        self._turn_begins, self._turn_ends = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no work is unfinished."""
        return self._work is None

    def run(self, work: Callable[[], None]) -> None:
        """Start the work, or resume work that waited; return when it is done or waits. Raises what the work raises."""
        if self._work is None:
            self._work = work
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="seqdefer-cohort", daemon=True)
            self._thread.start()
        self._turn_begins.release()
        self._turn_ends.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, call: Callable[[], Result]) -> Result:
        """Run a blocking call outside the turn, and return its result in the next turn."""
        self.is_waiting = True
        self._turn_ends.release()
        try:
            return call()
        finally:
            self.is_waiting = False
            self._wake()
            self._turn_begins.acquire()
            if self._is_closed:
                raise Cancelled

    def close(self) -> None:
        """End the thread, or let it end as soon as its blocking call returns."""
        self._is_closed = True
        self._turn_begins.release()

    def _loop(self) -> None:
        while True:
            self._turn_begins.acquire()
            if self._is_closed or self._work is None:
                return
            try:
                self._work()
            except Cancelled:
                return
            except Exception as error:
                self._error = error
            self._work = None
            self._turn_ends.release()


class WaitingExpertCaller(ExpertCaller):
    """Calls the expert of one cohort outside its turn. A timeout or `close` cancels the pending call."""

    def __init__(self, seconds: float | None, thread: CooperativeThread) -> None:
        super().__init__(seconds)
        self.thread, self.scope = thread, CancelScope()

    def __call__(self, call: Callable[[], Result]) -> Result:
        return self.thread.wait(lambda: self._with_timeout(call))

    def _with_timeout(self, call: Callable[[], Result]) -> Result:
        try:
            return ExpertCaller.__call__(self, lambda: self.scope.run(call))
        except ExpertTimeout:
            self.scope.cancel()
            raise

    def close(self) -> None:
        self.scope.cancel()
        super().close()
