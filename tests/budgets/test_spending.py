"""What settings spend on drafts, against choices and rollouts at every price."""

from __future__ import annotations

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
from seqdefer.budgets.rules import (
    FINITE_LIMIT,
    Setting,
    price_for,
    whole_threshold_for,
)
from seqdefer.budgets.spending import HandOffSpending
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import DataError
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
