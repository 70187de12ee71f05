"""A run puts a promise to the test: half of the test inputs calibrate, the other half is only counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_runs import TINY
from toy_pair import Toy, numbers

from seqdefer.budgets.promises import Confident
from seqdefer.budgets.spending import Spending, n_set_aside
from seqdefer.evaluation import experiment
from seqdefer.evaluation.promise import PROMISED_BUDGETS, check_promise
from seqdefer.methods.deferral import UnjudgedTask, deferral_of
from seqdefer.testing import ToyTask

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeModel"])
def test_the_halves_are_what_they_say(method: str) -> None:
    toy = Toy.of(length=5)
    examples = toy.served.codec.encode(numbers(201))
    spending = deferral_of(toy.rejector(method)).spending(UnjudgedTask(toy.served), examples)
    check = check_promise(method, spending)
    assert check is not None
    assert (check.inputs, check.unseen) == (100, 101)
    order = np.random.default_rng(0).permutation(201)
    calibrated, unseen = spending.select(order[:100]), spending.select(order[100:])
    assert [one.budget for one in check.budgets] == list(PROMISED_BUDGETS)
    for one in check.budgets:
        setting = Confident(0.9, "inputs").choose(calibrated, one.budget).threshold
        seen, spent = (part.at_setting(setting if abs(setting) < 1e90 else np.inf * np.sign(setting))
                       for part in (calibrated, unseen))  # fmt: skip
        assert one.calibrated == pytest.approx((seen.deferred / seen.written).mean())
        shares = (spent.deferred / spent.written)[0]
        assert one.spent == pytest.approx(shares.mean())
        assert one.error == pytest.approx(1.96 * shares.std() / np.sqrt(101))
        if 0 < one.budget < 1:
            assert one.bound <= one.budget + 1e-6  # what was tested at the budget has its bound below it
    assert check.budgets[0].spent == check.budgets[0].bound == 0


def test_few_inputs_promise_nothing() -> None:
    toy = Toy.of(length=5)
    examples = toy.served.codec.encode(numbers(19))
    spending = deferral_of(toy.rejector("OneTimeModel")).spending(UnjudgedTask(toy.served), examples)
    assert check_promise("OneTimeModel", spending) is None


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])
def test_a_run_fixes_the_thresholds_before_it_counts(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thresholds of the report's token-level promise were quantiles of the scores of the inputs that then tested them,
    and of those that calibration never saw."""
    task, fitted = ToyTask(n=60, length=4), Toy.of(length=4).rejector(method)
    found = list[Spending]()
    monkeypatch.setattr(experiment, "check_promise", lambda name, spending: found.append(spending))
    run = experiment.Experiment(task, TINY, tmp_path)
    run.promise({method: fitted})
    (spending,) = found
    is_token_level = method == "TokenwiseModel"
    assert spending.has_fixed_settings == is_token_level
    n_test = len(run.splits.test.examples)
    assert spending.inputs == n_test - (n_set_aside(n_test) if is_token_level else 0)
    assert spending.expert_loss.max() > 0  # from the labels of the run
