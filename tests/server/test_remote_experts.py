"""Experts behind an endpoint that hangs, fails, dies or answers with nonsense: nobody else waits, nothing is wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra 'text'")

from remote_experts import local_model, post_all, remote_model
from servers import BUDGETS, COMPLETIONS, RunningServer, documents, metric, running, until
from tiny_models import tiny_text_model
from vllm_like import FIELDS, vllm_like

from seqdefer.engine.pace import Pace
from seqdefer.server.batches import RunningBatch
from seqdefer.server.breaker import OPEN_SECONDS
from seqdefer.server.expert_calls import RemoteCalls
from seqdefer.server.http import Limits
from seqdefer.server.scheduler import OTHERS_TIME
from tests.remote.test_client import Handler, Misbehaving, completion, content, hang, server, status  # noqa: F401, server is a fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore::seqdefer.tasks.text.remote.ExpertCallsWarning"),
    pytest.mark.filterwarnings("ignore::seqdefer.model.calibrated_pair.BudgetWarning"),
]
PATIENT = Limits(grace_seconds=0.5, request_seconds=60.0)


def text_alone(prompt: str, budget: float) -> str:
    text: str = local_model().generate([prompt], budget).outputs[0]
    return text


def ask(front: RunningServer, prompt: str, budget: float) -> dict[str, Any]:
    response = front.post(COMPLETIONS, {"model": f"toy@{budget}", "prompt": prompt})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def check_degraded(front: RunningServer, prompt: str, reason: str) -> None:
    found = ask(front, prompt, 1.0)
    assert found["deferral"]["degraded"] is True
    assert reason in found["deferral"]["reason"]
    assert found["choices"][0]["text"] == text_alone(prompt, 0.0)


# -- endpoints that work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows", [FIELDS, FIELDS - {"ids"}], ids=["in chunks", "by texts"])
def test_tokens_are_those_of_the_plain_loop(knows: frozenset[str]) -> None:
    """Requests of all budgets at once. In chunks, they also equal the same pair with both models here."""
    prompts, budgets = documents(24), [BUDGETS[place % len(BUDGETS)] for place in range(24)]
    with vllm_like(tiny_text_model("gpt2", 2, 6), knows) as endpoint, running(remote_model(endpoint.url)) as front:
        plain = remote_model(endpoint.url) if knows != FIELDS else local_model()
        expected = [plain.generate([one], budget).outputs[0] for one, budget in zip(prompts, budgets, strict=True)]

        async def post_mixed() -> list[Any]:
            parts = (post_all(front.address, [one], budget) for one, budget in zip(prompts, budgets, strict=True))
            return [one for part in await asyncio.gather(*parts) for one in part]

        answers = [one.json() for one in asyncio.run(post_mixed())]
        front.wait_until_idle()
    assert not any(answer["deferral"]["degraded"] for answer in answers)
    assert [answer["choices"][0]["text"] for answer in answers] == expected


# -- endpoints that hang -------------------------------------------------------------------------------------------


def test_a_hanging_endpoint_holds_up_nobody_else(server: Misbehaving) -> None:  # noqa: F811
    """Regression: after 130 requests that hang, one that needs no expert took 57.6 seconds, with 317 threads."""
    server.behaviours = [hang] * 1000
    before = set(threading.enumerate())
    with running(remote_model(server.url), limits=PATIENT) as front:
        waiting = threading.Thread(target=lambda: asyncio.run(post_all(front.address, documents(130), 1.0)))
        waiting.daemon = True
        waiting.start()
        until(lambda: metric(front, "seqdefer_expert_calls") == 130)
        assert ask(front, "w3 w4", 0.0)["choices"][0]["text"] == text_alone("w3 w4", 0.0)
        own = [one for one in threading.enumerate() if one not in before and one.name.startswith("seqdefer")]
        assert len(own) <= 3  # one for the models, one for all calls
        assert metric(front, "seqdefer_sequences_waiting") == 130  # none of them has ended meanwhile
        server.released.set()
    waiting.join(60)


def test_waiting_requests_do_not_fill_the_queue(server: Misbehaving) -> None:  # noqa: F811
    """Requests that may ask the expert have a queue of their own."""
    server.behaviours = [hang] * 1000
    limits = Limits(grace_seconds=0.5, request_seconds=60.0, queue=2, inputs=1, batch=1, running=1)
    with running(remote_model(server.url), limits=limits) as front:
        waiting = threading.Thread(target=lambda: asyncio.run(post_all(front.address, documents(12), 1.0)))
        waiting.daemon = True
        waiting.start()
        until(lambda: metric(front, 'seqdefer_requests_rejected_total{reason="queue_full"}') >= 7)
        assert ask(front, "w3 w4", 0.0)["deferral"]["degraded"] is False
        assert metric(front, "seqdefer_sequences_waiting") > 0
        server.released.set()
    waiting.join(60)


# -- endpoints that fail -------------------------------------------------------------------------------------------


@pytest.fixture
def calm(server: Misbehaving) -> Iterator[tuple[RunningServer, Misbehaving]]:  # noqa: F811
    """A server in front of a scripted endpoint that is never tried twice."""
    server.behaviours = [status(400)]  # it does not take ids
    with running(remote_model(server.url, retries=0), limits=PATIENT) as front:
        yield front, server


def test_the_breaker_opens_and_closes(calm: tuple[RunningServer, Misbehaving]) -> None:
    front, endpoint = calm
    breaker = front.scheduler.breaker
    breaker.now = lambda: 0.0
    endpoint.behaviours += [status(500)] * 1000
    for number in range(5):
        assert metric(front, 'seqdefer_breaker_state{state="closed"}') == 1
        check_degraded(front, f"w{number + 3}", "the expert failed (EndpointError)")
    assert metric(front, 'seqdefer_breaker_state{state="open"}') == 1
    n = len(endpoint.asked)
    check_degraded(front, "w9", "the expert is not called for now: 5 calls in a row failed")
    assert ask(front, "w9", 0.0)["deferral"]["degraded"] is False
    assert len(endpoint.asked) == n
    assert metric(front, 'seqdefer_expert_failures_total{reason="unavailable"}') == 1
    breaker.now = lambda: OPEN_SECONDS
    assert metric(front, 'seqdefer_breaker_state{state="half_open"}') == 1
    check_degraded(front, "w9", "the expert failed (EndpointError)")  # the one that tries
    assert metric(front, 'seqdefer_breaker_state{state="open"}') == 1
    breaker.now = lambda: 2 * OPEN_SECONDS
    assert metric(front, 'seqdefer_breaker_state{state="half_open"}') == 1
    endpoint.behaviours = [completion(" w5")] * 100
    assert ask(front, "w9", 1.0)["deferral"]["degraded"] is False
    assert metric(front, 'seqdefer_breaker_state{state="closed"}') == 1
    assert metric(front, 'seqdefer_expert_seconds_count{status="error"}') == 6


def test_an_expert_that_is_gone_costs_two_calls_and_no_delay() -> None:
    """It used to cost `--expert-seconds` in each of five requests, because of retries."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with running(remote_model(url, retries=50), limits=PATIENT) as front:
        for number in range(2):
            check_degraded(front, f"w{number + 3}", "the expert failed (EndpointError)")
        check_degraded(front, "w9", "the expert is not called for now: 2 calls in a row failed")


def test_a_slow_expert_has_two_strikes(calm: tuple[RunningServer, Misbehaving]) -> None:
    front, endpoint = calm
    endpoint.behaviours += [hang] * 1000
    assert isinstance(front.scheduler._calls, RemoteCalls)
    front.scheduler._calls.seconds = 0.2
    for number in range(2):
        check_degraded(front, f"w{number + 3}", "the expert did not answer within 0.2 seconds")
    check_degraded(front, "w9", "the expert is not called for now: 2 calls in a row failed")


def test_refusals_of_single_requests_do_not_open_the_breaker(calm: tuple[RunningServer, Misbehaving]) -> None:
    front, endpoint = calm
    endpoint.behaviours += [status(413)] * 1000
    for number in range(8):
        check_degraded(front, f"w{number + 3}", "the expert failed (EndpointError)")
    assert metric(front, 'seqdefer_breaker_state{state="closed"}') == 1


# -- requests that need no expert come first -------------------------------------------------------------------------


@dataclass
class Turns:
    """Seconds of turns: as the scheduler has measured those of the shared batch, and of others while there is one."""

    shared: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def watch(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        advance, advance_others = scheduler._advance, scheduler._advance_others

        def timed(batch: Any) -> None:
            is_other, started = scheduler._shared not in (None, batch), time.perf_counter()
            advance(batch)
            self.others += [time.perf_counter() - started] if is_other else []

        def noted(seconds: float) -> None:
            self.shared.append(seconds)
            advance_others(seconds)

        monkeypatch.setattr(scheduler, "_advance", timed)
        monkeypatch.setattr(scheduler, "_advance_others", noted)


def test_requests_without_an_expert_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are at work, those that ask get half of the time that these take, and one turn more at most."""
    monkeypatch.setattr(Pace, "most_steps", lambda _: 1)  # so that no sequence is written in one turn
    turns, all_queued = Turns(), threading.Event()
    with vllm_like(tiny_text_model("gpt2", 2, 6)) as endpoint, running(remote_model(endpoint.url)) as front:
        ask(front, "w3", 1.0)
        front.wait_until_idle()
        turns.watch(front.scheduler, monkeypatch)
        admit = front.scheduler._admit
        monkeypatch.setattr(front.scheduler, "_admit", lambda: all_queued.wait(60) and admit())

        async def post_both() -> None:
            posts = [post_all(front.address, documents(24), budget) for budget in (1.0, 0.0)]
            await asyncio.gather(*posts)

        with ThreadPoolExecutor(1) as pool:
            posted = pool.submit(asyncio.run, post_both())
            until(lambda: len(front.scheduler._queue) == 48)
            all_queued.set()
            posted.result(120)
        front.wait_until_idle()
    assert turns.others  # they do not starve
    assert sum(turns.others[:-1]) <= OTHERS_TIME * sum(turns.shared) + max(turns.others)


def test_degraded_requests_do_not_crowd_the_others(calm: tuple[RunningServer, Misbehaving]) -> None:
    """While the breaker is open, requests that would ask are a batch of their own."""
    front, endpoint = calm
    front.scheduler.breaker.now = lambda: 0.0
    endpoint.behaviours += [status(500)] * 1000
    for number in range(5):
        check_degraded(front, f"w{number + 3}", "the expert failed")
    assert front.scheduler.breaker.state == "open"
    together = list[bool]()
    join = RunningBatch.join

    def watched(self: RunningBatch, tickets: Any) -> None:
        join(self, tickets)
        together.append(len({front.scheduler._may_ask(one) for one in self.tickets}) > 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningBatch, "join", watched)

        async def post_both() -> list[Any]:
            parts = await asyncio.gather(*(post_all(front.address, documents(8), budget) for budget in (0.0, 1.0)))
            return [one.json() for part in parts for one in part]

        answers = asyncio.run(post_both())
    assert together
    assert not any(together)
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [text_alone(one, 0.0) for one in documents(8)] * 2
    assert [answer["deferral"]["degraded"] for answer in answers] == [False] * 8 + [True] * 8


# -- answers that are none -----------------------------------------------------------------------------------------


def test_an_oversized_answer_is_not_read(calm: tuple[RunningServer, Misbehaving]) -> None:
    """Regression: 3 MB for an ask of a few tokens stalled everybody for seconds."""
    front, endpoint = calm
    body = json.dumps({"choices": [{"text": " w5" * 10**6, "finish_reason": "length"}]}).encode()
    endpoint.behaviours += [content(body)]
    check_degraded(front, "w3 w4", "the expert failed (EndpointError)")


def test_a_long_answer_is_cut_before_it_is_split(
    calm: tuple[RunningServer, Misbehaving], monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqdefer.tasks.text.remote import PromptAdapter

    front, endpoint = calm
    lengths, split = list[int](), PromptAdapter._split
    monkeypatch.setattr(
        PromptAdapter, "_split", lambda self, *given: (lengths.append(len(given[1])), split(self, *given))[1]
    )
    endpoint.behaviours += [completion(" w5" * 20_000, "length")] * 30
    assert ask(front, "w3 w4", 1.0)["deferral"]["degraded"] is False
    assert lengths
    assert max(lengths) <= 4 * 128


def answering(**changes: Any) -> Any:
    """Change what a server that takes ids says."""

    def change(choice: dict[str, Any]) -> dict[str, Any]:
        return {**choice, **changes}

    return change


@pytest.mark.parametrize(
    "change",
    [
        answering(token_ids=[10**6]),
        answering(token_ids=[-3]),
        answering(token_ids=[]),
        answering(token_ids=None),
        answering(token_ids=["5"]),
        answering(prompt_logprobs=[]),
        answering(prompt_logprobs=[None, {"999999": {"rank": 1, "logprob": 0.0, "decoded_token": "w5"}}]),
    ],
    ids=["out of range", "negative", "nothing", "no list", "texts", "no prompt", "short prompt"],
)  # fmt: skip
def test_nonsense_is_degraded(change: Any) -> None:
    """Regression: status 500."""
    with vllm_like(tiny_text_model("gpt2", 2, 6)) as endpoint, running(remote_model(endpoint.url, retries=0)) as front:
        assert ask(front, "w3 w4", 1.0)["deferral"]["degraded"] is False
        complete = endpoint.complete

        def nonsense(body: dict[str, Any]) -> dict[str, Any]:
            answer = complete(body)
            return {**answer, "choices": [change(one) for one in answer["choices"]]}

        endpoint.complete = nonsense  # type: ignore[method-assign]
        check_degraded(front, "w7 w8 w9", "the expert failed (")
