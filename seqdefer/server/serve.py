"""Listening sockets, loading, and shutdown.

While the models are loaded, probes are answered already. At shutdown the server drains: it refuses new requests, still
answers probes, gives requests in flight a grace period, and sends what is left an error response. uvicorn is imported
when a server is made: it comes with the extra 'server'.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

from seqdefer.errors import OptionError, import_extra
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.connections import ACCEPT_AT_ONCE, connection_class, log_failed_accepts, reserve_descriptors
from seqdefer.server.gateway import is_loopback, loading_app
from seqdefer.server.http import Limits
from seqdefer.server.scheduler import SHUTDOWN_SECONDS

BACKLOG = 2048  # connections that the system holds until they are accepted
DRAIN_STEP_SECONDS = 0.05

log = logging.getLogger("seqdefer.server")


def require_extra() -> None:
    """Raise MissingExtraError unless the extra 'server' is installed."""
    for package in ("fastapi", "prometheus_client", "python_multipart", "uvicorn"):
        import_extra(package, "server", "seqdefer serve")


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
    """Return a uvicorn.Server for an application of `create_app`, or for one without models."""
    import uvicorn

    scheduler = app.state.scheduler if hasattr(app, "state") else None

    class Server(uvicorn.Server):
        """A server that drains when it shuts down, and closes connections that do not read."""

        _skips_grace = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """End the grace period at a second signal, where uvicorn would drop connections without a response."""
            if self.should_exit:
                self._skips_grace = True
            else:
                super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            asyncio.get_running_loop().set_exception_handler(log_failed_accepts())
            for listening in sockets or ():
                listening.listen(BACKLOG)  # uvicorn's backlog is also how many it accepts at once

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if scheduler is not None:
                scheduler.refuse()
                await self._drain()
                scheduler.abort()
            asyncio.get_running_loop().call_later(SHUTDOWN_SECONDS, self._drop_connections)
            await super().shutdown(sockets)

        async def _drain(self) -> None:
            """Wait for requests in flight, until the grace period ends or a second signal comes."""
            log.info("shutting down: %d requests in flight", len(self.server_state.tasks))
            end = time.monotonic() + limits.grace_seconds
            while self.server_state.tasks and time.monotonic() < end and not self._skips_grace:
                await asyncio.sleep(DRAIN_STEP_SECONDS)

        def _drop_connections(self) -> None:
            for connection in tuple(self.server_state.connections):
                connection.transport.abort()

    # uvicorn's own logging configuration fails without a standard output, as in the background.
    config = uvicorn.Config(
        app, http=connection_class(limits), ws="none", loop="asyncio", lifespan="off" if scheduler is None else "on",
        log_config=None, log_level="error", access_log=False, server_header=False, backlog=ACCEPT_AT_ONCE,
        timeout_graceful_shutdown=math.ceil(SHUTDOWN_SECONDS + 1),
        timeout_keep_alive=math.ceil(limits.keep_alive_seconds + 1),  # ours ends first
    )  # fmt: skip
    return Server(config)


@contextmanager
def in_background(app: Any, limits: Limits, listening: socket.socket | None = None) -> Iterator[str]:
    """Serve in a thread, on a free local port by default, and yield the address. For notebooks and benchmarks."""
    with listen("127.0.0.1", 0) if listening is None else listening.dup() as own:
        server = make_server(app, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [own]})
        thread.start()
        try:
            yield address_of(own)
        finally:
            server.should_exit = True
            thread.join()


def answer_probes(listening: socket.socket, limits: Limits) -> AbstractContextManager[str]:
    """Answer /live, and at /ready that the models are being loaded, as long as the block takes to load them."""
    return in_background(loading_app(limits), limits, listening)


def require_key(listening: socket.socket, *, has_key: bool, allow_anyone: bool) -> None:
    """Raise OptionError if other machines could use the server without a key."""
    address = str(listening.getsockname()[0])
    if not (has_key or allow_anyone or is_loopback(address)):
        raise OptionError(
            f"anyone who reaches {address} could use this server, because it has no API key; give --keys FILE (made by "
            "seqdefer keys) or --api-key, or allow it with --allow-anyone"
        )


def serve(
    model: DeferringModel,
    name: str,
    listening: socket.socket,
    *,
    limits: Limits,
    host: str | None = None,
    ready: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Serve until Ctrl-C or SIGTERM. `host` is the name that the socket was opened with; options as in `create_app`."""
    from seqdefer.server.app import create_app

    reserve_descriptors(limits)
    has_key = any(options.get(name) is not None for name in ("api_key", "keys"))
    only_host = None if has_key else trusted_host(listening, host)
    app = create_app(model, name, limits=limits, only_host=only_host, **options)
    server = make_server(app, limits)
    app.state.scheduler.on_failure = lambda: setattr(server, "should_exit", True)
    ready()
    # uvicorn raises the signals again after its shutdown: both ended it properly.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    if app.state.scheduler.failure is not None:
        raise SystemExit(1)
    if not app.state.scheduler.close(SHUTDOWN_SECONDS):
        # An expert hangs in a thread: the interpreter would wait for it, or crash in it.
        sys.stderr.flush()
        os._exit(0)
