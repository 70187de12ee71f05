"""/openapi.json: the shape of every response, the errors of every route, and what the served model accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from seqdefer.labels.pair_statistics import can_read_first
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.http import Limits
from seqdefer.server.protocol import name_pattern
from seqdefer.server.shapes import Error, Health

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
    if not can_read_first(model.served):
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
