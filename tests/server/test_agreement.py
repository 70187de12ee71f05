"""The same request gives the same output: whole or streamed, by completion, chat or deferral, and from Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import (
    CHAT,
    COMPLETE,
    COMPLETIONS,
    IGNORE_BUDGETS,
    NumberCodec,
    RunningServer,
    events_of,
    running,
    toy_model,
    with_parts,
)
from toy_pair import METHODS

pytestmark = IGNORE_BUDGETS
# Two halves of an emoji, half a right-to-left letter, an accent that joins the character before it.
PARTS = (b"\xf0\x9f", b"\x98\x80", "\u0301".encode(), b"\xd7", b"e")
BUDGETS = st.one_of(st.floats(0, 1), st.sampled_from([0, 1, 1e-9, 0.205, 1 - 1e-9]))


class ByteCodec(NumberCodec):
    """Characters take several tokens, or never become complete."""

    def text(self, tokens: Sequence[Any]) -> str:
        return b"".join(PARTS[token] for token in tokens).decode(errors="replace")


@pytest.fixture(scope="module", params=METHODS)
def byte_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    model = with_parts(toy_model(request.param), codec=ByteCodec())
    assert model.calibration is not None
    # Every input is asked for several times, which is drift: answers would differ by a warning.
    model.calibration = replace(model.calibration, reference=None)
    with running(model) as started:
        yield started


@given(numbers=st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=3), budget=BUDGETS)
@settings(max_examples=25, deadline=None)
def test_all_routes_give_the_same_output(byte_server: RunningServer, numbers: list[int], budget: float) -> None:
    server, model, texts = byte_server, byte_server.model, [str(number) for number in numbers]
    written = list(model.generate(texts, budget).rows(model.served.codec))  # what `seqdefer generate --json` prints
    outputs, tokens = [row["output"] for row in written], [row["tokens"] for row in written]
    authors = [[token["source"] for token in row] for row in tokens]
    body = {"model": "toy", "deferral": {"budget": budget}}

    whole = server.post(COMPLETIONS, {**body, "prompt": texts}).json()
    assert [choice["text"] for choice in whole["choices"]] == outputs
    for name in ("expert_tokens", "predictor_tokens", "switches"):
        assert whole["usage"][name] == sum(row[name] for row in written)
    assert whole["usage"]["completion_tokens"] == sum(map(len, tokens))

    streamed = {**body, "prompt": texts, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of(server.post(COMPLETIONS, streamed))
    assert (last["usage"], last["deferral"]) == (whole["usage"], whole["deferral"])
    for place, output in enumerate(outputs):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == place]
        assert "".join(chunk["choices"][0]["text"] for chunk in own) == output
        assert [chunk["deferral"]["author"] for chunk in own] == authors[place]

    ours = server.post(COMPLETE, {**body, "inputs": texts}).json()
    assert [row["output"] for row in ours["data"]] == outputs
    assert (ours["usage"], ours["deferral"]) == (whole["usage"], whole["deferral"])
    for place, row in enumerate(ours["data"]):
        assert [token["token"] for token in row["tokens"]] == [token["token"] for token in tokens[place]]
        assert [token["author"] for token in row["tokens"]] == authors[place]
        assert "".join(token["text"] for token in row["tokens"]) == row["output"]

    chat = server.post(CHAT, {**body, "messages": [{"role": "user", "content": texts[0]}]}).json()
    assert chat["choices"][0]["message"]["content"] == outputs[0]
    pieces = list(model.stream(texts[0], budget))
    assert "".join(piece.text for piece in pieces) == outputs[0]
    assert [piece.source for piece in pieces] == authors[0]
