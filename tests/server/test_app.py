"""The API with OpenAI's own client: every request gets what the model writes for it alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from servers import BUDGETS, IGNORE_BUDGETS, LENGTH, RunningServer, documents, inputs_of, running, text_model, toy_model
from toy_pair import METHODS, Toy

from seqdefer.errors import OptionError
from seqdefer.model.calibrated_pair import BudgetWarning
from seqdefer.model.generation import Generation
from seqdefer.server.app import create_app

openai = pytest.importorskip("openai", reason="needs openai: pip install openai")

each_method = pytest.mark.parametrize("method", METHODS)


def check_usage(usage: Any, written: Generation) -> None:
    assert usage.predictor_tokens == sum(written.predictor_tokens)
    assert usage.expert_tokens == sum(written.expert_tokens)
    assert usage.switches == sum(written.switches)
    assert usage.completion_tokens == usage.predictor_tokens + usage.expert_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@each_method
@IGNORE_BUDGETS
def test_concurrent_requests_equal_single_ones(method: str) -> None:
    """32 requests at the same time with different budgets, half of them streamed, some of them chats."""
    model, inputs = toy_model(method), inputs_of(32)
    budgets = [BUDGETS[place % len(BUDGETS)] for place in range(32)]
    with running(model) as server:

        def ask(place: int) -> tuple[str, list[str] | None, Any]:
            prompt, budget = inputs[place], budgets[place]
            if place % 4 == 0:
                whole = server.complete(prompt, budget)
                return whole.choices[0].text, None, whole.usage
            if place % 4 == 1:
                messages = [{"role": "user", "content": prompt}]
                chat = server.client.chat.completions.create(model=f"toy@{budget}", messages=messages)
                return chat.choices[0].message.content, None, chat.usage
            *chunks, last = server.complete(prompt, budget, stream=True, stream_options={"include_usage": True})
            texts, authors = [one.choices[0].text for one in chunks], [one.deferral["author"] for one in chunks]
            return "".join(texts), authors, last.usage

        with ThreadPoolExecutor(32) as pool:
            responses = list(pool.map(ask, range(32)))
        server.wait_until_idle()
    for one, budget, (text, authors, usage) in zip(inputs, budgets, responses, strict=True):
        written = model.generate([one], budget)
        assert text == written.outputs[0]
        assert authors in (None, written.sources[0])
        check_usage(usage, written)


def test_chat_stream(server: RunningServer) -> None:
    written = toy_model().generate(["13"], 0.5)
    messages = [{"role": "user", "content": [{"type": "text", "text": "13"}]}]
    chunks = list(
        server.client.chat.completions.create(
            model="toy", messages=messages, stream=True, extra_body={"deferral": {"budget": 0.5}}
        )
    )
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == written.outputs[0]
    assert [chunk.deferral["author"] for chunk in chunks] == written.sources[0]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1].deferral["budget"] == 0.5
    assert chunks[-1].deferral["degraded"] is False
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_several_prompts_in_one_request(server: RunningServer) -> None:
    inputs = inputs_of(5)
    whole, written = server.complete(inputs, 0.5), toy_model().generate(inputs, 0.5)
    assert [choice.index for choice in whole.choices] == list(range(5))
    assert [choice.text for choice in whole.choices] == written.outputs
    check_usage(whole.usage, written)
    texts, shares = [""] * 5, [0.0] * 5
    for chunk in server.complete(inputs, 0.5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason is not None:
            shares[chunk.choices[0].index] = chunk.deferral["share"]
    assert texts == written.outputs
    assert len(set(shares)) > 1  # one share per text, not that of all texts so far
    assert shares == [pytest.approx(row.count("expert") / len(row)) for row in written.sources]


def test_max_tokens_below_the_length(server: RunningServer) -> None:
    written = toy_model().generate(["13"], 0.5)
    n = len(written.sources[0])
    for limit in range(1, n + 1):
        response = server.complete("13", 0.5, max_tokens=limit)
        assert response.choices[0].text == written.outputs[0][:limit]
        assert response.choices[0].finish_reason == ("length" if limit < n else "stop")
        assert response.usage.completion_tokens == limit
        assert response.usage.expert_tokens == written.sources[0][:limit].count("expert")


def test_max_tokens_beyond_the_length(server: RunningServer) -> None:
    """Clients send limits meant for other models: they get the whole output and a remark."""
    written = toy_model().generate(["13"], 0.5)
    for limit in (LENGTH + 1, 256, 10**30):
        response = server.complete("13", 0.5, max_tokens=limit)
        assert response.choices[0].text == written.outputs[0]
        assert response.deferral["remarks"] == [f"max_tokens is {limit}; this model writes at most {LENGTH} tokens"]
    body = {"model": "toy@0.5", "messages": [{"role": "user", "content": "13"}], "max_tokens": 5}
    chat = server.post("/v1/chat/completions", {**body, "max_completion_tokens": 99}).json()
    assert chat["choices"][0]["message"]["content"] == written.outputs[0]
    assert chat["deferral"]["remarks"] == [f"max_completion_tokens is 99; this model writes at most {LENGTH} tokens"]


def test_models(server: RunningServer) -> None:
    names = [one.id for one in server.client.models.list()]
    assert names[0] == "toy"
    assert "toy@0.20" in names
    for name in (*names, "toy@0.25", "toy@0", "toy@1.000", "toy@0.12345"):  # every name that completions accept
        assert server.client.models.retrieve(name).id == name
    for name in ("others/model", "toy@2", "toy@", "toy2", "toy@0.25@0.25"):
        with pytest.raises(openai.NotFoundError):
            server.client.models.retrieve(name)


def test_default_budget() -> None:
    with running(toy_model(), budget=0.75) as server:
        response = server.client.completions.create(model="toy", prompt="13")
        assert response.deferral["budget"] == 0.75
        check_usage(response.usage, toy_model().generate(["13"], 0.75))
    with pytest.raises(OptionError, match="budget is 7"):
        create_app(toy_model(), "toy", budget=7)


def test_unattainable_budget_gets_a_remark() -> None:
    model = toy_model("OneTimeModel")
    with running(model) as server:
        response = server.complete("13", 1)
    with pytest.warns(BudgetWarning):
        written = model.generate(["13"], 1.0)
    assert response.choices[0].text == written.outputs[0]
    assert "cannot be met" in response.deferral["remarks"][0]


def test_uncalibrated_model_is_not_served() -> None:
    with pytest.raises(OptionError, match="seqdefer calibrate"):
        create_app(Toy.of(length=4).model("TokenwiseModel"), "toy")


@each_method
def test_scores_equal_decide_and_need_no_expert(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = toy_model(method), inputs_of(4)
    decided = model.decide(inputs, 0.5)
    with running(model) as server:
        monkeypatch.setattr(type(model.served.expert), "next", None)
        monkeypatch.setattr(type(model.served.expert), "complete", None)
        response = server.post("/v1/deferral/score", {"model": "toy@0.5", "inputs": inputs}).json()
    assert response["object"] == "deferral.score"
    for place, row in enumerate(response["data"]):
        n = int(decided.sequences.lengths[place])
        assert row["text"] == decided.outputs[place]
        assert [token["token"] for token in row["tokens"]] == decided.sequences.tokens[place, :n].tolist()
        assert [token["defer"] for token in row["tokens"]] == decided.defer[place, :n].tolist()
        assert {token["author"] for token in row["tokens"]} == {"predictor"}
        torch.testing.assert_close(
            torch.tensor([token["score"] for token in row["tokens"]]), decided.scores[place, :n], check_dtype=False
        )


def test_description_loads_nothing_from_other_sites(server: RunningServer) -> None:
    assert "/v1/deferral/score" in server.get("/openapi.json").json()["paths"]
    assert "://" not in server.get("/docs").text
    assert "access-control-allow-origin" not in server.get("/health", headers={"origin": "http://else.where"}).headers


# -- texts ---------------------------------------------------------------------------------------------------------


@IGNORE_BUDGETS
def test_texts_of_different_lengths_equal_single_ones(text_server: RunningServer) -> None:
    model, texts = text_model(), documents(32)
    budgets = [BUDGETS[place % len(BUDGETS)] for place in range(32)]
    with ThreadPoolExecutor(32) as pool:
        responses = list(pool.map(text_server.complete, texts, budgets))
    for text, budget, response in zip(texts, budgets, responses, strict=True):
        written = model.generate([text], budget)
        assert response.choices[0].text == written.outputs[0]
        assert response.choices[0].finish_reason == ("stop" if written.sequences.tokens[0, -1] < 2 else "length")
        assert response.usage.prompt_tokens == len(text.split())
        check_usage(response.usage, written)


def test_truncated_text_gets_a_remark(text_server: RunningServer) -> None:
    response = text_server.complete(" ".join(["w5"] * 40), 0.5)
    assert response.usage.prompt_tokens == 16
    assert len(response.deferral["remarks"]) == 1


@pytest.mark.parametrize("text", ["", "  ", "\ud800"])
def test_invalid_text_is_refused(text_server: RunningServer, text: str) -> None:
    response = text_server.post("/v1/completions", json.dumps({"model": "toy", "prompt": text}).encode())
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert text_server.complete("w5", 0.5).choices[0].text
