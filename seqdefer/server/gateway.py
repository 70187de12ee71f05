"""What every request passes before the routes: host, API key, body size and time, request ID, logs, metrics.

It needs no FastAPI application inside: `loading_app` has none.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from seqdefer.server.http import CLIENT_CLOSED, TRANSCRIPTIONS, APIError, Limits, as_api_error, json_response
from seqdefer.server.keys import APIKey, KeyRing
from seqdefer.server.logs import PROBES, log_access, request_id
from seqdefer.server.metrics import Metrics
from seqdefer.server.usage import Ledger

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_PREFIX = "/page/"
USAGE, METRICS = "/v1/usage", "/metrics"
PUBLIC_PATHS = ("/live", "/ready", "/health", "/", "/docs")  # these and the page's files need no API key
KNOWN_PATHS = (
    *PROBES, "/openapi.json", "/v1/models", "/v1/completions", "/v1/chat/completions", TRANSCRIPTIONS,
    "/v1/deferral", "/v1/deferral/complete", "/v1/deferral/score", USAGE, "/", "/docs",
)  # fmt: skip
REQUEST_ID = b"x-request-id"
REQUEST_ID_PATTERN = re.compile(rb"[\w.:-]{1,128}", re.ASCII)  # a client's ID goes into the log
HOST_PATTERN = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")
# Read and discard up to this many times the allowed body: a client that is cut off while sending sees no response.
DISCARD_FACTOR = 16

log = logging.getLogger("seqdefer.server")


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
        limits: Limits,
        metrics: Metrics,
        keys: KeyRing | None = None,
        ledger: Ledger | None = None,
        only_host: str | None = None,
        takes_audio: bool = False,
    ) -> None:
        self.app, self.keys, self.limits, self.metrics, self.only_host = app, keys, limits, metrics, only_host
        self.ledger, self.takes_audio = ledger or Ledger(), takes_audio
        self.n_active = 0  # requests that are being answered
        self.n_arriving = 0  # bytes of bodies that have not arrived completely

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = scope.setdefault("state", {})["started"] = time.perf_counter()
        own_id, is_head = _request_id(scope), scope["method"] == "HEAD"
        request_id.set(own_id.decode())  # this task serves this request alone
        response = _Response(send, own_id, has_body=not is_head)
        try:
            # A HEAD is a GET without the body.
            await self._forward({**scope, "method": "GET"} if is_head else scope, receive, response)
        except Exception as error:
            if not isinstance(error, APIError):
                log.error("a request failed", exc_info=error)
            if not response.status:  # else the connection ends mid-body, which clients notice
                await as_api_error(error).response()(scope, receive, response.send)
        finally:  # also count cancelled requests
            self._record(scope, response.status or CLIENT_CLOSED, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        path, account = _path_label(scope["path"]), scope["state"].get("account")
        self.metrics.count("seqdefer_requests_total", {"path": path, "status": str(status)})
        self.metrics.observe("seqdefer_request_seconds", seconds, {"path": path})
        log_access(scope, status, seconds, None if self.keys is None or account is None else account.key.name)

    async def _forward(self, scope: Scope, receive: Receive, response: _Response) -> None:
        self._check_framing(scope)
        self._check_host(scope)
        self._check_site(scope)
        self._check_key(scope)
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                body = await self._read_body(receive, is_sound=self.takes_audio and scope["path"] == TRANSCRIPTIONS)
        except TimeoutError:
            message = f"the request did not arrive within {self.limits.request_seconds:g} seconds; send it faster"
            # Close the connection, or the rest of the body would be read as the next request.
            raise APIError(408, message, code="timeout", headers={"connection": "close"}) from None
        with self._place(scope["path"]):
            await self.app(scope, _replay(body, receive), response.send)

    def _check_framing(self, scope: Scope) -> None:
        """Refuse a body of two lengths: a proxy that believes the other one would read a part as another request."""
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            raise APIError(400, message, headers={"connection": "close"})

    @contextmanager
    def _place(self, path: str) -> Iterator[None]:
        """Count a request that is being answered. Refuse those beyond the limit of connections, except probes."""
        if self.n_active >= self.limits.connections and path not in PROBES:
            message = f"{self.limits.connections} requests are running already; try again later"
            raise _too_crowded(message)
        self.n_active += 1
        try:
            yield
        finally:
            self.n_active -= 1

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
        """Find the account of a request, and count it there."""
        path = scope["path"]
        if path in PUBLIC_PATHS or path.startswith(PAGE_PREFIX):
            return
        account = scope["state"]["account"] = self.ledger.account(self._key(scope))
        if path.startswith("/v1/") and path != USAGE:
            account.count_request()

    def _key(self, scope: Scope) -> APIKey | None:
        """Return the key of a request; None if this server has no keys."""
        if self.keys is None:
            return None
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        found = self.keys.find(key.strip(b" "))
        bearer = {"www-authenticate": "Bearer"}
        if scheme.lower() != b"bearer" or found is None:
            message = "wrong or missing API key; send it as: Authorization: Bearer KEY"
            raise APIError(401, message, code="invalid_api_key", headers=bearer)
        if scope["path"] == METRICS and not self.keys.may_read_metrics(found):
            raise APIError(401, f"{METRICS} takes the key of --api-key alone", code="operator_only", headers=bearer)
        return found

    def _check_memory(self, size: int) -> None:
        """Refuse a body that takes more than its share of the memory for arriving ones, if that is full."""
        limit = self.limits.arriving_bytes
        if self.n_arriving > limit and size > limit // self.limits.connections:
            message = "too many large requests are arriving; try again later, or send a smaller one"
            raise _too_crowded(message)

    async def _read_body(self, receive: Receive, *, is_sound: bool) -> bytes:
        max_size = self.limits.audio_bytes if is_sound else self.limits.body_bytes
        size, body = 0, bytearray()
        has_more = True
        try:
            while has_more and size <= DISCARD_FACTOR * max_size:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise APIError(CLIENT_CLOSED, "the client disconnected")
                part = message.get("body", b"")
                size += len(part)
                if size <= max_size:
                    self.n_arriving += len(part)
                    body += part
                    self._check_memory(len(body))
                has_more = message.get("more_body", False)
        finally:
            self.n_arriving -= len(body)
        if size > max_size:
            advice = "; cut the sound into clips, or send it as FLAC" if is_sound else ""
            raise APIError(413, f"the body is larger than {max_size} bytes{advice}", code="body_too_large")
        return bytes(body)


def loading_app(limits: Limits) -> Gateway:
    """Return the application that answers while the models are loaded."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in ("/live", "/ready", "/health"):
            message = "the models are being loaded; try again later"
            raise APIError(503, message, code="loading", headers={"retry-after": "1"})
        is_live = scope["path"] == "/live"
        response = json_response({"status": "ok" if is_live else "loading"}, 200 if is_live else 503)
        await response(scope, receive, send)

    return Gateway(answer, limits=limits, metrics=Metrics())


class _Response:
    """Adds the request ID to a response and remembers its status."""

    def __init__(self, send: Send, request_id: bytes, *, has_body: bool) -> None:
        self._send, self._request_id, self._has_body, self.status = send, request_id, has_body, 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), (REQUEST_ID, self._request_id)]}
        elif not self._has_body:
            message = {**message, "body": b""}
        await self._send(message)


def _too_crowded(message: str) -> APIError:
    return APIError(503, message, code="too_crowded", headers={"retry-after": "1", "connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body once, and then what the connection sends: the disconnect."""
    unread = [body]

    async def replayed() -> Message:
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
