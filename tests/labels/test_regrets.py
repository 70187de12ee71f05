"""Regrets: what a decision costs up to the end, against sequences written token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from oracles import toy_tasks

from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.jobs import LabelPart, unpack_trees
from seqdefer.labels.label_store import LabelStore
from seqdefer.labels.nodes import UNKNOWN
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors.token_training import default_price
from seqdefer.storage.shards import Store
from seqdefer.testing import ToyTask
from seqdefer.types import Sequences

toys = toy_tasks(longest=7)


def cost(task: ToyTask, row: int, prefix: list[int], decision: int) -> float:
    """Return the token losses of deciding once after a prefix, after which the predictor writes to the end."""
    example = task.split("train").select(torch.tensor([row]))
    total, tokens, is_first = 0.0, list(prefix), True
    while len(tokens) < task.spec.length and not (tokens and tokens[-1] == task.spec.end):
        state, expert_state = task.predictor.start(example.inputs)[0], task.expert.start(example)
        for token in tokens:
            state = task.predictor.append(state, torch.tensor([token]))
            expert_state = task.expert.append(expert_state, torch.tensor([token]))
        token, loss = task.predictor.propose(state).tokens, task.token_loss
        if is_first and decision:
            token, loss = task.expert.next(expert_state, torch.tensor([0]))[0], task.token_cost
        padded = torch.tensor([[*tokens, *[0] * (task.spec.length - len(tokens))]])
        total += float(loss(example, Sequences(padded, torch.tensor([len(tokens)])), token))
        tokens, is_first = [*tokens, int(token)], False
    return total


def prefix_of(trees: DecisionTrees, node: int) -> list[int]:
    table, tokens = trees.nodes, list[int]()
    while (parent := int(table.parent[node])) >= 0:
        tokens.append(int(table.tokens[parent, table.children[parent].tolist().index(node)]))
        node = parent
    return tokens[::-1]


def check(task: ToyTask, trees: DecisionTrees, nodes: torch.Tensor) -> None:
    found = torch.stack(trees.losses(nodes), 1)
    for node, regret in zip(nodes.tolist(), found.tolist(), strict=True):
        row, prefix = int(trees.nodes.example[node]), prefix_of(trees, node)
        costs = [cost(task, row, prefix, decision) for decision in (0, 1)]
        assert regret == pytest.approx([one - min(costs) for one in costs], abs=1e-5)


@settings(max_examples=20, deadline=None)
@given(task=toys)
def test_complete_trees_know_every_regret(task: ToyTask) -> None:
    trees = enumerate_trees(task, task.split("train")).branched()
    check(task, trees, torch.arange(0, trees.nodes.size, 1 + trees.nodes.size // 12))


@settings(max_examples=20, deadline=None)
@given(task=toys)
def test_branched_trees_follow_both_decisions_on_their_rollouts(task: ToyTask) -> None:
    examples = task.split("train")
    visited = explore_trees(task, examples, 3).nodes.size  # nodes of the rollouts come first within each batch
    trees = explore_trees(task, examples, 3, branched=True)
    assert trees.is_closed
    assert trees.is_branched
    assert trees.nodes.size >= visited
    differ = trees.differ(torch.arange(trees.nodes.size))
    known = (trees.nodes.used()["children"] != UNKNOWN).all(1)
    check(task, trees, (known | ~differ).nonzero().squeeze(1)[:12])


def test_every_disagreement_on_a_rollout_has_both_children() -> None:
    task = ToyTask(n=5, length=14, vocabulary=3, seed=3)
    plain, trees = (explore_trees(task, task.split("train"), 3, branched=branched) for branched in (False, True))
    on_rollouts = {(int(plain.nodes.example[node]), *prefix_of(plain, node)) for node in range(plain.nodes.size)}
    differ, lacking, checked = trees.differ(torch.arange(trees.nodes.size)), 0, 0
    for node in range(trees.nodes.size):
        if (int(trees.nodes.example[node]), *prefix_of(trees, node)) in on_rollouts and bool(differ[node]):
            checked += 1
            assert UNKNOWN not in trees.nodes.children[node].tolist()
        lacking += UNKNOWN in trees.nodes.children[node].tolist()
    assert checked > 10
    assert lacking > 0, "elsewhere the predictor alone goes on"


def test_stored_trees_are_branched_again(tmp_path: Path) -> None:
    task = ToyTask(n=7, length=14)
    task.expert.fingerprint = "toy expert"
    store = LabelStore(task, Store(tmp_path))
    part = LabelPart("branched-trees", "train", torch.arange(7), 4)
    trees = unpack_trees(task, part, store.read(part))
    fresh = explore_trees(task, task.split("train"), 4, branched=True)
    nodes = torch.arange(trees.nodes.size)
    assert torch.equal(torch.stack(trees.losses(nodes)), torch.stack(fresh.losses(nodes)))
    assert default_price(trees) == pytest.approx(float(trees.nodes.used()["losses"][:, 0].mean()))
    plain = LabelPart("trees", "train", torch.arange(7), 4)
    assert not unpack_trees(task, plain, store.read(plain)).is_branched
