"""A submitted request, between the event loop that reads it and the thread that owns the models."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from seqdefer.server.batches import Event, Failed, Token, WriteRequest
from seqdefer.server.http import as_api_error
from seqdefer.server.logs import request_id
from seqdefer.server.metrics import Metrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class TokenTimes:
    """When a request was submitted, began and got its tokens. Written by the thread, read when the request ends."""

    def __init__(self, n: int) -> None:
        self.submitted = time.perf_counter()
        self.began: float | None = None
        self.first: float | None = None
        self.gaps: list[float] = []  # seconds before each token but the first ones
        self._last: list[float | None] = [None] * n

    def note(self, tokens: Sequence[Token], made_at: float) -> None:
        """Note tokens of a turn, which come together: each took its share of the time since the last."""
        if tokens and self.first is None:
            self.first = made_at
        for index in {token.index for token in tokens}:
            n, last = sum(token.index == index for token in tokens), self._last[index]
            if last is not None:
                self.gaps += [(made_at - last) / n] * n
            self._last[index] = made_at

    @property
    def queue_seconds(self) -> float | None:
        return None if self.began is None else self.began - self.submitted

    def record(self, metrics: Metrics, status: str) -> None:
        by = {"status": status}
        if self.queue_seconds is not None:
            metrics.observe("seqdefer_queue_seconds", self.queue_seconds, by)
        if self.first is not None:
            metrics.observe("seqdefer_time_to_first_token_seconds", self.first - self.submitted, by)
        for gap in self.gaps:
            metrics.observe("seqdefer_time_between_tokens_seconds", gap, by)


class Ticket:
    """A submitted request. The event loop creates and reads it, the thread delivers to it.

    `waited` counts the seconds that the reader spent waiting for the models: up to the end of the step that made an
    event, not up to its arrival. `status` says how it stands: running, ok, degraded or failed."""

    def __init__(self, request: WriteRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.is_open, self.is_cancelled, self.waited = request, True, False, 0.0
        self.span: Span | None = None  # if requests are traced
        self.request_id = request_id.get()
        self.tokens_written: Counter[str] = Counter()  # by author, also those that nobody reads
        self.times, self.status = TokenTimes(len(request.inputs)), "running"
        self._loop, self._events = loop, asyncio.Queue[tuple[Event, float]]()
        self._undelivered: list[Event] = []  # used by the thread only, like the next ones
        self._unfinished, self._is_degraded = len(request.inputs), False

    def deliver(self, events: Sequence[Event], made_at: float) -> None:
        """Pass events to the loop, from the thread. Wake the loop only if it can do something: waking it at every token
        would take the interpreter away from the models."""
        self._undelivered += events
        self._note(events, made_at)
        if self._undelivered and (self.status != "running" or self.request.is_streamed):
            batch, self._undelivered = self._undelivered, []
            try:
                self._loop.call_soon_threadsafe(self._put, batch, made_at)
            except RuntimeError:  # the loop has ended, and with it every reader
                self.is_cancelled = True

    def _note(self, events: Sequence[Event], made_at: float) -> None:
        tokens = [event for event in events if isinstance(event, Token)]
        self.times.note(tokens, made_at)
        self.tokens_written.update(token.author for token in tokens)
        self._unfinished -= sum(token.finish is not None for token in tokens)
        self._is_degraded |= any(token.degraded is not None for token in tokens)
        if any(isinstance(event, Failed) for event in events):
            self.status = "failed"
        elif not self._unfinished:
            self.status = "degraded" if self._is_degraded else "ok"

    def fail(self, error: Exception) -> None:
        """End the request with an error, from the loop."""
        self.status = "failed"
        self._put([Failed(error)], time.perf_counter())

    def _put(self, events: Sequence[Event], made_at: float) -> None:
        for event in events:
            self._events.put_nowait((event, made_at))

    async def events(self, deadline: float) -> AsyncIterator[Event]:
        """Yield all events until every sequence has ended. Raises APIError if the request fails, and TimeoutError at
        the deadline (by the loop's clock)."""
        unfinished = len(self.request.inputs)
        while unfinished:
            event = await self._next(deadline)
            if isinstance(event, Failed):
                raise as_api_error(event.error)
            unfinished -= isinstance(event, Token) and event.finish is not None
            yield event

    async def _next(self, deadline: float) -> Event:
        started = time.perf_counter()
        async with asyncio.timeout_at(deadline):
            event, made_at = await self._events.get()
        self.waited += max(0.0, made_at - started)
        return event
