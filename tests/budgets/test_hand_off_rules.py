"""From the scores of a draft to one hand-off: choices against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hand_off_cases import HandOffCase
from hypothesis import given
from hypothesis import strategies as st
from toy_budgets import (
    choose_by_cost,
    choose_hand_off,
    choose_whole,
    deferral_odds,
    each_toy,
    estimates_of,
    once_curve,
    roll,
    table_of,
)

from seqdefer.budgets.hand_off_rules import HAND_OFF_RULES, ScoredHandOffs
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import DataError, OptionError
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.testing import ToyTask


def test_odds_of_deferring() -> None:
    scores = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0], [-1.0, -3.0, 4.0]])
    p = scores.softmax(1)
    torch.testing.assert_close(deferral_odds(scores).float(), ((1 - p[:, -1]) / p[:, -1]).log())
    torch.testing.assert_close(deferral_odds(scores + 7), deferral_odds(scores))


def test_hand_offs_are_chosen_by_score_and_threshold() -> None:
    grid = torch.tensor([0, 3, 6])
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 9.0]])
    assert choose_hand_off(scores, grid, 0.0).tolist() == [0, 3, 6]
    assert choose_hand_off(scores, grid, torch.inf).tolist() == [6, 6, 6]
    assert choose_hand_off(scores, grid, -torch.inf).tolist() == [0, 3, 0]
    exactly = float(deferral_odds(scores)[1])
    assert choose_hand_off(scores, grid, exactly).tolist() == [0, 3, 6]
    assert choose_whole(torch.tensor([0.1, 0.5, 0.9]), 6, 0.5).tolist() == [6, 0, 0]


@each_toy
@pytest.mark.parametrize("price", [-torch.inf, -1.3, 0.0, 0.4, 2.5, torch.inf])
def test_the_cheapest_hand_off_is_chosen(task: ToyTask, price: float) -> None:
    """One by one, from the definition; where a hand-off is impossible no price makes it possible."""
    scores, grid, lengths = estimates_of(task, task.spec.length + 1, coarse=True)
    scores[:, 1] = -torch.inf
    chosen = choose_by_cost(scores, grid, lengths, price)
    for row in range(task.n):

        def cost(kept: int, row: int = row) -> tuple[float, int]:
            ahead = max(int(lengths[row]) - kept, 0)
            return (price * ahead if ahead else 0.0) - float(scores[row, kept]), kept

        possible = [kept for kept in grid.tolist() if scores[row, kept] > -torch.inf]
        assert int(chosen[row]) == min(possible, key=cost)


@each_toy
def test_curves_of_hand_offs_are_what_the_engine_writes(task: ToyTask, generator: torch.Generator) -> None:
    """Every threshold of the engine's policy is a point of the sweep that the curve is drawn from."""
    grid, table, examples = hand_off_grid(task.spec.length, 3), table_of(task), task.split("test")
    scores = torch.randn(task.n, 3, generator=generator).double()
    points = {(round(x, 9), round(y, 9)) for x, y in once_curve(scores, grid, table, "odds").points}
    for threshold in [-torch.inf, torch.inf, *(deferral_odds(scores) - 1e-9).tolist()]:
        rollout = roll(task, HandOff(choose_hand_off(scores, grid, threshold)))
        x, y = rollout.deferred.double().mean(), task.sequence_loss(examples, rollout.sequences).double().mean()
        assert (round(float(x), 9), round(float(y), 9)) in points


@pytest.mark.parametrize("rule", HAND_OFF_RULES)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_path_of_a_rule_agrees_with_its_choices(rule: str, seed: int) -> None:
    """At every setting of the path, and between two, walking the path leads to the hand-offs that `kept` names."""
    case = HandOffCase(seed)
    scores = case.costs() if rule == "cost" or seed % 2 else case.integers(3, case.n, len(case.grid))
    scored = case.scored(scores, rule)
    path = scored.path()
    changing = np.unique(path.settings[np.isfinite(path.settings)])
    for setting in [-math.inf, *(changing[:-1] + np.diff(changing) / 2), math.inf]:
        columns = path.first.copy()
        taken = path.settings >= setting
        for row, before, after in zip(path.rows[taken], path.before[taken], path.after[taken], strict=True):
            assert columns[row] == before
            columns[row] = after
        assert scored.kept(setting).tolist() == scored.grid[columns].tolist()
    each = case.random.choice(changing, case.n) if len(changing) else np.zeros(case.n)  # a setting for each row
    assert scored.kept(each).tolist() == [scored.kept(one)[row] for row, one in enumerate(each)]


def test_grids_and_scores_that_cannot_be_used() -> None:
    with pytest.raises(DataError, match="1 scores are NaN and have no place in the order"):
        ScoredHandOffs.of([0.0, math.nan], 3)
    with pytest.raises(DataError, match="2 scores are NaN"):
        ScoredHandOffs.of([[0.0, math.nan], [math.nan, 0.0]], 3, hand_offs=[0, 3], rule="cost")
    for grid in ([0, 2], [0, 2, 2, 3], [3], [-1, 3], []):
        with pytest.raises(OptionError, match="must rise from 0 or more to 3"):
            ScoredHandOffs.of(np.zeros((2, len(grid))), 3, hand_offs=grid, rule="odds")
    with pytest.raises(OptionError, match="unknown decision rule 'luck'; available: cost, largest, odds"):
        ScoredHandOffs.of([0.0], 3, rule="luck")
