"""The thread that owns the models, and the queue before it: continuous batching.

Between two turns of the running batch, queued requests join it and finished ones leave. So no request waits for another
one to finish, and under load the batch is full. The rest of the server runs in an event loop. The two meet only in
`submit` and `cancel` (called by the loop) and `Ticket.deliver` (called by the thread).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.batches import Event, Failed, Member, Recipient, RunningBatch, Token, WriteRequest, encode_inputs
from seqdefer.server.fallback import CooperativeThread, ExpertCaller, ExpertTimeout, WaitingExpertCaller
from seqdefer.server.http import APIError, Limits, as_api_error, shutting_down
from seqdefer.server.logs import request_id
from seqdefer.server.metrics import Metrics

SHUTDOWN_SECONDS = 2.0  # for the thread to end its step, and for the last responses to be sent

log = logging.getLogger("seqdefer.server")


class Ticket:
    """A submitted request. The event loop creates and reads it, the thread delivers to it.

    `waited` counts the seconds that the reader spent waiting for the models: up to the end of the step that made an
    event, not up to its arrival."""

    def __init__(self, request: WriteRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.is_cancelled, self.waited = request, False, 0.0
        self._loop, self._events = loop, asyncio.Queue[tuple[Event, float]]()
        self._undelivered: list[Event] = []  # used by the thread only, like the next one
        self._unfinished = len(request.inputs)
        self.request_id = request_id.get()
        self.tokens_written: Counter[str] = Counter()  # by author, also those that nobody reads

    def deliver(self, events: Sequence[Event], made_at: float) -> None:
        """Pass events to the loop, from the thread. Wake the loop only if it can do something: waking it at every token
        would take the interpreter away from the models."""
        self._undelivered += events
        self.tokens_written.update(event.author for event in events if isinstance(event, Token))
        self._unfinished -= sum(isinstance(event, Token) and event.finish is not None for event in events)
        is_over = self._unfinished == 0 or any(isinstance(event, Failed) for event in events)
        if self._undelivered and (is_over or self.request.is_streamed):
            batch, self._undelivered = self._undelivered, []
            try:
                self._loop.call_soon_threadsafe(self._put, batch, made_at)
            except RuntimeError:  # the loop has ended, and with it every reader
                self.is_cancelled = True

    def fail(self, error: Exception) -> None:
        """End the request with an error, from the loop."""
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


class Scheduler:
    """The queue, the running batches, and the thread that advances them."""

    def __init__(self, model: DeferringModel, limits: Limits, metrics: Metrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._queue: deque[Ticket] = deque()
        self._batches: list[RunningBatch] = []
        self._shared: RunningBatch | None = None  # the one that requests join
        self._open: set[Ticket] = set()  # used by the loop only: whom to notify at shutdown, even if the thread hangs
        self._changed = threading.Condition()
        self._is_stopping = self._is_closed = False
        self._call = ExpertCaller(limits.expert_seconds)
        self._thread = threading.Thread(target=self._work, name="seqdefer-models", daemon=True)
        metrics.gauges["seqdefer_sequences_running"] = (
            "Sequences being written.",
            lambda: sum(map(len, tuple(self._batches))),
        )
        metrics.gauges["seqdefer_queue_length"] = ("Requests in the queue.", lambda: len(self._queue))
        metrics.gauges["seqdefer_expert_calls"] = ("Pending calls of a remote expert.", lambda: self.pending_calls)

    @property
    def pending_calls(self) -> int:
        """The number of pending calls of a remote expert."""
        return sum(not batch.is_ready for batch in tuple(self._batches))

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    # -- called by the event loop ----------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: WriteRequest) -> Ticket:
        """Queue a request. Every ticket must be passed to `cancel` in the end."""
        ticket = Ticket(request, asyncio.get_running_loop())
        with self._changed:
            if self._is_stopping:
                raise shutting_down()
            if len(self._queue) >= self.limits.queue:
                message = f"{len(self._queue)} requests are already queued; try again in a moment"
                raise APIError(429, message, code="queue_full", headers={"retry-after": "1"})
            self._queue.append(ticket)
            self._changed.notify()
        self._open.add(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End all work for a request that is answered or whose client is gone."""
        self._open.discard(ticket)
        ticket.is_cancelled = True
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
            self._changed.notify()

    def refuse(self) -> None:
        """Accept no more requests. Any thread may call this, and a signal handler."""
        self._is_stopping = True

    def abort(self) -> None:
        """Fail all open requests: the server shuts down."""
        for ticket in self._open:
            ticket.fail(shutting_down())

    def close(self, seconds: float) -> bool:
        """End the thread; return False if it hangs."""
        with self._changed:
            self._is_stopping = self._is_closed = True
            self._changed.notify()
        self._call.close()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wait_for_work():
            self._admit()
            for batch in tuple(self._batches):
                if self._is_due(batch):
                    self._advance(batch)
        for batch in self._batches:
            batch.close()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._is_closed or self._can_admit or any(map(self._is_due, self._batches))):
                self._changed.wait()
            return not self._is_closed

    @property
    def _free_rows(self) -> int:
        return self.limits.running - sum(map(len, self._batches))

    @property
    def _can_admit(self) -> bool:
        return bool(self._queue) and len(self._queue[0].request.inputs) <= self._free_rows

    @staticmethod
    def _is_due(batch: RunningBatch) -> bool:
        return batch.is_ready or not batch.is_active

    def _wake(self) -> None:
        """Wake the thread. Any thread may call this."""
        with self._changed:
            self._changed.notify()

    def _admit(self) -> None:
        """Take requests off the queue into the running batch. At most `limits.batch` inputs: to read them delays what
        runs. With an expert that waits, each request is a batch of its own, so that none waits for another's expert or
        shares its failure."""
        room, members = min(self._free_rows, self.limits.batch), list[Member]()
        while (ticket := self._take(room)) is not None:
            room -= len(ticket.request.inputs)
            try:
                members.append(Member(ticket, encode_inputs(self.model.served.codec, ticket.request.inputs)))
            except Exception as error:
                self._fail([ticket], error)
        if self.model.served.expert.waits:
            for member in members:
                self._start([member])
        elif members and self._shared in self._batches:
            self._shared.join(members)
        elif members:
            self._shared = self._start(members)

    def _take(self, room: int) -> Ticket | None:
        with self._changed:
            fits = bool(self._queue) and len(self._queue[0].request.inputs) <= room
            return self._queue.popleft() if fits else None

    def _start(self, members: Sequence[Member]) -> RunningBatch:
        """Start a batch."""
        batch = self._new_batch()
        batch.join(members)
        self._batches.append(batch)
        return batch

    def _new_batch(self) -> RunningBatch:
        if not self.model.served.expert.waits:
            return RunningBatch(self.model, self._call)
        thread = CooperativeThread(self._wake)
        # The expert's own retries may take longer than a request may, and the predictor needs time to finish.
        seconds = self.limits.expert_seconds or self.limits.request_seconds / 2
        return RunningBatch(self.model, WaitingExpertCaller(seconds, thread), thread)

    def _advance(self, batch: RunningBatch) -> None:
        members = list(batch.members)
        try:
            if batch.is_active:
                batch.advance()
        except Exception as error:
            self._end(batch)
            unseen = [member for member in members if not member.has_delivered]
            if len(members) > 1 and unseen:
                # One request may have caused the error: run each alone, so that the others succeed.
                for member in unseen:
                    self._start([Member(member.recipient, member.encoded)])
                members = [member for member in members if member.has_delivered]
            self._fail([member.recipient for member in members], error)
        else:
            self._note_failures(batch)
            if not batch.is_active:
                self._end(batch)

    def _end(self, batch: RunningBatch) -> None:
        self._note_failures(batch)
        batch.close()
        self._batches.remove(batch)
        self._shared = None if batch is self._shared else self._shared

    def _note_failures(self, batch: RunningBatch) -> None:
        while batch.refused:
            recipient, error = batch.refused.pop()
            self._fail([recipient], error)
        while batch.failures:
            failure = batch.failures.pop()
            reason = "timeout" if isinstance(failure, ExpertTimeout) else "error"
            self.metrics.count("seqdefer_expert_failures_total", {"reason": reason})
            log.warning("the expert failed, the predictor finished: %r", failure)

    def _fail(self, recipients: Sequence[Recipient], error: Exception) -> None:
        if as_api_error(error).status >= 500:
            ids = [getattr(recipient, "request_id", None) for recipient in recipients]
            log.error("a request failed", exc_info=error, extra={"fields": {"request_ids": ids}})
        for recipient in recipients:
            recipient.deliver([Failed(error)], time.perf_counter())
