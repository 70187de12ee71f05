"""What budgets take: measured at their thresholds, shown with what they buy, and never at a remote expert's cost."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from toy_pair import LetterCodec, Toy

from seqdefer.budgets.calibration import BUDGETS, Calibration, LossCurve, LossPoint
from seqdefer.budgets.rules import Setting
from seqdefer.interfaces import Served
from seqdefer.methods.timing import TIMED_BUDGETS, BudgetTime, Timing, write_alone
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.report.terminal import bought_table
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import blank_prefixes


def toy(method: str = "TokenwiseModel") -> tuple[ToyTask, Toy]:
    task = ToyTask(n=40, length=6)
    return task, Toy(task, Served(task.predictor, task.expert, task.spec, LetterCodec()))


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])
def test_budgets_are_timed_at_their_thresholds(method: str) -> None:
    task, pair = toy()
    model, examples = pair.model(method), task.split("validation")
    model.calibrate_on(examples, judge=task)
    model.time(examples, at_once=8)
    timing = model.timing
    assert timing is not None
    assert [one.budget for one in timing.budgets] == list(TIMED_BUDGETS)
    assert (timing.inputs, timing.at_once) == (16, 8)
    some = examples.select(torch.arange(16))
    for one in timing.budgets:
        assert model.calibration is not None
        settings = torch.full((16,), model.calibration.for_budget(one.budget).threshold, dtype=torch.float64)
        expected = model.deferral.write(model.served, some, settings, at_once=8).rollout
        assert one.share == expected.share
        assert (one.asked > 0) == (one.share > 0)
        assert one.asked <= float(expected.deferred.sum()) / 16
    assert min(timing.predictor, timing.expert, *(one.seconds for one in timing.budgets)) > 0


def test_the_expert_alone_is_what_it_completes() -> None:
    task, _ = toy()
    examples = task.split("validation")
    expected = task.expert.complete(examples, blank_prefixes(examples, task.spec), task.spec)
    found = write_alone(task, examples, 7)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.lengths, expected.lengths)


def test_a_remote_expert_is_not_called() -> None:
    task, pair = toy()
    model = pair.model("TokenwiseModel")
    model.calibrate_on(task.split("validation"), judge=task)
    waiting = type("Waiting", (type(task.expert),), {"waits": True, "complete": None})(task)
    model = DeferringModel(replace(model.served, expert=waiting), model.rejector, model.calibration)
    model.time(task.split("validation"))
    assert model.timing is None


def test_the_table_says_what_is_slower_than_the_expert() -> None:
    budgets = (BudgetTime(0.2, 0.25, 1.5, 0.01), BudgetTime(0.5, 0.5, 3.0, 0.04))
    timing = Timing("r", {"device": "cpu", "cores": "2"}, 16, 8, 0.005, 0.02, budgets)
    assert timing.price == 4.0
    curve = LossCurve("error", 10, "r", (LossPoint(0.0, 3.0), LossPoint(0.5, 1.0), LossPoint(1.0, 2.0)))
    assert (curve.loss_at(0.25), curve.random_at(0.25)) == (2.0, 2.75)
    found = Calibration(tuple(Setting(budget, 0.5, budget, budget, budget) for budget in BUDGETS), 10, "r")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(bought_table(found, timing, curve))
    assert max(map(len, console.export_text(clear=False).splitlines())) <= 80  # no row wraps in a small terminal
    shown = " ".join(console.export_text(clear=False).split())
    assert "slower: than the expert alone; loss and Random: error, on the 10 validation inputs" in shown
    lines = {line.split()[0]: line for line in console.export_text().splitlines() if line.strip()}
    assert lines["0.20"].split() == ["0.20", "0.250", "2", "2.75", "1.5", "10", "2.00"]
    assert lines["0.50"].split()[-1] == "slower"
    assert "slower" not in lines["0.20"]
    slow = replace(timing, budgets=tuple(replace(one, seconds=250 * one.seconds, share=0.25) for one in timing.budgets))
    console.print(bought_table(found, slow, curve))  # regression: 2.5e+03 did not fit, and was cut
    lines = {line.split()[0]: line for line in console.export_text().splitlines() if line.strip()}
    assert lines["0.20"].split()[5:] == ["2,500", "0.01", "slower"]
    console.print(bought_table(found, None, curve))  # a remote expert is not timed
    lines = {line.split()[0]: line for line in console.export_text().splitlines() if line.strip()}
    assert lines["0.20"].split() == ["0.20", "0.200", "2.2", "2.8"]
    assert "an expert that runs elsewhere is not timed" in " ".join(" ".join(lines.values()).split())
    assert bought_table(found, None, None) is None


def test_a_small_terminal_holds_small_numbers() -> None:
    """Bug: losses of seven characters beside short times cut "slower" to "slow…" and 0.0108 to "0.01…"."""
    budgets = (BudgetTime(0.2, 0.2, 1.5, 0.003),)
    timing = Timing("r", {"device": "cpu", "cores": "2"}, 16, 8, 0.00169, 0.0000108, budgets)
    curve = LossCurve("error", 10, "r", (LossPoint(0.0, 0.012345), LossPoint(1.0, 0.0)))
    found = Calibration(tuple(Setting(budget, 0.5, budget, budget, budget) for budget in BUDGETS), 10, "r")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(bought_table(found, timing, curve))
    shown = console.export_text()
    assert "…" not in shown
    assert "0.0108" in shown
