"""Cancelling calls from another thread.

scope = CancelScope()
scope.run(call)       # in one thread; what the call waits for registers with `on_cancel`
scope.cancel()        # in another thread
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")
_current = threading.local()


class CancelScope:
    """Calls that can be cancelled together."""

    def __init__(self) -> None:
        self._lock, self._is_cancelled = threading.Lock(), False
        self._callbacks: list[Callable[[], object]] = []

    def run(self, call: Callable[[], Result]) -> Result:
        """Return `call()`, run in this thread within the scope."""
        before = getattr(_current, "scope", None)
        _current.scope = self
        try:
            return call()
        finally:
            _current.scope = before

    def cancel(self) -> None:
        """Call all registered callbacks. Safe from any thread, any number of times; later callbacks run at once."""
        with self._lock:
            callbacks = [] if self._is_cancelled else list(self._callbacks)
            self._is_cancelled = True
        for callback in callbacks:
            callback()

    @contextmanager
    def _registered(self, callback: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            self._callbacks.append(callback)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            callback()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)


@contextmanager
def on_cancel(callback: Callable[[], object]) -> Iterator[None]:
    """Register a callback with the scope that this thread runs in, if any, for the time of the block."""
    scope: CancelScope | None = getattr(_current, "scope", None)
    if scope is None:
        yield
        return
    with scope._registered(callback):
        yield
