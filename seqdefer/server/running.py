"""A server on a socket, and its end: requests in flight get some seconds, then an answer that says why it is none."""

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
from seqdefer.server.gate import is_loopback
from seqdefer.server.limits import Limits
from seqdefer.server.scheduler import ENDING


def require_extra() -> None:
    """Before anything is loaded that takes long."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "server", "seqdefer serve") from error


def listen(host: str, port: int) -> socket.socket:
    """Port 0 takes a free one."""
    if not 0 <= port < 2**16:
        raise OptionError(f"port {port}; it must be from 0 to {2**16 - 1}")
    try:
        host.encode("idna")  # a name that cannot be one: create_server would raise TypeError, and leave a socket open
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"cannot listen at {host}, port {port}: {error}; choose another --host or --port") from error
    # Connections inherit it. asyncio sets it only where it made the socket, and an answer of two packets takes 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def trusted_host(listening: socket.socket, host: str | None = None) -> str | None:
    """By what name clients must call a server without a key; None: by any. One that listens on this machine alone
    trusts all that is on it, but not what a browser on it has loaded from elsewhere."""
    address = str(listening.getsockname()[0])
    return (host or address) if is_loopback(address) else None


def make_server(app: Any, limits: Limits) -> Any:
    """A uvicorn.Server for what `create_app` made."""
    import uvicorn

    from seqdefer.server.connections import connection_class

    class Server(uvicorn.Server):
        """Its end: nobody new; a grace for who is in flight; an answer for who is left; and who does not take it is
        hung up on."""

        _loop: asyncio.AbstractEventLoop | None = None  # once it ends
        _is_urgent = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """A second signal ends the grace. uvicorn's own way would cut off who can still be told."""
            if not self.should_exit:
                super().handle_exit(sig, frame)
                return
            self._is_urgent = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abort)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.scheduler.refuse()
            self._loop = asyncio.get_running_loop()
            self._loop.call_later(0.0 if self._is_urgent else limits.grace_seconds, self._abort)
            await super().shutdown(sockets)

        def _abort(self) -> None:
            app.state.scheduler.abort()
            asyncio.get_running_loop().call_later(ENDING, self._hang_up)

        def _hang_up(self) -> None:
            for connection in tuple(self.server_state.connections):
                connection.transport.abort()

    # uvicorn's own configuration of the log fails where there is no standard output, as in the background.
    config = uvicorn.Config(
        app, http=connection_class(limits, app.state.crowded), ws="none", loop="asyncio", lifespan="on",
        log_config=None, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=math.ceil(limits.grace_seconds + ENDING + 1),
    )  # fmt: skip
    return Server(config)


@contextmanager
def in_background(app: Any, limits: Limits) -> Iterator[str]:
    """A server for the time, in a thread, on a free port of this machine: its address. For notebooks and benchmarks."""
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
    """Until Ctrl-C, or until somebody ends the process. `host` is what it was told to listen at."""
    from seqdefer.server.app import create_app

    only_host = None if api_key is not None else trusted_host(listening, host)
    app = create_app(model, name, limits=limits, api_key=api_key, budget=budget, only_host=only_host)
    server = make_server(app, limits)
    ready()
    with suppress(KeyboardInterrupt):  # raised again by uvicorn when all is done
        server.run(sockets=[listening])
    if not app.state.scheduler.close(ENDING):
        # An expert hangs in a thread. The interpreter's own end would wait for it, or crash in it.
        sys.stderr.flush()
        os._exit(0)
