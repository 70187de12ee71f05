"""Limits, and errors as responses.

FastAPI is not imported until a response is made. Errors carry a status and a body in OpenAI's format; clients never
see a traceback.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from seqdefer.errors import FormatError, InputError, OptionError, TooLongError

if TYPE_CHECKING:
    from starlette.responses import Response

CLIENT_CLOSED = 499  # the client disconnected before it got a response
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
TRANSCRIPTIONS = "/v1/audio/transcriptions"


def option(default: Any, words: str) -> Any:
    """Return a field that is also an option of `seqdefer serve`, with its help text."""
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for, and how much may run at the same time."""

    body_bytes: int = option(2**20, "size of a request, at most")
    # 30 s of 24 bits, 48,000 Hz and two channels have 8.3 MiB
    audio_bytes: int = option(10 * 2**20, "size of an upload of sound, at most")
    arriving_bytes: int = option(2**28, "size of all requests that are arriving; beyond it, large ones are refused")
    head_seconds: float = option(10.0, "time for a connection to send the head of a request, at most")
    # Longer than clients (5 in httpx) and load balancers (60) keep it: what closes first must not be the server, which
    # would reset a request that is on its way.
    keep_alive_seconds: float = option(75.0, "time that a connection is kept open for its next request")
    request_seconds: float = option(120.0, "time of a request, at most")
    inputs: int = option(16, "inputs of a request, at most")
    queue: int = option(256, "requests that may wait")
    batch: int = option(32, "sequences that join the running batch at once, at most")
    running: int = option(128, "sequences in memory, at most")
    connections: int = option(512, "open connections, at most; a few more are kept for probes")
    expert_seconds: float | None = option(
        None,
        "time of an expert call; then the predictor finishes (half a request's if it is remote, else no limit)",
    )
    grace_seconds: float = option(5.0, "time for requests in flight to finish after SIGTERM or Ctrl-C")

    def __post_init__(self) -> None:
        limit = threading.TIMEOUT_MAX  # timers accept neither more nor infinity
        for name, value in vars(self).items():
            if value is not None and not 0 < value <= limit:
                raise OptionError(f"{name.replace('_', ' ')} is {value}; give more than 0 and at most {limit:.0f}")
        if not self.inputs <= self.batch <= self.running:
            raise OptionError(
                f"the inputs of a request ({self.inputs}) must fit into a batch ({self.batch}), and a batch into what "
                f"runs at the same time ({self.running})"
            )


# -- errors --------------------------------------------------------------------------------------------------------


class APIError(Exception):
    """An error response."""

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
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def as_api_error(error: Exception) -> APIError:
    """Return a client-safe error; internals stay in the log."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, TooLongError):
        return APIError(413, str(error), code="input_too_long")
    if isinstance(error, FormatError):
        return APIError(415, str(error), code="unsupported_format")
    if isinstance(error, InputError):
        return APIError(400, str(error))
    return APIError(500, "the models failed on this request; see the server's log", code="model_failed")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    from starlette.responses import Response

    return Response(to_json(content), status, headers, media_type="application/json")


def shutting_down() -> APIError:
    return APIError(503, "the server is shutting down; try again later", code="shutting_down")


def to_json(content: Any) -> bytes:
    """Encode as ASCII: a request may contain a lone surrogate, which UTF-8 cannot represent."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
