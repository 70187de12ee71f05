"""Logs: one line per request with its ID, tracebacks at level error, nothing of prompts, no forged lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from servers import (
    COMPLETIONS,
    FaultyExpert,
    RunningServer,
    check_error,
    running,
    slow_model,
    toy_model,
    until,
    with_parts,
)

from seqdefer.server.http import Limits
from seqdefer.server.logs import LATE_WRITE, logs_on_stderr


@contextmanager
def logged(form: str = "json", level: str = "info") -> Iterator[io.StringIO]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream := io.StringIO())
        with logs_on_stderr(form, level):
            yield stream


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_line_per_request(server: RunningServer) -> None:
    with logged() as stream:
        server.get("/v1/models?secret=7932", headers={"x-request-id": "trace-7"})
        server.post(COMPLETIONS, {"model": "toy", "prompt": "7932"})
        server.post(COMPLETIONS, {"model": "toy", "prompt": "7932", "stream": True})
        server.post(COMPLETIONS, {"model": "toy", "prompt": 7932, "stop": ["7932"]})
        server.get("/health")
        until(lambda: len(records(stream)) == 4)
    found = sorted(records(stream), key=lambda one: (one["path"] != "/v1/models", one["status"]))  # written once sent
    assert [(one["method"], one["path"], one["status"]) for one in found] == [
        ("GET", "/v1/models", 200), ("POST", COMPLETIONS, 200), ("POST", COMPLETIONS, 200), ("POST", COMPLETIONS, 400),
    ]  # fmt: skip
    assert found[0]["request_id"] == "trace-7"
    assert len({one["request_id"] for one in found}) == 4
    for one in found:
        assert one["level"] == "info"
        assert one["client"] == "127.0.0.1"
        assert one["ms"] > 0
        assert one["time"].endswith("Z")
    assert "7932" not in stream.getvalue()
    assert toy_model().generate(["7932"], 0.2).outputs[0] not in stream.getvalue()


def test_lines_for_people(server: RunningServer) -> None:
    with logged("human", "debug") as stream:
        server.get("/v1/models", headers={"x-request-id": "trace-7"})
        server.get("/ready")
        until(lambda: stream.getvalue().count("\n") == 2)
    first, second = sorted(stream.getvalue().splitlines(), key=lambda line: "/ready" in line)
    time, level, method, path, status, *fields = first.split()
    assert (level, method, path, status) == ("INFO", "GET", "/v1/models", "200")
    assert time.startswith("20")
    assert fields[1:] == ["client=127.0.0.1", "request_id=trace-7"]
    assert " DEBUG GET /ready 200 " in second


@pytest.mark.parametrize("form", ["human", "json"])
def test_clients_cannot_forge_lines(server: RunningServer, form: str) -> None:
    with logged(form) as stream:
        server.get("/x%0A2026-01-01T00:00:00Z%1b[31m INFO", headers={"x-request-id": "a b"})
        server.get("/" + "x" * 5000)
        until(lambda: stream.getvalue().count("\n") == 2)
    assert len(stream.getvalue()) < 1000
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("form", ["human", "json"])
def test_failures_have_a_traceback(form: str) -> None:
    def fail(_: Any) -> None:
        raise ArithmeticError("the numbers are gone")

    model, slow = slow_model()
    slow.propose = fail  # type: ignore[method-assign]
    with running(model) as server, logged(form) as stream:
        check_error(server.post(COMPLETIONS, {"model": "toy", "prompt": "7932"}), 500)
        until(lambda: " 500" in stream.getvalue() or '"status": 500' in stream.getvalue())
    text = stream.getvalue()
    assert "ArithmeticError: the numbers are gone" in text
    assert "7932" not in text
    if form == "json":
        failed = [one for one in records(stream) if one["level"] == "error"]
        assert ["Traceback" in one["traceback"] for one in failed] == [True]
        answered = [one for one in records(stream) if one.get("status") == 500]
        assert failed[0]["request_ids"] == [one["request_id"] for one in answered]
    else:
        assert text.count("\nTraceback") == 1


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])
def test_expert_failures_are_warnings_with_the_requests_they_concern(method: str) -> None:
    """They had no request IDs."""

    def fail() -> None:
        raise RuntimeError("the disk is gone")

    model = with_parts(toy_model(method), expert=FaultyExpert(toy_model(method).served.expert, fail))
    with running(model) as server, logged() as stream:
        assert server.complete("13", 1).deferral["degraded"]
        until(lambda: len(records(stream)) >= 2)
    failed, answered = sorted(records(stream), key=lambda one: one["level"] == "info")
    assert "the disk is gone" in failed["message"]
    assert failed["request_ids"] == [answered["request_id"]]


def test_level_and_warnings() -> None:
    with warnings.catch_warnings(action="always"), logged(level="error") as stream:
        logging.getLogger("seqdefer.server").warning("no")
        logging.getLogger("other").info("no")
        warnings.warn("odd", stacklevel=1)
        logging.getLogger("seqdefer.server").error("line\nbreak %s", "x")
    assert [one["level"] for one in records(stream)] == ["warning", "error"]  # warnings of libraries are kept
    assert records(stream)[1]["message"] == "line\nbreak x"
    assert not logging.getLogger("seqdefer").level


def test_clients_that_leave_are_no_news() -> None:
    """asyncio warned of every stream whose client left while the tokens of a turn were written."""
    told = list[str]()

    async def write(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(left.wait, 60)
        for _ in range(20):
            writer.transport.write(b"token")
        done.set()

    async def leave() -> None:
        async with await asyncio.start_server(write, "127.0.0.1") as serving:
            with socket.create_connection(serving.sockets[0].getsockname()) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
                await asyncio.sleep(0.1)
            left.set()
            await done.wait()

    left, done = threading.Event(), asyncio.Event()
    with logged() as stream:
        logging.getLogger("asyncio").addFilter(notice := lambda record: told.append(record.getMessage()) is None)
        asyncio.run(leave())
        logging.getLogger("asyncio").removeFilter(notice)
    assert LATE_WRITE in told
    assert stream.getvalue() == ""


def test_invalid_http_is_logged(server: RunningServer) -> None:
    import socket

    with logged() as stream, socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as client:
        client.sendall(b"\x16\x03\x01 what\r\n\r\n")
        client.recv(1000)
        until(lambda: len(records(stream)) == 1)
    assert records(stream)[0]["message"] == "a request was not valid HTTP"


def test_key_is_named_not_shown() -> None:
    with running(toy_model(), api_key="s3cret", limits=Limits(grace_seconds=0.5)) as server, logged() as stream:
        server.get("/v1/models", headers={"authorization": "Bearer s3cret"})
        server.get("/v1/models", headers={"authorization": "Bearer wr0ng"})
        until(lambda: len(records(stream)) == 2)
    assert {one["status"]: one.get("key") for one in records(stream)} == {200: "default", 401: None}
    assert "s3cret" not in stream.getvalue()
    assert "wr0ng" not in stream.getvalue()
