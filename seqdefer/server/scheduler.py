"""The one thread that owns the models, and the queue before it: continuous batching by cohorts.

At every tick the thread starts all requests that wait as a new cohort, and advances every cohort by one position. So
nobody waits for others to finish, and under load cohorts are full batches. The rest of the server lives in an event
loop; the two meet in `submit`, `leave` (from the loop) and `Ticket.tell` (from the thread), and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.cohorts import Ask, Cohort, Encoded, Event, Failed, Listener, Token, read_inputs
from seqdefer.server.faults import busy, fault_of, stopping
from seqdefer.server.guarding import Caller, ExpertTimeout
from seqdefer.server.limits import Limits
from seqdefer.server.metrics import Metrics
from seqdefer.server.turns import Turns, WaitingCaller

ENDING = 2.0  # seconds for the thread to end its step, and for the last answers to go out

log = logging.getLogger("seqdefer.server")


class Ticket:
    """One request between the event loop, which makes it and reads it, and the thread, which tells it.

    `waited` are the seconds that its reader spent waiting for the models: up to the end of the step that made an event,
    not up to its arrival."""

    def __init__(self, ask: Ask, loop: asyncio.AbstractEventLoop) -> None:
        self.ask, self.is_gone, self.waited = ask, False, 0.0
        self._loop, self._events = loop, asyncio.Queue[tuple[Event, float]]()
        self._untold: list[Event] = []  # the thread's own
        self._unfinished = len(ask.inputs)  # likewise

    def tell(self, events: Sequence[Event], made_at: float) -> None:
        """From the thread. The loop is not woken before there is something to do: that would take the interpreter
        away from the models at every token."""
        self._untold += events
        self._unfinished -= sum(isinstance(event, Token) and event.finish is not None for event in events)
        is_over = self._unfinished == 0 or any(isinstance(event, Failed) for event in events)
        if self._untold and (is_over or self.ask.is_streamed):
            told, self._untold = self._untold, []
            self._pass_on(told, made_at)

    def fail(self, error: Exception) -> None:
        """From the loop."""
        self._put([Failed(error)], time.perf_counter())

    def _pass_on(self, events: Sequence[Event], made_at: float) -> None:
        try:
            self._loop.call_soon_threadsafe(self._put, events, made_at)
        except RuntimeError:  # the loop has ended, and with it all who could listen
            self.is_gone = True

    def _put(self, events: Sequence[Event], made_at: float) -> None:
        for event in events:
            self._events.put_nowait((event, made_at))

    async def events(self, deadline: float) -> AsyncIterator[Event]:
        """All events, to the end of all sequences; raises a Fault where the request failed, or at the deadline (of
        the loop's clock)."""
        unfinished = len(self.ask.inputs)
        while unfinished:
            event = await self._next(deadline)
            if isinstance(event, Failed):
                raise fault_of(event.error)
            unfinished -= isinstance(event, Token) and event.finish is not None
            yield event

    async def _next(self, deadline: float) -> Event:
        begun = time.perf_counter()
        async with asyncio.timeout_at(deadline):
            event, made_at = await self._events.get()
        self.waited += max(0.0, made_at - begun)
        return event


class Scheduler:
    def __init__(self, model: DeferringModel, limits: Limits, metrics: Metrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._waiting: deque[Ticket] = deque()
        self._cohorts: list[Cohort] = []
        self._open: set[Ticket] = set()  # the loop's own: whom to tell at the end, even where the thread hangs
        self._changed = threading.Condition()
        self._is_stopping = self._is_closed = False
        self._call = Caller(limits.expert_seconds)
        self._thread = threading.Thread(target=self._work, name="seqdefer-models", daemon=True)
        metrics.gauges["seqdefer_cohorts_running"] = ("Batches being written.", lambda: len(self._cohorts))
        metrics.gauges["seqdefer_queue_length"] = ("Requests that wait.", lambda: len(self._waiting))

    @property
    def calls_under_way(self) -> int:
        """Of an expert that is elsewhere."""
        return sum(not cohort.is_ready for cohort in tuple(self._cohorts))

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    # -- the event loop's side -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, ask: Ask) -> Ticket:
        """A place in the queue. Whoever got one must `leave` in the end."""
        ticket = Ticket(ask, asyncio.get_running_loop())
        with self._changed:
            if self._is_stopping:
                raise stopping()
            if len(self._waiting) >= self.limits.queue:
                raise busy(f"{len(self._waiting)} requests wait already; ask again in a moment")
            self._waiting.append(ticket)
            self._changed.notify()
        self._open.add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Nobody listens any more: what is still at work for it ends."""
        self._open.discard(ticket)
        ticket.is_gone = True
        with self._changed:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            self._changed.notify()

    def refuse(self) -> None:
        """Takes no more requests; from any thread, a signal handler too."""
        self._is_stopping = True

    def abort(self) -> None:
        """Tells all that are still here that the server ends."""
        for ticket in self._open:
            ticket.fail(stopping())

    def close(self, seconds: float) -> bool:
        """Ends the thread; False where it hangs."""
        with self._changed:
            self._is_stopping = self._is_closed = True
            self._changed.notify()
        self._call.close()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- the thread's side -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wait_for_work():
            for tickets in self._admit():
                self._start(tickets)
            for cohort in tuple(self._cohorts):
                if self._is_due(cohort):
                    self._advance(cohort)
        for cohort in self._cohorts:
            cohort.close()

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._is_closed or self._has_room or any(map(self._is_due, self._cohorts))):
                self._changed.wait()
            return not self._is_closed

    @property
    def _room(self) -> int:
        return self.limits.running - sum(map(len, self._cohorts))

    @property
    def _has_room(self) -> bool:
        """For whoever waits first."""
        return bool(self._waiting) and len(self._waiting[0].ask.inputs) <= self._room

    @staticmethod
    def _is_due(cohort: Cohort) -> bool:
        return cohort.is_ready or not cohort.is_wanted

    def _wake(self) -> None:
        """From any thread."""
        with self._changed:
            self._changed.notify()

    def _admit(self) -> list[list[Ticket]]:
        """Whoever waits, as far as there is room, but no more than a batch: reading takes time, too, and others write.
        With an expert that waits each starts alone: nobody shall wait for another's, or share its failure."""
        room, admitted = min(self._room, self.limits.batch), list[Ticket]()
        with self._changed:
            while self._waiting and len(self._waiting[0].ask.inputs) <= room:
                admitted.append(self._waiting.popleft())
                room -= len(admitted[-1].ask.inputs)
        if self.model.served.expert.waits:
            return [[ticket] for ticket in admitted]
        return [admitted] if admitted else []

    def _start(self, tickets: Sequence[Ticket]) -> None:
        """Whoever gave no proper input is told, and the others start without him."""
        read: list[tuple[Listener, Encoded]] = []
        for ticket in tickets:
            try:
                read.append((ticket, read_inputs(self.model.served.codec, ticket.ask.inputs)))
            except Exception as error:
                self._fail([ticket], error)
        if read:
            self._cohorts.append(self._cohort(read))

    def _cohort(self, members: Sequence[tuple[Listener, Encoded]]) -> Cohort:
        if not self.model.served.expert.waits:
            return Cohort(self.model, members, self._call)
        turns = Turns(self._wake)
        # Its own tries and pauses may take longer than a request may; the predictor must still have time to finish.
        seconds = self.limits.expert_seconds or self.limits.request_seconds / 2
        return Cohort(self.model, members, WaitingCaller(seconds, turns), turns)

    def _advance(self, cohort: Cohort) -> None:
        try:
            if cohort.is_wanted:
                cohort.advance()
        except Exception as error:
            self._end(cohort)
            if len(cohort.members) > 1 and not cohort.has_told:
                # One of them may be to blame, and the others shall not suffer for it: each by itself.
                self._cohorts += [self._cohort([member]) for member in cohort.members]
            else:
                self._fail([listener for listener, _ in cohort.members], error)
        else:
            if not cohort.is_wanted:
                self._end(cohort)

    def _end(self, cohort: Cohort) -> None:
        cohort.close()
        self._cohorts.remove(cohort)
        if cohort.failure is not None:
            reason = "timeout" if isinstance(cohort.failure, ExpertTimeout) else "error"
            self.metrics.count("seqdefer_expert_failures_total", {"reason": reason})
            log.warning("the expert failed, the predictor finished: %r", cohort.failure)

    def _fail(self, listeners: Sequence[Listener], error: Exception) -> None:
        if fault_of(error).status >= 500:
            log.error("a request failed: %r", error)
            log.debug("where", exc_info=error)
        for listener in listeners:
            listener.tell([Failed(error)], time.perf_counter())
