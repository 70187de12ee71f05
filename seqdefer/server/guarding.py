"""An expert that may fail: at its first error, or when its time is over, the predictor finishes.

`Guard` stands between the engine and the expert, for one cohort. While the expert works it changes nothing. From the
first failure on it asks the expert no more and answers with what the predictor proposes; `reason` then says why.
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
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

Result = TypeVar("Result")


class ExpertTimeout(Exception):
    """A call of the expert took longer than it may."""


class Caller:
    """Calls the expert, for at most `seconds` at a time.

    With a limit, calls run in a thread of their own. A call that hangs keeps that thread, and models are
    single-threaded: until it returns, every further call fails at once, and nobody waits for it again."""

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
            if future.done():  # the expert's own
                raise
            raise ExpertTimeout(f"the expert did not answer within {self.seconds:g} seconds") from error

    def close(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        with torch.no_grad():  # a thread's own: the engine's does not reach here
            while (waiting := self._calls.get()) is not None:
                call, future = waiting
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
                del waiting, call, future  # or the last states would be kept until the next call


class Guard(NextTokenExpert[Any]):
    """The expert as one cohort sees it. `proposed` (B,) are the predictor's tokens of the rows at work, by token;
    `drafted` are its whole sequences, one-time."""

    def __init__(self, expert: Expert, call: Caller) -> None:
        self.expert, self.call = expert, call
        self.proposed: Tensor | None = None
        self.drafted: Sequences | None = None
        self.error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return self.error is not None

    @property
    def reason(self) -> str | None:
        """For clients: what an exception says may be nobody's business."""
        if self.error is None or isinstance(self.error, ExpertTimeout):
            return None if self.error is None else str(self.error)
        return f"the expert failed ({type(self.error).__name__})"

    def note_proposal(self, proposal: Proposal) -> None:
        """Remember the predictor's tokens, to write where the expert fails."""
        self.proposed = proposal.tokens

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
        """`examples.ids` are the places of the rows in the cohort."""
        assert self.drafted is not None
        alone = self.drafted.select(examples.ids.to(self.drafted.lengths.device))
        return self._try(lambda: self.expert.complete(examples, prefixes, spec), alone)

    def _try(self, call: Callable[[], Result], otherwise: Result) -> Result:
        if self.has_failed:
            return otherwise
        try:
            return self.call(call)
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames hold the caches
            self.error.__cause__ = self.error.__context__ = None
            return otherwise

    @property
    def _by_token(self) -> NextTokenExpert[Any]:
        assert isinstance(self.expert, NextTokenExpert)  # the engine asks for one
        return self.expert
