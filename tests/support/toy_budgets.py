"""Toys whose rollouts, hand-offs and budgets the tests of policies and budget rules compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.sweeps import hand_off_sweep
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.evaluation.curves import Curve, Ends, curve_of
from seqdefer.interfaces import Policy
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.losses import hand_off_grid, is_ended
from seqdefer.rejectors.token import LSTMRejector, MLPRejector
from seqdefer.testing import ToyTask
from seqdefer.types import HandOffTable, Rollout

TOYS = {
    "lengths differ": ToyTask(n=20, length=4),
    "all of one length": ToyTask(n=12, length=4, ends=False),
    "two words": ToyTask(n=20, length=5, vocabulary=3, seed=1),
}


each_toy = pytest.mark.parametrize("task", TOYS.values(), ids=TOYS)


BUDGETS = [0.0, 0.13, 0.3, 0.5, 0.77, 1.0]


def roll(task: ToyTask, policy: Policy[Any]) -> Rollout:
    return roll_out(task.predictor, task.expert, task.split("test"), policy, task.spec)


def table_of(task: ToyTask, kept: list[int] | None = None) -> HandOffTable:
    examples = task.split("test")
    return hand_off_table(task, examples, draft(task.predictor, examples, task.spec), kept=kept)[0]


def lengths_of(task: ToyTask) -> Tensor:
    return draft(task.predictor, task.split("test"), task.spec).sequences.lengths


def network(kind: type[LSTMRejector] | type[MLPRejector], task: ToyTask) -> LSTMRejector | MLPRejector:
    torch.manual_seed(1)
    return kind(Sizes(2, 3, task.spec.length, True, layers=2, units=6, dropout=0.3), "toy").eval()


def estimates_of(task: ToyTask, size: int, seed: int = 0, *, coarse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, grid and lengths of the drafts: minus made-up losses, -inf for hand-offs past the end of a draft."""
    generator, grid = torch.Generator().manual_seed(seed), hand_off_grid(task.spec.length, size)
    lengths = lengths_of(task)
    loss = torch.randn(task.n, size, generator=generator, dtype=torch.double)
    loss = (4 * loss).round() / 4 if coarse else loss
    return -torch.where(is_ended(grid, lengths), torch.inf, loss), grid, lengths


def deferral_odds(scores: Tensor) -> Tensor:
    return torch.from_numpy(
        ScoredHandOffs.of(
            scores, scores.shape[1], hand_offs=[*range(scores.shape[1] - 1), scores.shape[1]], rule="odds"
        )
        .path()
        .settings
    )


def choose_hand_off(scores: Tensor, grid: Tensor, threshold: float, rule: str = "odds") -> Tensor:
    return torch.from_numpy(ScoredHandOffs.of(scores, int(grid[-1]), hand_offs=grid, rule=rule).kept(threshold))


def choose_by_cost(scores: Tensor, grid: Tensor, lengths: Tensor, price: float) -> Tensor:
    scored = ScoredHandOffs.of(scores, int(grid[-1]), hand_offs=grid, rule="cost", lengths=lengths)
    return torch.from_numpy(scored.kept(price))


def choose_whole(scores: Tensor, length: int, threshold: float) -> Tensor:
    return torch.from_numpy(ScoredHandOffs.of(scores, length).kept(threshold))


def once_curve(scores: Tensor, grid: Tensor | None, table: HandOffTable, rule: str) -> Curve:
    length = table.loss.shape[1] - 1
    scored = ScoredHandOffs.of(scores, length, hand_offs=() if grid is None else grid, rule=rule)
    return curve_of(hand_off_sweep(scored, table), Ends.of(table))


def nearest(budget: float, shares: list[float]) -> float:
    return min(abs(share - budget) for share in shares)
