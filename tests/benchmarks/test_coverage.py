"""The coverage study on a small population: rows count what they say, promises hold, and populations survive a file."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import guarantees_page as page
import numpy as np
import pytest
from toy_pair import Toy, numbers

from benchmarks import populations
from benchmarks.coverage import CONFIDENCE, CoverageRow, share_at, study
from benchmarks.populations import SUBJECTS, Subject, measure
from seqdefer.budgets.spending import Spending
from seqdefer.methods.deferral import UnjudgedTask, deferral_of
from seqdefer.progress import Silent

pytestmark = pytest.mark.usefixtures("one_thread")
DRAWS = 60


@cache
def population(method: str) -> Spending:
    toy = Toy.of(length=5)
    examples = toy.served.codec.encode(numbers(400))
    return deferral_of(toy.rejector(method)).spending(UnjudgedTask(toy.served), examples, set_aside=True)


@cache
def rows(method: str) -> tuple[CoverageRow, ...]:
    return tuple(study("toy", population(method), draws=DRAWS, sizes=(80,), budgets=(0.3,)))


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeModel"])
def test_promises_are_kept_on_rollouts_of_a_pair(method: str) -> None:
    """The property that docs/guarantees.md measures on real labels."""
    found = {(row.share_of, row.rule): row for row in rows(method)}
    assert len(found) == 8
    delta = 1 - CONFIDENCE
    for share_of in ("tokens", "inputs"):
        for rule in ("confident", "hoeffding-bentkus"):
            assert found[share_of, rule].exceeds <= delta + 3 * math.sqrt(delta * (1 - delta) / DRAWS)
        expected = found[share_of, "expected"]
        assert expected.mean <= expected.budget + 3 * expected.error
        assert found[share_of, "confident"].unspent > expected.unspent
        assert 0 < found[share_of, "confident"].unspent < 20
    assert found["tokens", "nearest"].exceeds > 0.25


def test_rows_count_shares_of_the_population() -> None:
    spending = population("OneTimeModel")
    seen = spending.at([7])
    threshold = float(spending.settings[7])
    assert share_at(spending, threshold, "tokens") == seen.deferred.sum() / seen.written.sum()
    assert share_at(spending, threshold, "inputs") == pytest.approx((seen.deferred / seen.written).mean())
    some = np.array([3, 5])
    assert share_at(spending, threshold, "tokens", some) == seen.deferred[0, some].sum() / seen.written[0, some].sum()
    assert share_at(spending, math.inf, "tokens") == 0


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeModel", "OneTimeCost"])
def test_populations_are_stored_as_they_are(method: str) -> None:
    spending = population(method)
    again = populations._spending(populations._columns(spending))
    assert np.array_equal(again.settings, spending.settings)
    assert all(np.array_equal(*pair) for pair in zip(again.counts, spending.counts, strict=True))
    assert again.length == spending.length
    assert again.has_fixed_settings == spending.has_fixed_settings


def test_a_population_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, calls = Toy.of(length=5), []

    def sweep(subject: Subject, *_: object) -> tuple[object, Spending]:
        calls.append(subject)
        return toy.task, population("OneTimeModel")

    monkeypatch.setattr(populations, "_sweep", sweep)
    subject = SUBJECTS["pronounce"]
    first, second = (measure(subject, tmp_path, meter=Silent()) for _ in range(2))
    assert calls == [subject]
    assert first.made_by == second.made_by
    assert second.unit == toy.task.loss_unit
    assert measure(subject.with_options(seed=1), tmp_path, meter=Silent()).made_by != first.made_by


def test_the_page_names_the_worst_cell() -> None:
    plain = [vars(row) for row in rows("OneTimeModel")]
    worst = max((row for row in plain if row["rule"] == "confident"), key=lambda row: row["exceeds"])
    assert f"is {100 * worst['exceeds']:.1f} % of the draws" in page._rest({"rows": plain})
