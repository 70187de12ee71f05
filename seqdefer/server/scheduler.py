"""The thread that owns the models, and the queue before it: continuous batching.

Between two turns of the running batch, queued requests join it and finished ones leave. So no request waits for another
one to finish, and under load the batch is full. The rest of the server runs in an event loop. The two meet only in
`submit` and `cancel` (called by the loop) and `Ticket.deliver` (called by the thread).

Requests that may ask a remote expert are batches of their own, with places of their own in the queue and in memory:
while one waits for the expert, the thread serves others, and requests that need no expert wait for none. Those come
first: while they are at work, all others together get half of the time that they take.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from seqdefer.budgets.rules import FINITE_LIMIT
from seqdefer.errors import ContractError
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.batches import RunningBatch, encode_inputs
from seqdefer.server.breaker import STATES, CircuitBreaker, ExpertUnavailable
from seqdefer.server.expert_calls import ExpertAccess, ExpertTimeout, LocalCalls, NoCalls, RemoteCalls
from seqdefer.server.http import APIError, Limits, as_api_error, shutting_down
from seqdefer.server.metrics import Metrics
from seqdefer.server.tickets import Failed, Ticket, WriteRequest
from seqdefer.server.tracing import tracing_from_environment

OTHERS_TIME = 0.5  # of the other batches, for each second of the shared one
SHUTDOWN_SECONDS = 2.0  # for the thread to end its step, and for the last responses to be sent

log = logging.getLogger("seqdefer.server")


class Scheduler:
    """The queue, the running batches, and the thread that advances them."""

    def __init__(self, model: DeferringModel, limits: Limits, metrics: Metrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._queue: deque[Ticket] = deque()
        self._batches: list[RunningBatch] = []
        self._shared: RunningBatch | None = None  # the one that requests join
        self._degraded: RunningBatch | None = None  # the same for requests that would ask, while the breaker is open
        self._others_seconds = 0.0  # that the other batches may take
        self._open: set[Ticket] = set()  # used by the loop only: whom to notify at shutdown, even if the thread hangs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = threading.Condition()
        self._is_stopping = self._is_closed = False
        self.failure: BaseException | None = None  # that ended the thread
        self.on_failure: Callable[[], None] = lambda: None  # called by the loop when that happened
        self.tracing = tracing_from_environment()
        self.breaker = CircuitBreaker()
        self._calls = self._make_calls()
        self._calls.report = self._note_call
        self._no_calls = NoCalls(self.breaker)
        self._no_calls.report = self._note_call
        self._thread = threading.Thread(target=self._run, name="seqdefer-models", daemon=True)
        self._add_gauges()

    def _make_calls(self) -> LocalCalls | RemoteCalls:
        if not self.model.served.expert.waits:
            return LocalCalls(self.limits.expert_seconds)
        # The expert's own retries may take longer than a request may, and the predictor needs time to finish.
        seconds = self.limits.expert_seconds or self.limits.request_seconds / 2
        return RemoteCalls(seconds, self.breaker, self._wake)

    def _add_gauges(self) -> None:
        gauges: dict[str, Callable[[], float]] = {
            "seqdefer_sequences_running": lambda: sum(map(len, tuple(self._batches))),
            "seqdefer_sequences_waiting": lambda: sum(len(one) for one in tuple(self._batches) if one.is_waiting),
            "seqdefer_queue_length": lambda: len(self._queue),
            "seqdefer_expert_calls": lambda: self.pending_calls,
        }
        for name, value in gauges.items():
            self.metrics.gauge(name, value)
        for state in STATES:
            self.metrics.gauge("seqdefer_breaker_state", partial(self._is_in, state), {"state": state})

    def _is_in(self, state: str) -> bool:
        return self.breaker.state == state

    @property
    def pending_calls(self) -> int:
        """The number of pending calls of a remote expert."""
        return sum(batch.is_waiting for batch in tuple(self._batches))

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    # -- called by the event loop ----------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, request: WriteRequest) -> Ticket:
        """Queue a request. Every ticket must be passed to `cancel` in the end."""
        ticket = Ticket(request, asyncio.get_running_loop())
        with self._changed:
            if self._is_stopping:
                raise self._reject(shutting_down() if self.failure is None else models_died())
            n = sum(self._may_ask(other) == self._may_ask(ticket) for other in self._queue)
            if n >= self.limits.queue:
                message = f"{n} requests are already queued; try again in a moment"
                raise self._reject(APIError(429, message, code="queue_full", headers={"retry-after": "1"}))
            if self.tracing is not None:
                ticket.span = self.tracing.begin(len(request.inputs))
            self._queue.append(ticket)
            self._changed.notify()
        self._open.add(ticket)
        return ticket

    def _reject(self, error: APIError) -> APIError:
        self.metrics.count("seqdefer_requests_rejected_total", {"reason": error.code or str(error.status)})
        return error

    def cancel(self, ticket: Ticket) -> None:
        """End all work for a request that is answered or whose client is gone."""
        self._open.discard(ticket)
        if not ticket.is_cancelled:
            self._record(ticket)
        ticket.is_cancelled = True
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
            self._changed.notify()

    def _record(self, ticket: Ticket) -> None:
        status = "cancelled" if ticket.status == "running" else ticket.status
        ticket.times.record(self.metrics, status)
        if self.tracing is not None and ticket.span is not None:
            self.tracing.end(ticket.span, status, ticket.times.queue_seconds)

    def refuse(self) -> None:
        """Accept no more requests. Any thread may call this, and a signal handler."""
        self._is_stopping = True

    def abort(self, error: Callable[[], APIError] = shutting_down) -> None:
        """Fail all open requests: the server shuts down."""
        for ticket in self._open:
            ticket.fail(error())

    def close(self, seconds: float) -> bool:
        """End the thread; return False if it hangs."""
        with self._changed:
            self._is_stopping = self._is_closed = True
            self._changed.notify()
        self._calls.close()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Fail all open and future requests: no other thread can answer them."""
        log.critical("the thread that owns the models died; the server ends", exc_info=error)
        with self._changed:
            self.failure, self._is_stopping = error, True
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.abort, models_died)
            self._loop.call_soon_threadsafe(self.on_failure)

    def _work(self) -> None:
        while self._wait_for_work():
            self._admit()
            started = time.perf_counter()
            if self._shared is not None:
                self._advance(self._shared)
            self._advance_others(time.perf_counter() - started)
        for batch in self._batches:
            batch.close()

    def _advance_others(self, seconds: float) -> None:
        """Give turns to the other batches, first to those that have waited longest, while they have time left: the
        shared batch has just taken some `seconds`. Without a shared batch, they have all the time."""
        self._others_seconds = min(self._others_seconds, 0.0) + OTHERS_TIME * seconds
        for batch in [one for one in self._batches if one is not self._shared and one.is_due]:
            if self._shared is not None and self._others_seconds <= 0:
                return
            started = time.perf_counter()
            self._advance(batch)
            if batch in self._batches:
                self._batches.remove(batch)
                self._batches.append(batch)
            self._others_seconds -= 0.0 if self._shared is None else time.perf_counter() - started

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._is_closed or self._can_admit or any(batch.is_due for batch in self._batches)):
                deadlines = [one.call.deadline for one in self._batches if one.call and one.call.deadline is not None]
                self._changed.wait(max(0.0, min(deadlines) - time.perf_counter()) if deadlines else None)
            return not self._is_closed

    def _may_ask(self, ticket: Ticket) -> bool:
        """Tell whether a request may have to wait for a remote expert."""
        request = ticket.request
        return self.model.served.expert.waits and request.may_defer and request.threshold < FINITE_LIMIT

    def _asks_alone(self, ticket: Ticket) -> bool:
        return self._may_ask(ticket) and self.breaker.state != "open"

    def _room(self, *, asks: bool) -> int:
        """Return how many sequences may begin that may ask a remote expert, or of the others."""
        batches = [batch for batch in self._batches if (batch.calls is self._no_calls) != asks or not self._is_remote]
        if asks and sum(batch.is_waiting for batch in batches) >= self.limits.queue:
            return 0
        return self.limits.running - sum(len(batch) for batch in batches if not batch.is_waiting)

    @property
    def _is_remote(self) -> bool:
        return isinstance(self._calls, RemoteCalls)

    @property
    def _can_admit(self) -> bool:
        return any(self._next_in_queue(kind, self.limits.running) is not None for kind in (False, True))

    def _next_in_queue(self, asks: bool, room: int) -> Ticket | None:
        """Return the first request of a kind, if there is room for it."""
        ticket = next((one for one in self._queue if self._asks_alone(one) == asks), None)
        fits = ticket is not None and len(ticket.request.inputs) <= min(room, self._room(asks=asks))
        return ticket if fits else None

    def _wake(self) -> None:
        """Wake the thread. Any thread may call this."""
        with self._changed:
            self._changed.notify()

    def _admit(self) -> None:
        """Take requests off the queue. At most `limits.batch` inputs: to read them delays what runs. Those that may ask
        a remote expert become batches of their own, the others join the shared one, or that of degraded ones."""
        for ticket in self._take(asks=True):
            self._start([ticket], self._calls)
        tickets = self._take(asks=False)
        self._shared = self._join(self._shared, [one for one in tickets if not self._may_ask(one)])
        self._degraded = self._join(self._degraded, [one for one in tickets if self._may_ask(one)])

    def _join(self, batch: RunningBatch | None, tickets: Sequence[Ticket]) -> RunningBatch | None:
        """Let requests join a batch, or start one; return it."""
        if not tickets:
            return batch
        if batch is None or batch not in self._batches:
            return self._start(tickets, self._no_calls if self._is_remote else self._calls)
        batch.join(tickets)
        return batch

    def _take(self, *, asks: bool) -> list[Ticket]:
        """Take requests of a kind off the queue, and encode their inputs."""
        room, tickets = min(self._room(asks=asks), self.limits.batch), list[Ticket]()
        while (ticket := self._pop(asks, room)) is not None:
            room -= len(ticket.request.inputs)
            ticket.times.began = time.perf_counter()
            try:
                ticket.inputs = encode_inputs(self.model.served.codec, ticket.request.inputs)
                tickets.append(ticket)
            except Exception as error:
                self._fail([ticket], error)
        return tickets

    def _pop(self, asks: bool, room: int) -> Ticket | None:
        with self._changed:
            ticket = self._next_in_queue(asks, room)
            if ticket is not None:
                self._queue.remove(ticket)
            return ticket

    def _start(self, tickets: Sequence[Ticket], calls: ExpertAccess) -> RunningBatch:
        batch = RunningBatch(self.model, calls)
        batch.join(tickets)
        self._batches.append(batch)
        return batch

    def _advance(self, batch: RunningBatch) -> None:
        tickets = list(batch.tickets)
        try:
            if batch.is_active:
                self.metrics.observe("seqdefer_batch_size", len(batch))
                turn = batch.advance()
                if self.tracing is not None and turn is not None:
                    self.tracing.note([ticket.span for ticket in tickets if ticket.span], turn)
        except Exception as error:
            gone = [ticket for ticket, _ in batch.refused]
            self._end(batch)
            active = [ticket for ticket in tickets if ticket.is_active and ticket not in gone]
            if len(active) > 1:
                # One request may have caused the error: run each alone, so that the others succeed.
                log.warning("a batch of %d requests failed and is written one by one: %r", len(active), error)
                for ticket in active:
                    ticket.begin_anew()
                    self._start([ticket], batch.calls)
            else:
                self._fail(active, error)
        else:
            self._answer_refused(batch)
            if not batch.is_active:
                self._end(batch)

    def _end(self, batch: RunningBatch) -> None:
        self._answer_refused(batch)
        batch.close()
        self._batches.remove(batch)
        self._shared = None if batch is self._shared else self._shared

    def _answer_refused(self, batch: RunningBatch) -> None:
        while batch.refused:
            ticket, error = batch.refused.pop()
            self._fail([ticket], error)

    def _note_call(self, failure: Exception | None, seconds: float) -> None:
        """Count a call of the expert."""
        reason = "error"
        if isinstance(failure, ExpertTimeout | ExpertUnavailable):
            reason = "timeout" if isinstance(failure, ExpertTimeout) else "unavailable"
        if reason != "unavailable":
            self.metrics.observe("seqdefer_expert_seconds", seconds, {"status": "ok" if failure is None else reason})
        if failure is not None:
            self.metrics.count("seqdefer_expert_failures_total", {"reason": reason})

    def _fail(self, tickets: Sequence[Ticket], error: Exception) -> None:
        if isinstance(error, ContractError):  # it says nothing that clients must not know
            error = APIError(500, f"the models failed on this request: {error}", code="model_failed")
        if as_api_error(error).status >= 500:
            fields = {"request_ids": [ticket.request_id for ticket in tickets]}
            log.error("a request failed", exc_info=error, extra={"fields": fields})
        for ticket in tickets:
            ticket.deliver([Failed(error)], time.perf_counter())


def models_died() -> APIError:
    return APIError(503, "the models failed and the server ends; try again later", code="models_died")
