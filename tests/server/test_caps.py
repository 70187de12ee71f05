"""Caps and money in requests and answers: caps hold, answers say where they bite and what was spent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from servers import (
    COMPLETE,
    COMPLETIONS,
    LENGTH,
    NumberCodec,
    check_error,
    events_of,
    inputs_of,
    running,
    text_model,
    toy_model,
    with_parts,
)
from toy_pair import Toy, numbers

from seqdefer.budgets.caps import Cap
from seqdefer.budgets.prices import Prices, Rates
from seqdefer.budgets.quality import QualityPromise
from seqdefer.errors import OptionError
from seqdefer.model.served_log import ServedLog
from seqdefer.server.app import create_app
from seqdefer.server.request import BROKEN_PROMISE
from seqdefer.server.transcriptions import TranscriptionRequest

pytest.importorskip("openai", reason="needs openai: pip install openai")

PRICES = Prices(Rates(output=1e5), Rates(input=1e5, output=1e6, call=0.5), "EUR")


@pytest.fixture(scope="module")
def priced() -> Iterator[Any]:
    model = with_parts(toy_model())
    model.use_prices(PRICES)
    with running(model, caps=(Cap(tokens=3),)) as started:
        yield started


def ask(server: Any, inputs: list[str], **deferral: Any) -> Any:
    return server.post(COMPLETE, {"model": "toy", "inputs": inputs, "deferral": deferral})


def expert_tokens(answer: Any) -> list[int]:
    return [sum(token["author"] == "expert" for token in one["tokens"]) for one in answer["data"]]


@pytest.mark.parametrize("policy", ["cut-off", "rising"])
def test_a_cap_of_a_request_holds_and_is_told(server: Any, policy: str) -> None:
    cap = {"tokens": 5, "per": "request", "policy": policy}
    answer = ask(server, inputs_of(4), budget=1.0, cap=cap).json()
    counts = expert_tokens(answer)
    assert 0 < sum(counts) <= 5
    wanted = sum(token["defer"] for one in answer["data"] for token in one["tokens"])
    assert answer["deferral"]["capped"] == wanted - sum(counts) > 0
    model = server.model
    caps = [Cap(tokens=5, per="request", policy=policy)]  # type: ignore[arg-type]
    assert answer["usage"]["expert_tokens"] == sum(model.generate(inputs_of(4), 1.0, cap=caps).expert_tokens)


def test_a_cap_that_does_not_bite_is_told_too(server: Any) -> None:
    answer = ask(server, inputs_of(2), budget=0.2, cap={"passes": 99}).json()
    assert answer["deferral"]["capped"] == 0
    assert "capped" not in ask(server, inputs_of(2), budget=0.2).json()["deferral"]


def test_streams_and_names_with_a_budget(server: Any) -> None:
    body = {"model": "toy@1.0", "prompt": "13", "stream": True, "deferral": {"cap": {"tokens": 2}}}
    *_, last = events_of(server.post(COMPLETIONS, body))
    assert last["deferral"]["capped"] > 0
    cut = {"deferral": {"cap": {"tokens": 2, "policy": "cut-off"}}}
    assert server.complete("13", 1.0, extra_body=cut).usage.expert_tokens == 2


def test_the_caps_of_a_server_hold_for_all(priced: Any) -> None:
    for own in ({}, {"cap": {"tokens": 9}}, {"cap": {"tokens": 1}}):
        counts = expert_tokens(ask(priced, inputs_of(5), budget=1.0, **own).json())
        assert max(counts) <= (1 if own.get("cap") == {"tokens": 1} else 3)
    described = priced.get("/v1/deferral").json()
    assert described["caps"] == [{"tokens": 3, "passes": None, "money": None, "per": "sequence", "policy": "rising"}]
    assert described["currency"] == "EUR"


def test_nothing_is_promised_under_a_cap(tmp_path: Path) -> None:
    """A cap changes what is written, so that neither a promised budget nor a promised quality holds."""
    model = Toy.of(length=LENGTH).model("OneTimeModel")
    model.calibrate(numbers(60), guarantee="expected")
    model, cap = with_parts(model, codec=NumberCodec()), Cap(tokens=9)
    quality = QualityPromise(0.0, 0.4, 2.0, 1.5, 60, 1.0, 0.9, "loss", model.rejector.fingerprint)
    with running(model, quality=quality) as server:
        for budget in ({}, {"budget": 0.5}):
            capped = ask(server, inputs_of(2), **budget, cap={"tokens": 9}).json()["deferral"]
            assert "promise" not in capped
            assert BROKEN_PROMISE in capped["remarks"]
            free = server.post(COMPLETE, {"model": "toy", "inputs": inputs_of(2), "deferral": budget or None}).json()
            assert free["deferral"]["promise"]
            assert BROKEN_PROMISE not in free["deferral"].get("remarks", [])
        assert server.get("/v1/deferral").json()["promise"] is not None
    with running(model, caps=(cap,)) as server:
        assert server.get("/v1/deferral").json()["promise"] is None
    with pytest.raises(OptionError, match="leave out --within"):
        create_app(model, "toy", caps=[cap], quality=quality)
    log = ServedLog(tmp_path / "served.jsonl", 1)
    with pytest.raises(OptionError, match="leave out --served-log"):
        create_app(model, "toy", caps=[cap], served_log=log)
    log.close()


def test_answers_have_money(priced: Any) -> None:
    answer = ask(priced, inputs_of(3), budget=1.0).json()
    bills = [
        PRICES.bill(1, [int(token["author"] == "expert") for token in one["tokens"]], by_token=True)
        for one in answer["data"]
    ]
    money = answer["deferral"]["money"]
    assert money["currency"] == "EUR"
    assert money["expert"] == pytest.approx(sum(bill.expert for bill in bills))
    assert money["spent"] == pytest.approx(money["predictor"] + money["expert"])
    assert money["saved"] == pytest.approx(money["expert_alone"] - money["spent"])
    assert money["saved"] < 0 or money["spent"] < money["expert_alone"]


def test_budgets_and_caps_in_money(priced: Any) -> None:
    answer = ask(priced, inputs_of(3), budget=1.0, cap={"money": 2.0}).json()
    bills = [sum(token["author"] == "expert" for token in one["tokens"]) for one in answer["data"]]
    assert max(bills) == 1  # a call and a token cost 1.6 or more
    poor, rich = (ask(priced, ["13"], budget_money=money).json()["deferral"]["budget"] for money in (2.5, 9.0))
    assert 0 < poor < rich


@pytest.mark.parametrize(
    ("deferral", "message"),
    [
        ({"cap": {}}, "a cap limits nothing; give tokens, passes or money"),
        ({"cap": {"tokens": -1}}, "deferral.cap.tokens"),
        ({"cap": {"token": 1}}, "unknown field; leave it out"),
        ({"cap": {"money": 1.0}}, "a cap in money needs prices, and this server has none"),
        ({"budget_money": 1.0}, "a budget in money needs prices; give --prices FILE"),
        ({"budget": 0.2, "budget_money": 1.0}, "give either budget or budget_money"),
    ],
)
def test_bad_caps(server: Any, deferral: dict[str, Any], message: str) -> None:
    check_error(ask(server, ["13"], **deferral), 400, message)


def test_too_little_money(priced: Any) -> None:
    message = "a budget of 0.001 EUR is too small: the predictor alone costs about"
    check_error(ask(priced, ["13"], budget_money=0.001), 400, message)


def test_caps_in_forms() -> None:
    fields = {"file": b"x", "model": "toy", "deferral[cap][tokens]": "5", "deferral[cap][policy]": "cut-off"}
    assert TranscriptionRequest.model_validate(fields).options.cap.cap() == Cap(tokens=5, policy="cut-off")
    assert TranscriptionRequest.model_validate({"file": b"x", "model": "toy"}).options.cap is None
    both = {**fields, "deferral[budget]": "0.2", "deferral[budget_money]": "1"}
    with pytest.raises(ValueError, match="give either"):
        TranscriptionRequest.model_validate(both)


@pytest.mark.slow
def test_caps_hold_under_load() -> None:
    """`python -m benchmarks.caps --requests 10000` sends more."""
    from benchmarks import caps

    with running(caps.toy_model()) as server:
        found = asyncio.run(caps.send_all(server.address, "toy", 500, 50))
    assert found.requests == 500
    assert found.capped > 0
    assert found.exceeded == 0


def test_remarks_are_not_those_of_other_requests() -> None:
    """Inputs of requests with a budget in money are encoded by the event loop, and others meanwhile by a thread: each
    caught the other's warnings."""
    model = with_parts(text_model())
    model.use_prices(PRICES)
    long = " ".join(f"w{3 + place % 50}" for place in range(60))

    def ask_one(place: int) -> list[str]:
        is_long = place % 2 == 1
        deferral = {"budget_money": 50.0} if is_long else {"budget": 0.5}
        answer = ask(server, [long if is_long else "w5 w6"] * 3, **deferral).json()
        remarks: list[str] = answer["deferral"].get("remarks", [])
        return remarks if not is_long else []

    with running(model) as server, ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask_one, range(120)))
    assert not any("truncated" in remark for remarks in found for remark in remarks)
