"""From the scores of a draft to one hand-off: choices against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_budgets import (
    choose_by_cost,
    choose_hand_off,
    choose_whole,
    deferral_odds,
    each_toy,
    estimates_of,
    lengths_of,
    once_curve,
    roll,
    table_of,
)

from seqdefer.budgets.hand_off_rules import HAND_OFF_RULES, ScoredHandOffs
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import DataError, OptionError
from seqdefer.rejectors.losses import hand_off_grid, is_ended
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


@each_toy
@pytest.mark.parametrize("rule", sorted(HAND_OFF_RULES))
def test_a_rule_chooses_what_its_path_says(task: ToyTask, rule: str, generator: torch.Generator) -> None:
    """Walking along the path, step by step, gives the choice at every setting between two steps."""
    grid, lengths = hand_off_grid(task.spec.length, 4), lengths_of(task)
    scores = torch.where(is_ended(grid, lengths), -torch.inf, torch.randn(task.n, 4, generator=generator).double())
    scores[:, -1] = torch.randn(task.n, generator=generator)  # no deferral is always possible
    scored = ScoredHandOffs.of(scores, task.spec.length, hand_offs=grid, rule=rule, lengths=lengths)
    path = scored.path()
    falling = np.unique(path.settings[np.isfinite(path.settings)])[::-1]
    for setting in [np.inf, *((falling[1:] + falling[:-1]) / 2), -np.inf]:
        columns = path.first.copy()
        for at, row, before, after in zip(path.settings, path.rows, path.before, path.after, strict=True):
            if at >= setting:
                assert columns[row] == before
                columns[row] = after
        assert columns.tolist() == scored.columns(setting).tolist()


def test_each_draft_may_have_its_own_setting(generator: torch.Generator) -> None:
    scores, grid = torch.randn(9, 3, generator=generator), torch.tensor([0, 2, 5])
    settings = torch.randn(9, generator=generator).double()
    for rule in HAND_OFF_RULES:
        scored = ScoredHandOffs.of(scores, 5, hand_offs=grid, rule=rule)
        alone = [
            int(ScoredHandOffs.of(scores[[row]], 5, hand_offs=grid, rule=rule).kept(settings[row])[0])
            for row in range(9)
        ]
        assert scored.kept(settings).tolist() == alone


def test_grids_and_scores_that_cannot_be_used() -> None:
    with pytest.raises(OptionError, match=r"must rise from 0 or more to 4 \(no deferral\): \[0, 3\]"):
        ScoredHandOffs.of(torch.zeros(2, 2), 4, hand_offs=[0, 3], rule="odds")
    with pytest.raises(OptionError, match="unknown decision rule 'dice'; available: cost, largest, odds"):
        ScoredHandOffs.of(torch.zeros(2), 4, rule="dice")
    with pytest.raises(DataError, match="1 scores are NaN"):
        ScoredHandOffs.of(torch.tensor([0.0, torch.nan]), 4)
