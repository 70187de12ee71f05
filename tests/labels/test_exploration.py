"""Explored trees: a few paths of long sequences, equal for all batch sizes, stored, and closed for training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import rows_of, toy_tasks, write
from torch import Tensor

from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.errors import OptionError
from seqdefer.evaluation.oracle import all_outcomes, beam_outcomes
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.nodes import END, UNKNOWN
from seqdefer.labels.trees import DecisionTrees, join_trees
from seqdefer.rejectors.confidence import Confidence
from seqdefer.testing import ToyTask

Spy = Callable[[Any, str], list[tuple[Any, ...]]]
Prefix = tuple[int, ...]
toys = toy_tasks(longest=14)


def prefixes(trees: DecisionTrees) -> list[tuple[int, Prefix]]:
    """Return the example of every node and the tokens before it."""
    table = trees.nodes
    found: list[tuple[int, Prefix]] = []
    for node in range(table.size):
        parent, example = int(table.parent[node]), int(table.example[node])
        if parent < 0:
            found.append((example, ()))
            continue
        choice = table.children[parent].tolist().index(node)
        found.append((example, (*found[parent][1], int(table.tokens[parent, choice]))))
    return found


def by_prefix(trees: DecisionTrees) -> dict[tuple[int, Prefix], list[Any]]:
    """Return the content of every node, keyed by example and prefix."""
    places, table = prefixes(trees), trees.nodes
    columns = ("tokens", "losses", "features", "uncertainty", "entropy", "position")
    return {
        place: [getattr(table, name)[node].tolist() for name in columns]
        + [_named(child, places) for child in table.children[node].tolist()]
        for node, place in enumerate(places)
    }


def _named(child: int, places: list[tuple[int, Prefix]]) -> Any:
    return places[child] if child >= 0 else child


def lazily(task: ToyTask, prefix: Prefix, row: int) -> tuple[DecisionTrees, Tensor]:
    """Return a tree that has grown along a prefix, and its last node."""
    trees = DecisionTrees(task, task.split("train").select(torch.tensor([row])))
    node = trees.roots
    for token in prefix:
        node = trees.children(node, (trees.nodes.tokens[node, 0] != token))
    return trees, node


@pytest.mark.slow
@given(toys, st.integers(2, 5))
@settings(max_examples=25)
def test_nodes_are_those_of_lazily_grown_trees(task: ToyTask, rollouts: int) -> None:
    trees = explore_trees(task, task.split("train"), rollouts)
    places = prefixes(trees)
    assert len(set(places)) == len(places)
    for node, (row, prefix) in list(enumerate(places))[:: max(1, len(places) // 20)]:
        grown, there = lazily(task, prefix, row)
        for one, other in zip(trees.losses(torch.tensor([node])), grown.losses(there), strict=True):
            assert torch.equal(one, other)
        known, expected = trees.proposal(torch.tensor([node])), grown.proposal(there)
        assert torch.equal(known.features, expected.features)
        assert torch.equal(known.uncertainty, expected.uncertainty)
        assert torch.equal(trees.nodes.tokens[node], grown.nodes.tokens[there].squeeze(0))


@given(toys, st.integers(2, 5))
@settings(max_examples=25)
def test_paths_of_both_models_alone_are_included(task: ToyTask, rollouts: int) -> None:
    trees = explore_trees(task, task.split("train"), rollouts)
    for defer in (False, True):
        nodes, written = trees.roots, [write(task, one, lambda *_, way=defer: way) for one in rows_of(trees.examples)]
        for position in range(task.spec.length):
            live = (nodes != END).nonzero().squeeze(1)
            assert live.tolist() == [row for row, path in enumerate(written) if len(path) > position]
            tokens = trees.nodes.tokens[nodes[live], int(defer)]
            assert tokens.tolist() == [written[row].tokens[position] for row in live.tolist()]
            known = trees.nodes.children[nodes[live], int(defer)]  # grown, not replaced by the other child
            nodes = torch.full_like(nodes, END)
            nodes[live] = known
            assert not bool((nodes == UNKNOWN).any())


@given(toys, st.integers(2, 4))
@settings(max_examples=25)
def test_a_missing_child_is_replaced_by_the_other(task: ToyTask, rollouts: int) -> None:
    trees = explore_trees(task, task.split("train"), rollouts)
    assert trees.is_closed
    before, table = trees.nodes.size, trees.nodes
    everyone = torch.arange(before)
    for choice in (0, 1):
        known, other = table.children[:before, choice], table.children[:before, 1 - choice]
        found = trees.children(everyone, torch.full((before,), bool(choice)))
        assert torch.equal(found, torch.where(known == UNKNOWN, other, known))
        assert not bool((found == UNKNOWN).any())
    assert trees.nodes.size == before


def test_closed_trees_call_no_model_and_count_nothing(spy: Spy) -> None:
    task = ToyTask(n=6, length=20, ends=False)
    trees = explore_trees(task, task.split("train"), 3)
    calls, asked = trees.calls, [spy(task.predictor, "start"), spy(task.expert, "start")]
    nodes = trees.roots
    for position in range(20):
        nodes = trees.children(nodes, torch.arange(6) % 3 == position % 3)
    assert nodes.tolist() == [END] * 6
    assert trees.calls == calls
    assert asked == [[], []]
    assert len(trees.typical_nodes()) == trees.nodes.size  # all of them, not only the paths of one model alone


@pytest.mark.parametrize("ask", [partial(sweep_thresholds, Confidence("uncertainty")), beam_outcomes, all_outcomes])
def test_closed_trees_cannot_be_evaluated(ask: Callable[[DecisionTrees], Any]) -> None:
    """Regression: a sweep continued from the other child, and reported the share of other decisions."""
    task = ToyTask(n=3, length=13)
    with pytest.raises(OptionError, match=r"these trees are closed: .*; use DecisionTrees\(task, examples\)"):
        ask(explore_trees(task, task.split("train"), 2))


def test_trees_close_only_at_the_ends_of_sequences() -> None:
    """Regression: both children of the last nodes were unknown, and training used node 0 for them."""
    task = ToyTask(n=3, length=13, ends=False)
    trees = DecisionTrees(task, task.split("train"))
    with pytest.raises(OptionError, match="cannot close trees that stop in mid-sequence"):
        trees.close()


def test_more_rollouts_see_more() -> None:
    """Rollouts and examples have coins of their own."""
    task = ToyTask(n=40, length=20, ends=False)
    sizes = [explore_trees(task, task.split("train"), rollouts).nodes.size for rollouts in (2, 4, 8)]
    assert sizes == sorted(set(sizes))
    other = explore_trees(task, task.split("train"), 4, seed=1)
    assert by_prefix(other) != by_prefix(explore_trees(task, task.split("train"), 4))


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("batch_size", [1, 3, 4096])
def test_trees_do_not_depend_on_batches(batch_size: int, ends: bool, spy: Spy) -> None:
    """Regression: every batch drew the same coins, so a GPU with larger batches explored other paths than a CPU."""
    task, finished = ToyTask(n=11, length=14, ends=ends), []
    task.predictor.batch_size = 11
    whole = explore_trees(task, task.split("train"), 4)
    task.predictor.batch_size = batch_size
    counted = spy(task.expert, "next")
    parts = explore_trees(task, task.split("train"), 4, progress=finished.append)
    assert sum(finished) == 11
    assert by_prefix(parts) == by_prefix(whole)
    assert torch.equal(parts.context, whole.context)
    assert parts.calls.made == sum(len(rows) for _, rows in counted)


def test_trees_of_parts_join_into_trees_of_all() -> None:
    """Joined trees equal those of one batch, and grow like them."""
    task = ToyTask(n=9, length=14)
    examples = task.split("train")
    whole = DecisionTrees(task, examples)
    parts = [DecisionTrees(task, examples.select(rows)) for rows in torch.arange(9).split(4)]
    for trees in (whole, *parts):
        trees.typical_nodes()
    joined = join_trees(parts, task, examples)
    assert by_prefix(joined) == by_prefix(whole)
    assert joined.calls == sum((part.calls for part in parts), start=Calls())
    assert joined.nodes.example[joined.roots].tolist() == list(range(9))
    for trees in (whole, joined):
        nodes = trees.children(trees.roots, torch.arange(9) % 2 == 0)
        trees.children(nodes[nodes != END], torch.arange(int((nodes != END).sum())) % 2 == 1)
    assert by_prefix(joined) == by_prefix(whole)


def test_trees_grow_on_from_stored_tensors() -> None:
    task = ToyTask(n=5, length=14)
    one = DecisionTrees(task, task.split("train"))
    one.typical_nodes()
    other = DecisionTrees(task, task.split("train"), grown=one.tensors())
    assert by_prefix(other) == by_prefix(one)
    for trees in (one, other):
        trees.children(trees.roots, torch.arange(5) % 2 == 0)
    assert by_prefix(other) == by_prefix(one)


@pytest.mark.parametrize("rollouts", [-1, 0, 1])
def test_fewer_than_two_rollouts_are_refused(rollouts: int) -> None:
    task = ToyTask(n=2, length=14)
    with pytest.raises(OptionError, match=f"{rollouts} rollouts per example; at least 2 are needed"):
        explore_trees(task, task.split("train"), rollouts)
    with pytest.raises(OptionError, match=f"--rollouts is {rollouts}; it must be at least 2"):
        ExperimentSettings(rollouts=rollouts)
