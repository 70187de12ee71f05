"""A request in the hands of the models: what it asks for, what it gets, and the ticket that carries both.

The event loop makes a ticket and reads its events. The thread that owns the models gives it rows, and delivers what is
written in them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from seqdefer.budgets.caps import Cap
from seqdefer.interfaces import Served
from seqdefer.methods.plans import PlanRow, ScoredDraft
from seqdefer.server.log_probs import RowLogProbs, WrittenLogProb
from seqdefer.server.logs import request_id
from seqdefer.server.metrics import Metrics
from seqdefer.server.stopping import StopText
from seqdefer.types import PREDICTOR, Examples

if TYPE_CHECKING:
    from opentelemetry.trace import Span

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class WriteRequest:
    """What one request asks the models to write."""

    inputs: Sequence[Any]
    threshold: float
    max_tokens: int
    may_defer: bool = True  # False: only score the predictor's sequence
    is_streamed: bool = False  # False: events may be delivered together at the end
    stop: tuple[str, ...] = ()  # strings before which a text ends
    caps: tuple[Cap, ...] = ()
    n_likeliest: int | None = None  # tokens to tell the log-probabilities of, beside the written one; None: none at all

    def is_unlimited(self, length: int) -> bool:
        """Whether sequences of up to `length` tokens are written to their end, without a cap: as in a calibration."""
        return self.max_tokens >= length and not self.stop and not self.caps


# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputsRead:
    """The first event of a request: its inputs as examples, their lengths, and remarks on how they were read."""

    examples: Examples
    input_tokens: list[int]
    remarks: list[str]


@dataclass(frozen=True)
class Drafted:
    """The draft of one of the inputs, where deferral is by whole drafts; comes before its tokens."""

    index: int
    draft: ScoredDraft


@dataclass(frozen=True)
class Token:
    """One token of one of the inputs."""

    index: int
    position: int
    token: Any
    text: str  # what it adds; empty while a character is incomplete
    author: str
    score: float
    defer: bool  # the rejector's decision, even if the expert failed
    finish: FinishReason | None  # for the last token
    degraded: str | None  # why the expert failed to write this token or an earlier one
    log_prob: WrittenLogProb | None = None
    capped: bool = False  # a cap kept it from the expert


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed."""

    error: Exception


Event = InputsRead | Drafted | Token | Failed


# -- rows and tickets ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TicketRow:
    """One sequence of a request. `seen`: tokens that were delivered before the request began anew."""

    request: WriteRequest
    index: int  # among the inputs of its request
    plan_row: PlanRow
    seen: Sequence[Any] = ()
    log_probs: RowLogProbs | None = None
    n_delivered: int = 0
    text: str = ""
    is_finished: bool = False
    lost: str | None = None  # why the expert can no longer write here
    degraded: str | None = None  # why it failed to write a token

    def __post_init__(self) -> None:
        self.stop = StopText(self.request.stop)

    def new_tokens(self, served: Served) -> Iterator[Token]:
        """Yield what was written since the last time."""
        written, spec = self.plan_row.written, served.spec
        limit = min(spec.length, self.request.max_tokens)
        for position in range(self.n_delivered, min(limit, len(written.tokens))):
            tokens, author = written.tokens[: position + 1], written.authors[position]
            is_end = tokens[-1] == spec.end or (spec.end is None and position + 1 == spec.length)
            finish: FinishReason | None = "stop" if is_end else "length" if position + 1 == limit else None
            if self.lost is not None and author != PREDICTOR:
                self.degraded, author = self.lost, PREDICTOR
            text = served.codec.added(tokens, self.text, is_last=finish is not None)
            self.text += text
            shown, is_stopped = self.stop.push(text, is_last=finish is not None)
            finish = "stop" if is_stopped else finish
            self.n_delivered, self.is_finished = position + 1, finish is not None
            if position >= len(self.seen):
                yield Token(
                    self.index, position, tokens[-1], shown, served.authors[author], written.scores[position],
                    self.plan_row.wanted[position], finish, self.degraded,
                    None if self.log_probs is None else self.log_probs.read(tokens, author),
                    self.plan_row.is_capped(position),
                )  # fmt: skip
            elif tokens[-1] != self.seen[position]:
                raise RuntimeError(f"token {position} was {self.seen[position]} before the batch failed")
            if is_stopped:
                return


class TokenTimes:
    """When a request was submitted, began and got its tokens. Written by the thread, read when the request ends."""

    def __init__(self) -> None:
        self.submitted = time.perf_counter()
        self.began: float | None = None
        self.first: float | None = None
        self.gaps: list[float] = []  # seconds before each token but the first ones
        self._last: dict[int, float] = {}  # by input

    def note(self, tokens: Sequence[Token], made_at: float) -> None:
        """Note tokens of a turn, which come together: each took its share of the time since the last."""
        if tokens and self.first is None:
            self.first = made_at
        for index, n in Counter(token.index for token in tokens).items():
            if index in self._last:
                self.gaps += [(made_at - self._last[index]) / n] * n
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
    """A submitted request, with its rows once it is in a batch.

    `waited` counts the seconds that the reader spent waiting for the models: up to the end of the step that made an
    event, not up to its arrival. `status` says how it stands: running, ok, degraded or failed."""

    def __init__(self, request: WriteRequest, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.is_cancelled, self.waited = request, False, 0.0
        self.span: Span | None = None  # if requests are traced
        self.request_id = request_id.get()
        self.tokens_written: Counter[str] = Counter()  # by author, unread ones included
        self.times, self.status = TokenTimes(), "running"
        self._loop, self._events = loop, asyncio.Queue[tuple[Event, float]]()
        # Used by the thread only:
        self.inputs: InputsRead | None = None  # once they are encoded
        self.rows: list[TicketRow] = []
        self.seen: Sequence[Sequence[Any]] = [()] * len(request.inputs)  # of each row
        self._undelivered, self._has_inputs = list[Event](), False
        self._unfinished, self._is_degraded = len(request.inputs), False

    # -- called by the thread --------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether the request still needs tokens."""
        return self.status == "running" and not self.is_cancelled

    def begin_anew(self) -> None:
        """Go back to before the first turn. What the client has got is not delivered again."""
        seen = [max(row.plan_row.written.tokens[: row.n_delivered], row.seen, key=len) for row in self.rows]
        self.rows, self.seen = [], seen or self.seen

    def deliver_new(self, served: Served, made_at: float) -> None:
        """Deliver what was written in the last turn. Raises what a row failed with."""
        for row in self.rows:
            if row.plan_row.written.error is not None:
                raise row.plan_row.written.error
        assert self.inputs is not None
        events: list[Event] = [] if self._has_inputs else [self.inputs]
        for row in self.rows:
            if row.n_delivered == 0 and row.plan_row.draft is not None and not row.seen:
                events.append(Drafted(row.index, row.plan_row.draft))
        events += [token for row in self.rows if not row.is_finished for token in row.new_tokens(served)]
        self._has_inputs = True
        self.deliver(events, made_at)
        if not self.is_active:
            self.rows, self.inputs = [], None  # a slow reader must not hold the caches of log-probabilities

    def deliver(self, events: Sequence[Event], made_at: float) -> None:
        """Pass events to the loop. Wake the loop only if it can do something: waking it at every token would take the
        interpreter away from the models."""
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

    # -- called by the event loop ----------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.status = "failed"
        self._put([Failed(error)], time.perf_counter())

    def _put(self, events: Sequence[Event], made_at: float) -> None:
        for event in events:
            self._events.put_nowait((event, made_at))

    async def next_event(self, deadline: float) -> Event:
        """Return the next event. Raises TimeoutError at the deadline (by the loop's clock). Cancelling loses none."""
        started, made_at = time.perf_counter(), math.inf
        try:
            async with asyncio.timeout_at(deadline):
                event, made_at = await self._events.get()
        finally:
            self.waited += max(0.0, min(made_at, time.perf_counter()) - started)
        return event
