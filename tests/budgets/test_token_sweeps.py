"""Sweeps of token-level thresholds against a rollout for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import Hashing
from torch import Tensor
from toy_budgets import TOYS, each_toy, network, roll, table_of

from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.token_sweeps import sweep_hindsight, sweep_thresholds
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rejectors.token import LSTMRejector, MLPRejector
from seqdefer.testing import ToyTask


@each_toy
@pytest.mark.parametrize("rejector", [Hashing(), Confidence(), Confidence("entropy"), LSTMRejector, MLPRejector])
def test_a_sweep_is_a_rollout_for_each_threshold(task: ToyTask, rejector: Any) -> None:
    rejector = network(rejector, task) if isinstance(rejector, type) else rejector
    examples = task.split("test")
    trees = DecisionTrees(task, examples)
    met = sweep_thresholds(rejector, trees).thresholds[1:-1]
    thresholds = ((met[1:] + met[:-1]) / 2)[:: max(1, len(met) // 8)]  # between scores: no decision hangs on rounding
    swept = sweep_thresholds(rejector, trees, thresholds=thresholds)
    assert torch.equal(swept.thresholds, thresholds)
    for row, threshold in enumerate(thresholds.tolist()):
        rollout = roll(task, Threshold(rejector, threshold))
        assert torch.equal(swept.deferred[row], rollout.deferred)
        assert torch.equal(swept.lengths[row], rollout.sequences.lengths)
        assert torch.equal(swept.loss[row], task.sequence_loss(examples, rollout.sequences))
        assert swept.share[row] == pytest.approx(rollout.share)


@each_toy
def test_sweeps_run_from_the_expert_alone_to_the_predictor_alone(task: ToyTask) -> None:
    examples = task.split("test")
    swept = sweep_thresholds(Hashing(), enumerate_trees(task, examples))
    table = table_of(task)
    assert bool((swept.thresholds.diff() > 0).all())
    assert torch.equal(swept.loss[0], table.loss[:, 0])
    assert torch.equal(swept.deferred[0], table.deferred[:, 0])
    assert torch.equal(swept.deferred[0], swept.lengths[0])
    assert torch.equal(swept.loss[-1], table.loss[:, -1])
    assert int(swept.deferred[-1].sum()) == 0
    assert (float(swept.share[0]), float(swept.share[-1])) == (1.0, 0.0)


@each_toy
def test_hindsight_defers_where_the_next_token_of_the_expert_is_better(task: ToyTask) -> None:
    """By a loop over each example, at a threshold just above 0 and at others."""
    examples = task.split("test")
    trees = enumerate_trees(task, examples)
    swept = sweep_hindsight(trees)
    assert torch.equal(swept.loss[-1], table_of(task).loss[:, -1])
    above_zero = int((swept.thresholds > 0).nonzero()[0])
    for place in (above_zero, len(swept.thresholds) // 2):
        for row in range(0, len(examples), 7):
            node, deferred, choice = trees.roots[row : row + 1], 0, torch.zeros(1, dtype=torch.bool)
            while int(node) != END:
                last, (loss, cost) = node, trees.losses(node)
                choice = loss - cost >= swept.thresholds[place]
                deferred += int(choice)
                node = trees.children(node, choice)
            assert int(swept.deferred[place, row]) == deferred
            assert float(swept.loss[place, row]) == float(trees.outcomes(last, choice)[0])


@each_toy
def test_few_scores_are_all_tried(task: ToyTask) -> None:
    """Where rollouts meet fewer scores than thresholds, the sweep misses no outcome that some threshold has."""
    rejector = Hashing(3, levels=16)
    swept = sweep_thresholds(rejector, enumerate_trees(task, task.split("test")))
    outcomes = {tuple(row) for row in swept.deferred.tolist()}
    for level in range(18):
        assert tuple(roll(task, Threshold(rejector, (level - 0.5) / 16)).deferred.tolist()) in outcomes


def test_a_sweep_of_some_rows() -> None:
    task, rows = TOYS["two words"], torch.tensor([7, 2, 11])
    trees, thresholds = enumerate_trees(task, task.split("test")), torch.linspace(0, 1, 7)
    some = sweep_thresholds(Hashing(), trees, rows, thresholds)
    every = sweep_thresholds(Hashing(), trees, thresholds=thresholds)
    assert torch.equal(some.deferred, every.deferred[:, rows])
    assert torch.equal(some.loss, every.loss[:, rows])


class Counting(Hashing):
    """Notes how many rows it scored at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[int] = []

    def score(self, state: Tensor, position: int, proposal: Any) -> tuple[Tensor, Tensor]:
        self.scored.append(len(state))
        return super().score(state, position, proposal)


def test_a_prefix_is_scored_once_however_many_thresholds_reach_it() -> None:
    task, counting = TOYS["all of one length"], Counting()
    trees = enumerate_trees(task, task.split("test"))
    sweep_thresholds(counting, trees, thresholds=torch.linspace(0, 1, 100))
    at_each = [int((trees.nodes.position[: trees.nodes.size] == position).sum()) for position in range(4)]
    assert counting.scored[0] == task.n
    assert all(scored <= nodes for scored, nodes in zip(counting.scored, at_each, strict=True))
