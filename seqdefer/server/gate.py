"""What every request passes before the routes: host, key, size, time; its name; what is counted of it. Plain ASGI."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from seqdefer.errors import OptionError
from seqdefer.server.faults import Fault, crowded, fault_of, to_json, too_late
from seqdefer.server.limits import Limits
from seqdefer.server.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health", "/")  # no key is needed, as for the page's other files
PAGE = "/page/"
GONE = 499  # the client left before it had its answer
PATHS = (
    "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/completions", "/v1/chat/completions",
    "/v1/deferral", "/v1/deferral/complete", "/v1/deferral/score", "/",
)  # fmt: skip
REQUEST_ID = b"x-request-id"
ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)  # that a client may give: it goes into the log
KEY = re.compile(r"[\x21-\x7e]+")  # what headers carry without a doubt
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")  # and a port
DISCARDED = 16  # times what a body may have is read and thrown away: a client that is cut off sees no answer

log = logging.getLogger("seqdefer.server")


def check_key(key: str) -> None:
    if KEY.fullmatch(key) is None:
        raise OptionError(
            "the API key is empty, or holds a space or a letter that HTTP headers do not carry; choose one of ASCII's "
            "letters, digits and signs"
        )


def is_loopback(host: str) -> bool:
    """Whether it leads to this machine whoever asks, be it a name or an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Gate:
    def __init__(
        self, app: App, *, key: str | None, limits: Limits, metrics: Metrics, only_host: str | None = None
    ) -> None:
        self.app, self.key, self.limits, self.metrics, self.only_host = app, key, limits, metrics, only_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = scope.setdefault("state", {})["begun"] = time.perf_counter()
        name, is_head = _request_id(scope), scope["method"] == "HEAD"
        answer = _Answer(send, name, has_body=not is_head)
        try:
            # A HEAD is a GET of which only the head is sent.
            await self._pass({**scope, "method": "GET"} if is_head else scope, receive, answer)
        except Exception as error:
            if not isinstance(error, Fault):
                log.error("request %s failed: %r", name.decode(), error)
            await answer.refuse(fault_of(error))
        finally:  # a cancelled request, too, is counted
            path = _label(scope["path"])
            self.metrics.count("seqdefer_requests_total", {"path": path, "status": str(answer.status or GONE)})
            self.metrics.observe_seconds(time.perf_counter() - begun, {"path": path})

    async def _pass(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        self._check_host(scope)
        self._check_key(scope)
        try:
            async with asyncio.timeout(self.limits.request_seconds):
                body = await self._read(receive)
        except TimeoutError:
            raise too_late(self.limits.request_seconds) from None
        await self.app(scope, _replay(body, receive), answer.send)

    def _check_host(self, scope: Scope) -> None:
        given = dict(scope["headers"]).get(b"host")
        if self.only_host is None or given is None:  # browsers, which are to be feared here, always send one
            return
        host = _host(given.decode("latin-1"))
        if not is_loopback(host) and host != _host(self.only_host):
            raise Fault(
                403,
                f"this server is called localhost or {self.only_host}, not {host!r:.100}; call it so, let a proxy send "
                "that as Host, or start the server with --api-key, which allows any name",
                code="wrong_host",
            )

    def _check_key(self, scope: Scope) -> None:
        if self.key is None or scope["path"] in OPEN or scope["path"].startswith(PAGE):
            return
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(b" "), self.key.encode()):
            words = "wrong or missing API key; send it as: Authorization: Bearer KEY"
            raise Fault(401, words, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    async def _read(self, receive: Receive) -> bytes:
        most, size, body = self.limits.body_bytes, 0, bytearray()
        is_more = True
        while is_more and size <= DISCARDED * most:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Fault(GONE, "the client left")
            size += len(message.get("body", b""))
            if size <= most:
                body += message.get("body", b"")
            is_more = message.get("more_body", False)
        if size > most:
            raise Fault(413, f"the body is larger than {most} bytes", code="body_too_large")
        return bytes(body)


class Crowd:
    """What connections get that are too many. It comes after a gate, which counts and says it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise crowded(self.limits.connections)


class _Answer:
    """Knows which status was sent, and says to which request."""

    def __init__(self, send: Send, name: bytes, *, has_body: bool) -> None:
        self._send, self._name, self._has_body, self.status = send, name, has_body, 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), (REQUEST_ID, self._name)]}
        elif not self._has_body:
            message = {**message, "body": b""}
        await self._send(message)

    async def refuse(self, fault: Fault) -> None:
        if self.status:  # too late for another: the connection ends in the middle, which clients notice
            return
        body = to_json(fault.body())
        headers = {"content-type": "application/json", "content-length": str(len(body)), **fault.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": fault.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, and then whatever comes: that the client left."""
    waiting = [body]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed


def _request_id(scope: Scope) -> bytes:
    """The client's own, so that he can follow it through; else a new one."""
    given: bytes = dict(scope["headers"]).get(REQUEST_ID, b"")
    return given if ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _host(given: str) -> str:
    """Of host:port, [address]:port, or either without a port."""
    found = HOST.fullmatch(given)
    return (found[1] if found else given).strip("[]").rstrip(".").lower()


def _label(path: str) -> str:
    """Few values, whatever clients ask for."""
    if path in PATHS:
        return path
    if path.startswith(PAGE):
        return PAGE + "{name}"
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"
