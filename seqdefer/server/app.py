"""The routes. `create_app(model, "news")` is the whole service as an ASGI application, without a port.

POST /v1/completions, /v1/chat/completions   write, at once or as a stream
POST /v1/deferral/complete                   the same for any codec, with the author of every token
POST /v1/deferral/score                      where the rejector would defer; the expert is not asked
GET  /v1/deferral                            what is served, and what its budgets spend
GET  /v1/models, /health, /metrics, /openapi.json
GET  /                                       the page to try it
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from seqdefer import __version__
from seqdefer.errors import OptionError
from seqdefer.model.deferring_model import DEFAULT_BUDGET, DeferringModel
from seqdefer.server import schemas
from seqdefer.server.answers import (
    CHAT,
    COMPLETION,
    DeferralForm,
    Form,
    Tally,
    deferral_answer,
    model_answer,
    models_answer,
    scores_answer,
)
from seqdefer.server.cohorts import Ask
from seqdefer.server.describing import WRITING, answers, describe, errors, streamed
from seqdefer.server.faults import Fault, to_json
from seqdefer.server.gate import Crowd, Gate, check_key
from seqdefer.server.limits import Limits
from seqdefer.server.metrics import Metrics
from seqdefer.server.pages import add_page
from seqdefer.server.protocol import (
    ChatRequest,
    CompleteRequest,
    CompletionRequest,
    ScoreRequest,
    budget_of,
    name_pattern,
    tokens_of,
    unknown_model,
)
from seqdefer.server.scheduler import ENDING, Scheduler
from seqdefer.server.working import EventStream, Work, events_of, unless_gone

HEALTH: dict[int | str, dict[str, Any]] = {
    200: {"model": schemas.Health, "description": "It takes requests."},
    **errors(always=(403, 408, 413, 500)),
    503: {"model": schemas.Health | schemas.Error, "description": "It does not, now."},
}
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text format."},
    **errors(),
}
UNREADABLE = (
    "the body cannot be read: send a JSON object in UTF-8, not compressed, without numbers of thousands of digits and "
    "without hundreds of lists within lists"
)
Body = CompletionRequest | ChatRequest | CompleteRequest | ScoreRequest


def create_app(
    model: DeferringModel,
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    budget: float = DEFAULT_BUDGET,
    only_host: str | None = None,
) -> FastAPI:
    """`budget` is for requests that name none. With `only_host`, clients must call the server by that name or by one
    of the machine's own: else a foreign page, whose name is made to lead here, could use it."""
    if model.calibration is None:
        raise OptionError(
            "the budgets of this model were not measured, so no request could name one; do that first: "
            "seqdefer calibrate DIR --data FILE"
        )
    model.calibration.for_budget(budget)
    if api_key is not None:
        check_key(api_key)
    limits, metrics = limits or Limits(), Metrics()
    scheduler = Scheduler(model, limits, metrics)
    words = "Calls of an expert elsewhere that are under way."
    metrics.gauges["seqdefer_expert_calls"] = (words, lambda: scheduler.calls_under_way)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.close, ENDING)

    # The pages of documentation would load scripts from elsewhere.
    app = FastAPI(
        title="seqdefer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.scheduler, app.state.metrics = scheduler, metrics
    app.state.crowded = Gate(Crowd(limits), key=None, limits=limits, metrics=metrics)
    app.add_middleware(Gate, key=api_key, limits=limits, metrics=metrics, only_host=only_host)
    app.add_exception_handler(Fault, _say_fault)
    app.add_exception_handler(HTTPException, _say_http)
    app.add_exception_handler(RequestValidationError, _say_invalid)
    _add_routes(app, _Service(model, name, limits, scheduler, budget))
    add_page(app)
    describe(app, model, name, limits, has_key=api_key is not None, has_host=only_host is not None)
    return app


def _add_routes(app: FastAPI, service: _Service) -> None:
    @app.post("/v1/completions", responses=streamed(schemas.Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.write(request, body, COMPLETION)

    @app.post("/v1/chat/completions", responses=streamed(schemas.Chat))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.write(request, body, CHAT)

    @app.get("/v1/deferral", responses=answers(schemas.DeferralModel))
    async def deferral() -> Response:
        return _json(deferral_answer(service.model, service.name, service.usual_budget))

    @app.post("/v1/deferral/complete", responses=streamed(schemas.DeferralCompletion))
    async def complete(body: CompleteRequest, request: Request) -> Response:
        return await service.complete(request, body)

    @app.post("/v1/deferral/score", responses=answers(schemas.Scores, *WRITING))
    async def score(body: ScoreRequest, request: Request) -> Response:
        return await service.score(request, body)

    @app.get("/v1/models", responses=answers(schemas.Models))
    async def models() -> Response:
        return _json({"object": "list", "data": models_answer(service.name, service.created)})

    @app.get("/v1/models/{model:path}", responses=answers(schemas.Model, 404))
    async def one_model(model: str) -> Response:
        if re.fullmatch(name_pattern(service.name), model) is None:
            raise unknown_model(model, service.name)
        return _json(model_answer(model, service.created))

    @app.get("/health", responses=HEALTH)
    async def health() -> Response:
        is_well = service.scheduler.is_working
        return _json({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)

    @app.get("/metrics", response_class=Response, responses=METRICS)
    async def metrics() -> Response:
        return Response(service.scheduler.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Service:
    """What the routes share."""

    def __init__(
        self, model: DeferringModel, name: str, limits: Limits, scheduler: Scheduler, usual_budget: float
    ) -> None:
        self.model, self.name, self.limits, self.scheduler = model, name, limits, scheduler
        self.usual_budget, self.created = usual_budget, int(time.time())

    async def write(self, request: Request, body: CompletionRequest | ChatRequest, form: Form) -> Response:
        most, remarks = tokens_of(body.most_tokens(), self.model.served.spec.length)
        work = self._begin(request, body, most, remarks, is_streamed=bool(body.stream))
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        return await self._answer(request, work, form, body, wants_usage=wants_usage)

    async def complete(self, request: Request, body: CompleteRequest) -> Response:
        work = self._begin(request, body, self.model.served.spec.length, is_streamed=bool(body.stream))
        form = DeferralForm(self.model.served.codec, work.ticket.ask.inputs)
        return await self._answer(request, work, form, body, wants_usage=True)

    async def _answer(
        self,
        request: Request,
        work: Work,
        form: Form,
        body: CompletionRequest | ChatRequest | CompleteRequest,
        *,
        wants_usage: bool,
    ) -> Response:
        if not body.stream:
            try:
                await unless_gone(request, work.finish())
                return _json(form.whole(work.tally, body.model), headers=work.headers())
            finally:
                work.close()
        try:
            # The status waits for the first token, though not for long: what fails till then is an error, not a stream.
            await unless_gone(request, work.is_there())
        except BaseException:
            work.close()
            raise
        return EventStream(events_of(work, form, body.model, wants_usage=wants_usage), work)

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        work = self._begin(request, body, self.model.served.spec.length, may_defer=False)
        try:
            await unless_gone(request, work.finish())
            return _json(scores_answer(work.tally, body.model), headers=work.headers())
        finally:
            work.close()

    def _begin(self, request: Request, body: Body, most: int, said: Sequence[str] = (), **how: bool) -> Work:
        inputs, remarks = body.inputs(self.model.served.codec), [*body.remarks(self.model.served.codec), *said]
        if len(inputs) > self.limits.inputs:
            raise Fault(400, f"{len(inputs)} inputs; one request may have {self.limits.inputs}")
        budget = budget_of(body, self.name, self.usual_budget)
        assert self.model.calibration is not None
        setting = self.model.calibration.for_budget(budget)
        if not setting.is_near(budget):
            remarks.append(f"a budget of {budget:g} cannot be met; the nearest is {setting.share:.3f}")
        tally = Tally.of(len(inputs), budget, setting.share, remarks)
        ask = Ask(inputs, setting.threshold, most, **how)
        return Work(self.scheduler, ask, tally, request.scope["state"]["begun"])


# -- answers -------------------------------------------------------------------------------------------------------


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


async def _say_fault(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, Fault)
    return _json(fault.body(), fault.status, fault.headers)


async def _say_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == 405:
        words = f"{request.method:.20} is not possible at {request.url.path:.100}; possible: {headers.get('Allow')}"
    elif words == "Not Found":  # of the router, which knows no more
        words = f"there is nothing at {request.url.path:.100}; /openapi.json says what there is"
    elif error.status_code == 400:  # of FastAPI, which says only that the body cannot be read
        words = UNREADABLE
    return await _say_fault(request, Fault(error.status_code, words, headers=headers))


async def _say_invalid(request: Request, error: Exception) -> Response:
    """All problems together; what was sent is not said back."""
    assert isinstance(error, RequestValidationError)
    problems = [_problem(one) for one in error.errors()]
    words = "; ".join(f"{where}: {message}" if where else message for where, message in problems)
    return await _say_fault(request, Fault(400, words[:1000], param=problems[0][0] or None))


def _problem(one: Any) -> tuple[str, str]:
    """Where, and what."""
    if one["type"] == "json_invalid":
        return "", f"the body is no JSON: {one['ctx']['error']}, character {one['loc'][-1]}"
    if one["loc"] == ("body",) and one["type"] != "value_error":
        return "", "the body is no JSON object; send one, with the header content-type: application/json"
    words = "not known here; leave it out" if one["type"] == "extra_forbidden" else one["msg"]
    return ".".join(map(str, one["loc"][1:])), words.removeprefix("Value error, ")
