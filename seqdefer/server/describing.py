"""/openapi.json, true to the model that is served: its name, what its codec reads, how much it writes, every error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.limits import Limits
from seqdefer.server.protocol import name_pattern
from seqdefer.server.schemas import Error

STREAM = "text/event-stream"
ERRORS = {
    400: "The request, or an input in it, is none; the message says what to change.",
    401: "The API key is wrong or missing.",
    403: "The server was called by a name that is not its own.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait; retry-after says when to come back.",
    500: "The models failed; the server's log says how.",
    503: "The server is shutting down, or too many connections are open.",
    504: "Not finished in time.",
}
ALWAYS = (401, 403, 408, 413, 500, 503)  # the gate's, whatever the route
WRITING = (400, 404, 429, 504)
KEY = "key"
NOT_BLANK = r"\S"
NOT_OURS = ("422", "HTTPValidationError", "ValidationError")  # FastAPI's own errors, which nobody gets to see
Schema = dict[str, Any]


def errors(*statuses: int, always: tuple[int, ...] = ALWAYS) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route."""
    return {status: {"model": Error, "description": ERRORS[status]} for status in sorted({*statuses, *always})}


def answers(shape: Any, *statuses: int) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": shape, "description": "OK"}, **errors(*statuses)}


def streamed(shape: Any) -> dict[int | str, dict[str, Any]]:
    """Of routes that write whole, or as server-sent events: `data: {...}`, at last `data: [DONE]`."""
    found = answers(shape, *WRITING)
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    found[200]["content"] = {STREAM: {"itemSchema": event}}
    return found


def describe(app: FastAPI, model: DeferringModel, name: str, limits: Limits, *, has_key: bool, has_host: bool) -> None:
    """Makes the application describe itself when it is first asked."""
    unused = (() if has_key else ("401",)) + (() if has_host else ("403",))

    def openapi() -> Schema:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _leave_out(found, (*NOT_OURS, *unused))
            _fit(found["components"]["schemas"], model, name, limits)
            if has_key:
                _lock(found)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _leave_out(found: Schema, names: tuple[str, ...]) -> None:
    for part in (found["components"]["schemas"], *(one["responses"] for one in _operations(found))):
        for name in names:
            part.pop(name, None)


def _operations(found: Schema) -> Iterator[Schema]:
    return (one for path in found["paths"].values() for one in path.values())


def _lock(found: Schema) -> None:
    found["components"]["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
    for operation in _operations(found):
        if "401" in operation["responses"]:
            operation["security"] = [{KEY: []}]


# -- what the model takes ------------------------------------------------------------------------------------------


def _fit(schemas: Schema, model: DeferringModel, name: str, limits: Limits) -> None:
    one, several = model.served.codec.schema(), {"minItems": 1, "maxItems": limits.inputs}
    text = one if one.get("type") == "string" else {"type": "string"}  # other inputs come as JSON in a text
    texts = {"anyOf": [text, {"type": "array", "items": text, **several}]}
    writes = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}
    named_once = [{"properties": {"model": {"const": name}}}, {"properties": {"deferral": {"type": "null"}}}]
    narrower = {
        "model": {"type": "string", "pattern": name_pattern(name), "examples": [name]},
        "max_tokens": writes,
        "max_completion_tokens": writes,
        "prompt": texts,
    }
    for kind in ("CompletionRequest", "ChatRequest", "CompleteRequest", "ScoreRequest"):
        properties = schemas[kind]["properties"]
        properties |= {key: value for key, value in narrower.items() if key in properties}
        schemas[kind]["anyOf"] = named_once
    for kind in ("CompleteRequest", "ScoreRequest"):
        schemas[kind]["properties"] |= {"input": one, "inputs": {"type": "array", "items": one, **several}}
    if text.get("pattern") == NOT_BLANK and not model.served.codec.knows_roles:
        schemas["ChatRequest"]["properties"]["messages"]["contains"] = _saying(text)


def _saying(text: Schema) -> Schema:
    """A message that is such a text: then all of them joined are one, too."""
    part = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    content = {"anyOf": [text, {"type": "array", "contains": part}]}
    return {"type": "object", "properties": {"content": content}, "required": ["content"]}
