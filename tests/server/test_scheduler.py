"""Continuous batching: requests run together without waiting for each other, and a bad one fails alone."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
    step_until_written,
    toy_model,
    until,
    with_parts,
)
from torch import Tensor

from seqdefer.engine.speculative import SHOWN_SECONDS
from seqdefer.errors import ContractError
from seqdefer.server.http import Limits


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
    model, slow = slow_model(SHOWN_SECONDS * 1.2, pause_after=1)
    slow.gate.clear()
    with running(model) as server, ThreadPoolExecutor(1) as pool:
        one, other = writes_more_than(LENGTH - 1, inputs_of(40), 0.0)[:2]
        first = iter(server.complete(one, 0, stream=True))
        next(first)
        waiting = pool.submit(lambda: iter(server.complete(other, 0, stream=True)))
        until(lambda: len(server.scheduler._open) == 2)
        step_until_written(server, slow, other)
        second = waiting.result(60)
        next(second)
        assert metric(server, "seqdefer_sequences_running") == 2
        assert len(server.scheduler._batches) == 1
        slow.gate.set()
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
    model, slow = slow_model()
    slow.gate.clear()
    limits = Limits(queue=2, inputs=1, batch=1, running=1, grace_seconds=0.5)
    with running(model, limits=limits) as server, ThreadPoolExecutor(8) as pool:
        bodies = [{"model": "toy", "prompt": one} for one in inputs_of(8)]
        answers = [pool.submit(server.post, COMPLETIONS, body) for body in bodies]
        until(lambda: metric(server, 'seqdefer_requests_rejected_total{reason="queue_full"}') >= 5)
        slow.gate.set()
        responses = [answer.result(60) for answer in answers]
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
        with server.client_that_leaves({"model": "toy", "prompt": "14"}):
            until(lambda: server.scheduler._queue)
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


class OddPredictor:
    """A predictor with a flaw where it meets one input."""

    def __init__(self, inner: Any, number: int) -> None:
        self.inner, self.number = inner, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class AllergicPredictor(OddPredictor):
    """A predictor that fails on one input."""

    def start(self, inputs: Tensor) -> Any:
        if self.number in inputs:
            raise RuntimeError("secret: out of memory at /home/me")
        return self.inner.start(inputs)


def test_request_that_breaks_the_predictor_fails_alone() -> None:
    paused, slow = slow_model()
    slow.gate.clear()
    model = with_parts(paused, predictor=AllergicPredictor(slow, 99))
    inputs = [*inputs_of(7), "99"]
    with running(model) as server, ThreadPoolExecutor(8) as pool:
        bodies = [{"model": "toy@0.5", "prompt": one} for one in inputs]
        answers = [pool.submit(server.post, COMPLETIONS, body) for body in bodies]
        until(lambda: len(server.scheduler._open) >= 7)  # the other may have failed already
        slow.gate.set()
        *good, broken = [answer.result(60) for answer in answers]
        assert "secret" not in check_error(broken, 500)["message"]
        texts = [one.json()["choices"][0]["text"] for one in good]
        assert texts == toy_model().generate(inputs[:7], 0.5).outputs
        check_healthy(server)


class LateAllergicPredictor(OddPredictor):
    """A predictor that fails on one input at its fourth token."""

    def propose(self, state: Any) -> Any:
        if self.number in state.inputs and state.position == 3:
            raise RuntimeError("secret: out of memory at /home/me")
        return self.inner.propose(state)


def writes_more_than(n: int, inputs: list[str], budget: float) -> list[str]:
    written = toy_model().generate(inputs, budget)
    return [one for one, text in zip(inputs, written.outputs, strict=True) if len(text) > n]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_failure_after_the_first_token_is_of_one_request(is_streamed: bool) -> None:
    """Regression: all 21 requests of the batch got status 500."""
    paused, slow = slow_model()
    slow.gate.clear()
    inputs = writes_more_than(8, inputs_of(80), 0.5)[:12]
    model = with_parts(paused, predictor=LateAllergicPredictor(slow, int(inputs[5])))
    with running(model) as server, ThreadPoolExecutor(12) as pool:

        def text_of(one: str) -> str:
            response = server.complete(one, 0.5, stream=is_streamed)
            return "".join(part.choices[0].text for part in response) if is_streamed else response.choices[0].text

        answers = [pool.submit(text_of, one) for one in inputs]
        until(lambda: len(server.scheduler._open) == 12)
        slow.gate.set()
        failed = [place for place, answer in enumerate(answers) if answer.exception(60) is not None]
        assert failed == [5]
        good = [answer.result() for place, answer in enumerate(answers) if place != 5]
        assert good == toy_model().generate([*inputs[:5], *inputs[6:]], 0.5).outputs
        check_healthy(server)


class NanPredictor(OddPredictor):
    """A predictor whose features of one input are no numbers from its third token on, and so its scores."""

    def propose(self, state: Any) -> Any:
        proposal = self.inner.propose(state)
        is_bad = (state.inputs == self.number) & (state.position >= 2)
        return replace(proposal, features=proposal.features.masked_fill(is_bad[:, None], math.nan))


def test_scores_that_are_no_numbers_are_an_error_of_their_request() -> None:
    """Regression: nan counted as a decision to keep the predictor's token."""
    inputs = writes_more_than(4, inputs_of(40)[1:], 0.5)[:8]
    model = with_parts(toy_model(), predictor=NanPredictor(toy_model().served.predictor, int(inputs[0])))
    with pytest.raises(ContractError, match=r"the score of token 2 is not a number \(nan\)"):
        model.generate(inputs, 0.5)
    with pytest.raises(ContractError, match="not a number"):
        list(model.stream(inputs[0], 0.5))
    with running(model) as server, ThreadPoolExecutor(8) as pool:
        bodies = [{"model": "toy@0.5", "prompt": one} for one in inputs]
        first, *rest = pool.map(lambda body: server.post(COMPLETIONS, body), bodies)
        assert check_error(first, 500, "the score of token 2 is not a number (nan)")["code"] == "model_failed"
        assert [one.json()["choices"][0]["text"] for one in rest] == toy_model().generate(inputs[1:], 0.5).outputs
        check_healthy(server)


def test_a_dead_thread_fails_what_is_open_and_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: requests waited until their time was over."""
    model, slow = slow_model()
    slow.gate.clear()
    with running(model) as server, ThreadPoolExecutor(4) as pool:
        ended = list[bool]()
        server.scheduler.on_failure = lambda: ended.append(True)
        monkeypatch.setattr(server.scheduler, "_answer_refused", lambda batch: 1 / 0)
        bodies = [{"model": "toy@0.5", "prompt": one} for one in inputs_of(4)]
        responses = [pool.submit(server.post, COMPLETIONS, body) for body in bodies]
        until(lambda: len(server.scheduler._open) == 4 and server.scheduler._batches)
        slow.gate.set()
        for response in responses:
            assert check_error(response.result(), 503)["code"] == "models_died"
        assert check_error(server.post(COMPLETIONS, bodies[0]), 503)["code"] == "models_died"
        assert server.get("/health").status_code == 503
        until(lambda: ended)
        assert ended == [True]
        assert isinstance(server.scheduler.failure, ZeroDivisionError)
