"""Answers and `/v1/deferral` say what a calibration guarantees, and on what condition."""

from __future__ import annotations

from typing import Any

import pytest
from servers import LENGTH, NumberCodec, running, toy_model, with_parts
from toy_pair import Toy, numbers

from seqdefer.server.request import BROKEN_PROMISE

pytest.importorskip("openai", reason="needs openai: pip install openai")


def test_answers_say_what_is_promised() -> None:
    model = Toy.of(length=LENGTH).model("OneTimeCost")
    found = model.calibrate(numbers(60), guarantee="confident", confidence=0.8, share_of="inputs")
    assert found.promise is not None
    with running(with_parts(model, codec=NumberCodec()), budget=0.4) as server:
        answer = server.complete("13", 0.5)
        assert answer.deferral["promise"] == found.promise.in_words(0.5)
        assert "remarks" not in answer.deferral
        *_, last = server.complete("13", 0.5, stream=True)
        assert last.deferral["promise"] == found.promise.in_words(0.5)
        remarks = server.complete("13", 0.01).deferral["remarks"]
        assert "a budget of 0.01 cannot be promised from 60 inputs, so the expert writes nothing" in remarks[0]
        remarks = server.complete("13", "0.000001").deferral["remarks"]
        assert remarks[0].startswith("a budget of 1e-06 is below 0.01, the least calibrated one")
        described = server.get("/v1/deferral").json()["promise"]
    assert described == {
        "guarantee": "confident",
        "share_of": "inputs",
        "confidence": 0.8,
        "inputs": 60,
        "bound": "betting",
        "words": found.promise.in_words(0.4),
    }


def test_nothing_is_promised_about_sequences_that_a_request_cuts_off() -> None:
    """The calibration wrote whole sequences. Their first tokens may be the expert's, so that a part of them spends more
    than was promised: answers promised it all the same."""
    model = Toy.of(length=LENGTH).model("OneTimeCost")
    model.calibrate(numbers(60), guarantee="confident", confidence=0.8)
    limits: list[dict[str, Any]] = [{"max_tokens": LENGTH - 1}, {"stop": ["b"]}]
    with running(with_parts(model, codec=NumberCodec())) as server:
        for limit in limits:
            found = server.complete("13", 0.5, **limit).deferral
            assert "promise" not in found
            assert found["remarks"] == [BROKEN_PROMISE]
        assert server.complete("13", 0.5, max_tokens=LENGTH).deferral["promise"]


def test_a_measurement_promises_nothing() -> None:
    with running(toy_model()) as server:
        assert "promise" not in server.complete("13", 0.5).deferral
        assert server.get("/v1/deferral").json()["promise"] is None
