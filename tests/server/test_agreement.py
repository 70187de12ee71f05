"""Whoever asks for the same gets the same: whole or streamed, by completion, chat or deferral, and from Python."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_pair import METHODS

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("openai", reason="needs the official client: pip install openai")

from tests.server.test_app import NumberCodec, Running, running, toy_model, with_parts

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::seqdefer.model.deferring_model.BudgetWarning"),
]
# Two halves of an emoji, half a letter that is written from right to left, an accent that joins what is before it.
PARTS = (b"\xf0\x9f", b"\x98\x80", "\u0301".encode(), b"\xd7", b"e")
BUDGETS = st.one_of(st.floats(0, 1), st.sampled_from([0, 1, 1e-9, 0.205, 1 - 1e-9]))


class ByteCodec(NumberCodec):
    """Letters take several tokens, or never become whole."""

    def text(self, tokens: Sequence[Any]) -> str:
        return b"".join(PARTS[token] for token in tokens).decode(errors="replace")


@pytest.fixture(scope="module", params=METHODS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Running, Any]]:
    model = with_parts(toy_model(request.param), codec=ByteCodec())
    with running(model) as started:
        yield started, model


def events_of(answer: Any) -> list[dict[str, Any]]:
    *parts, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@given(numbers=st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=3), budget=BUDGETS)
@settings(max_examples=25, deadline=None)
def test_every_way_of_asking_gives_the_same(server: tuple[Running, Any], numbers: list[int], budget: float) -> None:
    (started, model), texts = server, [str(number) for number in numbers]
    written = list(model.generate(texts, budget).rows(model.served.codec))  # and so does: seqdefer generate --json
    outputs, tokens = [row["output"] for row in written], [row["tokens"] for row in written]
    body = {"model": "toy", "deferral": {"budget": budget}}

    whole = started.post("/v1/completions", {**body, "prompt": texts}).json()
    assert [choice["text"] for choice in whole["choices"]] == outputs
    assert whole["usage"]["expert_tokens"] == sum(row["expert_tokens"] for row in written)
    assert whole["usage"]["predictor_tokens"] == sum(row["predictor_tokens"] for row in written)
    assert whole["usage"]["switches"] == sum(row["switches"] for row in written)
    assert whole["usage"]["completion_tokens"] == sum(map(len, tokens))

    asked = {**body, "prompt": texts, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, closing = events_of(started.post("/v1/completions", asked))
    assert (closing["usage"], closing["deferral"]) == (whole["usage"], whole["deferral"])
    for place, output in enumerate(outputs):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == place]
        assert "".join(chunk["choices"][0]["text"] for chunk in own) == output
        assert [chunk["deferral"]["author"] for chunk in own] == [token["source"] for token in tokens[place]]

    ours = started.post("/v1/deferral/complete", {**body, "inputs": texts}).json()
    assert [row["output"] for row in ours["data"]] == outputs
    assert (ours["usage"], ours["deferral"]) == (whole["usage"], whole["deferral"])
    for row, told in zip(ours["data"], tokens, strict=True):
        assert [token["token"] for token in row["tokens"]] == [token["token"] for token in told]
        assert [token["author"] for token in row["tokens"]] == [token["source"] for token in told]
        assert "".join(token["text"] for token in row["tokens"]) == row["output"]

    said = [{"role": "user", "content": texts[0]}]
    chat = started.post("/v1/chat/completions", {**body, "messages": said}).json()
    assert chat["choices"][0]["message"]["content"] == outputs[0]
    pieces = list(model.stream(texts[0], budget))
    assert "".join(piece.text for piece in pieces) == outputs[0]
    assert [piece.source for piece in pieces] == [token["source"] for token in tokens[0]]
