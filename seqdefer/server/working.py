"""One request at work: its clock, its stream, and its end, also where the client leaves or reads nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from seqdefer.server.answers import Form, Tally
from seqdefer.server.cohorts import Ask, Read, Token
from seqdefer.server.faults import Fault, fault_of, to_json, too_slow
from seqdefer.server.gate import GONE
from seqdefer.server.scheduler import Scheduler

OVERHEAD = "x-seqdefer-overhead-ms"
UNREAD = 5.0  # seconds past its time that a stream waits for its reader
QUIET = 10.0  # seconds without a word; proxies cut what is quiet for longer
WAITING = b": waiting\n\n"  # a comment: clients skip it
DONE, LEFT = "done", "client_left"
Result = TypeVar("Result")

log = logging.getLogger("seqdefer.server")


class Work:
    """A ticket, what it has got, and its clock. `close` must be called in the end."""

    def __init__(self, scheduler: Scheduler, ask: Ask, tally: Tally, begun: float) -> None:
        self.scheduler, self.tally, self.begun = scheduler, tally, begun
        self.seconds = scheduler.limits.request_seconds
        self.deadline = asyncio.get_running_loop().time() + self.seconds - (time.perf_counter() - begun)
        self.ticket = scheduler.submit(ask)
        self._events = self.ticket.events(self.deadline)
        self._coming: asyncio.Task[Token | None] | None = None
        self._in_vain = 0.0  # seconds that `is_there` waited and nothing came
        self._is_open = True
        self.outcome = LEFT  # of its stream, until more is known

    async def next_token(self) -> Token | None:
        """None after the last one."""
        if self._coming is None:
            return await self._read()
        coming, self._coming = self._coming, None
        return await coming

    async def is_there(self) -> bool:
        """Whether the next token can be had at once, or the end; it is waited for, but not for long. Raises what went
        wrong."""
        if self._coming is None:
            self._coming = asyncio.create_task(self._read())
        begun = time.perf_counter()
        # Not wait_for: that would end the reading, and with it lose what comes a moment later.
        await asyncio.wait((self._coming,), timeout=QUIET)
        if self._coming.done():
            self._coming.result()
            return True
        self._in_vain += time.perf_counter() - begun
        return False

    async def _read(self) -> Token | None:
        try:
            async for event in self._events:
                assert isinstance(event, Read | Token)
                self.tally.add(event)
                if isinstance(event, Token):
                    return event
        except TimeoutError:
            raise too_slow(self.seconds) from None
        return None

    async def finish(self) -> None:
        while await self.next_token() is not None:
            pass

    def headers(self) -> dict[str, str]:
        overhead = time.perf_counter() - self.begun - self.ticket.waited - self._in_vain
        return {OVERHEAD: f"{1000 * overhead:.3f}"}

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._coming is not None and not self._coming.cancel() and not self._coming.cancelled():
                self._coming.exception()  # or asyncio would complain that nobody asked
            self.scheduler.leave(self.ticket)
            self.tally.count(self.scheduler.metrics)

    def close_stream(self) -> None:
        self.close()
        if self.outcome != DONE:
            self.scheduler.metrics.count("seqdefer_streams_failed_total", {"reason": self.outcome})


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Waits for the work; where the client leaves first, it ends."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Fault(GONE, "the client left")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Its work is closed however it ends, even before it began; and it ends, even where nobody reads."""

    def __init__(self, chunks: AsyncIterator[bytes], work: Work) -> None:
        # nginx would keep the tokens until it has some kilobytes of them.
        headers = {**work.headers(), "cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(chunks, headers=headers, media_type="text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._work.deadline + UNREAD):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            self._work.outcome = "unread"
        finally:
            self._work.close_stream()


async def events_of(work: Work, form: Form, model: str, *, wants_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events, and comments while there are none."""
    try:
        while True:
            while not await work.is_there():
                yield WAITING
            token = await work.next_token()
            if token is None:
                break
            yield _event(form.part(token, work.tally, model))
        if wants_usage:
            yield _event(form.closing(work.tally, model))
        work.outcome = DONE
    except Exception as error:  # the status is sent already
        fault = fault_of(error)
        if fault is not error:
            log.error("a stream failed: %r", error)
        work.outcome = fault.code or str(fault.status)
        yield _event(fault.body())
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"
