"""A few test examples as they come out at rising budgets, for a task to draw: by the finest learned policy there is.

Budgets are met on validation data, as users meet them; the examples are the first, whatever they show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seqdefer.budgets.policies import (
    Threshold,
    TokenSweep,
    choose_kept,
    cost_price_for,
    once_threshold_for,
    sweep_thresholds,
    threshold_for,
)
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.evaluation.splits import Splits, require_studied
from seqdefer.interfaces import Policy
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors.networks import TokenNetwork
from seqdefer.types import Draft

EXAMPLES, BUDGETS = 3, (0.1, 0.25, 0.5, 0.75)
JUDGES = {"enumerated": 200, "searched": 40}  # validation examples that the threshold of a budget is found with


def draw_examples(splits: Splits, grid: Tensor, rejectors: Mapping[str, Any]) -> str:
    """What the task draws; nothing where no learned partial method is there."""
    task, test = splits.task, splits.test
    rows = torch.arange(min(EXAMPLES, len(test.draft)))
    examples = test.examples.select(rows)
    rollouts = {
        budget: roll_out(task.predictor, task.expert, examples, policy, task.spec)
        for budget, policy in policies_of_budgets(splits, grid, rejectors, test.draft.select(rows)).items()
    }
    return task.draw(examples, rollouts) if rollouts else ""


def policies_of_budgets(
    splits: Splits, grid: Tensor, rejectors: Mapping[str, Any], drafted: Draft
) -> Mapping[float, Policy[Any]]:
    """A policy for each of the shown budgets; one-time policies are for `drafted` alone."""
    validation = splits.validation
    require_studied(validation)
    if "TokenwiseModel" in rejectors and validation.trees is not None:
        rejector, swept = rejectors["TokenwiseModel"], _sweep_judges(rejectors["TokenwiseModel"], splits)
        return {budget: Threshold(rejector, threshold_for(budget, swept).threshold) for budget in BUDGETS}
    name = next((name for name in ("OneTimeCost", "OneTimeModel") if name in rejectors), None)
    if name is None:
        return {}
    scores, judged = rejectors[name].score(drafted), rejectors[name].score(validation.draft)
    lengths, chosen = validation.draft.sequences.lengths, {}
    for budget in BUDGETS:
        if name == "OneTimeCost":
            found = cost_price_for(budget, judged, grid, lengths, validation.table)
        else:
            found = once_threshold_for(budget, judged, grid, lengths, validation.table)
        chosen[budget] = HandOff(choose_kept(rejectors[name], scores, drafted, found.threshold))
    return chosen


def _sweep_judges(rejector: TokenNetwork, splits: Splits) -> TokenSweep:
    """Some validation examples, to find the threshold of a budget with. Closed trees cannot tell."""
    validation = splits.validation
    assert validation.trees is not None
    some = torch.arange(min(len(validation.examples), JUDGES["searched" if splits.searches else "enumerated"]))
    if splits.searches:
        return sweep_thresholds(rejector, DecisionTrees(splits.task, validation.examples.select(some)))
    return sweep_thresholds(rejector, validation.trees, some)
