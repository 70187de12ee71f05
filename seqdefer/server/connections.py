"""Connections under the requests: how many may be open, and how long one may take to say or to hear something whole.

Needs uvicorn at import.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from seqdefer.server.faults import Fault, to_json
from seqdefer.server.limits import Limits

LAST_WORDS = 10.0  # seconds past its time that a request has to send its answer


def connection_class(limits: Limits, crowded: Any) -> type[H11Protocol]:
    """What uvicorn shall make of each connection; `crowded` is the ASGI application that those get who are too many.

    uvicorn's own clocks start anew at every byte, and wait for a client that does not read. The one here does not."""

    class Connection(H11Protocol):
        _clock: asyncio.TimerHandle | None = None
        _timed: Any = None  # the request that the clock runs for

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self.app = crowded  # an answer, not a slammed door: clients could not tell that from a broken network
            self._start_clock(limits.request_seconds)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:
                self._start_clock(limits.request_seconds)  # for the next head
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_clock()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            body = to_json(Fault(400, f"this is no HTTP request: {msg}").body())
            size = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", size), (b"connection", b"close")]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _look(self) -> None:
            """Whether another request has begun."""
            if self.cycle is not self._timed:
                self._timed = self.cycle
                if not self.cycle.response_complete:
                    self._start_clock(limits.request_seconds + LAST_WORDS)

        def _start_clock(self, seconds: float) -> None:
            self._stop_clock()
            self._clock = self.loop.call_later(seconds, self._hang_up)

        def _stop_clock(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

        def _hang_up(self) -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()  # closing would wait until all is read
            else:
                self.transport.close()

    return Connection
