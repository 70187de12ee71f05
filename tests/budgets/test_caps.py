"""Hard caps always hold, at every granularity, and both loops write the same tokens under them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Hashing, toy_tasks
from toy_pair import Toy, numbers

from seqdefer.budgets.capped import Schedule
from seqdefer.budgets.caps import Allowance, Cap, allowances
from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.prices import Charge, Prices, Rates
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.pace import FixedPace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.errors import OptionError
from seqdefer.interfaces import DraftRejector
from seqdefer.methods.plans import HandOffPlan, write_all
from seqdefer.rejectors.confidence import ChowMean
from seqdefer.testing import ToyTask
from seqdefer.types import Draft, Rollout

LIMITS = st.one_of(st.none(), st.integers(0, 9))
PRICES = Prices(Rates(output=1.0), Rates(input=3e5, cached_input=1e5, output=2e6, call=0.5))
MONEY = st.one_of(st.none(), st.floats(0, 30))


@st.composite
def caps(draw: st.DrawFn) -> Cap:
    limits = draw(st.tuples(LIMITS, LIMITS, MONEY).filter(lambda found: any(one is not None for one in found)))
    per, policy = draw(st.sampled_from(["sequence", "request"])), draw(st.sampled_from(["cut-off", "rising"]))
    return Cap(*limits, per=per, policy=policy)


def schedule_for(task: ToyTask) -> Schedule:
    """Thresholds of `Hashing`, whose scores are even."""
    shares = tuple(step / 16 for step in range(17))
    length = task.spec.length
    return Schedule(shares, tuple(1 - share for share in shares), tuple(float(length - at) for at in range(length)))


def check(cap: Cap, rollout: Rollout, lengths: list[int], *, by_token: bool) -> None:
    """Count what the expert did, and compare with the cap."""
    rows = zip(rollout.authors.tolist(), rollout.sequences.lengths.tolist(), strict=True)
    authors = [row[:length] for row, length in rows]
    tokens = [sum(row) for row in authors]
    passes = tokens if by_token else [int(n > 0) for n in tokens]
    bills = [PRICES.bill(n, row, by_token=by_token).expert for n, row in zip(lengths, authors, strict=True)]
    combine: Any = max if cap.per == "sequence" else sum
    for limit, spent in ((cap.tokens, tokens), (cap.passes, passes), (cap.money, bills)):
        assert limit is None or combine(spent) <= limit * (1 + 1e-8)


@settings(max_examples=60, deadline=None)
@given(toy_tasks(7), caps(), st.sampled_from([-1.0, 0.3, 0.8]), st.integers(1, 5), st.data())
def test_caps_hold_by_token_and_both_loops_write_the_same(
    task: ToyTask, cap: Cap, threshold: float, ahead: int, data: st.DataObject
) -> None:
    examples, rejector, schedule = task.split("test"), Hashing(), schedule_for(task)
    lengths = [data.draw(st.integers(0, 5)) for _ in range(len(examples))]
    policy = Threshold(rejector, threshold, allowances([cap], lengths, PRICES), schedule)
    plain = roll_out(task.predictor, task.expert, examples, policy, task.spec)
    check(cap, plain, lengths, by_token=True)
    pace = FixedPace(ahead, data.draw(st.one_of(st.none(), st.integers(1, 2))), foresees=data.draw(st.booleans()))
    loop = speculative_loop(task.predictor, task.expert, policy, task.spec, pace)
    ahead_of = run_all(loop, examples)
    assert torch.equal(ahead_of.authors, plain.authors)
    assert torch.equal(ahead_of.sequences.tokens, plain.sequences.tokens)
    assert loop.work.chunks <= int(plain.deferred.sum())  # a pass settles at least one token


@settings(max_examples=40, deadline=None)
@given(toy_tasks(6), caps(), st.sampled_from([-math.inf, -1.0, 0.5]), st.data())
def test_caps_hold_for_whole_sequences(task: ToyTask, cap: Cap, threshold: float, data: st.DataObject) -> None:
    examples = task.split("test")
    lengths = [data.draw(st.integers(0, 5)) for _ in range(len(examples))]
    allowed = allowances([cap], lengths, PRICES)
    chosen = torch.full((len(examples),), threshold, dtype=torch.float64)
    found = write_all(HandOffPlan(task, ChowMean()), examples, chosen, task.spec, at_once=3, allowed=allowed)
    check(cap, found.rollout, lengths, by_token=False)


@settings(max_examples=40, deadline=None)
@given(caps(), st.sampled_from(["TokenwiseModel", "OneTimeModel", "OneTimeCost"]), st.sampled_from([0.3, 0.7, 1.0]))
def test_caps_hold_in_a_model(cap: Cap, method: str, budget: float) -> None:
    model = _calibrated(method)
    threshold = model.setting(budget).threshold if budget < 1 else -math.inf
    found = model.generate(numbers(5), threshold=threshold, cap=cap)
    check(cap, found.rollout, [1] * 5, by_token=model.is_token_level)
    free = model.generate(numbers(5), threshold=threshold)
    assert found.capped is not None
    for place, kept in enumerate(found.capped):
        is_same = found.sources[place] == free.sources[place]
        assert is_same or kept > 0  # where the cap changes anything, it says so


_MODELS: dict[str, Any] = {}


def _calibrated(method: str) -> Any:
    if method not in _MODELS:
        _MODELS[method] = Toy.of(length=6).model(method)
        _MODELS[method].calibrate(numbers(40))
        _MODELS[method].use_prices(PRICES)
    return _MODELS[method]


def test_streams_say_where_the_cap_bites() -> None:
    model = _calibrated("TokenwiseModel")
    tokens = list(model.stream(13, threshold=-math.inf, cap=Cap(tokens=2, policy="cut-off")))
    assert [token.source for token in tokens] == ["expert"] * 2 + ["predictor"] * (len(tokens) - 2)
    assert [token.capped for token in tokens] == [False] * 2 + [True] * (len(tokens) - 2)


def test_without_a_limit_nothing_changes() -> None:
    task = ToyTask(n=7, length=6)
    examples, rejector = task.split("test"), Hashing()
    free = roll_out(task.predictor, task.expert, examples, Threshold(rejector, 0.4), task.spec)
    capped = Threshold(rejector, 0.4, [Allowance(tokens=99)] * 7, schedule_for(task))
    found = roll_out(task.predictor, task.expert, examples, capped, task.spec)
    assert torch.equal(found.authors, free.authors)
    assert int(free.deferred.sum()) > 0


@settings(max_examples=30, deadline=None)
@given(toy_tasks(7), st.integers(0, 5))
def test_a_cap_of_what_is_spent_changes_nothing_and_a_smaller_one_does(task: ToyTask, n: int) -> None:
    examples, rejector = task.split("test"), Hashing()
    free = roll_out(task.predictor, task.expert, examples, Threshold(rejector, 0.3), task.spec)
    rows = zip(free.authors.tolist(), free.sequences.lengths.tolist(), strict=True)
    bills = [PRICES.bill(n, row[:length], by_token=True).expert for row, length in rows]
    for part in (1.0, 0.99):
        allowed = [Allowance(money=part * bill, charge=PRICES.expert.charge(n)) for bill in bills]
        found = roll_out(
            task.predictor, task.expert, examples, Threshold(rejector, 0.3, allowed), task.spec
        )  # fmt: skip
        is_same = (found.authors == free.authors).all(1)
        assert is_same.tolist() == [part == 1 or bill == 0 for bill in bills]


def test_a_rising_threshold_is_that_of_what_is_left() -> None:
    """Of 4 tokens to come, 2 are left: half of them, whose threshold is 0.5; with none left, the highest."""
    found = Schedule((0.0, 0.25, 0.5, 1.0), (9.0, 0.75, 0.5, 0.0), (4.0, 3.0, 2.0, 1.0))
    left, positions = torch.tensor([2.0, 1.0, 0.0, 9.0, 1.0]), torch.tensor([0, 0, 0, 0, 3])
    assert found.thresholds_for(left.double(), positions).tolist() == [0.5, 0.75, 9.0, 0.0, 0.0]


def test_a_rising_cap_spreads_what_a_cut_off_spends_at_once() -> None:
    model = _calibrated("TokenwiseModel")
    cut, rising = (
        model.generate(numbers(40), threshold=-math.inf, cap=Cap(tokens=2, policy=policy))
        for policy in ("cut-off", "rising")
    )
    positions = torch.arange(6.0)
    mean = [float((found.by_expert * positions).sum() / found.by_expert.sum()) for found in (cut, rising)]
    assert mean[1] > mean[0]


def test_a_cap_of_a_request_is_divided() -> None:
    found = allowances([Cap(tokens=7, per="request"), Cap(passes=4)], [0, 0, 0])
    assert found is not None
    assert [(one.tokens, one.passes) for one in found] == [(3, 4), (2, 4), (2, 4)]
    assert sum(one.tokens for one in found) == 7


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "a cap limits nothing; give tokens, passes or money"),
        ({"tokens": -1}, "a cap of -1 tokens; give a number from 0 to 1e+12"),
        ({"tokens": 10**400}, f"a cap of {'1' + '0' * 39} tokens; give a number from 0 to 1e+12"),
        ({"tokens": "5"}, "a cap of '5' tokens; give a number from 0 to 1e+12"),
        ({"tokens": 2.5}, "a cap of 2.5 tokens; give a whole number"),
        ({"money": math.nan}, "a cap of nan money; give a number from 0 to 1e+12"),
        ({"tokens": 1, "per": "day"}, "unknown scope of a cap 'day'; available: request, sequence"),
        ({"tokens": 1, "policy": "soft"}, "unknown policy of a cap 'soft'; available: cut-off, rising"),
    ],
)
def test_bad_caps(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Cap(**wrong)
    assert str(caught.value) == message


def test_what_a_cap_needs() -> None:
    with pytest.raises(OptionError, match="a cap in money needs prices; give --prices FILE"):
        allowances([Cap(money=1.0)], [3])
    with pytest.raises(OptionError, match="a rising cap needs budgets that were measured"):
        Toy.of(length=6).model("TokenwiseModel").generate([13], threshold=0.0, cap=Cap(tokens=1, policy="rising"))


class HandsOffAfterTwo(DraftRejector):
    """Prefers the hand-off after two of four tokens."""

    hand_offs = (0, 2, 4)

    def score(self, draft: Draft) -> torch.Tensor:
        return torch.tensor([[0.5, 1.0, 0.0]]).repeat(len(draft), 1)


@pytest.mark.parametrize(("tokens", "deferred"), [(1, 0), (2, 2), (4, 2)])
def test_a_hand_off_that_does_not_fit_is_left_out(tokens: int, deferred: int) -> None:
    task = ToyTask(n=3, length=4, ends=False)
    chosen, allowed = torch.full((3,), 0.4, dtype=torch.float64), [Allowance(tokens=tokens)] * 3
    plan = HandOffPlan(task, HandsOffAfterTwo())
    found = write_all(plan, task.split("test"), chosen, task.spec, at_once=3, allowed=allowed)
    assert found.rollout.deferred.tolist() == [deferred] * 3
    assert found.capped.tolist() == [2 - deferred] * 3


def test_no_hand_off_comes_earlier_than_wanted() -> None:
    """Where reading costs more than writing, an earlier hand-off may be the cheaper one."""
    task = ToyTask(n=3, length=4, ends=False)
    chosen = torch.full((3,), 0.4, dtype=torch.float64)
    allowed = [Allowance(money=4.0, charge=Charge(read=10.0, write=1.0))] * 3
    plan = HandOffPlan(task, HandsOffAfterTwo())
    found = write_all(plan, task.split("test"), chosen, task.spec, at_once=3, allowed=allowed)
    assert found.rollout.deferred.tolist() == [0] * 3
    assert found.capped.tolist() == [2] * 3
