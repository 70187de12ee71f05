"""What settings spend on drafts, against choices and rollouts at every price."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import WithExpert, completing
from torch import Tensor
from toy_budgets import (
    BUDGETS,
    choose_by_cost,
    choose_whole,
    each_toy,
    estimates_of,
    lengths_of,
    nearest,
    roll,
    table_of,
)

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.rules import FINITE_LIMIT, Setting, price_for, whole_threshold_for
from seqdefer.budgets.spending import HandOffSpending, TokenSpending
from seqdefer.budgets.token_sweeps import TokenSweep
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import DataError, OptionError
from seqdefer.testing import ToyTask
from seqdefer.types import HandOffTable


def every_price(scores: Tensor, grid: Tensor, lengths: Tensor) -> list[float]:
    """All prices at which any two hand-offs of an example cost the same, those between them, and beyond."""
    ahead = (lengths[:, None] - grid).clamp(min=0)
    more = (ahead[:, :, None] - ahead[:, None, :]).double()  # (n, J, J)
    equal = (scores[:, :, None] - scores[:, None, :]) / more
    ties = equal[(more > 0) & equal.isfinite()].unique()  # sorted
    return [-torch.inf, *ties.tolist(), *((ties[1:] + ties[:-1]) / 2).tolist(), torch.inf]


def share_of(kept: Tensor, lengths: Tensor, table: HandOffTable) -> float:
    by_expert = int(table.deferred.gather(1, kept[:, None]).sum())
    return by_expert / (by_expert + int(torch.minimum(kept, lengths).sum()))


@each_toy
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_cost_budget_is_met_as_nearly_as_any_price_can(task: ToyTask, coarse: bool, seed: int) -> None:
    """Experts write as much as they please, so the share may fall where the price does: halving an interval missed the
    nearest. And at the very price where a choice changes, rounding decided whether it had."""
    scores, grid, lengths = estimates_of(task, task.spec.length + 1, seed, coarse=coarse)
    table = table_of(task)
    prices = every_price(scores, grid, lengths)
    shares = [share_of(choose_by_cost(scores, grid, lengths, price), lengths, table) for price in prices]
    for budget in BUDGETS:
        found = price_for(budget, scores, grid, lengths, table)
        kept = choose_by_cost(scores, grid, lengths, found.threshold)
        assert found.share == pytest.approx(roll(task, HandOff(kept)).share)
        if budget in (0, 1):
            assert found.threshold == FINITE_LIMIT * (1 - 2 * budget)
        else:
            assert abs(found.share - budget) == pytest.approx(nearest(budget, shares), abs=1e-9)


def test_a_price_where_nothing_can_be_handed_off() -> None:
    table = HandOffTable(torch.zeros(2, 3), torch.tensor([[2, 1, 0]] * 2))
    scores = torch.tensor([[-torch.inf, -torch.inf, 0.0]] * 2)
    assert price_for(0.7, scores, torch.arange(3), torch.tensor([2, 2]), table) == Setting(
        0.7, FINITE_LIMIT, 0.0, 0.0, 0.0
    )


def test_budgets_of_an_expert_that_only_completes() -> None:
    task = WithExpert(completing, n=8, length=4)
    found = whole_threshold_for(0.5, torch.arange(8.0), lengths_of(task), table_of(task))
    assert roll(task, HandOff(choose_whole(torch.arange(8.0), 4, found.threshold))).share == pytest.approx(found.share)


def test_hand_offs_of_the_grid_must_be_labelled() -> None:
    table = HandOffTable(torch.zeros(1, 3), torch.tensor([[2, -1, 0]]))
    assert HandOffSpending(ScoredHandOffs.of([0.0], 2), table).shares.tolist() == [0.0, 1.0]
    with pytest.raises(DataError, match="some hand-offs of the grid were not labelled"):
        HandOffSpending(ScoredHandOffs.of(torch.zeros(1, 3), 2, hand_offs=range(3), rule="odds"), table)


@each_toy
@pytest.mark.parametrize("rule", ["odds", "largest", "cost"])
def test_counts_at_every_setting_are_those_of_its_choices(task: ToyTask, rule: str) -> None:
    """Counts add up the steps of a path; outcomes are chosen anew at each setting."""
    scores, grid, lengths = estimates_of(task, task.spec.length + 1, 1, coarse=True)
    scored = ScoredHandOffs.of(scores, task.spec.length, hand_offs=grid, rule=rule, lengths=lengths)
    spending = HandOffSpending(scored, table_of(task))
    every = spending.at(range(len(spending.settings)))
    assert np.array_equal(spending.counts[0], every.deferred)
    assert np.array_equal(spending.counts[1], every.written)
    assert np.array_equal(spending.shares, every.deferred.sum(1) / every.written.sum(1))
    some = np.array([2, 0, 2])
    chosen, settings = spending.select(some), spending.settings[::5]
    for setting in settings:
        seen = chosen.at_setting(setting)
        assert np.array_equal(seen.deferred[0], spending.at_setting(setting).deferred[0, some])


def test_only_thresholds_that_were_rolled_out_are_known() -> None:
    columns = (torch.tensor([[3.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0, 2.0], [3.0, 2.0]]), torch.zeros(2, 2))
    spending = TokenSpending(TokenSweep(torch.tensor([0.1, 0.6]), *columns), 3)
    assert spending.at_setting(float(torch.tensor(0.6))).deferred.tolist() == [[0.0, 1.0]]
    with pytest.raises(OptionError, match=r"threshold 0\.3 was not rolled out; take one of the 2 that were"):
        spending.at_setting(0.3)
    assert spending.select(np.array([1, 1])).shares.tolist() == [0.5, 1.0]
