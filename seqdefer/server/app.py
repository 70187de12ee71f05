"""The routes. `create_app(model, "news")` returns the whole service as an ASGI application, without a socket.

POST /v1/completions, /v1/chat/completions   OpenAI's API, whole or streamed
POST /v1/audio/transcriptions                the same for models that take audio
POST /v1/deferral/complete                   inputs of any type, with the author of every token
POST /v1/deferral/score                      where the rejector would defer, without the expert
GET  /v1/deferral                            the served model and the share that each budget spends
GET  /v1/models, /metrics, /openapi.json
GET  /live, /ready, /health                  probes: the process runs; the models are loaded and requests are accepted
GET  /v1/usage                               what the API key of the request used today
GET  /, /docs                                the page to try it, and the reference of the API
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from seqdefer import __version__
from seqdefer.budgets.caps import Cap, allowances
from seqdefer.budgets.quality import QualityPromise
from seqdefer.errors import OptionError
from seqdefer.model.calibrated_pair import DEFAULT_BUDGET
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.served_log import ServedLog
from seqdefer.server import openapi, protocol, responses, shapes
from seqdefer.server.drift import TrafficMonitor
from seqdefer.server.gateway import USAGE, Gateway
from seqdefer.server.http import TRANSCRIPTIONS, APIError, Limits, json_response
from seqdefer.server.keys import KeyRing
from seqdefer.server.metrics import Metrics
from seqdefer.server.request import Service
from seqdefer.server.scheduler import SHUTDOWN_SECONDS, Scheduler
from seqdefer.server.settings import check_promises
from seqdefer.server.transcriptions import form_schema, no_audio, read_form, transcription_responses
from seqdefer.server.usage import Ledger, usage_file

PAGES = {"/": "index.html", "/docs": "docs.html"}  # and all files at /page/NAME
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidate each time: a new page must not load old scripts
}
UNREADABLE_BODY = (
    "the body cannot be read; send an uncompressed JSON object in UTF-8, without numbers of thousands of digits or "
    "hundreds of nested lists"
)


def create_app(
    model: DeferringModel,
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    keys: Path | None = None,
    usage: Path | None = None,
    budget: float = DEFAULT_BUDGET,
    caps: Sequence[Cap] = (),
    only_host: str | None = None,
    served_log: ServedLog | None = None,
    quality: QualityPromise | None = None,
) -> FastAPI:
    """Return the application that serves `model` as `name`.

    `budget` is the default of requests that give none, and `caps` hold for all. `keys` is a file of API keys, `usage`
    where to keep what they used. With `only_host`, the Host header must be that name or a loopback one: otherwise a web
    page of another site could reach the server through DNS rebinding. `served_log` gets what was spent, without texts.
    With `quality`, requests that name no budget get its setting."""
    if model.calibration is None:
        raise OptionError(
            "this model is not calibrated, so requests cannot choose a budget; first run: "
            "seqdefer calibrate DIR --data FILE"
        )
    model.calibration.for_budget(budget)
    allowances(caps, [0], model.prices)  # raises if a cap in money has no prices
    check_promises(caps, within=quality, served_log=served_log)
    ring = None if api_key is None and keys is None else KeyRing(keys, api_key)
    ledger = Ledger(usage or (None if keys is None else usage_file(keys)))
    limits, metrics = limits or Limits(), Metrics()
    metrics.inform(version=__version__, model=name, task=model.task, method=model.method)
    scheduler = Scheduler(model, limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        saving = asyncio.create_task(ledger.keep_saved())
        yield
        saving.cancel()
        ledger.save()
        await asyncio.to_thread(scheduler.close, SHUTDOWN_SECONDS)
        if served_log is not None:
            served_log.close()

    # No docs_url or redoc_url: these pages would load scripts from other sites. Ours is /docs.
    app = FastAPI(
        title="seqdefer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.scheduler, app.state.ledger = scheduler, ledger
    takes_audio = model.served.codec.sample_rate is not None
    app.add_middleware(
        Gateway, limits=limits, metrics=metrics, keys=ring, ledger=ledger, only_host=only_host, takes_audio=takes_audio
    )
    app.add_exception_handler(APIError, _handle_api_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(RequestValidationError, _handle_invalid_body)
    service = Service(scheduler, name, budget, TrafficMonitor(model, metrics, served_log), quality, tuple(caps))
    _add_routes(app, service)
    _add_probes(app, service)
    _add_transcriptions(app, service, takes_audio=takes_audio)
    _add_page(app)
    openapi.describe(app, model, name, limits, has_key=ring is not None, has_host=only_host is not None)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=openapi.stream_responses(shapes.TextCompletion))
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        return await service.write(request, body, responses.COMPLETION)

    @app.post("/v1/chat/completions", responses=openapi.stream_responses(shapes.ChatCompletion))
    async def chat(body: protocol.ChatRequest, request: Request) -> Response:
        return await service.write(request, body, responses.CHAT)

    @app.get("/v1/deferral", responses=openapi.json_responses(shapes.DeferralModel))
    async def deferral() -> Response:
        return json_response(service.describe())

    @app.post("/v1/deferral/complete", responses=openapi.stream_responses(shapes.DeferralCompletion))
    async def complete(body: protocol.CompleteRequest, request: Request) -> Response:
        return await service.complete(request, body)

    @app.post("/v1/deferral/score", responses=openapi.json_responses(shapes.Scores, *openapi.WRITING_ERRORS))
    async def score(body: protocol.ScoreRequest, request: Request) -> Response:
        return await service.score(request, body)

    @app.get("/v1/models", responses=openapi.json_responses(shapes.Models))
    async def models() -> Response:
        return json_response({"object": "list", "data": responses.model_list(service.name, service.created)})

    @app.get("/v1/models/{model:path}", responses=openapi.json_responses(shapes.Model, 404))
    async def one_model(model: str) -> Response:
        if re.fullmatch(protocol.name_pattern(service.name), model) is None:
            raise protocol.unknown_model(model, service.name)
        return json_response(responses.model_response(model, service.created))

    @app.get(USAGE, responses=openapi.json_responses(shapes.KeyUsage))
    async def usage(request: Request) -> Response:
        account = request.scope["state"]["account"]
        return json_response(account.response(app.state.ledger.day))


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/live", responses=openapi.LIVE_RESPONSES)
    async def live() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready", responses=openapi.HEALTH_RESPONSES)
    @app.get("/health", responses=openapi.HEALTH_RESPONSES)
    async def ready() -> Response:
        is_well = service.scheduler.is_working
        return json_response({"status": "ok" if is_well else "stopping"}, 200 if is_well else 503)

    @app.get("/metrics", response_class=Response, responses=openapi.METRICS_RESPONSES)
    async def metrics() -> Response:
        return Response(service.scheduler.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_transcriptions(app: FastAPI, service: Service, *, takes_audio: bool) -> None:
    has_prices = service.model.prices is not None
    form = form_schema(service.name, service.model.served.codec, has_prices=has_prices)

    @app.post(TRANSCRIPTIONS, openapi_extra=form, responses=transcription_responses(), include_in_schema=takes_audio)
    async def transcriptions(request: Request) -> Response:
        if not takes_audio:
            raise no_audio(service.name)
        return await service.transcribe(request, await read_form(request))


# -- the page ------------------------------------------------------------------------------------------------------


def _add_page(app: FastAPI) -> None:
    """Serve the static files of the page, which need no API key; what they fetch from /v1 does."""
    files = _read_page()

    @app.get("/", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    @app.get("/page/{name}", include_in_schema=False)
    async def page(request: Request) -> Response:
        name = request.path_params.get("name") or PAGES[request.scope["route"].path]
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r:.100}; available: {', '.join(sorted(files))}")
        etag = files[name].headers["etag"]
        known = {one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")}
        return Response(status_code=304, headers={**PAGE_HEADERS, "etag": etag}) if known & {etag, "*"} else files[name]


def _read_page() -> dict[str, Response]:
    files = {}
    for path in resources.files("seqdefer.server").joinpath("page").iterdir():
        media_type = MEDIA_TYPES.get(f".{path.name.rpartition('.')[2]}")
        if media_type is not None:  # skip the files of editors
            content = path.read_bytes()
            headers = {**PAGE_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
            files[path.name] = Response(content, headers=headers, media_type=media_type)
    return files


# -- errors --------------------------------------------------------------------------------------------------------


async def _handle_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, headers = str(error.detail), dict(error.headers or {})
    if error.status_code == 405:
        message = f"{request.method:.20} is not allowed at {request.url.path:.100}; allowed: {headers.get('Allow')}"
    elif message == "Not Found":  # the router's message
        message = f"nothing at {request.url.path:.100}; /openapi.json lists all paths"
    elif error.status_code == 400:  # FastAPI's message says only that the body cannot be read
        message = UNREADABLE_BODY
    return APIError(error.status_code, message, headers=headers).response()


async def _handle_invalid_body(_: Request, error: Exception) -> Response:
    """Report all problems together, without echoing the body."""
    assert isinstance(error, RequestValidationError)
    problems = [_problem(one) for one in error.errors()]
    message = "; ".join(f"{where}: {what}" if where else what for where, what in problems)
    return APIError(400, message[:1000], param=problems[0][0] or None).response()


def _problem(error: Any) -> tuple[str, str]:
    """Return where the problem is, and what it is."""
    if error["type"] == "json_invalid":
        return "", f"the body is not valid JSON: {error['ctx']['error']}, character {error['loc'][-1]}"
    if error["loc"] == ("body",) and error["type"] != "value_error":
        return "", "the body is not a JSON object; send one, with the header content-type: application/json"
    message = "unknown field; leave it out" if error["type"] == "extra_forbidden" else error["msg"]
    return ".".join(map(str, error["loc"][1:])), message.removeprefix("Value error, ")
