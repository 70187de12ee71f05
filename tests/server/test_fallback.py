"""Experts that fail or hang, and remote experts: the predictor takes over, and other requests go on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from servers import (
    BUDGETS,
    COMPLETIONS,
    IGNORE_BUDGETS,
    LENGTH,
    FaultyExpert,
    RunningServer,
    inputs_of,
    metric,
    running,
    slow_model,
    toy_model,
    until,
    with_parts,
)
from torch import Tensor
from toy_pair import METHODS

from seqdefer.server.expert_calls import THREADS, ExpertTimeout, LocalCalls
from seqdefer.server.http import Limits
from seqdefer.types import Examples, Sequences, SequenceSpec

PATIENT = Limits(grace_seconds=0.5, request_seconds=120.0)
each_method = pytest.mark.parametrize("method", METHODS)
token_and_one_time = pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])


def fail() -> None:
    raise ConnectionError("secret address 10.0.0.1")


def text_alone(one: str, budget: float, method: str = "TokenwiseModel") -> str:
    text: str = toy_model(method).generate([one], budget).outputs[0]
    return text


# -- experts that fail ---------------------------------------------------------------------------------------------


@token_and_one_time
def test_predictor_replaces_a_failed_expert(method: str) -> None:
    expert = FaultyExpert(toy_model(method).served.expert, fail)
    with running(with_parts(toy_model(method), expert=expert)) as server:
        response = server.complete("13", 1.0)
        assert response.choices[0].text == text_alone("13", 0.0, method)
        assert response.deferral["degraded"] is True
        assert response.deferral["reason"] == "the expert failed (ConnectionError)"
        assert response.usage.expert_tokens == 0
        *_, last = server.complete("13", 1.0, stream=True)
        assert last.deferral["degraded"] is True
        assert server.complete("13", 0.0).deferral["degraded"] is False
        until(lambda: metric(server, 'seqdefer_expert_failures_total{reason="error"}') == 2)
        expert.fault = None
        again = server.complete("13", 1.0)
        assert again.choices[0].text == text_alone("13", 1.0, method)
        assert again.deferral["degraded"] is False


def test_tokens_before_the_failure_are_kept() -> None:
    expert = FaultyExpert(toy_model().served.expert, fail, after=3)
    with running(with_parts(toy_model(), expert=expert)) as server:
        chunks = list(server.complete("13", 1.0, stream=True))
    authors = [chunk.deferral["author"] for chunk in chunks]
    n = authors.count("expert")
    assert 1 <= n <= 3
    assert authors == ["expert"] * n + ["predictor"] * (len(authors) - n)
    assert "".join(chunk.choices[0].text for chunk in chunks)[:n] == text_alone("13", 1.0)[:n]
    assert chunks[-1].deferral["degraded"] is True
    assert expert.calls == 4


@pytest.mark.parametrize("after", [0, 1], ids=["fails", "works"])
def test_one_time_expert_is_called_once_for_all_inputs(after: int) -> None:
    model, inputs = toy_model("OneTimeCost"), inputs_of(16)
    both = model.generate(inputs, 0.3)
    kept = [row.index("expert") if "expert" in row else LENGTH for row in both.sources]
    assert len({*kept} - {LENGTH}) > 1  # hand-offs at different positions
    expert = FaultyExpert(model.served.expert, fail, after=after)
    with running(with_parts(model, expert=expert)) as server:
        response = server.complete(inputs, 0.3)
    expected = both if after else model.generate(inputs, 0.0)
    assert expert.calls == 1
    assert [choice.text for choice in response.choices] == expected.outputs
    assert response.usage.expert_tokens == sum(expected.expert_tokens)
    assert response.deferral["degraded"] is not bool(after)


def test_requests_without_deferral_are_not_degraded() -> None:
    expert = FaultyExpert(toy_model().served.expert, fail)
    model, _ = slow_model(0.02)
    inputs = inputs_of(10)
    with running(with_parts(model, expert=expert)) as server, ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(server.complete, inputs, [0.0, 1.0] * 5))
    assert [response.deferral["degraded"] for response in responses] == [False, True] * 5
    assert [response.choices[0].text for response in responses] == toy_model().generate(inputs, 0.0).outputs


@token_and_one_time
def test_hanging_expert_is_waited_for_once(method: str) -> None:
    release = threading.Event()
    expert = FaultyExpert(toy_model(method).served.expert, lambda: release.wait(60))
    limits = Limits(expert_seconds=0.6, grace_seconds=0.5)
    with running(with_parts(toy_model(method), expert=expert), limits=limits) as server:
        response = server.complete("13", 1.0)
        assert "within 0.6 seconds" in response.deferral["reason"]
        assert response.choices[0].text == text_alone("13", 0.0, method)
        server.scheduler._calls.seconds = 1000.0  # that a second wait would take
        response = server.complete("14", 1.0)
        assert "still busy" in response.deferral["reason"]
        until(lambda: metric(server, 'seqdefer_expert_failures_total{reason="timeout"}') == 2)
        release.set()
        until(lambda: server.complete("13", 1.0).deferral["degraded"] is False)
        assert server.complete("13", 1.0).choices[0].text == text_alone("13", 1.0, method)


def test_timeout_error_of_the_expert_is_not_ours() -> None:
    def raise_timeout() -> None:
        raise TimeoutError("of a socket")

    with pytest.raises(TimeoutError, match="socket"):
        LocalCalls(5.0).run(raise_timeout)
    release = threading.Event()
    with pytest.raises(ExpertTimeout):
        LocalCalls(0.05).run(lambda: release.wait(60))
    release.set()


class OddExpert(FaultyExpert):
    """An expert that changes its answers."""

    def __init__(self, inner: Any, change: Callable[[Any], Any]) -> None:
        super().__init__(inner)
        self.change = change

    def next(self, state: Any, rows: Tensor) -> tuple[Tensor, Any]:
        tokens, state = super().next(state, rows)
        return self.change(tokens), state

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        completed = super().complete(examples, prefixes, spec)
        return Sequences(self.change(completed.tokens), completed.lengths)


@token_and_one_time
@pytest.mark.parametrize(
    "change",
    [lambda tokens: tokens + 1000, lambda tokens: tokens - 9, lambda tokens: tokens[:0], lambda tokens: None,
     lambda tokens: tokens * math.nan],
    ids=["too large", "negative", "empty", "nothing", "nan"],
)  # fmt: skip
def test_answers_that_are_none_are_failures(method: str, change: Callable[[Any], Any]) -> None:
    """Regression: status 500."""
    expert = OddExpert(toy_model(method).served.expert, change)
    with running(with_parts(toy_model(method), expert=expert)) as server:
        response = server.complete("13", 1.0)
        assert response.choices[0].text == text_alone("13", 0.0, method)
        assert response.deferral["degraded"] is True


# -- remote experts ------------------------------------------------------------------------------------------------


class RemoteExpert(FaultyExpert):
    """An expert that waits for a gate to open before it answers, and cannot be asked without waiting."""

    waits = True

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, self._wait)
        self.gate, self.waiting = threading.Event(), threading.Semaphore(0)
        self.pending, self.max_pending, self.lock = 0, 0, threading.Lock()

    def _wait(self) -> None:
        with self.lock:
            self.pending += 1
            self.max_pending = max(self.max_pending, self.pending)
        self.waiting.release()
        assert self.gate.wait(60)
        with self.lock:
            self.pending -= 1


@contextmanager
def remote(method: str = "TokenwiseModel", limits: Limits = PATIENT) -> Iterator[tuple[RunningServer, RemoteExpert]]:
    expert = RemoteExpert(toy_model(method).served.expert)
    try:
        with running(with_parts(toy_model(method), expert=expert), limits=limits) as server:
            yield server, expert
    finally:
        expert.gate.set()


@each_method
@IGNORE_BUDGETS
def test_others_are_answered_while_one_waits(method: str) -> None:
    inputs = inputs_of(4)
    with remote(method) as (server, expert), ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.complete, one, 1.0) for one in inputs[:3]]
        assert expert.waiting.acquire(timeout=60)
        for one in inputs:
            assert server.complete(one, 0.0).choices[0].text == text_alone(one, 0.0, method)
        assert not any(one.done() for one in waiting)
        expert.gate.set()
        for one, response in zip(inputs, waiting, strict=False):
            assert response.result(60).choices[0].text == text_alone(one, 1.0, method)
        server.wait_until_idle()


@each_method
@IGNORE_BUDGETS
def test_concurrent_requests_equal_single_ones(method: str) -> None:
    inputs, budgets = inputs_of(32), [BUDGETS[place % len(BUDGETS)] for place in range(32)]
    with remote(method) as (server, expert):
        expert.gate.set()
        with ThreadPoolExecutor(32) as pool:
            responses = list(pool.map(server.complete, inputs, budgets))
        server.wait_until_idle()
    for one, budget, response in zip(inputs, budgets, responses, strict=True):
        assert response.choices[0].text == text_alone(one, budget, method)


def test_several_calls_wait_at_the_same_time() -> None:
    with remote() as (server, expert), ThreadPoolExecutor(3) as pool:
        assert metric(server, "seqdefer_expert_calls") == 0
        responses = []
        for one in inputs_of(3):
            responses.append(pool.submit(server.complete, one, 1.0))
            assert expert.waiting.acquire(timeout=60)
        assert expert.max_pending == 3
        until(lambda: metric(server, "seqdefer_expert_calls") == 3)
        expert.gate.set()
        assert all(response.result(60) for response in responses)
        until(lambda: metric(server, "seqdefer_expert_calls") == 0)


def test_requests_that_start_together_do_not_wait_for_each_other() -> None:
    with remote() as (server, expert), ThreadPoolExecutor(8) as pool:
        hold = threading.Event()
        wait_for_work = server.scheduler._wait_for_work
        server.scheduler._wait_for_work = lambda: hold.wait(60) and wait_for_work()
        first = pool.submit(server.complete, "7", 0.0)
        until(lambda: server.scheduler._batches)  # the scheduler now stands still until all are queued
        responses = [pool.submit(server.complete, *one) for one in zip(inputs_of(4), (1.0, 0.0, 1.0, 0.0), strict=True)]
        until(lambda: len(server.scheduler._queue) == 4)
        hold.set()
        assert first.result(60)
        for place in (1, 3):
            assert responses[place].result(60).deferral["degraded"] is False
        assert not responses[0].done()
        until(lambda: server.scheduler.pending_calls == metric(server, "seqdefer_sequences_running") == 2)
        expert.gate.set()
        assert all(one.result(60) for one in responses)


def test_disconnect_while_waiting_leaves_nothing_behind() -> None:
    before = threading.active_count()
    with remote() as (server, expert):
        with server.client_that_leaves({"model": "toy@1.0", "prompt": "1"}):
            assert expert.waiting.acquire(timeout=60)
        server.wait_until_idle()  # although the expert has not answered
        expert.gate.set()
        assert server.complete("2", 1.0).usage.expert_tokens > 0
    until(lambda: threading.active_count() <= before)


def test_remote_expert_times_out() -> None:
    with remote(limits=Limits(grace_seconds=0.5, expert_seconds=0.1)) as (server, expert):
        response = server.complete("3", 1.0)
        assert response.deferral["degraded"] is True
        assert response.choices[0].text == text_alone("3", 0.0)
        until(lambda: metric(server, 'seqdefer_expert_failures_total{reason="timeout"}') == 1)
        server.scheduler._calls.seconds = 60.0
        expert.gate.set()
        assert server.complete("3", 1.0).deferral["degraded"] is False  # the next request calls it again


def test_shutdown_while_an_expert_waits() -> None:
    with remote() as (server, expert), ThreadPoolExecutor(1) as pool:
        response = pool.submit(server.post, COMPLETIONS, {"model": "toy@1.0", "prompt": "1"})
        assert expert.waiting.acquire(timeout=60)
        server.server.should_exit = True
        assert response.result(60).status_code == 503


def test_calls_that_wait_take_few_threads() -> None:
    before = set(threading.enumerate())
    with remote() as (server, expert), ThreadPoolExecutor(40) as pool:
        responses = [pool.submit(server.complete, one, 1.0) for one in inputs_of(40)]
        until(lambda: metric(server, "seqdefer_expert_calls") == 40)
        until(lambda: expert.pending == THREADS)
        started = [one for one in threading.enumerate() if one not in before and one.name == "seqdefer-expert"]
        assert len(started) == expert.max_pending == THREADS
        expert.gate.set()
        texts = [one.result(60).choices[0].text for one in responses]
        assert texts == toy_model().generate(inputs_of(40), 1.0).outputs
    until(lambda: not any(one.is_alive() for one in started))
