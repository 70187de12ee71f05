"""The routes. `create_app(model, "news")` is the whole service as an ASGI application, without a port.

POST /v1/completions, /v1/chat/completions   write, at once or as a stream
POST /v1/deferral/score                      where the rejector would defer; the expert is not asked
GET  /v1/models, /health, /metrics
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from seqdefer import __version__
from seqdefer.deferring import BUDGET, DeferringModel
from seqdefer.errors import OptionError
from seqdefer.server.cohorts import Ask, Read, Token
from seqdefer.server.faults import Fault, to_json, too_slow
from seqdefer.server.gate import GONE, Gate
from seqdefer.server.limits import Limits
from seqdefer.server.metrics import Metrics
from seqdefer.server.protocol import (
    CHAT,
    COMPLETION,
    ChatRequest,
    CompletionRequest,
    Form,
    ScoreRequest,
    Tally,
    budget_of,
    models_answer,
    scores_answer,
    tokens_of,
    unknown_model,
)
from seqdefer.server.scheduler import ENDING, Scheduler

OVERHEAD = "x-seqdefer-overhead-ms"
UNREAD = 5.0  # seconds past its time that a stream waits for its reader
Result = TypeVar("Result")


def create_app(
    model: DeferringModel,
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    budget: float = BUDGET,
) -> FastAPI:
    """`budget` is for requests that name none."""
    if model.calibration is None:
        raise OptionError(
            "the budgets of this model were not measured, so no request could name one; do that first: "
            "seqdefer calibrate DIR --data FILE"
        )
    model.calibration.for_budget(budget)
    limits, metrics = limits or Limits(), Metrics()
    scheduler = Scheduler(model, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.close, ENDING)

    # The pages of documentation would load scripts from elsewhere.
    app = FastAPI(title="seqdefer", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.scheduler, app.state.metrics = scheduler, metrics
    app.add_middleware(Gate, key=api_key, limits=limits, metrics=metrics)
    app.add_exception_handler(Fault, _say_fault)
    app.add_exception_handler(HTTPException, _say_http)
    app.add_exception_handler(RequestValidationError, _say_invalid)
    _add_routes(app, _Service(model, name, limits, scheduler, budget))
    return app


def _add_routes(app: FastAPI, service: _Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.write(request, body, COMPLETION)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.write(request, body, CHAT)

    @app.post("/v1/deferral/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        return await service.score(request, body)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": models_answer(service.name, service.created)})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        found = [one for one in models_answer(service.name, service.created) if one["id"] == model]
        if not found:
            raise unknown_model(model, service.name)
        return _json(found[0])

    @app.get("/health")
    async def health() -> Response:
        is_well = service.scheduler.is_working
        return _json({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.scheduler.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Work:
    """One request at work: its ticket, what it has got, and its clock. `close` must be called in the end."""

    def __init__(self, scheduler: Scheduler, ask: Ask, tally: Tally, begun: float) -> None:
        self.scheduler, self.tally, self.begun = scheduler, tally, begun
        self.seconds = scheduler.limits.request_seconds
        self.deadline = asyncio.get_running_loop().time() + self.seconds - (time.perf_counter() - begun)
        self.ticket = scheduler.submit(ask)
        self._events = self.ticket.events(self.deadline)
        self._is_open = True

    async def next_token(self) -> Token | None:
        """None after the last one."""
        try:
            async for event in self._events:
                assert isinstance(event, Read | Token)
                self.tally.add(event)
                if isinstance(event, Token):
                    return event
        except TimeoutError:
            raise too_slow(self.seconds) from None
        return None

    async def finish(self) -> None:
        while await self.next_token() is not None:
            pass

    def headers(self) -> dict[str, str]:
        overhead = time.perf_counter() - self.begun - self.ticket.waited
        return {OVERHEAD: f"{1000 * overhead:.3f}"}

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.scheduler.leave(self.ticket)
            self.tally.count(self.scheduler.metrics)


class _Service:
    """What the routes share."""

    def __init__(
        self, model: DeferringModel, name: str, limits: Limits, scheduler: Scheduler, usual_budget: float
    ) -> None:
        self.model, self.name, self.limits, self.scheduler = model, name, limits, scheduler
        self.usual_budget, self.created = usual_budget, int(time.time())

    async def write(self, request: Request, body: CompletionRequest | ChatRequest, form: Form) -> Response:
        most = tokens_of(body.most_tokens(), self.model.served.spec.length)
        work = self._begin(request, body, most, is_streamed=bool(body.stream))
        if not body.stream:
            try:
                await _unless_gone(request, work.finish())
                return _json(form.whole(work.tally, body.model), headers=work.headers())
            finally:
                work.close()
        try:
            # The status waits for the first token: what fails before it is an error, not a stream.
            first = await _unless_gone(request, work.next_token())
        except BaseException:
            work.close()
            raise
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        return _EventStream(_chunks(first, work, form, body.model, wants_usage), work)

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        work = self._begin(request, body, self.model.served.spec.length, may_defer=False)
        try:
            await _unless_gone(request, work.finish())
            return _json(scores_answer(work.tally, body.model), headers=work.headers())
        finally:
            work.close()

    def _begin(
        self, request: Request, body: CompletionRequest | ChatRequest | ScoreRequest, most: int, **how: bool
    ) -> _Work:
        inputs = body.inputs()
        if len(inputs) > self.limits.inputs:
            raise Fault(400, f"{len(inputs)} inputs; one request may have {self.limits.inputs}")
        budget = budget_of(body, self.name, self.usual_budget)
        assert self.model.calibration is not None
        setting = self.model.calibration.for_budget(budget)
        is_met = setting.is_near(budget)
        remarks = [] if is_met else [f"a budget of {budget:g} cannot be met; the nearest is {setting.share:.3f}"]
        tally = Tally.of(len(inputs), budget, setting.share, remarks)
        ask = Ask(inputs, setting.threshold, most, **how)
        return _Work(self.scheduler, ask, tally, request.scope["state"]["begun"])


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Waits for the work; where the client leaves first, it ends."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Fault(GONE, "the client left")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- streams -------------------------------------------------------------------------------------------------------


class _EventStream(StreamingResponse):
    """Its work is closed however it ends, even before it began; and it ends, even where nobody reads."""

    def __init__(self, chunks: AsyncIterator[bytes], work: _Work) -> None:
        headers = {**work.headers(), "cache-control": "no-cache"}
        super().__init__(chunks, headers=headers, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._work.deadline + UNREAD):
                    await super().__call__(scope, receive, send)
        finally:
            self._work.close()


async def _chunks(first: Token | None, work: _Work, form: Form, model: str, wants_usage: bool) -> AsyncIterator[bytes]:
    token = first
    try:
        while token is not None:
            yield _event(form.part(token, work.tally, model))
            token = await work.next_token()
        if wants_usage:
            yield _event(form.closing(work.tally, model))
    except Fault as fault:  # the status is sent already
        yield _event(fault.body())
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


# -- answers -------------------------------------------------------------------------------------------------------


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


async def _say_fault(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, Fault)
    return _json(fault.body(), fault.status, fault.headers)


async def _say_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _say_fault(request, Fault(error.status_code, str(error.detail), headers=dict(error.headers or {})))


async def _say_invalid(request: Request, error: Exception) -> Response:
    """All problems together; what was sent is not said back."""
    assert isinstance(error, RequestValidationError)
    problems = [
        (".".join(map(str, one["loc"][1:])), one["msg"].removeprefix("Value error, ")) for one in error.errors()
    ]
    words = "; ".join(f"{where}: {message}" if where else message for where, message in problems)
    return await _say_fault(request, Fault(400, words[:1000], param=problems[0][0] or None))
