"""Listening sockets, connection timeouts, and shutdown.

At shutdown, new requests are refused, requests in flight get a grace period, and what is left gets an error response.
uvicorn is imported when a server is made: it comes with the extra 'server'.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from seqdefer.errors import OptionError, missing_extra
from seqdefer.model.deferring_model import DEFAULT_BUDGET, DeferringModel
from seqdefer.server.http import APIError, Limits, is_loopback, to_json
from seqdefer.server.scheduler import SHUTDOWN_SECONDS

SEND_SECONDS = 10.0  # for sending a response, after the time of its request is over


def require_extra() -> None:
    """Raise MissingExtraError unless the extra 'server' is installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "server", "seqdefer serve") from error


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one."""
    if not 0 <= port < 2**16:
        raise OptionError(f"port {port}; it must be from 0 to {2**16 - 1}")
    try:
        host.encode("idna")  # for an invalid name, create_server would raise TypeError and leak a socket
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"cannot listen at {host}, port {port}: {error}; choose another --host or --port") from error
    # Connections inherit it. asyncio sets it only on sockets it creates; without it, two packets take 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def trusted_host(listening: socket.socket, host: str | None = None) -> str | None:
    """Return the only host name that a server without an API key accepts, or None for any.

    A server that listens on this machine alone trusts every program on it, but not the pages that a browser loads from
    other sites."""
    address = str(listening.getsockname()[0])
    return (host or address) if is_loopback(address) else None


def make_server(app: Any, limits: Limits) -> Any:
    """Return a uvicorn.Server for an application of `create_app`."""
    import uvicorn

    class Server(uvicorn.Server):
        """A server that tells requests in flight when it shuts down, and closes connections that do not read."""

        _loop: asyncio.AbstractEventLoop | None = None  # set at shutdown
        _skips_grace = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """End the grace period at a second signal, where uvicorn would drop connections without a response."""
            if not self.should_exit:
                super().handle_exit(sig, frame)
                return
            self._skips_grace = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abort)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.scheduler.refuse()
            self._loop = asyncio.get_running_loop()
            self._loop.call_later(0.0 if self._skips_grace else limits.grace_seconds, self._abort)
            await super().shutdown(sockets)

        def _abort(self) -> None:
            app.state.scheduler.abort()
            asyncio.get_running_loop().call_later(SHUTDOWN_SECONDS, self._drop_connections)

        def _drop_connections(self) -> None:
            for connection in tuple(self.server_state.connections):
                connection.transport.abort()

    # uvicorn's own logging configuration fails without a standard output, as in the background.
    config = uvicorn.Config(
        app, http=_connection_class(limits, app.state.overloaded), ws="none", loop="asyncio", lifespan="on",
        log_config=None, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=math.ceil(limits.grace_seconds + SHUTDOWN_SECONDS + 1),
    )  # fmt: skip
    return Server(config)


def _connection_class(limits: Limits, overloaded: Any) -> type[Any]:
    """Return uvicorn's connection with a limit on its time; connections beyond the limit go to the app `overloaded`.

    uvicorn's own timers restart at every byte, and wait for clients that do not read. This one does neither."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _timed: Any = None  # the request that the timer runs for

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self.app = overloaded  # a response: clients could not tell a closed connection from a broken network
            self._start_timer(limits.request_seconds)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._check_for_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:
                self._start_timer(limits.request_seconds)  # for the next request's head
            self._check_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            body = to_json(APIError(400, f"not a valid HTTP request: {msg}").body())
            size = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", size), (b"connection", b"close")]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _check_for_request(self) -> None:
            """Restart the timer if another request has begun."""
            if self.cycle is not self._timed:
                self._timed = self.cycle
                if not self.cycle.response_complete:
                    self._start_timer(limits.request_seconds + SEND_SECONDS)

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


@contextmanager
def in_background(app: Any, limits: Limits) -> Iterator[str]:
    """Serve in a thread on a free local port, and yield the address. For notebooks and benchmarks."""
    with listen("127.0.0.1", 0) as listening:
        server = make_server(app, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield address_of(listening)
        finally:
            server.should_exit = True
            thread.join()


def serve(
    model: DeferringModel,
    name: str,
    listening: socket.socket,
    *,
    limits: Limits,
    api_key: str | None = None,
    budget: float = DEFAULT_BUDGET,
    host: str | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until Ctrl-C or SIGTERM. `host` is the name that the socket was opened with."""
    from seqdefer.server.app import create_app

    only_host = None if api_key is not None else trusted_host(listening, host)
    app = create_app(model, name, limits=limits, api_key=api_key, budget=budget, only_host=only_host)
    server = make_server(app, limits)
    app.state.scheduler.on_failure = lambda: setattr(server, "should_exit", True)
    ready()
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        server.run(sockets=[listening])
    if app.state.scheduler.failure is not None:
        raise SystemExit(1)
    if not app.state.scheduler.close(SHUTDOWN_SECONDS):
        # An expert hangs in a thread: the interpreter would wait for it, or crash in it.
        sys.stderr.flush()
        os._exit(0)
