"""The server over a socket, with the official client: it writes what the model writes alone, request by request."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from toy_pair import METHODS, LetterCodec, Toy, numbers

from seqdefer.engine.drafts import draft
from seqdefer.errors import InputError, OptionError
from seqdefer.interfaces import Served
from seqdefer.model.deferring_model import BudgetWarning, DeferringModel
from seqdefer.model.generation import Generation
from seqdefer.rejectors.base import Sizes, step_inputs
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.server.limits import Limits
from seqdefer.server.metrics import Metrics
from seqdefer.types import Examples, SequenceSpec

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("openai", reason="needs the official client: pip install openai")

import httpx
import openai

from seqdefer.server import working
from seqdefer.server.app import create_app
from seqdefer.server.running import address_of, listen, make_server

pytestmark = pytest.mark.usefixtures("one_thread")
each_method = pytest.mark.parametrize("method", METHODS)
LENGTH = 12
BUDGETS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


class NumberCodec(LetterCodec):
    """As the server gets them: numbers in texts."""

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": "^[0-9]{1,9}$"}

    def encode(self, inputs: Sequence[Any]) -> Examples:
        try:
            return super().encode([int(one) for one in inputs])
        except (ValueError, TypeError) as error:
            raise InputError(f"{error}; give a number") from error


@cache
def toy_model(method: str = "TokenwiseModel") -> DeferringModel:
    """Nobody may change it."""
    toy = Toy.of(length=LENGTH)
    model = toy.model(method)
    model.calibrate(numbers(60))
    return with_parts(model, codec=NumberCodec())


def with_parts(model: DeferringModel, **parts: Any) -> DeferringModel:
    """The same with another expert, predictor or codec."""
    return DeferringModel(replace(model.served, **parts), model.rejector, model.calibration)


def inputs_of(n: int) -> list[str]:
    return [str(number) for number in numbers(n)]


@dataclass
class Running:
    address: str
    app: Any
    http: httpx.Client
    server: Any

    @property
    def scheduler(self) -> Any:
        return self.app.state.scheduler

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, http_client=self.http)

    def post(self, path: str, content: Any) -> Any:
        given = {"content": content} if isinstance(content, bytes) else {"json": content}
        return self.http.post(f"{self.address}{path}", **given, headers={"content-type": "application/json"})

    def get(self, path: str, **options: Any) -> Any:
        return self.http.get(f"{self.address}{path}", **options)

    def wait_until_idle(self) -> None:
        until(lambda: not self.scheduler._cohorts and not self.scheduler._waiting)


def until(holds: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def metric(server: Running, line: str) -> float:
    found = [one for one in server.get("/metrics").text.splitlines() if one.startswith(line + " ")]
    return float(found[0].split()[-1]) if found else 0.0


@contextmanager
def running(
    model: DeferringModel, *, name: str = "toy", port: int = 0, limits: Limits | None = None, **options: Any
) -> Iterator[Running]:
    """A real server, on a free port unless one is named."""
    limits = limits or Limits(grace_seconds=0.5)
    app, listening = create_app(model, name, limits=limits, **options), listen("127.0.0.1", port)
    server = make_server(app, limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started)
        with httpx.Client(verify=False, timeout=30) as http:
            yield Running(address_of(listening), app, http, server)
    finally:
        server.should_exit = True
        thread.join(15)
        listening.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(toy_model()) as server:
        yield server


def alone(model: DeferringModel, one: str, budget: float) -> Generation:
    return model.generate([one], budget)


def check_usage(usage: Any, written: Generation) -> None:
    assert usage.predictor_tokens == sum(written.predictor_tokens)
    assert usage.expert_tokens == sum(written.expert_tokens)
    assert usage.switches == sum(written.switches)
    assert usage.completion_tokens == usage.predictor_tokens + usage.expert_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


# -- the official client -------------------------------------------------------------------------------------------


@each_method
@pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning")
def test_concurrent_requests_get_what_they_would_get_alone(method: str) -> None:
    """32 at once, with different budgets, half of them streamed, some of them chats."""
    model, inputs = toy_model(method), inputs_of(32)
    budgets = [BUDGETS[place % len(BUDGETS)] for place in range(32)]
    with running(model) as server:

        def ask(place: int) -> tuple[str, list[str] | None, Any]:
            name, client = f"toy@{budgets[place]}", server.client
            if place % 4 == 0:
                whole = client.completions.create(model=name, prompt=inputs[place])
                return whole.choices[0].text, None, whole.usage
            if place % 4 == 1:
                said = [{"role": "user", "content": inputs[place]}]
                chat = client.chat.completions.create(model=name, messages=said)
                return chat.choices[0].message.content, None, chat.usage
            options = {"stream": True, "stream_options": {"include_usage": True}}
            *chunks, last = client.completions.create(model=name, prompt=inputs[place], **options)
            texts, authors = [one.choices[0].text for one in chunks], [one.deferral["author"] for one in chunks]
            return "".join(texts), authors, last.usage

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(ask, range(32)))
        server.wait_until_idle()
    for one, budget, (text, authors, usage) in zip(inputs, budgets, answers, strict=True):
        written = alone(model, one, budget)
        assert text == written.outputs[0]
        assert authors in (None, written.sources[0])
        check_usage(usage, written)


def test_a_chat_streams(served: Running) -> None:
    written = alone(toy_model(), "13", 0.5)
    said = [{"role": "user", "content": [{"type": "text", "text": "13"}]}]
    chunks = list(
        served.client.chat.completions.create(
            model="toy", messages=said, stream=True, extra_body={"deferral": {"budget": 0.5}}
        )
    )
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == written.outputs[0]
    assert [chunk.deferral["author"] for chunk in chunks] == written.sources[0]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].deferral["budget"] == 0.5
    assert chunks[-1].deferral["degraded"] is False
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_several_prompts_of_one_request(served: Running) -> None:
    inputs, model = inputs_of(5), toy_model()
    answer = served.client.completions.create(model="toy@0.5", prompt=inputs)
    written = model.generate(inputs, 0.5)
    assert [choice.index for choice in answer.choices] == list(range(5))
    assert [choice.text for choice in answer.choices] == written.outputs
    check_usage(answer.usage, written)
    texts, shares = [""] * 5, [0.0] * 5
    for chunk in served.client.completions.create(model="toy@0.5", prompt=inputs, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason is not None:
            shares[chunk.choices[0].index] = chunk.deferral["share"]
    assert texts == written.outputs
    assert len(set(shares)) > 1  # each is its own text's, not that of all texts so far
    assert shares == [pytest.approx(row.count("expert") / len(row)) for row in written.sources]


def test_fewer_tokens_may_be_asked_for(served: Running) -> None:
    written = alone(toy_model(), "13", 0.5)
    n = len(written.sources[0])
    for most in range(1, n + 1):
        answer = served.client.completions.create(model="toy@0.5", prompt="13", max_tokens=most)
        assert answer.choices[0].text == written.outputs[0][:most]
        assert answer.choices[0].finish_reason == ("length" if most < n else "stop")
        assert answer.usage.completion_tokens == most
        assert answer.usage.expert_tokens == written.sources[0][:most].count("expert")


def test_more_tokens_than_the_model_writes_may_be_asked_for(served: Running) -> None:
    """Clients send numbers that suit other models. They get what there is, and are told."""
    written = alone(toy_model(), "13", 0.5)
    for most in (LENGTH + 1, 256, 10**30):
        answer = served.client.completions.create(model="toy@0.5", prompt="13", max_tokens=most)
        assert answer.choices[0].text == written.outputs[0]
        assert answer.deferral["remarks"] == [f"max_tokens is {most}; this model writes {LENGTH} tokens at most"]
    body = {"model": "toy@0.5", "messages": [{"role": "user", "content": "13"}], "max_tokens": 5}
    said = served.post("/v1/chat/completions", {**body, "max_completion_tokens": 99}).json()
    assert said["choices"][0]["message"]["content"] == written.outputs[0]
    assert said["deferral"]["remarks"] == [f"max_completion_tokens is 99; this model writes {LENGTH} tokens at most"]


def test_models_are_listed(served: Running) -> None:
    names = [one.id for one in served.client.models.list()]
    assert names[0] == "toy"
    assert "toy@0.20" in names
    for name in (*names, "toy@0.25", "toy@0", "toy@1.000", "toy@0.12345"):  # whatever completions take
        assert served.client.models.retrieve(name).id == name
    for name in ("others/model", "toy@2", "toy@", "toy2", "toy@0.25@0.25"):
        with pytest.raises(openai.NotFoundError):
            served.client.models.retrieve(name)


def test_the_usual_budget_is_the_servers() -> None:
    with running(toy_model(), budget=0.75) as server:
        answer = server.client.completions.create(model="toy", prompt="13")
        assert answer.deferral["budget"] == 0.75
        check_usage(answer.usage, alone(toy_model(), "13", 0.75))
    with pytest.raises(OptionError, match="budget is 7"):
        create_app(toy_model(), "toy", budget=7)


def test_a_budget_that_cannot_be_met_is_remarked() -> None:
    model = toy_model("OneTimeModel")
    with running(model) as server:
        answer = server.client.completions.create(model="toy@1", prompt="13")
    with pytest.warns(BudgetWarning):
        written = alone(model, "13", 1.0)
    assert answer.choices[0].text == written.outputs[0]
    assert "cannot be met" in answer.deferral["remarks"][0]


def test_without_budgets_nothing_is_served() -> None:
    with pytest.raises(OptionError, match="seqdefer calibrate"):
        create_app(Toy.of(length=4).model("TokenwiseModel"), "toy")


@each_method
def test_scores_are_what_the_model_decides(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = toy_model(method), inputs_of(4)
    decided = model.decide(inputs, 0.5)
    with running(model) as server:
        monkeypatch.setattr(type(model.served.expert), "next", None)  # nobody may ask it
        monkeypatch.setattr(type(model.served.expert), "complete", None)
        answer = server.post("/v1/deferral/score", {"model": "toy@0.5", "inputs": inputs}).json()
    assert answer["object"] == "deferral.score"
    for place, row in enumerate(answer["data"]):
        n = int(decided.sequences.lengths[place])
        assert row["text"] == decided.outputs[place]
        assert [token["token"] for token in row["tokens"]] == decided.sequences.tokens[place, :n].tolist()
        assert [token["defer"] for token in row["tokens"]] == decided.defer[place, :n].tolist()
        assert {token["author"] for token in row["tokens"]} == {"predictor"}
        torch.testing.assert_close(
            torch.tensor([token["score"] for token in row["tokens"]]), decided.scores[place, :n], check_dtype=False
        )


def test_the_overhead_is_told(served: Running) -> None:
    for stream in (False, True):
        answer = served.post("/v1/completions", {"model": "toy", "prompt": "13", "stream": stream})
        assert answer.status_code == 200
        assert 0 < float(answer.headers["x-seqdefer-overhead-ms"]) < 1000


def test_a_stream_is_server_sent_events(served: Running) -> None:
    answer = served.post("/v1/completions", {"model": "toy", "prompt": "13", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"  # or proxies keep it until it is whole
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    facts = [json.loads(event.removeprefix("data: "))["deferral"] for event in events]
    assert [one["position"] for one in facts] == list(range(len(facts)))


def test_a_stream_that_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies cut what is quiet for long. The official client skips what is said, and gets all that follows."""
    monkeypatch.setattr(working, "QUIET", 0.02)
    model, slow = slow_model(0)
    body = {"model": "toy@0.5", "prompt": "13", "stream": True}
    with running(model) as server:
        slow.may_go.clear()
        with server.http.stream("POST", f"{server.address}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert answer.status_code == 200
            assert [next(lines) for _ in range(4)] == [": waiting", ""] * 2
            slow.may_go.set()
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        slow.may_go.clear()
        chunks = server.client.completions.create(**body)  # it has the status, which only a comment can have brought
        slow.may_go.set()
        assert "".join(chunk.choices[0].text for chunk in chunks) == alone(toy_model(), "13", 0.5).outputs[0]
        server.wait_until_idle()


def test_the_description_needs_nothing_from_elsewhere(served: Running) -> None:
    assert "/v1/deferral/score" in served.get("/openapi.json").json()["paths"]
    assert served.get("/docs").status_code == 404
    assert "access-control-allow-origin" not in served.get("/health", headers={"origin": "http://else.where"}).headers


def test_answers_do_not_wait_for_an_acknowledgement() -> None:
    """asyncio sends at once only on sockets that it made itself: every answer once took 40 ms longer."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# -- batching ------------------------------------------------------------------------------------------------------


class Slow:
    """Part of a pair that takes its time, and counts the rows it is asked about."""

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner, self.seconds, self.sizes = inner, seconds, list[int]()
        self.may_go = threading.Event()
        self.may_go.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, state: Any) -> Any:
        time.sleep(self.seconds)
        assert self.may_go.wait(30)
        proposal = self.inner.propose(state)
        self.sizes.append(len(proposal.tokens))
        return proposal


def slow_model(seconds: float) -> tuple[DeferringModel, Slow]:
    slow = Slow(toy_model().served.predictor, seconds)
    return with_parts(toy_model(), predictor=slow), slow


def test_whoever_waits_is_written_together() -> None:
    model, slow = slow_model(0)
    slow.may_go.clear()
    with running(model) as server, ThreadPoolExecutor(20) as pool:
        ask = lambda one: server.client.completions.create(model="toy", prompt=one)  # noqa: E731
        answers = [pool.submit(ask, one) for one in inputs_of(1)]
        until(lambda: server.scheduler._cohorts)
        answers += [pool.submit(ask, one) for one in inputs_of(20)[1:]]
        until(lambda: len(server.scheduler._waiting) == 19)
        assert metric(server, "seqdefer_queue_length") == 19
        assert metric(server, "seqdefer_cohorts_running") == 1
        slow.may_go.set()
        assert [one.result().choices[0].text for one in answers] == toy_model().generate(inputs_of(20)).outputs
    assert max(slow.sizes) == 19
    assert len(slow.sizes) <= 2 * LENGTH


def test_nobody_waits_for_others_to_finish() -> None:
    model, _ = slow_model(0.05)
    with running(model) as server:
        first = iter(server.client.completions.create(model="toy@0", prompt="13", stream=True))
        next(first)
        second = iter(server.client.completions.create(model="toy@0", prompt="14", stream=True))
        next(second)
        assert len(server.scheduler._cohorts) == 2
        list(first), list(second)


def test_more_than_may_run_at_once_wait_their_turn() -> None:
    limits = Limits(inputs=2, batch=2, running=4, grace_seconds=0.5)
    model, slow = slow_model(0.002)
    inputs = inputs_of(12)
    with running(model, limits=limits) as server, ThreadPoolExecutor(12) as pool:
        ask = lambda one: server.client.completions.create(model="toy@0.5", prompt=one).choices[0].text  # noqa: E731
        assert list(pool.map(ask, inputs)) == toy_model().generate(inputs, 0.5).outputs
    assert max(slow.sizes) <= 2


# -- metrics -------------------------------------------------------------------------------------------------------


def test_metrics_count_right() -> None:
    model, inputs = toy_model(), inputs_of(6)
    written = model.generate(inputs, 0.5)
    with running(model) as server:
        for place, one in enumerate(inputs):
            answer = server.client.completions.create(model="toy@0.5", prompt=one, stream=bool(place % 2))
            list(answer)
        server.post("/v1/completions", b"{")
        server.get("/nowhere")
        # counted when an answer has been sent: the client may be a little faster
        until(lambda: metric(server, 'seqdefer_request_seconds_count{path="/v1/completions"}') == 7)
        until(lambda: metric(server, 'seqdefer_requests_total{path="other",status="404"}') == 1)
        assert metric(server, 'seqdefer_tokens_total{author="expert"}') == sum(written.expert_tokens)
        assert metric(server, 'seqdefer_tokens_total{author="predictor"}') == sum(written.predictor_tokens)
        assert metric(server, "seqdefer_switches_total") == sum(written.switches)
        assert metric(server, 'seqdefer_requests_total{path="/v1/completions",status="200"}') == 6
        assert metric(server, 'seqdefer_requests_total{path="/v1/completions",status="400"}') == 1
        assert metric(server, 'seqdefer_request_seconds_bucket{path="/v1/completions",le="+Inf"}') == 7
        until(lambda: metric(server, "seqdefer_cohorts_running") == 0)
        assert metric(server, "seqdefer_queue_length") == 0


def test_labels_are_escaped() -> None:
    metrics = Metrics()
    metrics.count("seqdefer_requests_total", {"path": 'a"b\\c\nd'})
    assert 'seqdefer_requests_total{path="a\\"b\\\\c\\nd"} 1' in metrics.render()


def test_a_histogram_adds_up() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.005, 0.3, 1000):
        metrics.observe_seconds(seconds, {"path": "/"})
    lines = metrics.render().splitlines()
    buckets = [int(line.split()[-1]) for line in lines if "_bucket" in line]
    assert buckets == sorted(buckets)
    assert buckets[0] == 2  # at most 0.005
    assert buckets[-1] == 4
    assert 'seqdefer_request_seconds_sum{path="/"} 1000.306' in lines


# -- texts ---------------------------------------------------------------------------------------------------------


def documents(n: int, most: int = 12) -> list[str]:
    generator = random.Random(3)
    return [" ".join(f"w{generator.randrange(3, 60)}" for _ in range(generator.randint(1, most))) for _ in range(n)]


@cache
def text_model() -> DeferringModel:
    """A tiny pair of Hugging Face models and a rejector with random weights. Nobody may change it."""
    pytest.importorskip("transformers", reason="needs the extra 'text'")
    from tiny_models import tiny_pair

    from seqdefer.tasks.text.task import TextOptions, codec_of

    pair = tiny_pair("t5")
    codec = codec_of(TextOptions(length=LENGTH, input_tokens=16), pair)
    served = Served(pair.predictor, pair.expert, SequenceSpec(LENGTH, pair.predictor.end), codec)
    drafted = draft(served.predictor, codec.encode(documents(8)), served.spec)
    torch.manual_seed(0)
    sizes = Sizes(drafted.context.shape[1], drafted.features.shape[2], LENGTH, True, layers=1, units=8, dropout=0.0)
    rejector = LSTMRejector(sizes, served.predictor.fingerprint).eval()
    rejector.standardise(drafted.context, step_inputs(drafted.features, drafted.uncertainty, drafted.entropy)[:, 0])
    model = DeferringModel(served, rejector)
    model.calibrate(documents(24))
    return model


@pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning")
def test_texts_of_different_lengths_are_written_as_if_alone() -> None:
    model, texts = text_model(), documents(32)
    budgets = [BUDGETS[place % len(BUDGETS)] for place in range(32)]
    with running(model) as server, ThreadPoolExecutor(32) as pool:

        def ask(text: str, budget: float) -> Any:
            return server.client.completions.create(model=f"toy@{budget}", prompt=text)

        answers = list(pool.map(ask, texts, budgets))
    for text, budget, answer in zip(texts, budgets, answers, strict=True):
        written = alone(model, text, budget)
        assert answer.choices[0].text == written.outputs[0]
        assert answer.choices[0].finish_reason == ("stop" if written.sequences.tokens[0, -1] < 2 else "length")
        assert answer.usage.prompt_tokens == len(text.split())
        check_usage(answer.usage, written)


def test_a_text_that_is_cut_is_remarked() -> None:
    with running(text_model()) as server:
        answer = server.client.completions.create(model="toy", prompt=" ".join(["w5"] * 40))
    assert answer.usage.prompt_tokens == 16
    assert "were cut" in answer.deferral["remarks"][0]


@pytest.mark.parametrize("text", ["", "  ", "\ud800"])
def test_what_is_no_text_is_refused(text: str) -> None:
    with running(text_model()) as server:
        answer = server.post("/v1/completions", json.dumps({"model": "toy", "prompt": text}).encode())
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert server.client.completions.create(model="toy", prompt="w5").choices[0].text
