"""Log-probabilities: those of the model that wrote the token, in both of OpenAI's forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from servers import (
    CHAT,
    COMPLETIONS,
    IGNORE_BUDGETS,
    FaultyExpert,
    RunningServer,
    check_error,
    events_of,
    inputs_of,
    running,
    toy_model,
    with_parts,
)

from seqdefer.interfaces import Served
from seqdefer.server.log_probs import MIN_LOG_PROB, RowLogProbs
from seqdefer.types import EXPERT, PREDICTOR

pytestmark = IGNORE_BUDGETS
MESSAGES = [{"role": "user", "content": "13"}]


def step_by_step(served: Served, one: Any, tokens: list[int], author: int) -> list[float]:
    """Return log p of all tokens under one model, which appends one token after the other."""
    example, place, found = served.codec.encode([one]), torch.tensor([0]), []
    model: Any = (served.predictor if author == PREDICTOR else served.expert).with_log_probs()  # type: ignore[attr-defined]
    state = model.start(example.inputs)[0] if author == PREDICTOR else model.start(example)
    for token in tokens:
        if author == EXPERT:
            state = model.next(state, place)[1]
        told = model.log_probs(state) if author == PREDICTOR else model.log_probs(state, place)
        found.append(float(told[0, token]))
        state = model.append(state, torch.tensor([token]))
    return found


@pytest.mark.parametrize("kind", ["server", "text_server"])
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_each_token_has_the_log_probability_of_its_author(
    kind: str, budget: float, request: pytest.FixtureRequest
) -> None:
    server, prompt = request.getfixturevalue(kind), "13" if kind == "server" else "w3 w7 w11"
    served, written = server.model.served, server.model.generate([prompt], budget)
    length = int(written.rollout.sequences.lengths[0])
    tokens = written.rollout.sequences.tokens[0, :length].tolist()
    authors = written.rollout.authors[0, :length].tolist()
    by_author = [step_by_step(served, prompt, tokens, author) for author in (PREDICTOR, EXPERT)]
    expected = [by_author[author][place] for place, author in enumerate(authors)]

    told = server.complete(prompt, budget, logprobs=3).choices[0].logprobs
    assert told.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert told.authors == [served.authors[author] for author in authors]
    assert told.tokens == [served.codec.text([token]) for token in tokens]
    # Decoding is greedy, so what an author writes is what it finds likeliest.
    best = [max(top.values()) for top in told.top_logprobs]
    assert told.token_logprobs == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("method", ["OneTimeModel", "OneTimeCost"])
def test_hand_offs_have_the_log_probabilities_of_their_authors(method: str) -> None:
    model = toy_model(method)
    with running(model) as server:
        for prompt in inputs_of(4):
            told = server.complete(prompt, 0.5, logprobs=1).choices[0].logprobs
            assert told.token_logprobs == pytest.approx([max(top.values()) for top in told.top_logprobs])
            assert told.authors == model.generate([prompt], 0.5).sources[0]


def test_offsets_are_places_in_the_text(server: RunningServer) -> None:
    choice = server.complete("13", 0.5, logprobs=0).choices[0]
    assert choice.logprobs.text_offset == list(range(len(choice.text)))  # one letter a token
    assert [choice.text[offset] for offset in choice.logprobs.text_offset] == choice.logprobs.tokens
    assert choice.logprobs.top_logprobs == [{} for _ in choice.text]


def test_chats_and_streams_tell_the_same(server: RunningServer) -> None:
    whole = server.complete("13", 0.5, logprobs=2).choices[0].logprobs
    options = {"model": "toy@0.5", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    chat = server.client.chat.completions.create(**options).choices[0].logprobs.content
    assert [one.token for one in chat] == whole.tokens
    assert [one.logprob for one in chat] == whole.token_logprobs
    assert [one.author for one in chat] == whole.authors
    assert [{top.token: top.logprob for top in one.top_logprobs} for one in chat] == whole.top_logprobs
    assert bytes(chat[0].bytes).decode() == chat[0].token
    events = events_of(server.post(CHAT, {**options, "stream": True}))
    streamed = [one for event in events for one in event["choices"][0]["logprobs"]["content"]]
    assert [one["logprob"] for one in streamed] == whole.token_logprobs
    events = events_of(server.post(COMPLETIONS, {"model": "toy@0.5", "prompt": "13", "logprobs": 2, "stream": True}))
    parts = [event["choices"][0]["logprobs"] for event in events]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "authors"):
        assert [one for part in parts for one in part[key]] == getattr(whole, key)


def test_impossible_tokens_have_a_finite_number() -> None:
    served = toy_model().served

    class Sure:
        def start(self, inputs: Any) -> Any:
            return None, None

        def log_probs(self, state: Any) -> Any:
            return torch.tensor([[0.0, -math.inf, -math.inf]])

    row = RowLogProbs(served, served.codec.encode(["13"]), 2)
    row._models = (Sure(), None)
    told = row.read([1], PREDICTOR)
    assert told.log_prob == MIN_LOG_PROB
    assert [one.log_prob for one in told.likeliest] == [0.0, MIN_LOG_PROB]


def test_models_that_tell_none() -> None:
    model = with_parts(toy_model(), expert=FaultyExpert(toy_model().served.expert))
    with running(model) as server:
        for path, fields in (
            (COMPLETIONS, {"prompt": "13", "logprobs": 0}),
            (CHAT, {"messages": MESSAGES, "logprobs": True}),
        ):
            error = check_error(server.post(path, {"model": "toy", **fields}), 400, "gives no log-probabilities")
            assert error["param"] == "logprobs"
        schemas = server.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["CompletionRequest"]["properties"]["logprobs"] == {"type": "null"}
