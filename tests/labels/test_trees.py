"""Decision trees: nodes hold what the two models would do there, whichever way the trees grew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from oracles import Hashing, WithExpert, Written, completing, expert_after, rows_of, write
from torch import Tensor, nn

from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.engine.interleaved import roll_out
from seqdefer.errors import ContractError, OptionError
from seqdefer.evaluation.oracle import all_outcomes, beam_outcomes
from seqdefer.interfaces import Task
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import ToyState
from seqdefer.types import Examples, Proposal, Sequences

Spy = Callable[[Any, str], list[tuple[Any, ...]]]
Grow = Callable[[Task, Examples], DecisionTrees]

TOYS = {
    "lengths differ": ToyTask(n=10, length=4),
    "all of one length": ToyTask(n=6, length=4, ends=False),
    "one token": ToyTask(n=4, length=1),
    "two words": ToyTask(n=10, length=5, vocabulary=3, seed=1),
}
each_toy = pytest.mark.parametrize("task", TOYS.values(), ids=TOYS)
each_way = pytest.mark.parametrize("grow", [enumerate_trees, DecisionTrees], ids=["enumerated", "lazy"])


def decisions(length: int) -> list[tuple[bool, ...]]:
    return list(product([False, True], repeat=length))


def write_by(task: Task, one: Examples, decided: tuple[bool, ...]) -> Written:
    return write(task, one, lambda position, prefix, proposal: decided[position])


def prefixes_of(task: Task, one: Examples) -> list[set[tuple[Any, ...]]]:
    """Return the distinct prefixes of each length that the two models can reach and continue from."""
    levels: list[set[tuple[Any, ...]]] = [set() for _ in range(task.spec.length)]
    for decided in decisions(task.spec.length):
        tokens = write_by(task, one, decided).tokens
        for position in range(len(tokens)):
            levels[position].add(tuple(tokens[:position]))
    return levels


@each_toy
@each_way
def test_every_path_is_what_the_obvious_loop_writes(task: ToyTask, grow: Grow) -> None:
    examples = task.split("test")
    trees = grow(task, examples)
    for decided in decisions(task.spec.length):
        nodes, paths = trees.roots, [write_by(task, one, decided) for one in rows_of(examples)]
        for position, choice in enumerate(decided):
            live = (nodes != END).nonzero().squeeze(1)
            assert live.tolist() == [row for row, path in enumerate(paths) if len(path) > position]
            here, deferring = nodes[live], torch.full((len(live),), choice)
            check_nodes(trees, here, live, position, [paths[row] for row in live.tolist()])
            ends = [row for row in live.tolist() if len(paths[row]) == position + 1]
            check_leaves(trees, nodes[ends], choice, [paths[row] for row in ends])
            nodes = torch.full_like(nodes, END)
            nodes[live] = trees.children(here, deferring)
        assert nodes.tolist() == [END] * len(examples)


def check_nodes(trees: DecisionTrees, nodes: Tensor, rows: Tensor, position: int, paths: list[Written]) -> None:
    """Compare proposals and losses at the nodes with those of the obvious loop."""
    proposal, (loss, cost) = trees.proposal(nodes), trees.losses(nodes)
    expected: list[Proposal] = [path.proposals[position] for path in paths]
    assert proposal.tokens.tolist() == [one.tokens.item() for one in expected]
    assert proposal.features.tolist() == [one.features[0].tolist() for one in expected]
    assert proposal.uncertainty.tolist() == [one.uncertainty.item() for one in expected]
    assert proposal.entropy is not None
    assert proposal.entropy.tolist() == [one.entropy.item() for one in expected if one.entropy is not None]
    examples, before = trees.examples.select(rows), [path.tokens[:position] for path in paths]
    prefixes = Sequences(torch.tensor(before).view(len(rows), position), torch.full_like(rows, position))
    task, ones = trees.task, rows_of(examples)
    named = [expert_after(task, one, path.tokens[:position]) for one, path in zip(ones, paths, strict=True)]
    assert torch.equal(loss, task.token_loss(examples, prefixes, proposal.tokens))
    assert torch.equal(cost, task.token_cost(examples, prefixes, torch.tensor(named, dtype=torch.long)))


def check_leaves(trees: DecisionTrees, nodes: Tensor, choice: bool, paths: list[Written]) -> None:
    sequences = trees.sequences(nodes, torch.full((len(nodes),), choice))
    assert [tokens[:length] for tokens, length in zip(sequences.tokens.tolist(), sequences.lengths, strict=True)] == [
        path.tokens for path in paths
    ]


@each_toy
@each_way
def test_a_prefix_is_one_node(task: ToyTask, grow: Grow) -> None:
    """Regression: lazily grown trees made two nodes where both decisions of an agreement were requested at once."""
    trees = grow(task, task.split("test"))
    all_outcomes(trees)  # visits every path, both decisions of a node at once
    table = trees.nodes
    for node in range(table.size):
        kept, deferred = table.children[node].tolist()
        agree = bool(table.tokens[node, 0] == table.tokens[node, 1])
        assert agree == (kept == deferred) or END in (kept, deferred)
    distinct = sum(len(level) for one in rows_of(task.split("test")) for level in prefixes_of(task, one))
    assert table.size == distinct


@each_toy
@each_way
def test_every_node_costs_one_call(task: ToyTask, grow: Grow, spy: Spy) -> None:
    named = spy(task.expert, "next")
    trees = grow(task, task.split("test"))
    all_outcomes(trees)
    assert trees.calls.made == sum(len(rows) for _, rows in named) == trees.nodes.size


@each_toy
def test_calls_made_and_saved_are_those_of_the_naive_way(task: ToyTask) -> None:
    """The naive way makes a call at every position of every way to decide, and shares common prefixes of decisions."""
    trees = enumerate_trees(task, task.split("test"))
    naive = 0
    for one in rows_of(task.split("test")):
        for position in range(task.spec.length):
            naive += sum(len(write_by(task, one, (*way, *[False] * task.spec.length))) > position
                         for way in decisions(position))  # fmt: skip
    assert trees.calls.made + trees.calls.saved == naive


def test_an_expert_that_ignores_prefixes_is_asked_once_a_position(weather: WeatherTask) -> None:
    examples = weather.split("test").select(torch.arange(10))
    trees = enumerate_trees(weather, examples)
    assert trees.nodes.size == 10 * (2**6 - 1)
    assert trees.calls == Calls(made=10 * 6, saved=10 * (2**6 - 1 - 6))


@each_toy
@each_way
def test_a_second_pass_calls_no_model(task: ToyTask, grow: Grow, spy: Spy) -> None:
    trees = grow(task, task.split("test"))
    if grow is DecisionTrees:
        sweep_thresholds(Hashing(), trees)
    asked = [spy(task.predictor, name) for name in ("start", "propose", "append")]
    asked += [spy(task.expert, name) for name in ("start", "next", "append")]
    sweep_thresholds(Hashing(), trees)
    assert not any(asked)


def test_real_numbers_in_trees_are_those_of_the_loop(weather: WeatherTask) -> None:
    examples = weather.split("test").select(torch.arange(8))
    _, context = weather.predictor.start(examples.inputs)
    features = weather.predictor.propose(weather.predictor.start(examples.inputs)[0]).features.shape[1]
    torch.manual_seed(0)
    rejector = LSTMRejector(Sizes(context.shape[1], features, 6, False, layers=2, units=4, dropout=0.3), "x").eval()
    grown, lazy = enumerate_trees(weather, examples), DecisionTrees(weather, examples)
    rejector.standardise(grown.context, torch.randn(50, features + 1))
    scores = sweep_thresholds(rejector, grown)
    thresholds = (scores.thresholds[1:-2] + scores.thresholds[2:-1])[::15] / 2  # between scores: no call is close
    both = [sweep_thresholds(rejector, trees, thresholds=thresholds) for trees in (grown, lazy)]
    assert lazy.nodes.size < grown.nodes.size
    for row, threshold in enumerate(thresholds.tolist()):
        rollout = roll_out(weather.predictor, weather.expert, examples, Threshold(rejector, threshold), weather.spec)
        for swept in both:
            assert torch.equal(swept.deferred[row], rollout.deferred)
            torch.testing.assert_close(swept.loss[row], weather.sequence_loss(examples, rollout.sequences))


@each_toy
def test_trees_do_not_depend_on_the_size_of_batches(task: ToyTask) -> None:
    examples, finished = task.split("test"), []
    whole, parts = (
        enumerate_trees(task, examples),
        enumerate_trees(task, examples, batch_size=3, progress=finished.append),
    )
    assert sum(finished) == len(examples)
    assert whole.calls == parts.calls
    for one, other in zip(all_outcomes(whole), all_outcomes(parts), strict=True):
        assert torch.equal(one, other)


def test_lazy_trees_grow_only_along_visited_paths() -> None:
    task = ToyTask(n=8, length=30, ends=False)  # far too long to enumerate
    examples = task.split("test")
    trees = DecisionTrees(task, examples)
    assert trees.nodes.size == len(examples)
    swept = sweep_thresholds(Hashing(), trees, thresholds=torch.tensor([0.3, 0.6]))
    assert trees.nodes.size <= len(examples) * (1 + 2 * 29)
    for row, threshold in enumerate([0.3, 0.6]):
        rollout = roll_out(task.predictor, task.expert, examples, Threshold(Hashing(), threshold), task.spec)
        assert torch.equal(swept.deferred[row], rollout.deferred)
        assert torch.equal(swept.loss[row], task.sequence_loss(examples, rollout.sequences))


@pytest.mark.parametrize("batch_size", [1, 8, 24, 4096])
def test_parts_and_cached_states_change_nothing(batch_size: int) -> None:
    """Children may continue from cached states or be replayed, and examples may come in any parts."""
    task = ToyTask(n=14, length=10)
    examples, thresholds = task.split("test"), torch.linspace(0, 1, 9)
    expected = enumerate_trees(task, examples)
    task.predictor.batch_size = batch_size
    trees, rows = DecisionTrees(task, examples), torch.tensor([13, 2, 2, 7, 0, 11])
    for rejector in (Hashing(1), Hashing(2)):  # the second finds nodes, and must replay to grow others
        for some in (rows, torch.arange(14)):
            one, other = (sweep_thresholds(rejector, grown, some, thresholds) for grown in (trees, expected))
            assert torch.equal(one.deferred, other.deferred)
            assert torch.equal(one.lengths, other.lengths)
            assert torch.equal(one.loss, other.loss)
            found, wanted = (sweep_thresholds(rejector, grown, some) for grown in (trees, expected))
            assert torch.equal(found.thresholds, wanted.thresholds)
            assert torch.equal(found.deferred, wanted.deferred)


def test_an_input_is_read_once_a_walk_and_no_token_twice(spy: Spy) -> None:
    """Regression: every level read its prefixes again from the start of the input."""
    task = ToyTask(n=12, length=15, ends=False)
    task.predictor.batch_size = 16  # four examples a part
    trees = DecisionTrees(task, task.split("test"))
    started, read = spy(task.predictor, "start"), spy(task.predictor, "append")
    sweep_thresholds(Hashing(), trees, thresholds=torch.tensor([0.0, 2.0]))
    assert [len(inputs) for (inputs,) in started] == [4, 4, 4]
    assert sum(len(tokens) for _, tokens in read) == trees.nodes.size - 12


def test_calls_of_lazy_trees_are_all_counted(spy: Spy) -> None:
    """Including those that only make the expert read its input."""
    task = ToyTask(n=12, length=15)
    task.predictor.batch_size = 16
    named = spy(task.expert, "next")
    trees = DecisionTrees(task, task.split("test"))
    sweep_thresholds(Hashing(), trees)
    beam_outcomes(trees)
    assert trees.calls.made == sum(len(rows) for _, rows in named)


def test_states_are_cached_only_while_working() -> None:
    task = ToyTask(n=6, length=15)
    trees = DecisionTrees(task, task.split("test"))
    trees.typical_nodes()
    sweep_thresholds(Hashing(), trees)
    assert trees._cache is None
    with pytest.raises(IndexError), trees.working_on(torch.arange(3)):
        trees.children(torch.tensor([10**6]), torch.tensor([True]))
    assert trees._cache is None


def test_trees_outside_the_working_set_can_grow() -> None:
    task, deferring = ToyTask(n=6, length=15, ends=False), torch.ones(6, dtype=torch.bool)
    trees, plain = (DecisionTrees(task, task.split("test")) for _ in range(2))
    with trees.working_on(torch.tensor([1, 4])):
        first = trees.children(trees.roots[[4]], deferring[:1])
        nodes = trees.children(trees.roots, deferring)
        nodes = trees.children(nodes, ~deferring)
    expected = plain.children(plain.children(plain.roots, deferring), ~deferring)
    assert int(trees.nodes.parent[nodes[4]]) == int(first)
    assert torch.equal(trees.proposal(nodes).features, plain.proposal(expected).features)
    assert torch.equal(trees.proposal(nodes).tokens, plain.proposal(expected).tokens)
    assert trees.calls == Calls(made=18 + 2, saved=1)  # nodes, and the inputs read ahead; a child that was there


def test_typical_nodes_depend_neither_on_batches_nor_on_growth() -> None:
    """They are those of predictor alone and expert alone."""
    task = ToyTask(n=11, length=14)
    found = []
    for batch_size in (4096, 8):
        task.predictor.batch_size = batch_size
        trees = DecisionTrees(task, task.split("test"))
        if found:
            sweep_thresholds(Hashing(), trees)
        nodes = trees.typical_nodes()
        found.append((trees.nodes.example[nodes], trees.nodes.position[nodes], trees.nodes.tokens[nodes]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    alone = [write_by(task, one, (by,) * 14) for by in (False, True) for one in rows_of(task.split("test"))]
    assert len(nodes) == sum(len(path) for path in alone)


def test_long_sequences_are_not_enumerated() -> None:
    task = ToyTask(n=2, length=13)
    with pytest.raises(OptionError, match="cannot enumerate 2\\^13 decisions"):
        enumerate_trees(task, task.split("test"))


def test_trees_need_next_tokens() -> None:
    task = WithExpert(completing, n=2)
    with pytest.raises(ContractError, match="only completes"):
        DecisionTrees(task, task.split("test"))


class Weighted(ToyTask):
    """A toy task whose predictor has trainable weights."""

    def __init__(self) -> None:
        super().__init__(n=4, length=3)
        weight, start = nn.Parameter(torch.ones(())), self.predictor.start

        def weighted(inputs: Tensor) -> tuple[ToyState, Tensor]:
            state, context = start(inputs)
            return state, context * weight

        self.predictor.start = weighted  # type: ignore[method-assign]


@each_way
def test_trees_carry_no_gradient(grow: Grow) -> None:
    """Regression: the context kept the graph of trainable weights, and the second epoch of a fit failed."""
    task = Weighted()
    trees = grow(task, task.split("test"))
    assert not trees.context.requires_grad
