"""Work that takes turns at the models with other work, though it waits in between.

The models are for one thread at a time. An expert on another machine (`Expert.waits`) takes long to answer and uses
nothing here; the engine, which asks it in the middle of a step, knows nothing of that. So a cohort with such an expert
is written in a thread of its own, which stands still unless it is given a turn, and gives it back while it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from seqdefer.remote.cancellation import CancelScope
from seqdefer.server.guarding import Caller, ExpertTimeout

Result = TypeVar("Result")


class Abandoned(BaseException):
    """Unwinds work that nobody wants any more."""


class Turns:
    """`run` gives a turn; `wait`, called from within the work, gives it back for as long as a call takes."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from the other thread, when the work could go on."""
        self.is_waiting = False
        self._wake, self._is_closed = wake, False
        self._turn, self._given_back = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], None] | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is begun and not done."""
        return self._work is None

    def run(self, work: Callable[[], None]) -> None:
        """Begins the work, or goes on with what waited; returns when it is done or waits. Raises what it raises."""
        if self._work is None:
            self._work = work
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="seqdefer-cohort", daemon=True)
            self._thread.start()
        self._turn.release()
        self._given_back.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, call: Callable[[], Result]) -> Result:
        self.is_waiting = True
        self._given_back.release()
        try:
            return call()
        finally:
            self.is_waiting = False
            self._wake()
            self._turn.acquire()
            if self._is_closed:
                raise Abandoned

    def close(self) -> None:
        """What waits ends when its call has come back."""
        self._is_closed = True
        self._turn.release()

    def _loop(self) -> None:
        while True:
            self._turn.acquire()
            if self._is_closed or self._work is None:
                return
            try:
                self._work()
            except Abandoned:
                return
            except Exception as error:
                self._error = error
            self._work = None
            self._given_back.release()


class WaitingCaller(Caller):
    """Calls the expert of one cohort while others have the models. When its time is over, or nobody wants it any more,
    what the expert waits for is called off."""

    def __init__(self, seconds: float | None, turns: Turns) -> None:
        super().__init__(seconds)
        self.turns, self.scope = turns, CancelScope()

    def __call__(self, call: Callable[[], Result]) -> Result:
        return self.turns.wait(lambda: self._within_time(call))

    def _within_time(self, call: Callable[[], Result]) -> Result:
        try:
            return Caller.__call__(self, lambda: self.scope.run(call))
        except ExpertTimeout:
            self.scope.cancel()
            raise

    def close(self) -> None:
        self.scope.cancel()
        super().close()
