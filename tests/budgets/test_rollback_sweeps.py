"""BiLD on trees, against its algorithm written as a loop over one sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles import column, expert_after, has_ended, proposal_after, rows_of
from toy_budgets import TOYS, each_toy, table_of

from seqdefer.budgets.rollback_sweeps import sweep_rollbacks
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.errors import OptionError
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors.other_rules import ReadFirstRule
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Sequences

TOY = ToyTask(n=12, length=6)
KNOWN: dict[Any, tuple[list[float], list[float]]] = {}


def probabilities(task: ToyTask, one: Examples, prefix: list[int]) -> tuple[list[float], list[float]]:
    """Return q and p after a prefix. They are asked for again and again."""
    key = (task, int(one.ids), *prefix)
    if key not in KNOWN:
        KNOWN[key] = _probabilities(task, one, prefix)
    return KNOWN[key]


def _probabilities(task: ToyTask, one: Examples, prefix: list[int]) -> tuple[list[float], list[float]]:
    state, expert = task.predictor.start(one.inputs)[0], task.expert.start(one)
    for token in prefix:
        state, expert = task.predictor.append(state, column(token)), task.expert.append(expert, column(token))
    log_p = task.expert.log_probs(expert, torch.tensor([0]))
    return task.predictor.log_probs(state)[0].exp().tolist(), log_p[0].exp().tolist()


def bild(task: ToyTask, one: Examples, alpha: float, rho: float) -> tuple[list[int], list[bool], int]:
    """Algorithm 1 of the paper. Return tokens, which the expert wrote, and its passes."""
    tokens: list[int] = []
    by_expert: list[bool] = []
    passes = 0
    while not has_ended(task, list(tokens)):
        if max(probabilities(task, one, tokens)[0]) >= alpha:
            tokens.append(int(proposal_after(task, one, list(tokens)).tokens))
            by_expert.append(False)
            continue
        passes += 1
        for place, token in enumerate(tokens):
            p = probabilities(task, one, tokens[:place])[1]
            if not by_expert[place] and -math.log(p[token]) > rho:
                tokens, by_expert = tokens[:place], by_expert[:place]
                break
        tokens.append(int(expert_after(task, one, list(tokens))))
        by_expert.append(True)
    return tokens, by_expert, passes


@pytest.mark.parametrize("task", [*TOYS.values(), TOY], ids=[*TOYS, "longer"])
@pytest.mark.parametrize("rho", [0.5, 2.0, 5.0])
def test_a_sweep_is_the_algorithm_at_every_alpha(task: ToyTask, rho: float) -> None:
    examples = task.split("test")
    trees, rolled_back = DecisionTrees(task, examples, reads_first=True), 0
    alphas = [0.0, 0.55, 0.72, 0.81, 0.9, 0.97, 1.1]
    swept = sweep_rollbacks(trees, rho, thresholds=torch.tensor([1 - alpha for alpha in alphas]))
    for place, alpha in enumerate(alphas):
        for row, one in enumerate(rows_of(examples)):
            tokens, by_expert, passes = bild(task, one, alpha, rho)
            padded = torch.tensor([[*tokens, *[0] * (task.spec.length - len(tokens))]])
            loss = task.sequence_loss(one, Sequences(padded, torch.tensor([len(tokens)])))
            assert int(swept.deferred[place, row]) == sum(by_expert)
            assert int(swept.lengths[place, row]) == len(tokens)
            assert float(swept.loss[place, row]) == float(loss)
            assert swept.passes is not None
            assert int(swept.passes[place, row]) == passes == sum(by_expert)
            never, *_ = bild(task, one, alpha, math.inf)
            rolled_back += tokens != never
    assert rolled_back > 0


@each_toy
def test_it_runs_from_the_expert_alone_to_the_predictor_alone(task: ToyTask) -> None:
    trees = enumerate_trees(task, task.split("test"), reads_first=True)
    swept, table = sweep_rollbacks(trees, 2.0), table_of(task)
    assert torch.equal(swept.loss[0], table.loss[:, 0])
    assert torch.equal(swept.deferred[0], table.deferred[:, 0])
    assert torch.equal(swept.loss[-1], table.loss[:, -1])
    assert int(swept.deferred[-1].sum()) == 0
    some = torch.tensor([5, 1])
    assert torch.equal(sweep_rollbacks(trees, 2.0, some, swept.thresholds).loss, swept.loss[:, some])


def test_trees_without_statistics_are_refused() -> None:
    trees = enumerate_trees(TOY, TOY.split("test"))
    with pytest.raises(OptionError, match="these trees hold no statistics of both models' distributions"):
        sweep_rollbacks(trees, 2.0)
    with pytest.raises(OptionError, match="reads_first=True"):
        sweep_thresholds(ReadFirstRule("Diff"), trees)
