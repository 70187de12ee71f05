"""Experts that are elsewhere: while one is waited for, others have the models, and what waits comes out the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("openai", reason="needs the official client: pip install openai")

from seqdefer.interfaces import NextTokenExpert
from seqdefer.remote.cancellation import on_cancel
from seqdefer.server.limits import Limits
from seqdefer.server.turns import Abandoned, Turns
from seqdefer.types import Examples, Sequences, SequenceSpec
from tests.server.test_app import (
    BUDGETS,
    Running,
    alone,
    each_method,
    inputs_of,
    metric,
    running,
    toy_model,
    until,
    with_parts,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SLOW = Limits(grace_seconds=0.5, request_seconds=30.0)


class Elsewhere(NextTokenExpert[Any]):
    """An expert that waits for a door to open before it answers."""

    waits = True

    def __init__(self, inner: NextTokenExpert[Any]) -> None:
        self.inner, self.fingerprint = inner, inner.fingerprint
        self.door, self.waiting = threading.Event(), threading.Semaphore(0)
        self.at_once, self.most, self.called_off = 0, 0, 0

    def start(self, examples: Examples) -> Any:
        return self.inner.start(examples)

    def next(self, state: Any, rows: Tensor) -> tuple[Tensor, Any]:
        self._wait()
        return self.inner.next(state, rows)

    def append(self, state: Any, tokens: Tensor) -> Any:
        return self.inner.append(state, tokens)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self.inner.select(state, rows)

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        self._wait()
        return self.inner.complete(examples, prefixes, spec)

    def _wait(self) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.waiting.release()
        with on_cancel(self._note):
            assert self.door.wait(20)
        self.at_once -= 1

    def _note(self) -> None:
        self.called_off += 1


@contextmanager
def elsewhere(method: str = "TokenwiseModel", limits: Limits = SLOW) -> Iterator[tuple[Running, Elsewhere]]:
    model = toy_model(method)
    assert isinstance(model.served.expert, NextTokenExpert)
    expert = Elsewhere(model.served.expert)
    try:
        with running(with_parts(model, expert=expert), limits=limits) as server:
            yield server, expert
    finally:
        expert.door.set()


def ask(server: Running, one: str, budget: float) -> Any:
    answer = server.post("/v1/completions", {"model": f"toy@{budget}", "prompt": one})
    assert answer.status_code == 200
    return answer.json()


@each_method
@pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning")
def test_others_are_answered_while_one_waits(method: str) -> None:
    model, inputs = toy_model(method), inputs_of(4)
    with elsewhere(method) as (server, expert), ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, server, one, 1.0) for one in inputs[:3]]
        assert expert.waiting.acquire(timeout=10)
        for one in inputs:  # the models are free
            assert ask(server, one, 0.0)["choices"][0]["text"] == alone(model, one, 0.0).outputs[0]
        assert not any(one.done() for one in waiting)
        expert.door.set()
        for one, answer in zip(inputs, waiting, strict=False):
            assert answer.result(20)["choices"][0]["text"] == alone(model, one, 1.0).outputs[0]
        server.wait_until_idle()


@each_method
@pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning")
def test_many_at_once_get_what_they_would_get_alone(method: str) -> None:
    model, inputs = toy_model(method), inputs_of(32)
    budgets = [BUDGETS[place % len(BUDGETS)] for place in range(32)]
    with elsewhere(method) as (server, expert):
        expert.door.set()
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda place: ask(server, inputs[place], budgets[place]), range(32)))
        server.wait_until_idle()
    for one, budget, answer in zip(inputs, budgets, answers, strict=True):
        assert answer["choices"][0]["text"] == alone(model, one, budget).outputs[0]


def test_several_wait_at_once() -> None:
    with elsewhere() as (server, expert), ThreadPoolExecutor(3) as pool:
        answers = []
        for one in inputs_of(3):  # one after the other: each is a cohort of its own
            answers.append(pool.submit(ask, server, one, 1.0))
            assert expert.waiting.acquire(timeout=10)
        assert expert.most == 3
        expert.door.set()
        assert all(answer.result(20) for answer in answers)


def test_requests_that_start_together_do_not_wait_for_each_other() -> None:
    """Nor does one whose expert fails harm the others."""
    with elsewhere() as (server, expert), ThreadPoolExecutor(8) as pool:
        hold = threading.Event()
        right = server.scheduler._wait_for_work
        server.scheduler._wait_for_work = lambda: hold.wait(10) and right()
        first = pool.submit(ask, server, "7", 0.0)
        until(lambda: server.scheduler._cohorts)  # now the thread stands still, and all will be there when it goes on
        budgets = (1.0, 0.0, 1.0, 0.0)
        asked = [pool.submit(ask, server, *one) for one in zip(inputs_of(4), budgets, strict=True)]
        until(lambda: len(server.scheduler._waiting) == 4)
        hold.set()
        assert first.result(10)
        for place in (1, 3):
            assert asked[place].result(10)["deferral"]["degraded"] is False
        assert not asked[0].done()
        until(lambda: metric(server, "seqdefer_cohorts_running") == 2)
        assert server.scheduler.calls_under_way == 2
        expert.door.set()
        assert all(one.result(10) for one in asked)


def test_whoever_leaves_while_it_waits_leaves_nothing_behind() -> None:
    before = threading.active_count()
    with elsewhere() as (server, expert):
        with server.http.stream(
            "POST", f"{server.address}/v1/completions", json={"model": "toy@0.0", "prompt": "1"}
        ) as answer:
            answer.read()
        stopped = threading.Thread(target=lambda: _leave_early(server), daemon=True)
        stopped.start()
        assert expert.waiting.acquire(timeout=10)
        stopped.join(10)
        server.wait_until_idle()  # though the expert has not answered
        assert expert.called_off == 1
        expert.door.set()
        until(lambda: not [one for one in threading.enumerate() if one.name == "seqdefer-cohort"])
        assert ask(server, "2", 1.0)["usage"]["expert_tokens"] > 0
    until(lambda: threading.active_count() <= before)


def _leave_early(server: Running) -> None:
    import httpx

    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.address}/v1/completions", json={"model": "toy@1.0", "prompt": "1"}, timeout=0.5)


def test_an_expert_that_takes_too_long_is_done_without() -> None:
    limits = Limits(grace_seconds=0.5, expert_seconds=0.1)
    with elsewhere(limits=limits) as (server, expert):
        answer = ask(server, "3", 1.0)
        assert answer["deferral"]["degraded"] is True
        assert expert.called_off == 1
        assert answer["choices"][0]["text"] == alone(toy_model(), "3", 0.0).outputs[0]
        assert metric(server, 'seqdefer_expert_failures_total{reason="timeout"}') == 1
        expert.door.set()
        assert ask(server, "3", 1.0)["deferral"]["degraded"] is False  # the next one asks again


def test_the_server_ends_while_an_expert_is_waited_for() -> None:
    with elsewhere() as (server, expert), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", {"model": "toy@1.0", "prompt": "1"})
        assert expert.waiting.acquire(timeout=10)
        server.server.should_exit = True
        assert answer.result(10).status_code == 503


# -- turns -----------------------------------------------------------------------------------------------------------


def test_work_goes_on_when_its_wait_is_over_and_it_has_a_turn() -> None:
    woken, order = threading.Semaphore(0), list[str]()
    doors = {name: threading.Event() for name in "ab"}
    turns = {name: Turns(woken.release) for name in "ab"}

    def work(name: str) -> Callable[[], None]:
        def go() -> None:
            for step in "123":
                order.append(name + step)
                turns[name].wait(lambda: doors[name].wait(10))

        return go

    works = {name: work(name) for name in "ab"}
    for name in "ab":
        turns[name].run(works[name])
        assert turns[name].is_waiting
    doors["b"].set()
    assert woken.acquire(timeout=10)
    while not turns["b"].is_idle:
        turns["b"].run(works["b"])
        until(lambda: not turns["b"].is_waiting)
    doors["a"].set()
    while not turns["a"].is_idle:
        until(lambda: not turns["a"].is_waiting)
        turns["a"].run(works["a"])
    assert order == ["a1", "b1", "b2", "b3", "a2", "a3"]


def test_what_the_work_raises_is_raised_where_it_got_its_turn() -> None:
    turns = Turns(lambda: None)

    def fails() -> None:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            turns.run(fails)
    turns.close()


def test_abandoned_work_is_unwound_when_its_wait_is_over() -> None:
    door, unwound = threading.Event(), threading.Event()
    turns = Turns(lambda: None)

    def work() -> None:
        try:
            turns.wait(lambda: door.wait(10))
        except Abandoned:
            unwound.set()
            raise

    turns.run(work)
    turns.close()
    time.sleep(0.05)
    assert not unwound.is_set()
    door.set()
    assert unwound.wait(10)
