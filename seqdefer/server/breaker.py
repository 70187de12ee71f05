"""A circuit breaker: after several failures in a row, an expert is left alone for a while. Failures that cost time, or
that the next call will meet too, count more.

closed      every call is made
open        no call is made, until some seconds have passed
half_open   one call tries; its success closes the breaker, its failure opens it again
"""

from __future__ import annotations

import time
from typing import Literal

MAX_STRIKES = 5  # in a row that open it; a failure is one
ABSENT_STRIKES = 3  # of an expert that cannot be reached or does not answer in time: two such calls open it
OPEN_SECONDS = 5.0
STATES = ("closed", "open", "half_open")
BreakerState = Literal["closed", "open", "half_open"]


class ExpertUnavailable(Exception):
    """The expert is not called, because its last calls failed."""


class CircuitBreaker:
    """Counts failures of one expert. One thread uses it; others may look at `state`."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self._failures, self._strikes, self._opened, self._is_trying = 0, 0, 0.0, False

    @property
    def state(self) -> BreakerState:
        if self._strikes < MAX_STRIKES:
            return "closed"
        return "half_open" if self._is_trying or self.now() >= self._opened + OPEN_SECONDS else "open"

    @property
    def allows(self) -> bool:
        """Whether a call may be made now."""
        return self.state == "closed" or (self.state == "half_open" and not self._is_trying)

    def begin(self) -> None:
        """Note that a call begins. Raises ExpertUnavailable if none may be made."""
        if not self.allows:
            raise self.refusal()
        self._is_trying = self.state == "half_open"

    def refusal(self) -> ExpertUnavailable:
        return ExpertUnavailable(f"the expert is not called for now: {self._failures} calls in a row failed")

    def succeed(self) -> None:
        self._failures, self._strikes, self._is_trying = 0, 0, False

    def fail(self, strikes: int = 1) -> None:
        self._failures, self._strikes, self._is_trying = self._failures + 1, self._strikes + strikes, False
        self._opened = self.now()

    def forget(self) -> None:
        """Note that a call ended without telling anything about the expert."""
        self._is_trying = False
