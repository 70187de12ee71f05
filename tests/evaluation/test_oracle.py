"""The token oracle's outcomes against brute force: all of them, and those that a beam finds."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from oracles import rows_of, write
from tiny_models import Decided
from torch import Tensor

from seqdefer.engine.interleaved import roll_out
from seqdefer.evaluation.curves import optimal_curve
from seqdefer.evaluation.oracle import all_outcomes, beam_outcomes
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.trees import DecisionTrees
from seqdefer.testing import ToyTask
from seqdefer.types import Sequences

TOYS = {
    "lengths differ": ToyTask(n=20, length=4),
    "all of one length": ToyTask(n=12, length=6, ends=False),
    "two words": ToyTask(n=20, length=7, vocabulary=3, seed=1),
}
each_toy = pytest.mark.parametrize("task", TOYS.values(), ids=TOYS)


@each_toy
def test_all_outcomes_are_those_of_every_way_to_decide(task: ToyTask) -> None:
    examples = task.split("test").select(torch.arange(8))
    loss, deferred = all_outcomes(enumerate_trees(task, examples))
    for row, one in enumerate(rows_of(examples)):
        ways = product([False, True], repeat=task.spec.length)
        written = [write(task, one, lambda position, prefix, proposal, way=way: way[position]) for way in ways]
        assert deferred[row].tolist() == [sum(path.by_expert) for path in written]
        tokens = torch.tensor([[*path.tokens, *[0] * (task.spec.length - len(path))] for path in written])
        repeated = examples.select(torch.full((len(written),), row))
        lengths = torch.tensor([len(path) for path in written])
        assert torch.equal(loss[row], task.sequence_loss(repeated, Sequences(tokens, lengths)))


def test_outcomes_of_some_rows() -> None:
    task, rows = TOYS["two words"], torch.tensor([7, 2])
    trees = enumerate_trees(task, task.split("test"))
    for some, every in zip(all_outcomes(trees, rows), all_outcomes(trees), strict=True):
        assert torch.equal(some, every[rows])


# -- the beam ------------------------------------------------------------------------------------------------------


def reachable(task: ToyTask) -> list[set[tuple[int, float]]]:
    """What the engine makes of each example, whichever way is decided."""
    examples = task.split("test")
    found: list[set[tuple[int, float]]] = [set() for _ in range(task.n)]
    for way in product([False, True], repeat=task.spec.length):
        decided = Decided(torch.tensor(way).repeat(task.n, 1))
        rollout = roll_out(task.predictor, task.expert, examples, decided, task.spec)
        losses = task.sequence_loss(examples, rollout.sequences)
        for row, outcome in enumerate(zip(rollout.deferred.tolist(), losses.tolist(), strict=True)):
            found[row].add(outcome)
    return found


def outcomes_of(loss: Tensor, deferred: Tensor) -> list[list[tuple[int, float]]]:
    """Those that are no padding, row by row."""
    return [
        [(int(count), float(value)) for value, count in zip(*row, strict=True) if value < torch.inf]
        for row in zip(loss, deferred, strict=True)
    ]


def frontier(outcomes: set[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those that no other beats in both, by rising deferral."""
    best: list[tuple[int, float]] = []
    for deferred, loss in sorted(outcomes):
        if not best or loss < best[-1][1]:
            best.append((deferred, loss))
    return best


@each_toy
@pytest.mark.parametrize("width", [1, 2, 8])
def test_what_a_beam_finds_is_real_and_worth_its_price(task: ToyTask, width: int) -> None:
    """Every outcome is one of the engine's, the first defers nothing, and each further one buys something. There is
    no more padding than needed."""
    loss, deferred = beam_outcomes(DecisionTrees(task, task.split("test")), width=width)
    found = outcomes_of(loss, deferred)
    assert loss.shape[1] == max(map(len, found))
    for row, possible in zip(found, reachable(task), strict=True):
        assert set(row) <= possible
        assert row[0] == min(possible)
        assert row == frontier(set(row))


@each_toy
def test_a_wide_beam_finds_all_that_is_worth_finding(task: ToyTask) -> None:
    found = outcomes_of(*beam_outcomes(DecisionTrees(task, task.split("test")), width=2**7))
    assert found == [frontier(possible) for possible in reachable(task)]


@each_toy
@pytest.mark.parametrize("width", [1, 2, 8])
def test_a_beam_never_beats_all_outcomes(task: ToyTask, width: int) -> None:
    trees = enumerate_trees(task, task.split("test"))
    bound, exact = optimal_curve(*beam_outcomes(trees, width=width), 3.0), optimal_curve(*all_outcomes(trees), 3.0)
    assert bound.area >= exact.area - 1e-9
    assert (bound.at(exact.deferred) >= exact.loss - 1e-9).all()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 40, 4096])
def test_beams_of_long_sequences_do_not_depend_on_batches(batch_size: int) -> None:
    task = ToyTask(n=9, length=24, ends=False)
    done: list[int] = []
    every = beam_outcomes(DecisionTrees(task, task.split("test")), width=3)
    task.predictor.batch_size = batch_size
    rows = torch.tensor([5, 0, 8])
    trees = DecisionTrees(task, task.split("test"))
    some = beam_outcomes(trees, rows, width=3, progress=done.append)
    assert sum(done) == 3
    assert outcomes_of(*some) == [outcomes_of(*every)[row] for row in rows.tolist()]


def test_a_beam_visits_no_more_than_its_width() -> None:
    """Of each example, at most `width` prefixes for each number of deferred tokens."""
    task = ToyTask(n=5, length=16, ends=False)
    trees = DecisionTrees(task, task.split("test"))
    beam_outcomes(trees, width=2)
    for position in range(1, 16):
        here = trees.nodes.example[: trees.nodes.size][trees.nodes.position[: trees.nodes.size] == position]
        assert int(here.bincount().max()) <= 2 * (position + 1)
