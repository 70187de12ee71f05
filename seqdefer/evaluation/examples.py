"""A few test examples as they come out at rising budgets, for a task to draw: by the finest learned method there is.

Budgets are met on validation data, as users meet them; the examples are the first ones, whatever they show.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from seqdefer.budgets.rules import NEAREST
from seqdefer.budgets.spending import Spending, TokenSpending
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.evaluation.splits import Splits
from seqdefer.interfaces import TokenRejector
from seqdefer.labels.labelled import require_learning_data
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.deferral import deferral_of
from seqdefer.methods.registry import preferred_methods
from seqdefer.rejectors.checkpoints import Rejector

N_EXAMPLES, DRAWN_BUDGETS = 3, (0.1, 0.25, 0.5, 0.75)
N_CALIBRATION = {"enumerated": 200, "searched": 40}  # validation examples that find the threshold of a budget


def draw_examples(splits: Splits, rejectors: Mapping[str, Rejector]) -> str:
    """Let the task draw its first test examples; empty where no learned partial method is there."""
    name = next((name for name in preferred_methods(splits.task) if name in rejectors), None)
    if name is None:
        return ""
    task, rejector = splits.task, rejectors[name]
    examples = splits.test.examples.select(torch.arange(min(N_EXAMPLES, len(splits.test.draft))))
    spending, rollouts = _spending(splits, rejector), {}
    for budget in DRAWN_BUDGETS:
        threshold = NEAREST.choose(spending, budget).threshold
        setting = torch.full((len(examples),), threshold, dtype=torch.float64)
        rollouts[budget] = deferral_of(rejector).write(task, examples, setting).rollout
    return task.draw(examples, rollouts)


def _spending(splits: Splits, rejector: Rejector) -> Spending:
    """Tell what settings spend on validation data. Of long sequences a few trees are grown for it."""
    validation = splits.validation
    require_learning_data(validation)
    if not isinstance(rejector, TokenRejector):
        return deferral_of(rejector).spending(splits.task, validation.examples, labelled=validation)
    n = N_CALIBRATION["searched" if splits.searches else "enumerated"]
    some = torch.arange(min(len(validation.examples), n))
    if splits.searches:
        trees = DecisionTrees(splits.task, validation.examples.select(some))
        return TokenSpending(sweep_thresholds(rejector, trees), splits.task.spec.length)
    assert validation.trees is not None
    return TokenSpending(sweep_thresholds(rejector, validation.trees, some), splits.task.spec.length)
