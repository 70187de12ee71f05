"""Budgets are met as nearly as any setting can, by brute force over all settings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from oracles import Hashing
from torch import Tensor
from toy_budgets import (
    BUDGETS,
    TOYS,
    choose_hand_off,
    choose_whole,
    deferral_odds,
    each_toy,
    estimates_of,
    lengths_of,
    nearest,
    roll,
    table_of,
)

from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.rules import (
    FINITE_LIMIT,
    Setting,
    once_threshold_for,
    price_for,
    threshold_for,
    whole_threshold_for,
)
from seqdefer.budgets.token_sweeps import TokenSweep, sweep_thresholds
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import OptionError
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.testing import ToyTask
from seqdefer.types import HandOffTable


@each_toy
def test_token_budget_is_met_as_nearly_as_any_threshold_can(task: ToyTask) -> None:
    rejector = Hashing(levels=16)
    sweep = sweep_thresholds(rejector, enumerate_trees(task, task.split("test")))
    every = [roll(task, Threshold(rejector, (level - 0.5) / 16)).share for level in range(18)]
    for budget in BUDGETS:
        found = threshold_for(budget, sweep)
        spent = roll(task, Threshold(rejector, found.threshold)).share
        assert found.share == pytest.approx(spent)
        assert abs(spent - budget) == pytest.approx(nearest(budget, every), abs=1e-6)


@each_toy
@pytest.mark.parametrize("levels", [3, 1000])
def test_whole_budget_is_met_as_nearly_as_any_threshold_can(task: ToyTask, levels: int) -> None:
    """With few levels many scores are equal, and equal scores are deferred together. The share is that of all tokens
    written: it once was that of the tokens the expert alone would have written."""
    scores = torch.randint(levels, (task.n,), generator=torch.Generator().manual_seed(4)).float()
    found = [whole_threshold_for(budget, scores, lengths_of(task), table_of(task)) for budget in BUDGETS]
    check_budgets(task, found, scores, lambda threshold: choose_whole(scores, task.spec.length, threshold))


@each_toy
@pytest.mark.parametrize("size", [2, 4])
def test_once_budget_is_met_as_nearly_as_any_threshold_can(task: ToyTask, size: int) -> None:
    grid = hand_off_grid(task.spec.length, size)
    scores = torch.randn(task.n, size, generator=torch.Generator().manual_seed(4))
    found = [
        once_threshold_for(budget, scores, grid, lengths_of(task), table_of(task, grid.tolist())) for budget in BUDGETS
    ]
    check_budgets(task, found, deferral_odds(scores), lambda threshold: choose_hand_off(scores, grid, threshold))


def check_budgets(task: ToyTask, found: list[Setting], scores: Tensor, choose: Callable[[float], Tensor]) -> None:
    """The thresholds spend what they say, and none of all others comes nearer to its budget; 0 and 1 are the ends."""
    shares = [roll(task, HandOff(choose(at))).share for at in [torch.inf, *scores.unique().flip(0).tolist()]]
    for budget, one in zip(BUDGETS, found, strict=True):
        assert one.share == pytest.approx(roll(task, HandOff(choose(one.threshold))).share)
        if budget in (0, 1):
            assert one.share == pytest.approx(shares[0 if budget == 0 else -1])
        else:
            assert abs(one.share - budget) == pytest.approx(nearest(budget, shares), abs=1e-6)


@pytest.mark.parametrize("size", [2, 5])
def test_a_larger_budget_has_a_lower_price(size: int) -> None:
    """With sequences of one length, what is deferred is what was foreseen."""
    task = TOYS["all of one length"]
    estimates, table = estimates_of(task, size), table_of(task)
    found = [price_for(budget, *estimates, table) for budget in np.linspace(0, 1, 41)]
    for one, other in pairwise(found):
        assert one.threshold >= other.threshold
        assert one.share <= other.share
    assert (found[0].threshold, found[0].share) == (FINITE_LIMIT, 0.0)
    assert (found[-1].threshold, found[-1].share) == (-FINITE_LIMIT, 1.0)
    assert len({one.share for one in found}) > 5


@pytest.mark.parametrize("budget", [-0.01, 1.01, float("nan"), float("inf")])
def test_budgets_out_of_range(budget: float) -> None:
    sweep = TokenSweep(torch.zeros(1), torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
    table = HandOffTable(torch.zeros(2, 3), torch.tensor([[2, 1, 0]] * 2))
    message = "budget is .*; it is the share of tokens the expert writes, from 0 to 1"
    with pytest.raises(OptionError, match=message):
        threshold_for(budget, sweep)
    with pytest.raises(OptionError, match=message):
        whole_threshold_for(budget, torch.zeros(2), torch.tensor([2, 2]), table)
    with pytest.raises(OptionError, match=message):
        once_threshold_for(budget, torch.zeros(2, 3), torch.tensor([0, 1, 2]), torch.tensor([2, 2]), table)
    with pytest.raises(OptionError, match=message):
        price_for(budget, torch.zeros(2, 3), torch.tensor([0, 1, 2]), torch.tensor([2, 2]), table)
