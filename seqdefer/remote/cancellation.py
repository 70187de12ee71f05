"""Calls that wait for others, and how whoever gave them time ends them, from another thread.

patience = Patience()
patience.run(call)      # in one thread; what the call waits for registers with `ends_with`
patience.end()          # in another: what is waited for is called off
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")
_running = threading.local()


class Patience:
    def __init__(self) -> None:
        self._lock, self._is_over = threading.Lock(), False
        self._call_off: list[Callable[[], object]] = []

    def run(self, call: Callable[[], Result]) -> Result:
        before = getattr(_running, "patience", None)
        _running.patience = self
        try:
            return call()
        finally:
            _running.patience = before

    def end(self) -> None:
        """From any thread, as often as you like. What registers later is called off at once."""
        with self._lock:
            waiting = [] if self._is_over else list(self._call_off)
            self._is_over = True
        for call_off in waiting:
            call_off()

    @contextmanager
    def _ending(self, call_off: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            self._call_off.append(call_off)
            is_over = self._is_over
        if is_over:
            call_off()
        try:
            yield
        finally:
            with self._lock:
                self._call_off.remove(call_off)


@contextmanager
def ends_with(call_off: Callable[[], object]) -> Iterator[None]:
    """Within, `call_off` is called when the patience that this thread runs with ends; without one, never."""
    patience: Patience | None = getattr(_running, "patience", None)
    if patience is None:
        yield
        return
    with patience._ending(call_off):
        yield
