"""Continuous batching: requests run together without waiting for each other, and a bad one fails alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers import (
    COMPLETIONS,
    LENGTH,
    check_error,
    check_healthy,
    inputs_of,
    metric,
    running,
    slow_model,
    toy_model,
    until,
    with_parts,
)
from torch import Tensor

from seqdefer.server.http import Limits

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")


def test_queued_requests_form_a_batch() -> None:
    model, slow = slow_model()
    slow.gate.clear()
    with running(model) as server, ThreadPoolExecutor(20) as pool:
        responses = [pool.submit(server.complete, one, 0.2) for one in inputs_of(1)]
        until(lambda: server.scheduler._batches)
        responses += [pool.submit(server.complete, one, 0.2) for one in inputs_of(20)[1:]]
        until(lambda: len(server.scheduler._queue) == 19)
        assert metric(server, "seqdefer_queue_length") == 19
        assert metric(server, "seqdefer_sequences_running") == 1
        slow.gate.set()
        assert [one.result().choices[0].text for one in responses] == toy_model().generate(inputs_of(20)).outputs
    assert max(slow.sizes) >= 19
    assert len(slow.sizes) <= 4 * LENGTH


def test_new_requests_do_not_wait_for_running_ones() -> None:
    model, _ = slow_model(0.05)
    with running(model) as server:
        first = iter(server.complete("13", 0, stream=True))
        next(first)
        second = iter(server.complete("14", 0, stream=True))
        next(second)
        assert metric(server, "seqdefer_sequences_running") == 2
        assert len(server.scheduler._batches) == 1
        list(first), list(second)


def test_running_and_batch_limits() -> None:
    limits = Limits(inputs=2, batch=2, running=4, grace_seconds=0.5)
    model, slow = slow_model(0.002)
    inputs = inputs_of(12)
    with running(model, limits=limits) as server, ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda one: server.complete(one, 0.5), inputs))
    assert [one.choices[0].text for one in responses] == toy_model().generate(inputs, 0.5).outputs
    assert max(slow.sizes) <= 2


@pytest.mark.slow
def test_full_queue() -> None:
    model, _ = slow_model(0.1)
    limits = Limits(queue=2, inputs=1, batch=1, running=1, grace_seconds=0.5)
    with running(model, limits=limits) as server, ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda one: server.post(COMPLETIONS, {"model": "toy", "prompt": one}), inputs_of(8)))
        assert {response.status_code for response in responses} == {200, 429}
        for response in responses:
            if response.status_code == 429:
                assert check_error(response, 429)["code"] == "queue_full"
                assert response.headers["retry-after"] == "1"
        check_healthy(server)


def test_disconnect_leaves_the_queue() -> None:
    model, slow = slow_model()
    slow.gate.clear()
    limits = Limits(inputs=1, batch=1, running=1, grace_seconds=0.5)
    with running(model, limits=limits) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, "13", 0.5)
        until(lambda: server.scheduler._batches)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.address}{COMPLETIONS}", json={"model": "toy", "prompt": "14"}, timeout=0.3)
        until(lambda: not server.scheduler._queue)
        slow.gate.set()
        assert first.result().choices[0].text == toy_model().generate(["13"], 0.5).outputs[0]


def test_invalid_inputs_do_not_affect_other_requests() -> None:
    model, _ = slow_model(0.02)
    inputs = inputs_of(8)
    with running(model) as server, ThreadPoolExecutor(16) as pool:
        bodies = [{"model": "toy@0.5", "prompt": one} for one in (*inputs, *"abcdefgh")]
        responses = list(pool.map(lambda body: server.post(COMPLETIONS, body), bodies))
        for response in responses[8:]:
            check_error(response, 400, "give a number")
        texts = [one.json()["choices"][0]["text"] for one in responses[:8]]
        assert texts == toy_model().generate(inputs, 0.5).outputs
        check_healthy(server)


class AllergicPredictor:
    """A predictor that fails on one input."""

    def __init__(self, inner: Any, number: int) -> None:
        self.inner, self.number = inner, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, inputs: Tensor) -> Any:
        if self.number in inputs:
            raise RuntimeError("secret: out of memory at /home/me")
        return self.inner.start(inputs)


def test_request_that_breaks_the_predictor_fails_alone() -> None:
    slow, _ = slow_model(0.02)
    model = with_parts(slow, predictor=AllergicPredictor(slow.served.predictor, 99))
    inputs = [*inputs_of(7), "99"]
    with running(model) as server, ThreadPoolExecutor(8) as pool:
        bodies = [{"model": "toy@0.5", "prompt": one} for one in inputs]
        *good, broken = pool.map(lambda body: server.post(COMPLETIONS, body), bodies)
        assert "secret" not in check_error(broken, 500)["message"]
        texts = [one.json()["choices"][0]["text"] for one in good]
        assert texts == toy_model().generate(inputs[:7], 0.5).outputs
        check_healthy(server)
