"""Answers and `/v1/deferral` say what a calibration guarantees, and on what condition."""

from __future__ import annotations

import pytest
from servers import LENGTH, FaultyExpert, NumberCodec, fail, running, toy_model, with_parts
from toy_pair import Toy, numbers

from seqdefer.budgets.quality import QualityPromise
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


def test_a_measurement_promises_nothing() -> None:
    with running(toy_model()) as server:
        assert "promise" not in server.complete("13", 0.5).deferral
        assert server.get("/v1/deferral").json()["promise"] is None


def test_nothing_is_promised_about_texts_that_are_cut_or_left_to_the_predictor() -> None:
    """`stop` and a smaller `max_tokens` change shares and losses, and an expert that fails gives no quality."""
    model = Toy.of(length=LENGTH).model("TokenwiseModel")
    model.calibrate(numbers(60), guarantee="expected")
    quality = QualityPromise(0.0, 0.4, 2.0, 1.5, 60, 1.0, 0.9, "loss", model.rejector.fingerprint)
    expert = FaultyExpert(model.served.expert, None)
    with running(with_parts(model, codec=NumberCodec(), expert=expert), quality=quality) as server:
        for name in ("toy", "toy@0.50"):
            asked = {"model": name, "prompt": "13"}
            for cut in ({"stop": ["9 9 9"]}, {"max_tokens": LENGTH - 1}):
                deferral = server.post("/v1/completions", {**asked, **cut}).json()["deferral"]
                assert "promise" not in deferral
                assert deferral["remarks"] == [BROKEN_PROMISE]
            for whole in ({}, {"max_tokens": LENGTH}):
                assert server.post("/v1/completions", {**asked, **whole}).json()["deferral"]["promise"]
        expert.fault = fail
        degraded = server.complete("13", 1.0).deferral
        assert degraded["degraded"]
        assert "promise" not in degraded
        *_, last = server.complete("13", 1.0, stream=True)
        assert "promise" not in last.deferral
