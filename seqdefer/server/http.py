"""What every request passes before the routes: limits, host, API key, body size, request ID, metrics.

Plain ASGI, without FastAPI. Errors carry a status and a body in OpenAI's format; clients never see a traceback.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from seqdefer.errors import FormatError, InputError, OptionError, TooLongError
from seqdefer.server.metrics import Metrics

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

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
PAGE_PREFIX = "/page/"
PUBLIC_PATHS = ("/health", "/", "/docs")  # these and the page's files need no API key
KNOWN_PATHS = (
    "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/completions", "/v1/chat/completions", TRANSCRIPTIONS,
    "/v1/deferral", "/v1/deferral/complete", "/v1/deferral/score", "/", "/docs",
)  # fmt: skip
REQUEST_ID = b"x-request-id"
REQUEST_ID_PATTERN = re.compile(rb"[\w.:-]{1,128}", re.ASCII)  # a client's ID goes into the log
API_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")
HOST_PATTERN = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")
# Read and discard up to this many times the allowed body: a client that is cut off while sending sees no response.
DISCARD_FACTOR = 16

log = logging.getLogger("seqdefer.server")


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for, and how much may run at the same time."""

    body_bytes: int = 2**20
    audio_bytes: int = 10 * 2**20  # of an upload: 30 s of 24 bits, 48,000 Hz and two channels have 8.3 MiB
    request_seconds: float = 120.0
    connections: int = 512  # open at the same time
    queue: int = 256  # requests waiting
    inputs: int = 16  # per request
    batch: int = 32  # sequences that join the running batch at once
    running: int = 128  # sequences at work, whose caches are in memory
    expert_seconds: float | None = None  # per call; None: unlimited for a local expert, else half of request_seconds
    grace_seconds: float = 5.0  # for requests in flight at shutdown

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


def shutting_down() -> APIError:
    return APIError(503, "the server is shutting down; try again later", code="shutting_down")


def to_json(content: Any) -> bytes:
    """Encode as ASCII: a request may contain a lone surrogate, which UTF-8 cannot represent."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


# -- the gateway ---------------------------------------------------------------------------------------------------


def check_api_key(key: str) -> None:
    if API_KEY_PATTERN.fullmatch(key) is None:
        raise OptionError(
            "the API key is empty, or contains a space or a non-ASCII character; use ASCII letters, digits and "
            "punctuation"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Gateway:
    """ASGI middleware around the routes. It reads the whole body before it calls `app`.

    `takes_audio`: the route for uploads of sound accepts larger bodies than the others."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        limits: Limits,
        metrics: Metrics,
        only_host: str | None = None,
        takes_audio: bool = False,
    ) -> None:
        self.app, self.key, self.limits, self.metrics, self.only_host = app, key, limits, metrics, only_host
        self.takes_audio = takes_audio

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = scope.setdefault("state", {})["started"] = time.perf_counter()
        request_id, is_head = _request_id(scope), scope["method"] == "HEAD"
        response = _Response(send, request_id, has_body=not is_head)
        try:
            # A HEAD is a GET without the body.
            await self._forward({**scope, "method": "GET"} if is_head else scope, receive, response)
        except Exception as error:
            if not isinstance(error, APIError):
                log.error("request %s failed: %r", request_id.decode(), error)
            await response.send_error(as_api_error(error))
        finally:  # also count cancelled requests
            path = _path_label(scope["path"])
            status = str(response.status or CLIENT_CLOSED)
            self.metrics.count("seqdefer_requests_total", {"path": path, "status": status})
            self.metrics.observe_seconds(time.perf_counter() - started, {"path": path})

    async def _forward(self, scope: Scope, receive: Receive, response: _Response) -> None:
        self._check_host(scope)
        self._check_site(scope)
        self._check_key(scope)
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                body = await self._read_body(receive, self._max_bytes(scope["path"]))
        except TimeoutError:
            message = f"the request did not arrive within {self.limits.request_seconds:g} seconds; send it faster"
            # Close the connection, or the rest of the body would be read as the next request.
            raise APIError(408, message, code="timeout", headers={"connection": "close"}) from None
        await self.app(scope, _replay(body, receive), response.send)

    def _check_host(self, scope: Scope) -> None:
        header = dict(scope["headers"]).get(b"host")
        if self.only_host is None or header is None:  # the attackers here are browsers, which always send a Host
            return
        host = _host_name(header.decode("latin-1"))
        if not is_loopback(host) and host != _host_name(self.only_host):
            raise APIError(
                403,
                f"the Host header is {host!r:.100}, but this server answers only to localhost or {self.only_host}; use "
                "one of these, let your proxy send one, or start the server with --api-key, which allows any host",
                code="wrong_host",
            )

    def _check_site(self, scope: Scope) -> None:
        """Refuse uploads from pages of other sites: browsers send forms anywhere without asking the server first."""
        site = dict(scope["headers"]).get(b"sec-fetch-site", b"none")
        if self.only_host is not None and scope["method"] == "POST" and site not in (b"same-origin", b"none"):
            message = (
                "this request comes from a page of another site; use this server's own page or a program, or start it"
            )
            raise APIError(403, f"{message} with --api-key, which allows any site", code="wrong_site")

    def _check_key(self, scope: Scope) -> None:
        if self.key is None or scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PAGE_PREFIX):
            return
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(b" "), self.key.encode()):
            message = "wrong or missing API key; send it as: Authorization: Bearer KEY"
            raise APIError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _max_bytes(self, path: str) -> int:
        return self.limits.audio_bytes if self.takes_audio and path == TRANSCRIPTIONS else self.limits.body_bytes

    async def _read_body(self, receive: Receive, max_size: int) -> bytes:
        size, body = 0, bytearray()
        has_more = True
        while has_more and size <= DISCARD_FACTOR * max_size:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise APIError(CLIENT_CLOSED, "the client disconnected")
            size += len(message.get("body", b""))
            if size <= max_size:
                body += message.get("body", b"")
            has_more = message.get("more_body", False)
        if size > max_size:
            raise APIError(413, f"the body is larger than {max_size} bytes", code="body_too_large")
        return bytes(body)


def overloaded_app(limits: Limits, metrics: Metrics) -> ASGIApp:
    """Return the application that answers connections beyond the limit."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        message = f"more than {limits.connections} connections are open; try again later"
        headers = {"retry-after": "1", "connection": "close"}
        raise APIError(503, message, code="too_crowded", headers=headers)

    return Gateway(refuse, key=None, limits=limits, metrics=metrics)


class _Response:
    """Adds the request ID to a response and remembers its status."""

    def __init__(self, send: Send, request_id: bytes, *, has_body: bool) -> None:
        self._send, self._request_id, self._has_body, self.status = send, request_id, has_body, 0

    async def send(self, message: ASGIMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), (REQUEST_ID, self._request_id)]}
        elif not self._has_body:
            message = {**message, "body": b""}
        await self._send(message)

    async def send_error(self, error: APIError) -> None:
        if self.status:  # already sent: the connection ends mid-body, which clients notice
            return
        body = to_json(error.body())
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body once, and then what the connection sends: the disconnect."""
    unread = [body]

    async def replayed() -> ASGIMessage:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replayed


def _request_id(scope: Scope) -> bytes:
    """Return the client's request ID if it is valid, else a new one."""
    header: bytes = dict(scope["headers"]).get(REQUEST_ID, b"")
    return header if REQUEST_ID_PATTERN.fullmatch(header) else uuid.uuid4().hex.encode()


def _host_name(host: str) -> str:
    """Return the host of `host:port`, `[address]:port`, or either without a port."""
    found = HOST_PATTERN.fullmatch(host)
    return (found[1] if found else host).strip("[]").rstrip(".").lower()


def _path_label(path: str) -> str:
    """Return the path as a metric label, which takes few values whatever clients request."""
    if path in KNOWN_PATHS:
        return path
    if path.startswith(PAGE_PREFIX):
        return PAGE_PREFIX + "{name}"
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"
