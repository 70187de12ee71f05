"""Connections: how long they may take, and which gives way when there are too many.

A connection waits until a whole request has arrived, and between two requests. Beyond the limit, the one that waits the
longest is closed at once, so that clients that send nothing, or slowly, cannot lock out the others. uvicorn is imported
when a server is made: it comes with the extra 'server'.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from typing import Any

from seqdefer.errors import OptionError
from seqdefer.server.http import APIError, Limits, to_json

SEND_SECONDS = 10.0  # for sending a response, after the time of its request is over
RESERVED_CONNECTIONS = 16  # beyond the limit: for probes, and to tell others that there are too many
OTHER_FILES = 128  # descriptors that are not connections of clients: models, logs, pipes, libraries
ACCEPT_AT_ONCE = 16  # connections in one turn of the event loop; each takes a descriptor before it can be closed
ACCEPT_FAILED = "socket.accept() out of system resource"  # asyncio's message; it tries again after a second
LOG_SECONDS = 60.0  # between two messages about that

log = logging.getLogger("seqdefer.server")


def reserve_descriptors(limits: Limits) -> None:
    """Raise the limit of open files to what `limits` needs. Raises OptionError where that is not allowed."""
    needed = limits.connections + RESERVED_CONNECTIONS + ACCEPT_AT_ONCE + limits.running + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OptionError(
            f"{limits.connections} connections and {limits.running} sequences need up to {needed} open files, but this "
            f"process may have {hard}; lower --connections, or raise the limit: ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def log_failed_accepts() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return an exception handler that logs one line where asyncio would log a traceback for each failed accept."""
    logged_at = -LOG_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        if context.get("message") != ACCEPT_FAILED:
            loop.default_exception_handler(context)
        elif time.monotonic() - logged_at >= LOG_SECONDS:
            logged_at = time.monotonic()
            log.error("cannot accept connections: %s; trying again every second", context["exception"])

    return handle


def connection_class(limits: Limits) -> type[Any]:
    """Return uvicorn's connection with limits on its time and on the number of connections.

    uvicorn's own timers restart at every byte, and wait for clients that do not read. This one does neither."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[Any, None] = {}  # connections without a whole request, the oldest first

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _timed: Any = None  # the request that the timer runs for
        _is_idle = False  # nothing of the next request has arrived

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait(limits.head_seconds)
            if len(self.connections) > limits.connections + RESERVED_CONNECTIONS:
                next(iter(waiting)).drop()  # this one, if all others have requests

        def data_received(self, data: bytes) -> None:
            if self._is_idle:
                self._wait(limits.head_seconds)
            super().data_received(data)
            self._check_for_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()  # begins the next request, if that was sent already
            is_idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
            self._wait(limits.keep_alive_seconds if is_idle else limits.head_seconds)
            self._is_idle = is_idle
            self._check_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            waiting.pop(self, None)
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            log.info("a request was not valid HTTP")
            if self.cycle is not None:  # the application can no longer answer it
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._write_400(msg)
            self.transport.close()

        def _write_400(self, msg: str) -> None:
            body = to_json(APIError(400, f"not a valid HTTP request: {msg}").body())
            size = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", size), (b"connection", b"close")]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

        def drop(self) -> None:
            """Close at once, without a response."""
            self.connections.discard(self)
            waiting.pop(self, None)
            self.transport.abort()

        def _wait(self, seconds: float) -> None:
            """Wait for a request: for its head, or for its first byte."""
            self._is_idle = False
            if self in self.connections:
                waiting.pop(self, None)
                waiting[self] = None  # as the last
            self._start_timer(seconds)

        def _check_for_request(self) -> None:
            """Restart the timer if another request has begun; keep the connection if it has arrived."""
            if self.cycle is None or self.cycle.response_complete:
                return
            if self.cycle is not self._timed:
                self._timed = self.cycle
                self._start_timer(limits.request_seconds + SEND_SECONDS)
            if not self.cycle.more_body:
                waiting.pop(self, None)

        def _start_timer(self, seconds: float) -> None:
            self._stop_timer()
            self._timer = self.loop.call_later(seconds, self._disconnect)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _disconnect(self) -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()  # close() would wait until everything is read
            else:
                self.transport.close()

    return Connection
