"""/openapi.json: the shape of every response, the errors of every route, and what the served model accepts.

Tests validate every response against this description, so nothing is sent that is not described.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.http import Limits
from seqdefer.server.log_probs import gives_log_probs
from seqdefer.server.protocol import name_pattern

Author = Literal["predictor", "expert"]
Finish = Literal["stop", "length"]
Schema = dict[str, Any]
RouteResponses = dict[int | str, dict[str, Any]]

ERRORS = {
    400: "The request or one of its inputs is invalid; the message says what to change.",
    401: "The API key is wrong or missing.",
    403: "The Host header names another server, or a page of another site asks.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body or an input is too large.",
    415: "The body or its file has a format that is not read.",
    429: "The queue is full, or the API key has used what it may; try again after retry-after seconds.",
    500: "The models failed; see the server's log.",
    503: "The server is loading or shutting down, or too many requests are running.",
    504: "The request did not finish in time.",
}
GATEWAY_ERRORS = (401, 403, 408, 413, 500, 503)  # possible on every route
WRITING_ERRORS = (400, 404, 415, 429, 504)
SECURITY_SCHEME = "key"
NOT_BLANK = r"\S"
UNUSED_BY_US = ("422", "HTTPValidationError", "ValidationError")  # FastAPI's own errors, which the app replaces
no_extra = with_config(ConfigDict(extra="forbid"))


# -- shapes of responses -------------------------------------------------------------------------------------------


@no_extra
class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@no_extra
class Error(TypedDict):
    error: ErrorDetails


@no_extra
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    predictor_tokens: int
    expert_tokens: int
    switches: int


@no_extra
class Money(TypedDict):
    """What was spent by the server's prices, and what the expert alone would cost. `saved` may be negative."""

    currency: str
    predictor: float
    expert: float
    spent: float
    expert_alone: float
    saved: float


@no_extra
class Deferral(TypedDict):
    """`degraded`: the expert failed, for this `reason`, and the predictor finished. `promise`: what the calibration
    guarantees at this budget, and on what condition; none under a cap. `drift`: a warning that inputs are no longer
    like those of the calibration. `capped`: tokens that a cap kept from the expert, where there is a cap."""

    budget: float
    expected_share: float
    share: float
    degraded: bool
    reason: NotRequired[str]
    remarks: NotRequired[list[str]]
    promise: NotRequired[str]
    drift: NotRequired[str]
    capped: NotRequired[int]
    money: NotRequired[Money]


@no_extra
class CompletionLogProbs(TypedDict):
    """Lists with an item for each token. Its log-probability and the likeliest others are those of its author."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    authors: list[Author]


@no_extra
class ChatTopLogProb(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@no_extra
class ChatTokenLogProb(ChatTopLogProb):
    """Log-probabilities under the model that wrote the token, its author."""

    top_logprobs: list[ChatTopLogProb]
    author: Author


@no_extra
class ChatLogProbs(TypedDict):
    content: list[ChatTokenLogProb]
    refusal: None


@no_extra
class Choice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: Finish


@no_extra
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


@no_extra
class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogProbs | None
    finish_reason: Finish


class _Head(TypedDict):
    id: str
    created: int
    model: str


@no_extra
class TextCompletion(_Head):
    object: Literal["text_completion"]
    choices: list[Choice]
    usage: Usage
    deferral: Deferral


@no_extra
class ChatCompletion(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    deferral: Deferral


@no_extra
class TokenDetails(TypedDict):
    """`defer`: the rejector's decision, even if the expert failed; `score` is null if it is infinite."""

    position: int
    token: Any
    text: str
    author: Author
    score: float | None
    defer: bool


@no_extra
class DeferralOutput(TypedDict):
    index: int
    output: Any
    finish_reason: Finish
    facts: dict[str, float]
    tokens: list[TokenDetails]


@no_extra
class DeferralCompletion(_Head):
    object: Literal["deferral.completion"]
    data: list[DeferralOutput]
    usage: Usage
    deferral: Deferral


@no_extra
class ScoredSequence(TypedDict):
    index: int
    text: str
    tokens: list[TokenDetails]


@no_extra
class ScoreDeferral(TypedDict):
    budget: float
    expected_share: float
    remarks: list[str]


@no_extra
class Scores(TypedDict):
    object: Literal["deferral.score"]
    model: str
    data: list[ScoredSequence]
    usage: Usage
    deferral: ScoreDeferral


@no_extra
class BudgetSetting(TypedDict):
    """`limit`: the most that the expected share of an input is, by the calibration; null if it cannot tell."""

    budget: float
    share: float
    low: float
    high: float
    limit: float | None


@no_extra
class CurvePoint(TypedDict):
    share: float
    loss: float


@no_extra
class DeferralCurve(TypedDict):
    unit: str
    inputs: int
    points: list[CurvePoint]


@no_extra
class BudgetSeconds(TypedDict):
    budget: float
    share: float
    asked: float
    seconds: float


@no_extra
class DeferralTiming(TypedDict):
    """Seconds per sequence, of each model alone and at budgets, where `at_once` sequences were written together."""

    inputs: int
    at_once: int
    predictor: float
    expert: float
    budgets: list[BudgetSeconds]


@no_extra
class BudgetPromise(TypedDict):
    """What the budgets guarantee, with `words` for the default budget; `confidence` is null in expectation."""

    guarantee: Literal["expected", "confident"]
    share_of: Literal["tokens", "inputs"]
    confidence: float | None
    inputs: int
    bound: Literal["conformal", "betting", "hoeffding-bentkus"]
    words: str


@no_extra
class QualityDetails(TypedDict):
    """The promise whose setting requests get that name no budget: an expected loss of at most `within` above that of
    the expert. `share`, `loss` and `expert_loss` were seen on the inputs that were tested."""

    within: float
    unit: str
    confidence: float
    inputs: int
    share: float
    loss: float
    expert_loss: float
    words: str


@no_extra
class DriftTest(TypedDict):
    """Evidence of 50 or more is an alarm, which stays: `alarm_at` is the number of inputs then."""

    inputs: int
    evidence: float
    alarm_at: int | None


@no_extra
class DriftState(TypedDict):
    """Tests of what is served against the calibration; `delta` is the probability that any of them ever sounds while
    inputs are like those of the calibration."""

    delta: float
    spent: DriftTest
    scores: DriftTest
    warning: str | None


@no_extra
class ServedBudget(TypedDict):
    """What was spent at a budget since the server started, on inputs that the calibration has not seen."""

    budget: float
    inputs: int
    share: float


@no_extra
class AudioInputs(TypedDict):
    max_seconds: float
    language: str | None


@no_extra
class CapDetails(TypedDict):
    tokens: int | None
    passes: int | None
    money: float | None
    per: Literal["sequence", "request"]
    policy: Literal["cut-off", "rising"]


@no_extra
class DeferralModel(TypedDict):
    """The served model: its granularity, its inputs, the share each budget spends, and the loss at each share."""

    object: Literal["deferral.model"]
    id: str
    kind: str
    by: Literal["token", "one-time"]
    length: int
    size: int | None
    hint: str
    about: str
    examples: list[Any]
    audio: AudioInputs | None
    budget: float
    calibrated_on: int
    promise: BudgetPromise | None
    quality: QualityDetails | None
    settings: list[BudgetSetting]
    drift: DriftState | None
    served: list[ServedBudget]
    curve: DeferralCurve | None
    timing: DeferralTiming | None
    currency: str | None
    caps: list[CapDetails]


@no_extra
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["seqdefer"]


@no_extra
class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@no_extra
class Health(TypedDict):
    status: Literal["ok", "loading", "stopping"]


@no_extra
class KeyLimits(TypedDict):
    requests_per_minute: int | None
    expert_tokens_per_day: int | None


@no_extra
class KeyUsage(TypedDict):
    """What an API key used since midnight (UTC), and what it may use; null means no limit."""

    object: Literal["usage"]
    key: str
    day: str
    requests: int
    refused: int
    predictor_tokens: int
    expert_tokens: int
    expert_tokens_left: int | None
    limits: KeyLimits


# -- responses of routes -------------------------------------------------------------------------------------------


def error_responses(*statuses: int, always: tuple[int, ...] = GATEWAY_ERRORS) -> RouteResponses:
    return {status: {"model": Error, "description": ERRORS[status]} for status in sorted({*statuses, *always})}


def json_responses(shape: Any, *statuses: int) -> RouteResponses:
    return {200: {"model": shape, "description": "OK"}, **error_responses(*statuses, 429)}


def stream_responses(shape: Any) -> RouteResponses:
    """Describe a route that returns JSON, or server-sent events: `data: {...}`, and finally `data: [DONE]`."""
    responses = json_responses(shape, *WRITING_ERRORS)
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    responses[200]["content"] = {"text/event-stream": {"itemSchema": event}}
    return responses


HEALTH_RESPONSES: RouteResponses = {
    200: {"model": Health, "description": "The server accepts requests."},
    **error_responses(always=(403, 408, 413, 500)),
    503: {"model": Health | Error, "description": "The server accepts no requests now."},
}
LIVE_RESPONSES: RouteResponses = {
    200: {"model": Health, "description": "The process runs."},
    **error_responses(always=(403, 408, 413, 500, 503)),
}
METRICS_RESPONSES: RouteResponses = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The Prometheus text format."},
    **error_responses(),
}


# -- the served model ----------------------------------------------------------------------------------------------


def describe(app: FastAPI, model: DeferringModel, name: str, limits: Limits, *, has_key: bool, has_host: bool) -> None:
    """Make the application describe itself at the first request of its description."""
    takes_audio = model.served.codec.sample_rate is not None
    is_possible = {"401": has_key, "403": has_host, "415": takes_audio}
    impossible = [status for status, can_be in is_possible.items() if not can_be]

    def openapi() -> Schema:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for part in (schema["components"]["schemas"], *(one["responses"] for one in _operations(schema))):
                for key in (*UNUSED_BY_US, *impossible):
                    part.pop(key, None)
            _narrow(schema["components"]["schemas"], model, name, limits)
            if has_key:
                _require_key(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _operations(schema: Schema) -> Iterator[Schema]:
    return (one for path in schema["paths"].values() for one in path.values())


def _require_key(schema: Schema) -> None:
    schema["components"]["securitySchemes"] = {SECURITY_SCHEME: {"type": "http", "scheme": "bearer"}}
    for operation in _operations(schema):
        if "401" in operation["responses"]:
            operation["security"] = [{SECURITY_SCHEME: []}]


def _narrow(schemas: Schema, model: DeferringModel, name: str, limits: Limits) -> None:
    """Narrow the schemas of requests to what this model accepts."""
    one, counts = model.served.codec.schema(), {"minItems": 1, "maxItems": limits.inputs}
    text = one if one.get("type") == "string" else {"type": "string"}  # other inputs arrive as JSON in a text
    kinds = [text] if (ids := model.served.codec.ids_schema()) is None else [text, ids]
    prompts = {"anyOf": [*kinds, *({"type": "array", "items": kind, **counts} for kind in kinds)]}
    max_tokens = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
    no_budget = {"not": {"anyOf": [{"required": ["budget"]}, {"required": ["budget_money"]}]}}
    one_budget = [
        {"properties": {"model": {"const": name}}},
        {"properties": {"deferral": {"anyOf": [{"type": "null"}, {"type": "object", **no_budget}]}}},
    ]
    narrower = {
        "model": {"type": "string", "pattern": name_pattern(name), "examples": [name]},
        "max_tokens": max_tokens,
        "max_completion_tokens": max_tokens,
        "prompt": prompts,
    }
    for kind in ("CompletionRequest", "ChatRequest", "CompleteRequest", "ScoreRequest"):
        properties = schemas[kind]["properties"]
        properties |= {key: value for key, value in narrower.items() if key in properties}
        schemas[kind]["anyOf"] = one_budget
    if model.prices is None:
        del schemas["DeferralOptions"]["properties"]["budget_money"], schemas["CapOptions"]["properties"]["money"]
        schemas["CapOptions"]["anyOf"] = [{"required": ["tokens"]}, {"required": ["passes"]}]
    if not gives_log_probs(model.served):
        schemas["CompletionRequest"]["properties"]["logprobs"] = {"type": "null"}
        schemas["ChatRequest"]["properties"] |= {
            "logprobs": {"enum": [None, False]},
            "top_logprobs": {"enum": [None, 0]},
        }
    for kind in ("CompleteRequest", "ScoreRequest"):
        schemas[kind]["properties"] |= {"input": one, "inputs": {"type": "array", "items": one, **counts}}
    if text.get("pattern") == NOT_BLANK and not model.served.codec.knows_roles:
        schemas["ChatRequest"]["properties"]["messages"]["contains"] = _message_with(text)


def _message_with(text: Schema) -> Schema:
    """Return the schema of a message with such a text: one non-blank message makes the joined text non-blank."""
    part = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    content = {"anyOf": [text, {"type": "array", "contains": part}]}
    return {"type": "object", "properties": {"content": content}, "required": ["content"]}
