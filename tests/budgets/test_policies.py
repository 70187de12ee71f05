"""Policies against the plain loop, and against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from oracles import Hashing
from toy_budgets import each_toy, network, once_curve, roll, table_of

from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.sweeps import GridSweep
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.engine.drafts import draft
from seqdefer.evaluation.curves import Curve, Ends, curve_of, optimal_curve, optimal_once, optimal_whole
from seqdefer.evaluation.oracle import all_outcomes
from seqdefer.interfaces import TokenRejector
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors.confidence import ChowMean, ChowQuantile, ChowSum, Confidence, DraftConfidence
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.testing import ToyTask


@each_toy
def test_a_score_that_meets_the_threshold_defers(task: ToyTask) -> None:
    trees = enumerate_trees(task, task.split("test"))
    thresholds = torch.arange(17) / 16  # the very scores of the rejector
    swept = sweep_thresholds(Hashing(levels=16), trees, thresholds=thresholds)
    for row, threshold in enumerate(thresholds.tolist()):
        assert torch.equal(swept.deferred[row], roll(task, Threshold(Hashing(levels=16), threshold)).deferred)


def token_curve(rejector: TokenRejector[Any], trees: DecisionTrees, ends: Ends) -> Curve:
    swept = sweep_thresholds(rejector, trees)
    return curve_of(GridSweep(swept.deferred, swept.loss), ends)


@each_toy
def test_no_method_beats_the_oracle(task: ToyTask) -> None:
    examples = task.split("test")
    trees, table = enumerate_trees(task, examples), table_of(task)
    drafted, ends, grid = draft(task.predictor, examples, task.spec), Ends.of(table), hand_off_grid(task.spec.length, 3)
    loss, deferred = all_outcomes(trees)
    until = float(ends.expert_deferred.mean())
    oracle = {
        "token": optimal_curve(loss, deferred, until=until),
        "once": optimal_once(table),
        "whole": optimal_whole(table),
    }
    random = torch.Generator().manual_seed(0)
    rejectors = [Confidence(), Confidence("entropy"), network(LSTMRejector, task), *map(Hashing, range(5))]
    curves = {
        "token": [token_curve(rejector, trees, ends) for rejector in rejectors],
        "once": [once_curve(torch.randn(task.n, 3, generator=random), grid, table, "odds") for _ in range(10)],
        "whole": [
            once_curve(chow.score(drafted), None, table, "largest")
            for chow in (ChowSum(), ChowMean(), ChowQuantile(0.4))
        ],
    }
    least_certain = DraftConfidence(grid.tolist(), "entropy").score(drafted)
    curves["once"].append(once_curve(least_certain, grid, table, "largest"))
    budgets = np.linspace(0, until, 50)
    for granularity, best in oracle.items():
        for curve in curves[granularity]:
            assert best.area <= curve.area + 1e-9
            assert (best.at(budgets) <= curve.at(budgets) + 1e-9).all()
    assert oracle["token"].area <= oracle["once"].area <= oracle["whole"].area
