"""The study of drift on a toy with two seasons: rows count what they say, and a log calibrates for the new season."""

from __future__ import annotations

import math
from functools import cache

import drift_page as page
import numpy as np
import pytest
import torch
from toy_pair import Toy, numbers

from benchmarks import drift
from benchmarks.drift import BUDGETS, QUIET, SHIFT, Season, Stream, exceed, in_order, study
from seqdefer.budgets.drift import TEST_DELTA
from seqdefer.budgets.spending import TokenSpending
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.deferral import UnjudgedTask, deferral_of, sweep_tokens

pytestmark = pytest.mark.usefixtures("one_thread")
STREAMS = 20


@cache
def seasons() -> dict[str, Season]:
    """The inputs of a toy whose first scores are low, and those whose are high."""
    toy = Toy.of(length=5)
    task, rejector = UnjudgedTask(toy.served), toy.rejector("TokenwiseModel")
    examples = toy.served.codec.encode(numbers(300))
    chosen = deferral_of(rejector).spending(task, examples.select(torch.arange(20)))
    assert isinstance(chosen, TokenSpending)
    swept = sweep_tokens(rejector, DecisionTrees(task, examples), thresholds=chosen.sweep.thresholds)
    scores = swept.first_scores
    assert scores is not None
    found = {}
    for name, is_own in (("summer", scores <= scores.median()), ("winter", scores > scores.quantile(0.3))):
        rows = is_own.nonzero()[:, 0]
        own = TokenSpending(swept, 5, has_fixed_settings=True).select(rows.numpy())
        found[name] = Season(examples.select(rows), own)
    return found


@cache
def rows() -> tuple[drift.DriftRow, ...]:
    return tuple(study(seasons(), "summer", "winter", STREAMS))


def test_rows_count_alarms() -> None:
    found = {row.test: row for row in rows()}
    assert set(found) == set(drift.TESTS)
    scores = found["scores"]
    assert scores.false_alarms <= TEST_DELTA + 3 * math.sqrt(TEST_DELTA / STREAMS)
    assert scores.broken == scores.true_alarms == 0
    assert scores.found > 0.8
    assert scores.median is not None
    assert 0 < scores.median <= drift.AFTER
    for row in found.values():
        assert len(row.quiet_by) == QUIET // drift.STEP + 1
        assert row.quiet_by[-1] == pytest.approx(row.false_alarms + row.true_alarms)
        assert row.shifted_by[SHIFT // drift.STEP] + row.found == pytest.approx(row.shifted_by[-1])
        assert list(row.shifted_by) == sorted(row.shifted_by)


def test_a_stream_compares_with_its_own_limits() -> None:
    home = seasons()["summer"].spending
    stream = Stream(home, 0)
    assert stream.holds(home) == [True, True, True]  # calibrated on the whole population
    deferred, written = home.counts
    for place, budget in zip(stream.promised, BUDGETS, strict=True):
        assert deferred[place].sum() / written[place].sum() <= budget
    stream.ceilings = np.zeros(3)
    assert stream.holds(home)[1] is False or not any(deferred[place].any() for place in stream.measured)
    stream.serve(home, np.arange(5), np.zeros(5, np.int64))
    assert stream.score_test.evidence.inputs == 5


def test_other_parts_have_a_row_for_everything() -> None:
    assert [row["spent"] for row in exceed(3)] == pytest.approx([0.25, 0.3, 0.4])
    assert len(in_order(seasons(), 2)) == 2 * len(drift.TESTS)


def test_the_page_has_the_figures() -> None:
    text = page._table_of_rows({"rows": [vars(row) for row in rows()]})
    scores = next(row for row in rows() if row.test == "scores")
    assert f"| summer, winter | scores | {100 * scores.false_alarms:.1f} % |" in text
    assert f"{scores.median:,.0f}" in text
