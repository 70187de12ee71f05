"""Fallback to the predictor when an expert fails or takes too long, and experts that wait without blocking others.

`FallbackRows` (token level) and `FallbackExpert` (hand-offs) wrap the expert of a running batch. They change nothing
while it works. Where it fails, what the predictor wrote takes the place of its answer.

Only one thread at a time may use the models. A remote expert (`Expert.waits`) uses none of them while it waits for its
response, but the engine calls it in the middle of a turn. A batch with such an expert therefore runs in a
`CooperativeThread`, which gives others a turn while it waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch

from seqdefer.engine.rows import rows_of_expert
from seqdefer.interfaces import Expert
from seqdefer.remote.cancellation import CancelScope
from seqdefer.rows import Chunk, ExpertRows
from seqdefer.types import Draft, Examples, Sequences, SequenceSpec

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


class _Guard:
    """Calls an expert until it fails, and keeps the failure until it is taken."""

    def __init__(self, call: ExpertCaller) -> None:
        self.call = call
        self._failure: Exception | None = None

    def take_failure(self) -> Exception | None:
        """Return the failure since the last time this was called, if any."""
        failure, self._failure = self._failure, None
        return failure

    def _try(self, call: Callable[[], Result]) -> Result | None:
        """Return the expert's answer, or None if it failed."""
        try:
            return self.call(call)
        except Exception as error:
            self._failure = error.with_traceback(None)  # the frames would keep the caches alive
            self._failure.__cause__ = self._failure.__context__ = None
            return None


def reason_of(failure: Exception) -> str:
    """Return why the expert failed, without the text of its exception, which may be confidential."""
    return str(failure) if isinstance(failure, ExpertTimeout) else f"the expert failed ({type(failure).__name__})"


class FallbackExpert(_Guard, Expert):
    """An expert that completes; where it fails, the predictor's drafts stay as they are."""

    def __init__(self, expert: Expert, call: ExpertCaller) -> None:
        super().__init__(call)
        self.expert, self.drafted = expert, Sequences(torch.zeros(0, 0), torch.zeros(0))

    def note(self, drafted: Draft) -> None:
        """Keep what the predictor wrote, for where the expert fails."""
        self.drafted = drafted.sequences

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        """Complete the prefixes; `examples.ids` are the places of their drafts."""
        completed = self._try(lambda: self.expert.complete(examples, prefixes, spec))
        return self.drafted.select(examples.ids.to(self.drafted.lengths.device)) if completed is None else completed


class FallbackRows(_Guard, ExpertRows):
    """Rows of an expert. Once it fails, all rows at work keep the predictor's guesses; rows that come later ask it
    again."""

    def __init__(self, expert: Expert, call: ExpertCaller) -> None:
        super().__init__(call)
        self.expert, self.inner = expert, rows_of_expert(expert)
        self.foresees = self.inner.foresees
        self.places: list[int | None] = []  # of each row, its place among those that may ask
        self.n_inner = 0

    def admit(self, examples: Examples) -> None:
        inner, new = self.inner, list[int | None](range(self.n_inner, self.n_inner + len(examples)))
        self.places += new
        self.n_inner += len(new)
        self._run(lambda: inner.admit(examples))

    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        inner, answers = self.inner, [list(chunk.guesses) for chunk in chunks]
        places = {number: self.places[chunk.row] for number, chunk in enumerate(chunks)}
        asked = {number: replace(chunks[number], row=place) for number, place in places.items() if place is not None}
        if asked:
            before = inner.tokens_read
            named = self._run(lambda: inner.read(list(asked.values())))
            self.tokens_read += inner.tokens_read - before
            for number, answer in zip(asked, named or (), strict=False):  # none where the expert failed
                answers[number] = answer
        return answers

    def go_back(self, steps: Sequence[int]) -> None:
        inner, back = self.inner, [0] * self.n_inner
        for place, n in zip(self.places, steps, strict=True):
            if place is not None:
                back[place] = n
        if any(back):
            self._run(lambda: inner.go_back(back))

    def keep(self, rows: Sequence[int]) -> None:
        inner, kept = self.inner, [self.places[row] for row in rows]
        asking = [place for place in kept if place is not None]
        if self.n_inner:
            self._run(lambda: inner.keep(asking))
        if self.n_inner:  # else that failed
            numbers = iter(range(len(asking)))
            self.places, self.n_inner = [None if place is None else next(numbers) for place in kept], len(asking)
        else:
            self.places = [None] * len(kept)

    def _run(self, call: Callable[[], Result]) -> Result | None:
        """Call the expert. After a failure its rows are abandoned: the call may hang, or have stopped half-way."""
        before = self._failure
        result = self._try(call)
        if self._failure is not before:
            self.inner, self.places, self.n_inner = rows_of_expert(self.expert), [None] * len(self.places), 0
        return result


# -- experts that wait ---------------------------------------------------------------------------------------------


class Cancelled(BaseException):
    """Unwinds work whose batch was closed."""


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
            self._thread = threading.Thread(target=self._loop, name="seqdefer-batch", daemon=True)
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
    """Calls the expert of one batch outside its turn. A timeout or `close` cancels the pending call."""

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
