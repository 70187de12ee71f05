"""Streams, deadlines, and clients that disconnect or stop reading."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers import (
    COMPLETIONS,
    LENGTH,
    RunningServer,
    check_error,
    check_healthy,
    events_of,
    inputs_of,
    metric,
    running,
    slow_model,
    step_until_written,
    toy_model,
    until,
)

from seqdefer.engine.speculative import SHOWN_SECONDS
from seqdefer.server import request
from seqdefer.server.http import Limits
from seqdefer.testing.fakes import ToyState

openai = pytest.importorskip("openai", reason="needs openai: pip install openai")

STREAMED = {"model": "toy@0.5", "prompt": "13", "stream": True}


@pytest.mark.parametrize("stream", [False, True])
def test_headers(server: RunningServer, stream: bool) -> None:
    response = server.post(COMPLETIONS, {**STREAMED, "stream": stream})
    assert 0 < float(response.headers["x-seqdefer-overhead-ms"]) < 1000 * response.elapsed.total_seconds()
    if stream:
        assert response.headers["x-accel-buffering"] == "no"  # else nginx would buffer it
        positions = [event["deferral"]["position"] for event in events_of(response)]
        assert positions == list(range(len(positions)))


def test_waiting_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies drop silent connections. The official client skips the comments and gets all tokens."""
    monkeypatch.setattr(request, "SILENT_SECONDS", 0.02)
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
    model, slow = slow_model(SHOWN_SECONDS * 1.2, pause_after=1)
    slow.gate.clear()
    with running(model, limits=Limits(request_seconds=1.5, grace_seconds=0.5)) as server:
        chunks = iter(server.complete("13", 0, stream=True))
        assert next(chunks).choices[0].text
        with pytest.raises(openai.APIError, match=r"1\.5 seconds"):
            list(chunks)
        error = check_error(server.post(COMPLETIONS, {"model": "toy@0", "prompt": "13"}), 504)
        assert error["code"] == "timeout"
        until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="timeout"}') == 1)
        slow.gate.set()
        server.wait_until_idle()


def test_failure_after_a_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure before any comment is an error status."""
    model, slow = slow_model()
    slow.gate.clear()
    with running(model, limits=Limits(request_seconds=1.0, grace_seconds=0.5)) as server:
        try:
            assert check_error(server.post(COMPLETIONS, STREAMED), 504)["code"] == "timeout"
            monkeypatch.setattr(request, "SILENT_SECONDS", 0.02)
            response = server.post(COMPLETIONS, STREAMED)
            *comments, error, done, rest = response.text.split("\n\n")
            assert response.status_code == 200
            assert set(comments) == {": waiting"}
            assert '"code":"timeout"' in error
            assert (done, rest) == ("data: [DONE]", "")
            with pytest.raises(openai.APIError, match="within 1 seconds"):
                list(server.client.completions.create(**STREAMED))
            until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="timeout"}') == 2)
            until(lambda: not server.scheduler._open)
        finally:
            slow.gate.set()


# -- clients that disconnect ---------------------------------------------------------------------------------------


def test_disconnect_frees_the_caches() -> None:
    model, slow = slow_model(SHOWN_SECONDS * 1.2)
    prompts = inputs_of(40)
    texts = dict(zip(prompts, toy_model().generate(prompts, 0.5).outputs, strict=True))
    one, other = [prompt for prompt in prompts if len(texts[prompt]) == LENGTH][:2]
    before = {id(state) for state in gc.get_objects() if type(state) is ToyState}

    def is_all_freed() -> bool:
        gc.collect()
        return not [state for state in gc.get_objects() if type(state) is ToyState and id(state) not in before]

    with running(model) as server, ThreadPoolExecutor(1) as pool:
        for stream in (True, False):
            slow.gate.clear()
            running_on = pool.submit(server.complete, other, 0.5)
            until(lambda: server.scheduler._batches)
            with server.client_that_leaves({"model": "toy@0.5", "prompt": one, "stream": stream}) as client:
                until(lambda: len(server.scheduler._open) == 2)
                if stream:
                    step_until_written(server, slow, one)
                    assert client.recv(1)
            until(lambda: len(server.scheduler._open) == 1)
            slow.gate.set()
            assert running_on.result(60).choices[0].text == texts[other]
        until(is_all_freed)
        until(lambda: metric(server, 'seqdefer_requests_total{path="/v1/completions",status="499"}') == 1)
        until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="client_left"}') == 1)
        check_healthy(server)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_stops_the_models(stream: bool) -> None:
    model, slow = slow_model(SHOWN_SECONDS * 1.2, pause_after=2)
    slow.gate.clear()
    assert toy_model().generate(["13"], 0.0).predictor_tokens[0] > 3
    with running(model) as server:
        with server.client_that_leaves({"model": "toy@0", "prompt": "13", "stream": stream}) as client:
            until(lambda: slow.calls == 3)
            assert not stream or client.recv(1)
        until(lambda: not server.scheduler._open)
        slow.gate.set()
        server.wait_until_idle()
        assert len(slow.sizes) == 3  # with the step in progress
        assert metric(server, 'seqdefer_queue_seconds_count{status="cancelled"}') == 1


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

    asyncio.run(asyncio.wait_for(respond(), 60))
    assert closed == ["unread"]
