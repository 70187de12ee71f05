"""Streams, deadlines, and clients that disconnect or stop reading."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from servers import (
    COMPLETIONS,
    RunningServer,
    check_error,
    check_healthy,
    events_of,
    metric,
    running,
    slow_model,
    toy_model,
    until,
)

from seqdefer.server import request
from seqdefer.server.http import Limits
from seqdefer.testing.fakes import ToyState

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
openai = pytest.importorskip("openai", reason="needs openai: pip install openai")

STREAMED = {"model": "toy@0.5", "prompt": "13", "stream": True}


def test_stream_is_server_sent_events(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, STREAMED)
    assert response.headers["x-accel-buffering"] == "no"  # else nginx would buffer it
    positions = [event["deferral"]["position"] for event in events_of(response)]
    assert positions == list(range(len(positions)))


@pytest.mark.parametrize("stream", [False, True])
def test_overhead_header(server: RunningServer, stream: bool) -> None:
    response = server.post(COMPLETIONS, {**STREAMED, "stream": stream})
    assert 0 < float(response.headers["x-seqdefer-overhead-ms"]) < 1000


def test_waiting_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies drop silent connections. The official client skips the comments and gets all tokens."""
    monkeypatch.setattr(request, "KEEPALIVE_SECONDS", 0.02)
    model, slow = slow_model()
    with running(model) as server:
        slow.gate.clear()
        with server.http.stream("POST", f"{server.address}{COMPLETIONS}", json=STREAMED) as response:
            lines = response.iter_lines()
            assert response.status_code == 200
            assert [next(lines) for _ in range(4)] == [": waiting", ""] * 2
            slow.gate.set()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        slow.gate.clear()
        chunks = server.client.completions.create(**STREAMED)  # returns: a comment has brought the status
        slow.gate.set()
        assert "".join(chunk.choices[0].text for chunk in chunks) == toy_model().generate(["13"], 0.5).outputs[0]
        server.wait_until_idle()


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_slow_requests_time_out() -> None:
    model, _ = slow_model(0.2)
    with running(model, limits=Limits(request_seconds=0.8, grace_seconds=0.5)) as server:
        error = check_error(server.post(COMPLETIONS, {"model": "toy@0", "prompt": "13"}), 504)
        assert error["code"] == "timeout"
        chunks = iter(server.complete("13", 0, stream=True))
        assert next(chunks).choices[0].text
        with pytest.raises(openai.APIError, match=r"0\.8 seconds"):
            list(chunks)
        until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="timeout"}') == 1)
        server.wait_until_idle()
        assert not server.scheduler._open


def test_failure_after_a_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure before any comment is an error status."""
    model, slow = slow_model()
    slow.gate.clear()
    with running(model, limits=Limits(request_seconds=0.4, grace_seconds=0.5)) as server:
        try:
            assert check_error(server.post(COMPLETIONS, STREAMED), 504)["code"] == "timeout"
            monkeypatch.setattr(request, "KEEPALIVE_SECONDS", 0.02)
            response = server.post(COMPLETIONS, STREAMED)
            *comments, error, done, rest = response.text.split("\n\n")
            assert response.status_code == 200
            assert set(comments) == {": waiting"}
            assert '"code":"timeout"' in error
            assert (done, rest) == ("data: [DONE]", "")
            with pytest.raises(openai.APIError, match=r"0\.4 seconds"):
                list(server.client.completions.create(**STREAMED))
            until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="timeout"}') == 2)
            assert not server.scheduler._open
        finally:
            slow.gate.set()


# -- clients that disconnect ---------------------------------------------------------------------------------------


def test_disconnect_frees_the_caches() -> None:
    model, _ = slow_model(0.05)
    before = {id(one) for one in gc.get_objects() if type(one) is ToyState}
    with running(model) as server:
        other = iter(server.complete("14", 0.5, stream=True))
        texts = [next(other).choices[0].text]
        for _ in range(3):
            stream = server.complete("13", 0.5, stream=True)
            next(iter(stream))
            stream.response.close()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.address}{COMPLETIONS}", json={"model": "toy", "prompt": "13"}, timeout=0.1)
        texts += [chunk.choices[0].text for chunk in other]
        assert "".join(texts) == toy_model().generate(["14"], 0.5).outputs[0]
        server.wait_until_idle()
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is ToyState and id(one) not in before]
        until(lambda: metric(server, 'seqdefer_requests_total{path="/v1/completions",status="499"}') == 1)
        until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="client_left"}') == 3)
        check_healthy(server)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_stops_the_models(stream: bool) -> None:
    model, slow = slow_model(0.1)
    n = toy_model().generate(["13"], 0.0).predictor_tokens[0]
    with running(model) as server:
        body = {"model": "toy@0", "prompt": "13", "stream": stream}
        url = f"{server.address}{COMPLETIONS}"
        with suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.25) as response:
            next(response.iter_lines())
        until(lambda: not server.scheduler._open)
        steps = len(slow.sizes)
        server.wait_until_idle()
        assert steps < n - 2
        assert len(slow.sizes) <= steps + 1  # the step in progress


def test_unread_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that kept its connection open without reading once kept its request open."""
    monkeypatch.setattr(request, "UNREAD_SECONDS", 0.1)
    closed: list[str] = []

    class Active:
        deadline, outcome = 0.0, ""

        def headers(self) -> dict[str, str]:
            return {}

        def close_stream(self) -> None:
            closed.append(self.outcome)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def stream() -> AsyncIterator[bytes]:
        yield b""

    async def respond() -> None:
        active: Any = Active()
        active.deadline = asyncio.get_running_loop().time()
        await request.EventStream(stream(), active)({"type": "http"}, never, never)

    asyncio.run(asyncio.wait_for(respond(), 5))
    assert closed == ["unread"]
