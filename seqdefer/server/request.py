"""One request from its body to its response: submitted, read token by token, answered whole or as a stream.

It ends when it is answered, when its time is over, and when the client disconnects or stops reading.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from seqdefer.budgets.caps import Cap, allowances
from seqdefer.budgets.quality import QualityPromise
from seqdefer.budgets.rules import FINITE_LIMIT, Setting
from seqdefer.errors import InputError, OptionError
from seqdefer.labels.pair_statistics import can_read_first
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server import protocol, responses
from seqdefer.server.batches import encode_inputs
from seqdefer.server.drift import ServedSequence, TrafficMonitor
from seqdefer.server.http import CLIENT_CLOSED, APIError, as_api_error, json_response, to_json
from seqdefer.server.responses import ResponseFormat, Transcript
from seqdefer.server.scheduler import Scheduler
from seqdefer.server.tickets import Failed, Token, WriteRequest
from seqdefer.server.transcriptions import TranscriptionFormat, TranscriptionRequest
from seqdefer.server.usage import Account

OVERHEAD_HEADER = "x-seqdefer-overhead-ms"
UNREAD_SECONDS = 5.0  # that a stream waits for its reader after the deadline
SILENT_SECONDS = 10.0  # of a stream: proxies drop connections that are silent for longer
KEEPALIVE = b": waiting\n\n"  # a comment, which clients skip
NO_LOG_PROBS = "one of the two models gives no log-probabilities, like an expert behind an endpoint; leave it out"
DONE, CLIENT_LEFT = "done", "client_left"
WritingBody = protocol.CompletionRequest | protocol.ChatRequest | protocol.CompleteRequest | TranscriptionRequest
Result = TypeVar("Result")
BROKEN_PROMISE = (
    "a cap, stop or a smaller max_tokens changes what is written, so the promise of the calibration does not hold for "
    "this request"
)

log = logging.getLogger("seqdefer.server")


@dataclass(frozen=True)
class _Choice:
    """What decides for a request, what is promised about it, and why it spends too little."""

    budget: float
    setting: Setting
    promise: str | None = None
    shortfall: str | None = None


@dataclass
class Service:
    """A served model: the handlers of the routes that use it."""

    scheduler: Scheduler
    name: str
    default_budget: float
    monitor: TrafficMonitor
    quality: QualityPromise | None = None  # whose setting requests get that name no budget
    caps: tuple[Cap, ...] = ()  # of every request
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> DeferringModel:
        return self.scheduler.model

    def describe(self) -> dict[str, Any]:
        """Return the response of /v1/deferral."""
        found = responses.deferral_response(self.model, self.monitor, self.default_budget, self.quality, self.caps)
        return {"id": self.name, **found}

    async def write(
        self, request: Request, body: protocol.CompletionRequest | protocol.ChatRequest, form: responses.OpenAIFormat
    ) -> Response:
        served = self.model.served
        if body.n_likeliest is not None and not can_read_first(served):
            raise APIError(400, NO_LOG_PROBS, param="logprobs")
        limit, remarks = protocol.max_tokens(body, served.spec.length)
        form = replace(form, echoed=tuple(body.echoed(served.codec)))
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        options = {"max_tokens": limit, "stop": tuple(body.stop), "n_likeliest": body.n_likeliest}
        return await self._answer(request, body, form, has_usage=has_usage, remarks=remarks, **options)

    async def complete(self, request: Request, body: protocol.CompleteRequest) -> Response:
        codec = self.model.served.codec
        return await self._answer(request, body, responses.DeferralFormat(codec, body.inputs(codec)))

    async def transcribe(self, request: Request, body: TranscriptionRequest) -> Response:
        form = TranscriptionFormat(self.model.served.codec, body.response_format)
        return await self._answer(request, body, form)

    async def score(self, request: Request, body: protocol.ScoreRequest) -> Response:
        return await respond_whole(request, self._submit(request, body, may_defer=False), responses.scores_response)

    async def _answer(
        self, request: Request, body: WritingBody, form: ResponseFormat, *, has_usage: bool = True, **options: Any
    ) -> Response:
        active = self._submit(request, body, is_streamed=bool(body.stream), **options)
        if not body.stream:
            return await respond_whole(request, active, form.whole)
        try:
            # The status waits briefly for the first token: an earlier failure is an error response, not a stream.
            await unless_disconnected(request, active.has_next())
        except BaseException:
            active.close()
            raise
        return EventStream(stream_events(active, form, has_usage=has_usage), active)

    def _submit(
        self, request: Request, body: protocol.ModelRequest, remarks: Sequence[str] = (), **options: Any
    ) -> ActiveRequest:
        codec = self.model.served.codec
        inputs, remarks = body.inputs(codec), [*body.remarks(codec), *remarks]
        if len(inputs) > self.scheduler.limits.inputs:
            raise APIError(400, f"{len(inputs)} inputs; one request may have {self.scheduler.limits.inputs}")
        chosen, caps, length = self._choose(body, inputs), self._caps(body), self.model.served.spec.length
        setting = chosen.setting
        asked = WriteRequest(inputs, setting.threshold, caps=caps, **{"max_tokens": length, **options})
        if chosen.promise is not None and not asked.is_unlimited(length):
            chosen, remarks = replace(chosen, promise=None), [*remarks, BROKEN_PROMISE]
        remarks += [] if chosen.shortfall is None else [chosen.shortfall]
        transcript = Transcript(
            body.model, chosen.budget, setting.share, remarks, [[] for _ in inputs],
            promise=chosen.promise, drift=self.monitor.warning, has_cap=bool(caps), prices=self.model.prices,
            by_token=self.model.is_token_level,
        )  # fmt: skip
        active = ActiveRequest(self.scheduler, asked, transcript, request.scope["state"])
        if asked.may_defer:
            active.on_close = partial(self._watch, asked, setting, transcript)
        return active

    def _choose(self, body: protocol.ModelRequest, inputs: Sequence[Any]) -> _Choice:
        budget, calibration = self._budget(body, inputs), self.model.calibration
        if budget is None and self.quality is not None:
            return _Choice(self.quality.share, self.quality.setting, self.quality.in_words())
        assert calibration is not None
        budget = self.default_budget if budget is None else budget
        promise = None if calibration.promise is None else calibration.promise.in_words(budget)
        return _Choice(budget, calibration.for_budget(budget), promise, calibration.shortfall(budget))

    def _watch(self, request: WriteRequest, setting: Setting, transcript: Transcript) -> None:
        if transcript.examples is None:
            return  # nothing was read
        is_learned = self.monitor.are_learned(transcript.examples)
        for index, tokens in enumerate(transcript.tokens):
            one = ServedSequence(setting, tokens, transcript.drafts.get(index), is_learned[index])
            self.monitor.note(request, one)

    def _budget(self, body: protocol.ModelRequest, inputs: Sequence[Any]) -> float | None:
        """Return the budget of a request: as given, or what its money buys; None: it names none."""
        given = protocol.requested_budget(body, self.name)
        money: float | None = body.options.budget_money
        if money is None:
            return given
        try:
            tokens = encode_inputs(self.model.served.codec, inputs).input_tokens
            return self.model.budget_for_money(money, tokens)
        except InputError as error:
            param = "deferral" if isinstance(error, OptionError) else None
            raise APIError(400, str(error), param=param) from error

    def _caps(self, body: protocol.ModelRequest) -> tuple[Cap, ...]:
        """Return the caps of a request: the server's, and its own."""
        if (own := body.options.cap) is None:
            return self.caps
        if own.money is not None and self.model.prices is None:
            raise APIError(400, "a cap in money needs prices, and this server has none", param="deferral")
        return (*self.caps, own.cap())


class ActiveRequest:
    """A submitted request with its transcript and deadline. Call `close` in the end."""

    def __init__(self, scheduler: Scheduler, request: WriteRequest, transcript: Transcript, state: Any) -> None:
        self.scheduler, self.transcript, self.started = scheduler, transcript, state["started"]
        self.account: Account = state["account"]
        self.most = self._most_tokens(request) if request.may_defer and request.threshold < FINITE_LIMIT else 0
        self.account.check_spending(self.most)
        self.seconds = scheduler.limits.request_seconds
        self.deadline = asyncio.get_running_loop().time() + self.seconds - (time.perf_counter() - self.started)
        self.ticket = scheduler.submit(request)
        self.account.reserved += self.most
        self._unfinished = len(request.inputs)
        self._next: Token | None = None  # that `has_next` has read
        self._is_open = True
        self.outcome = CLIENT_LEFT  # of its stream, until it ends otherwise
        self.on_close: Callable[[], None] = lambda: None  # called once, when nothing more is read

    def _most_tokens(self, request: WriteRequest) -> int:
        """Return the most tokens that the expert may write for a request."""
        n, most = len(request.inputs), request.max_tokens
        allowed = allowances(request.caps, [0] * n, self.scheduler.model.prices)
        return n * most if allowed is None else sum(one.most_tokens(most) for one in allowed)

    async def next_token(self) -> Token | None:
        """Return the next token, or None after the last."""
        token, self._next = self._next or await self._read(), None
        return token

    async def has_next(self) -> bool:
        """Wait briefly, and return whether `next_token` would return immediately. Raises what it would raise."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                self._next = self._next or await self._read()
        except TimeoutError:
            return False
        return True

    async def _read(self) -> Token | None:
        while self._unfinished:
            try:
                event = await self.ticket.next_event(self.deadline)
            except TimeoutError:
                message = f"not finished within {self.seconds:g} seconds; ask for less, or try again later"
                raise APIError(504, message, code="timeout") from None
            if isinstance(event, Failed):
                raise as_api_error(event.error)
            self.transcript.add(event)
            if isinstance(event, Token):
                self._unfinished -= event.finish is not None
                return event
        return None

    async def finish(self) -> None:
        while await self.next_token() is not None:
            pass

    def headers(self) -> dict[str, str]:
        overhead = time.perf_counter() - self.started - self.ticket.waited
        return {OVERHEAD_HEADER: f"{1000 * overhead:.3f}"}

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.scheduler.cancel(self.ticket)
            self.transcript.record(self.scheduler.metrics)
            self.on_close()
            written = self._tokens_to_pay()
            self.account.settle(self.most, written)
            for author, n in written.items():
                labels = {"key": self.account.key.name, "author": author}
                self.scheduler.metrics.count("seqdefer_key_tokens_total", labels, n)

    def _tokens_to_pay(self) -> dict[str, int]:
        """Return the tokens written for the request, by author. A client that leaves during a hand-off, which is one
        turn, pays as much as the expert may write."""
        written, is_late = dict(self.ticket.tokens_written), self.ticket.status == "running"
        if is_late and self.ticket.times.began is not None and not self.scheduler.model.is_token_level:
            written["expert"] = max(written.get("expert", 0), self.most)
        return written

    def close_stream(self) -> None:
        self.close()
        if self.outcome != DONE:
            self.scheduler.metrics.count("seqdefer_streams_failed_total", {"reason": self.outcome})


async def respond_whole(request: Request, active: ActiveRequest, build: Callable[[Transcript], Any]) -> Response:
    """Finish a request and return `build` of its transcript, as JSON unless it is a text."""
    try:
        await unless_disconnected(request, active.finish())
        content, headers = build(active.transcript), active.headers()
        is_text = isinstance(content, str)
        return PlainTextResponse(content, 200, headers) if is_text else json_response(content, headers=headers)
    finally:
        active.close()


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """Await the work, or cancel it when the client disconnects."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise APIError(CLIENT_CLOSED, "the client disconnected")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream that closes its request however it ends, and that ends even if the client does not read."""

    def __init__(self, chunks: AsyncIterator[bytes], active: ActiveRequest) -> None:
        # x-accel-buffering: nginx would hold tokens back until it has some kilobytes.
        headers = {**active.headers(), "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(chunks, headers=headers, media_type="text/event-stream")
        self._active = active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._active.deadline + UNREAD_SECONDS):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            self._active.outcome = "unread"
        finally:
            self._active.close_stream()


async def stream_events(active: ActiveRequest, form: ResponseFormat, *, has_usage: bool) -> AsyncIterator[bytes]:
    """Yield server-sent events, and a comment whenever there is none for a while."""
    try:
        while True:
            while not await active.has_next():
                yield KEEPALIVE
            token = await active.next_token()
            if token is None:
                break
            yield _event(form.chunk(token, active.transcript))
        if has_usage:
            yield _event(form.usage_chunk(active.transcript))
        active.outcome = DONE
    except Exception as error:  # the status is already sent
        api_error = as_api_error(error)
        if api_error is not error:
            log.error("a stream failed: %r", error)
        active.outcome = api_error.code or str(api_error.status)
        yield _event(api_error.body())
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
