"""Hand-offs of a draft in one pass equal completing each prefix alone, with no more runs than needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import hand_off, rows_of, toy_tasks, write

from seqdefer.engine.drafts import draft
from seqdefer.labels.branches import branch_out
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.testing import ToyTask
from seqdefer.types import Sequences

toys = toy_tasks(longest=7)


def texts(sequences: Sequences) -> list[list[int]]:
    both = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in both]


def handed_off(task: ToyTask, kept: list[int]) -> list[list[Any]]:
    """Complete one row, one prefix, one token at a time."""
    return [write(task, one, hand_off(place)).tokens for one in rows_of(task.split("test")) for place in kept]


@given(toys, st.data())
@settings(max_examples=60)
def test_branches_are_completions_of_each_prefix_alone(task: ToyTask, data: st.DataObject) -> None:
    examples = task.split("test")
    drafts = draft(task.predictor, examples, task.spec).sequences
    kept = sorted(data.draw(st.sets(st.integers(0, task.spec.length), min_size=1)))
    before = drafts.tokens.clone()
    completed, runs = branch_out(task.expert, examples, drafts, torch.tensor(kept), task.spec)
    assert texts(completed) == handed_off(task, kept)
    assert torch.equal(drafts.tokens, before)
    assert 0 <= runs <= sum(length > place for length in drafts.lengths.tolist() for place in kept)


@pytest.mark.parametrize("batch_size", [1, 5, 8, 4096])
@pytest.mark.parametrize("ends", [True, False])
def test_tables_do_not_depend_on_batches(batch_size: int, ends: bool) -> None:
    task = ToyTask(n=13, length=6, ends=ends)
    examples = task.split("test")
    drafted = draft(task.predictor, examples, task.spec)
    plain, naive = hand_off_table(task, examples, drafted, shortcut=False)
    whole, calls = hand_off_table(task, examples, drafted)
    task.expert.batch_size = batch_size
    parts, same = hand_off_table(task, examples, drafted)
    assert calls == same
    assert calls.made + calls.saved == naive.made
    assert 0 < calls.made < naive.made
    for table in (whole, parts):
        assert torch.equal(table.loss, plain.loss)
        assert torch.equal(table.deferred, plain.deferred)


REQUESTED = [[0, 1, 2, 3, 4, 5], [0], [3], [0, 4], [2, 5]]


@pytest.mark.parametrize("kept", REQUESTED, ids=str)
def test_runs_are_the_positions_where_the_expert_disagrees(kept: list[int]) -> None:
    """One run per next disagreement after a requested hand-off, and one for reading the draft to its last token."""
    task = ToyTask(n=20, length=6)
    drafts = draft(task.predictor, task.split("test"), task.spec).sequences
    runs = 0
    for one, tokens in zip(rows_of(task.split("test")), texts(drafts), strict=True):
        named = [write(task, one, hand_off(place)).tokens[place] for place in range(len(tokens))]
        leaves = [place for place, token in enumerate(named) if token != tokens[place]]
        last = len(tokens) - 1
        runs += len({min([last, *(place for place in leaves if place >= k)]) for k in kept if k <= last})
    _, counted = branch_out(task.expert, task.split("test"), drafts, torch.tensor(kept), task.spec)
    assert counted == runs


@pytest.mark.parametrize("kept", REQUESTED, ids=str)
def test_the_expert_reads_every_needed_prefix_once(kept: list[int], spy: Any) -> None:
    task, n = ToyTask(n=8, length=6, ends=False), len(kept)
    drafts = draft(task.predictor, task.split("test"), task.spec).sequences
    started, read = spy(task.expert, "start"), spy(task.expert, "append")
    completed, _ = branch_out(task.expert, task.split("test"), drafts, torch.tensor(kept), task.spec)
    assert len(started) == 1
    distinct = {(row // n, *text[:end]) for row, text in enumerate(texts(completed)) for end in range(1, 6)}
    assert sum(len(tokens) for _, tokens in read) == len(distinct)
