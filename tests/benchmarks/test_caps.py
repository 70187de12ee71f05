"""The study of caps on a toy: rows count what they say, and an answer above its cap is noticed."""

from __future__ import annotations

import pytest

from benchmarks.caps import PRICES, Pair, compare, is_exceeded, request_with_cap
from seqdefer.rejectors.confidence import Confidence
from seqdefer.testing import ToyTask


def test_rows_compare_policies_on_the_same_inputs() -> None:
    pair = Pair.of(ToyTask(n=60, length=6, ends=False), Confidence("uncertainty"), inputs=20, written=30)
    assert len(pair.examples) == 30
    rows = list(compare("toy", pair, caps=(0.3,), budgets=(0.2, 1.0)))
    assert [(row.budget, row.policy) for row in rows] == [
        (budget, policy) for budget in (0.2, 1.0) for policy in ("cut-off", "rising")
    ]
    assert len({row.cap for row in rows}) == 1
    for cut, rising in zip(rows[::2], rows[1::2], strict=True):
        assert cut.difference == 0
        assert rising.difference == pytest.approx(rising.loss - cut.loss)
    assert rows[2].capped == 1  # at budget 1 every sequence reaches the cap


def test_an_answer_above_its_cap_is_noticed() -> None:
    token = {"author": "expert"}
    for number in range(20):
        body = request_with_cap(number, "toy")
        cap = body["deferral"]["cap"]
        limit = 1 if "money" in cap else cap.get("tokens", cap.get("passes"))
        if "money" in cap:
            cap["money"] = PRICES.bill(1, [1], by_token=True).expert
        for more in (0, 1):
            assert is_exceeded(body, {"data": [{"tokens": [token] * (limit + more)}]}) == bool(more)
