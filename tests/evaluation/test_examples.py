"""Drawings of examples: by which rejector, at which budgets, and that no others stay in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer.budgets.policies import Threshold, choose_by_cost, choose_hand_off
from seqdefer.budgets.rules import once_threshold_for, threshold_for
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.evaluation.examples import BUDGETS
from seqdefer.evaluation.experiment import Experiment
from seqdefer.interfaces import TaskEntry
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.draft import DraftNetwork
from seqdefer.report.run import run_task
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Rollout
from tests.evaluation.test_experiment import TINY


class Draws(ToyTask):
    """Notes what it is asked to draw."""

    def __init__(self, drawn: str = "<p>drawn</p>", **sizes: Any) -> None:
        super().__init__(**sizes)
        self.drawn, self.asked = drawn, list[tuple[Examples, dict[float, Rollout]]]()

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        self.asked.append((examples, dict(rollouts)))
        return self.drawn


def run_drawn(task: Draws, folder: Path, **settings: Any) -> str:
    """Runs as the command does; the report."""
    entry = TaskEntry("toy", "a toy", {}, lambda *_: task)
    run_task(entry, None, replace(TINY, **settings), folder, device="cpu")
    return (folder / "report.html").read_text(encoding="utf-8")


def kept_by(rollout: Rollout) -> Tensor:
    """Tokens before the hand-off: all of a row that was not handed off."""
    return (rollout.sequences.mask() & ~rollout.by_expert).sum(1)


def test_a_task_draws_its_first_test_examples_at_rising_budgets(tmp_path: Path) -> None:
    task = Draws(n=40)
    assert "<p>drawn</p>" in run_drawn(task, tmp_path, methods=("OneTimeCost",))
    assert (tmp_path / "examples.html").read_text() == "<p>drawn</p>"
    ((examples, rollouts),) = task.asked  # once, whatever the number of seeds
    experiment_ = Experiment(task, TINY, tmp_path)
    validation, test = experiment_.splits.validation, experiment_.splits.test
    assert examples.ids.tolist() == test.examples.ids[:3].tolist()
    assert list(rollouts) == sorted(rollouts) == list(BUDGETS)
    rejector = load_rejector(tmp_path / "rejectors" / "OneTimeCost-seed0")
    assert isinstance(rejector, DraftNetwork)
    lengths = validation.draft.sequences.lengths
    for budget, rollout in rollouts.items():
        found = cost_price_for(budget, rejector.score(validation.draft), experiment_.grid, lengths, validation.table)
        first = test.draft.select(torch.arange(3))
        kept = choose_by_cost(rejector.score(first), experiment_.grid, first.sequences.lengths, found.threshold)
        expected = roll_out(task.predictor, task.expert, examples, HandOff(kept), task.spec)
        assert torch.equal(rollout.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(rollout.by_expert, expected.by_expert)
    for one, other in pairwise(rollouts.values()):
        assert bool((kept_by(one) >= kept_by(other)).all())


def test_drawings_are_by_token_where_that_is_learned(tmp_path: Path) -> None:
    task = Draws(n=40)
    run_drawn(task, tmp_path, methods=("OneTimeCost", "TokenwiseModel"))
    ((examples, rollouts),) = task.asked
    rejector = load_rejector(tmp_path / "rejectors" / "TokenwiseModel-seed0", task.predictor)
    validation = Experiment(task, TINY, tmp_path).splits.validation
    assert validation.trees is not None
    swept = sweep_thresholds(rejector, validation.trees)
    for budget, rollout in rollouts.items():
        policy = Threshold(rejector, threshold_for(budget, swept).threshold)
        expected = roll_out(task.predictor, task.expert, examples, policy, task.spec)
        assert torch.equal(rollout.by_expert, expected.by_expert)
        assert torch.equal(rollout.sequences.tokens, expected.sequences.tokens)


def test_drawings_follow_the_odds_where_costs_are_not_learned(tmp_path: Path) -> None:
    task = Draws(n=40)
    run_drawn(task, tmp_path, methods=("OneTimeModel",))
    ((_, rollouts),) = task.asked
    experiment_ = Experiment(task, TINY, tmp_path)
    validation, test = experiment_.splits.validation, experiment_.splits.test
    rejector = load_rejector(tmp_path / "rejectors" / "OneTimeModel-seed0")
    assert isinstance(rejector, DraftNetwork)
    for budget, rollout in rollouts.items():
        lengths = validation.draft.sequences.lengths
        found = once_threshold_for(
            budget, rejector.score(validation.draft), experiment_.grid, lengths, validation.table
        )
        first = test.draft.select(torch.arange(3))
        kept = choose_hand_off(rejector.score(first), experiment_.grid, found.threshold)
        assert torch.equal(kept_by(rollout), torch.minimum(kept, first.sequences.lengths))


def test_drawings_of_an_earlier_run_go(tmp_path: Path) -> None:
    """Where OneTimeCost is not run nothing is drawn; what lay in the folder came from other settings."""
    run_drawn(Draws(n=40), tmp_path)
    task = Draws(n=40)
    assert "<p>drawn</p>" not in run_drawn(task, tmp_path, methods=("ChowMean",))
    assert task.asked == []
    assert not (tmp_path / "examples.html").exists()


def test_a_drawing_that_could_do_more_stays_out_of_the_report(tmp_path: Path) -> None:
    report = run_drawn(Draws("<p>drawn</p><script>alert(1)</script>", n=40), tmp_path)
    assert "<p>drawn</p>" not in report
    assert "alert(1)" not in report
