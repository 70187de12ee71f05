"""Hand-off tables: short-cuts change nothing but the number of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import WithExpert, completing, expert_after, hand_off, rows_of, write_all
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.interfaces import DraftExpert, Expert, Task
from seqdefer.labels.hand_offs import Calls, hand_off_table
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import FunctionExpert, ToyTask
from seqdefer.types import Draft, Examples, Sequences, SequenceSpec

Spy = Callable[[Any, str], list[tuple[Any, ...]]]

TASKS: dict[str, Task] = {
    "lengths differ": ToyTask(n=24),
    "all of one length": ToyTask(n=12, length=4, ends=False),
    "two words": ToyTask(n=24, length=6, vocabulary=3, seed=1),
    "completes only": WithExpert(completing, n=12, length=4),
}


@pytest.fixture(params=[*TASKS, "weather"])
def task(request: pytest.FixtureRequest) -> Task:
    found: Task = TASKS.get(request.param) or request.getfixturevalue("weather")
    return found


def examples_and_draft(task: Task) -> tuple[Examples, Draft]:
    examples = task.split("test")
    examples = examples.select(torch.arange(min(len(examples), 24)))
    return examples, draft(task.predictor, examples, task.spec)


def test_short_cuts_change_nothing(task: Task) -> None:
    examples, drafted = examples_and_draft(task)
    quick, calls = hand_off_table(task, examples, drafted)
    plain, naive = hand_off_table(task, examples, drafted, shortcut=False)
    assert torch.equal(quick.loss, plain.loss)
    assert torch.equal(quick.deferred, plain.deferred)
    assert naive == Calls(made=int(drafted.sequences.lengths.sum()), saved=0)  # one call before each drafted token
    assert calls.made + calls.saved == naive.made
    assert calls.made < naive.made


@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("kept", [(), (0,), (2,), (0, 2), (2, 1, 2), (1, 3)], ids=str)
def test_a_subset_equals_its_columns_of_the_full_table(task: Task, kept: tuple[int, ...], shortcut: bool) -> None:
    examples, drafted = examples_and_draft(task)
    every, _ = hand_off_table(task, examples, drafted, shortcut=False)
    some, calls = hand_off_table(task, examples, drafted, kept=kept, shortcut=shortcut)
    known = sorted({*kept, task.spec.length})
    assert torch.equal(some.loss[:, known], every.loss[:, known])
    assert torch.equal(some.deferred[:, known], every.deferred[:, known])
    others = [column for column in range(task.spec.length) if column not in known]
    assert bool(some.loss[:, others].isnan().all())
    assert bool((some.deferred[:, others] == -1).all())
    naive = sum(int((drafted.sequences.lengths > each).sum()) for each in set(kept))
    assert calls.made + calls.saved == naive
    assert calls.saved >= 0 if shortcut else calls.saved == 0


def test_every_column_is_what_the_engine_writes(task: Task) -> None:
    examples, drafted = examples_and_draft(task)
    table, _ = hand_off_table(task, examples, drafted)
    assert table.loss.shape == table.deferred.shape == (len(examples), task.spec.length + 1)
    for kept in range(task.spec.length + 1):
        policy = HandOff(torch.full((len(examples),), kept))
        rollout = roll_out(task.predictor, task.expert, examples, policy, task.spec)
        torch.testing.assert_close(table.loss[:, kept], task.sequence_loss(examples, rollout.sequences))
        assert table.deferred[:, kept].tolist() == rollout.deferred.tolist()


def test_the_ends_are_expert_alone_and_predictor_alone() -> None:
    task = TASKS["lengths differ"]
    examples, drafted = examples_and_draft(task)
    table, _ = hand_off_table(task, examples, drafted)
    expert = write_all(task, examples, hand_off(0))
    assert table.deferred[:, 0].tolist() == [len(one) for one in expert]
    assert table.deferred[:, -1].tolist() == [0] * len(examples)
    assert torch.equal(table.loss[:, 0], loss_of(task, examples, [one.tokens for one in expert]))
    assert torch.equal(table.loss[:, -1], task.sequence_loss(examples, drafted.sequences))


def loss_of(task: Task, examples: Examples, rows: list[list[Any]]) -> Tensor:
    tokens = torch.tensor([[*row, *[0] * (task.spec.length - len(row))] for row in rows])
    return task.sequence_loss(examples, Sequences(tokens, torch.tensor([len(row) for row in rows])))


@pytest.mark.parametrize("name", ["lengths differ", "all of one length", "two words"])
def test_a_row_is_run_once_and_after_each_disagreement(name: str, spy: Spy) -> None:
    task = TASKS[name]
    examples, drafted = examples_and_draft(task)
    named = spy(task.expert, "next")
    for row, (one, tokens, length) in enumerate(zip(rows_of(examples), *sequences_of(drafted), strict=True)):
        del named[:]
        _, calls = hand_off_table(task, examples.select(torch.tensor([row])), drafted.select(torch.tensor([row])))
        asked = sum(len(rows) for _, rows in named)
        differ = [j for j in range(length) if expert_after(task, one, tokens[:j]) != tokens[j]]
        # The last token does not matter: nothing can be handed off after it.
        assert calls.made == 1 + sum(j < length - 1 for j in differ)
        # The expert reads the draft once, and of each branch only its own tokens.
        branches = [write_all(task, examples, hand_off(j))[row] for j in differ]
        written = sum(len(branch) - j - 1 for j, branch in zip(differ, branches, strict=True))
        assert asked == length + written


def sequences_of(drafted: Draft) -> tuple[list[list[Any]], list[int]]:
    return drafted.sequences.tokens.tolist(), drafted.sequences.lengths.tolist()


def test_an_expert_that_ignores_prefixes_is_asked_once(weather: WeatherTask) -> None:
    examples, drafted = examples_and_draft(weather)
    _, calls = hand_off_table(weather, examples, drafted)
    assert calls == Calls(made=len(examples), saved=5 * len(examples))


def test_an_expert_that_is_not_deterministic_is_always_asked() -> None:
    answers = iter(range(10_000))

    def moody(row: Tensor, prefix: list[int]) -> list[int]:
        return [*prefix, *(next(answers) % 4 for _ in range(4 - len(prefix)))]

    task = WithExpert(lambda _: FunctionExpert(moody, deterministic=False), n=6, length=4, ends=False)
    _, calls = hand_off_table(task, *examples_and_draft(task))
    assert calls == Calls(made=24, saved=0)


class ReadsOff(FunctionExpert):
    """An expert that ignores the prefix, in sequences that can end."""

    reads_prefix = False


def test_an_expert_that_ignores_prefixes_may_end_a_sequence() -> None:
    """Its completions differ between prefixes: a kept token may lie past the end of an earlier answer."""

    def read_off(task: ToyTask) -> FunctionExpert:
        def complete(row: Tensor, prefix: list[int]) -> list[int]:
            tokens = list(prefix)
            while len(tokens) < task.spec.length and (not tokens or tokens[-1] != task.spec.end):
                tokens.append(int(task.target(row, len(tokens))))
            return tokens

        return ReadsOff(complete)

    task = WithExpert(read_off, n=24)
    examples, drafted = examples_and_draft(task)
    quick, calls = hand_off_table(task, examples, drafted)
    plain, _ = hand_off_table(task, examples, drafted, shortcut=False)
    assert calls.saved > 0
    assert torch.equal(quick.loss, plain.loss)
    assert torch.equal(quick.deferred, plain.deferred)


def test_complete_of_a_next_token_expert_keeps_prefixes_and_ended_rows() -> None:
    """Prefixes of every length in one batch."""
    task = ToyTask(n=12)
    examples = task.split("test")
    drafted = draft(task.predictor, examples, task.spec).sequences
    kept = torch.minimum(torch.arange(12) % (task.spec.length + 1), drafted.lengths)
    completed = task.expert.complete(examples, drafted.truncate(kept), task.spec)
    for row, one in enumerate(rows_of(examples)):
        expected = write_all(task, one, hand_off(int(kept[row])))[0].tokens
        assert completed.tokens[row, : completed.lengths[row]].tolist() == expected


# -- experts that complete all prefixes of a draft at once ---------------------------------------------------------


class WrappedDraftExpert(DraftExpert):
    """Wraps an expert. It runs only prefixes that do not follow from a shorter one, and writes garbage where the draft
    has ended, which must not be read."""

    def __init__(self, inner: Expert) -> None:
        self.inner, self.runs = inner, 0

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        self.runs += len(examples)
        return self.inner.complete(examples, prefixes, spec)

    def hand_offs(
        self, examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        rows, runs = [], 0
        for row, length in enumerate(drafts.lengths.tolist()):
            one, alone = examples.select(torch.tensor([row])), drafts.select(torch.tensor([row]))
            last: Sequences | None = None
            for first in kept.tolist():
                if first >= length:
                    rows.append(Sequences(torch.full_like(alone.tokens, 99), torch.tensor([77])))
                    continue
                if last is None or last.tokens[0, :first].tolist() != alone.tokens[0, :first].tolist():
                    last, runs = self.inner.complete(one, alone.truncate(torch.tensor([first])), spec), runs + 1
                rows.append(last)
        completed = Sequences(torch.cat([one.tokens for one in rows]), torch.cat([one.lengths for one in rows]))
        return completed, runs


def wrapped(task: ToyTask) -> WrappedDraftExpert:
    return WrappedDraftExpert(completing(task))


@pytest.mark.parametrize("sizes", [{"n": 16}, {"n": 8, "length": 4, "ends": False}])
def test_a_draft_expert_gives_the_same_table(sizes: dict[str, Any]) -> None:
    task = WithExpert(wrapped, **sizes)
    assert isinstance(task.expert, WrappedDraftExpert)
    examples, drafted = examples_and_draft(task)
    quick, calls = hand_off_table(task, examples, drafted)
    assert task.expert.runs == 0  # no prefix was completed alone
    plain, naive = hand_off_table(task, examples, drafted, shortcut=False)
    assert torch.equal(quick.loss, plain.loss)
    assert torch.equal(quick.deferred, plain.deferred)
    assert (quick.loss.dtype, quick.deferred.dtype) == (plain.loss.dtype, plain.deferred.dtype)
    assert calls.made + calls.saved == naive.made == int(drafted.sequences.lengths.sum())
    assert len(examples) <= calls.made < naive.made
    parts, same_calls = hand_off_table(task, examples, drafted, batch_size=5)
    assert torch.equal(parts.loss, quick.loss)
    assert same_calls == calls


def test_batches_have_the_size_the_expert_asks_for() -> None:
    task, finished = WithExpert(wrapped, n=16), list[int]()
    task.expert.batch_size = 6
    hand_off_table(task, *examples_and_draft(task), progress=finished.append)
    assert finished == [6, 6, 4]
