"""Drawings of examples: by which rejector, at which budgets, and which ones the report keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TINY
from torch import Tensor

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.rules import once_threshold_for, price_for, threshold_for
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.evaluation.examples import DRAWN_BUDGETS
from seqdefer.evaluation.experiment import Experiment
from seqdefer.interfaces import TaskEntry
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.rejectors.draft import DraftNetwork
from seqdefer.rejectors.token import TokenNetwork
from seqdefer.report.run import run_task
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Rollout


class Draws(ToyTask):
    """A toy that records what it is asked to draw."""

    def __init__(self, drawn: str = "<p>drawn</p>", **sizes: Any) -> None:
        super().__init__(**sizes)
        self.drawn, self.asked = drawn, list[tuple[Examples, dict[float, Rollout]]]()

    def draw(self, examples: Examples, rollouts: Mapping[float, Rollout]) -> str:
        self.asked.append((examples, dict(rollouts)))
        return self.drawn


def run_drawn(task: Draws, folder: Path, **settings: Any) -> str:
    """Run as the command does, and return the report."""
    entry = TaskEntry("toy", "a toy", {}, lambda *_: task)
    run_task(entry, None, replace(TINY, **settings), folder, device="cpu")
    return (folder / "report.html").read_text(encoding="utf-8")


def kept_by(rollout: Rollout) -> Tensor:
    """Return the tokens before the hand-off, all of a row that is not handed off."""
    return (rollout.sequences.mask() & ~rollout.by_expert).sum(1)


@pytest.mark.parametrize(("method", "rule"), [("OneTimeCost", "cost"), ("OneTimeModel", "odds")])
def test_a_task_draws_its_first_test_examples_at_rising_budgets(method: str, rule: str, tmp_path: Path) -> None:
    """Settings are those that spend the budgets on validation data."""
    task = Draws(n=40)
    assert "<p>drawn</p>" in run_drawn(task, tmp_path, methods=(method,))
    assert (tmp_path / "examples.html").read_text() == "<p>drawn</p>"
    ((examples, rollouts),) = task.asked  # once, for all seeds
    experiment_ = Experiment(task, TINY, tmp_path)
    validation, test, grid = experiment_.splits.validation, experiment_.splits.test, experiment_.grid
    assert examples.ids.tolist() == test.examples.ids[:3].tolist()
    assert list(rollouts) == sorted(rollouts) == list(DRAWN_BUDGETS)
    rejector = load_rejector(tmp_path / "rejectors" / f"{method}-seed0")
    assert isinstance(rejector, DraftNetwork)
    first, lengths = test.draft.select(torch.arange(3)), validation.draft.sequences.lengths
    scored = ScoredHandOffs.of(
        rejector.score(first), task.spec.length, hand_offs=grid, rule=rule, lengths=first.sequences.lengths
    )
    setting_for = price_for if rule == "cost" else once_threshold_for
    for budget, rollout in rollouts.items():
        found = setting_for(budget, rejector.score(validation.draft), grid, lengths, validation.table)
        kept = torch.from_numpy(scored.kept(found.threshold))
        expected = roll_out(task.predictor, task.expert, examples, HandOff(kept), task.spec)
        assert torch.equal(rollout.sequences.tokens, expected.sequences.tokens)
        assert torch.equal(rollout.by_expert, expected.by_expert)
    for one, other in pairwise(rollouts.values()):
        assert bool((kept_by(one) >= kept_by(other)).all())


def test_drawings_prefer_a_learned_token_level_method(tmp_path: Path) -> None:
    task = Draws(n=40)
    run_drawn(task, tmp_path, methods=("OneTimeCost", "TokenwiseModel"))
    ((examples, rollouts),) = task.asked
    rejector = load_rejector(tmp_path / "rejectors" / "TokenwiseModel-seed0", task.predictor)
    assert isinstance(rejector, TokenNetwork)
    validation = Experiment(task, TINY, tmp_path).splits.validation
    assert validation.trees is not None
    swept = sweep_thresholds(rejector, validation.trees)
    for budget, rollout in rollouts.items():
        policy = Threshold(rejector, threshold_for(budget, swept).threshold)
        expected = roll_out(task.predictor, task.expert, examples, policy, task.spec)
        assert torch.equal(rollout.by_expert, expected.by_expert)
        assert torch.equal(rollout.sequences.tokens, expected.sequences.tokens)


def test_drawings_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    """Without a learned partial method nothing is drawn; what lies in the folder came from other settings."""
    run_drawn(Draws(n=40), tmp_path)
    task = Draws(n=40)
    assert "<p>drawn</p>" not in run_drawn(task, tmp_path, methods=("ChowMean",))
    assert task.asked == []
    assert not (tmp_path / "examples.html").exists()


def test_a_drawing_with_a_script_stays_out_of_the_report(tmp_path: Path) -> None:
    report = run_drawn(Draws("<p>drawn</p><script>alert(1)</script>", n=40), tmp_path)
    assert "<p>drawn</p>" not in report
    assert "alert(1)" not in report
