"""Passes of the expert: counted along a path, by a plain loop, and by the engine that makes them."""

from __future__ import annotations

import random

import pytest
import torch
from oracles import Hashing, rows_of
from toy_budgets import each_toy, roll

from seqdefer.budgets.passes import CHUNK, PassCounter
from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.engine.pace import FixedPace
from seqdefer.engine.speculative import run_all, speculative_loop
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rejectors.other_rules import ReadFirstRule
from seqdefer.testing import ToyTask


def by_loop(defer: list[bool], differ: list[bool], chunk: int, *, reads_first: bool) -> int:
    """Draft a chunk, look for the first token that the expert replaces, and start again after it."""
    start, passes = 0, 0
    while start < len(defer):
        drafted = range(start, min(start + chunk, len(defer)))
        replaced = next((place for place in drafted if defer[place] and differ[place]), None)
        passes += reads_first or any(defer[place] for place in drafted)
        start = drafted[-1] + 1 if replaced is None else replaced + 1
    return passes


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 50])
def test_passes_are_those_of_a_loop_over_chunks(chunk: int, reads_first: bool) -> None:
    chance = random.Random(chunk)
    lengths = [chance.randint(1, 20) for _ in range(60)]
    defer = [[chance.random() < 0.3 for _ in range(20)] for _ in lengths]
    differ = [[chance.random() < 0.5 for _ in range(20)] for _ in lengths]
    counter = PassCounter((60,), torch.device("cpu"), reads_first=reads_first, chunk=chunk)
    for position in range(20):
        live = torch.tensor([position < length for length in lengths])
        is_last = torch.tensor([position == length - 1 for length in lengths])
        columns = (torch.tensor([row[position] for row in rows]) & live for rows in (defer, differ))
        counter.add(live, *columns, is_last)
    for row, length in enumerate(lengths):
        expected = by_loop(defer[row][:length], differ[row][:length], chunk, reads_first=reads_first)
        assert int(counter.passes[row]) == expected
        if chunk == 1:  # the plain loop
            assert expected == (length if reads_first else sum(defer[row][:length]))


@each_toy
def test_the_engine_makes_as_many_passes_as_a_sweep_counts(task: ToyTask) -> None:
    examples, rejector = task.split("test"), Hashing()
    trees, thresholds = enumerate_trees(task, examples), torch.linspace(0.05, 0.95, 7)
    swept = sweep_thresholds(rejector, trees, thresholds=thresholds)
    assert swept.passes is not None
    assert bool((swept.passes <= swept.deferred).all())
    for place, threshold in enumerate(thresholds.tolist()):
        for row, one in enumerate(rows_of(examples)):
            policy = Threshold(rejector, threshold)
            loop = speculative_loop(task.predictor, task.expert, policy, task.spec, FixedPace(CHUNK))
            run_all(loop, one)
            assert int(swept.passes[place, row]) == loop.work.expert_passes


@each_toy
def test_who_reads_first_has_a_pass_even_where_nothing_is_deferred(task: ToyTask) -> None:
    """Unless it is settled beforehand that nothing will be."""
    trees = enumerate_trees(task, task.split("test"), reads_first=True)
    swept = sweep_thresholds(ReadFirstRule("Token2"), trees, thresholds=torch.tensor([-torch.inf, 2.0, torch.inf]))
    assert swept.passes is not None
    assert int(swept.deferred[1:].sum()) == 0
    assert swept.passes[1].tolist() == [-(-length // CHUNK) for length in swept.lengths[1].tolist()]
    assert int(swept.passes[2].sum()) == 0
    before = sweep_thresholds(Confidence(), trees, thresholds=torch.tensor([-torch.inf]))
    assert before.passes is not None
    assert torch.equal(before.passes[0], swept.passes[0])  # both are lossless speculative decoding
    assert torch.equal(before.deferred[0], roll(task, Threshold(Confidence(), -torch.inf)).deferred)
