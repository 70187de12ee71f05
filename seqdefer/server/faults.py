"""What the server refuses or cannot do: a status, and a body in OpenAI's form. Clients never see a traceback."""

from __future__ import annotations

import json
from typing import Any

from seqdefer.errors import InputError

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class Fault(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def fault_of(error: Exception) -> Fault:
    """What a client is told of an error: in full what he can mend, of all else only that it happened."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, InputError):
        return Fault(400, str(error))
    return Fault(500, "the models failed on this request; the server's log says how", code="model_failed")


def busy(message: str) -> Fault:
    return Fault(429, message, code="queue_full", headers={"retry-after": "1"})


def crowded(most: int) -> Fault:
    headers = {"retry-after": "1", "connection": "close"}
    return Fault(503, f"more than {most} connections are open; ask again later", code="too_crowded", headers=headers)


def too_late(seconds: float) -> Fault:
    """The rest of the body would be read as the next request."""
    words = f"the request did not arrive within {seconds:g} seconds; send it faster"
    return Fault(408, words, code="timeout", headers={"connection": "close"})


def stopping() -> Fault:
    return Fault(503, "the server is shutting down; ask again later", code="shutting_down")


def too_slow(seconds: float) -> Fault:
    return Fault(504, f"not finished within {seconds:g} seconds; ask for less or later", code="timeout")


def to_json(content: Any) -> bytes:
    """ASCII: half a surrogate pair, which a request may hold, has no UTF-8."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
