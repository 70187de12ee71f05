"""Tables of hand-offs: the short-cuts change nothing but the number of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import WithExpert, completing, expert_after, hand_off, rows_of, write_all
from torch import Tensor

from seqdefer.engine import HandOff, draft, roll_out
from seqdefer.interfaces import Task
from seqdefer.labels import Calls, hand_off_table
from seqdefer.tasks.weather import WeatherTask
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
    assert naive.saved == 0
    assert calls.made < naive.made


def test_every_column_is_what_the_engine_writes(task: Task) -> None:
    examples, drafted = examples_and_draft(task)
    table, _ = hand_off_table(task, examples, drafted)
    assert table.loss.shape == table.deferred.shape == (len(examples), task.spec.length + 1)
    for kept in range(task.spec.length + 1):
        policy = HandOff(torch.full((len(examples),), kept))
        rollout = roll_out(task.predictor, task.expert, examples, policy, task.spec)
        torch.testing.assert_close(table.loss[:, kept], task.sequence_loss(examples, rollout.sequences))
        assert table.deferred[:, kept].tolist() == rollout.deferred.tolist()


def test_the_ends_are_both_writers_alone() -> None:
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


def test_calls_made_and_saved_are_those_of_the_naive_way(task: Task) -> None:
    """Naively: one call for every token of every draft, before which it may be handed off."""
    examples, drafted = examples_and_draft(task)
    _, calls = hand_off_table(task, examples, drafted)
    _, naive = hand_off_table(task, examples, drafted, shortcut=False)
    assert calls.made + calls.saved == naive.made == int(drafted.sequences.lengths.sum())


@pytest.mark.parametrize("name", ["lengths differ", "all of one length", "two words"])
def test_a_row_is_asked_once_and_after_each_disagreement(name: str, spy: Spy) -> None:
    task = TASKS[name]
    examples, drafted = examples_and_draft(task)
    completed = spy(task.expert, "complete")
    _, calls = hand_off_table(task, examples, drafted)
    asked = Counter(int(one) for batch, _, _ in completed for one in batch.ids)
    assert calls.made == asked.total()
    for one, tokens, length in zip(rows_of(examples), *sequences_of(drafted), strict=True):
        # What the two write last does not matter: nothing can be handed off after it.
        differ = sum(expert_after(task, one, tokens[:j]) != tokens[j] for j in range(length - 1))
        assert asked[int(one.ids)] == 1 + differ


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
    """Ignores the prefix like a reader of a thermometer, in sequences that can end."""

    reads_prefix = False


def test_an_expert_that_ignores_prefixes_may_end_a_sequence() -> None:
    """Its completion is not the same for every prefix then: a kept token goes past the end of an earlier answer."""

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


def test_batches_and_progress() -> None:
    task, finished = TASKS["lengths differ"], []
    examples, drafted = examples_and_draft(task)
    whole, calls = hand_off_table(task, examples, drafted)
    parts, same_calls = hand_off_table(task, examples, drafted, batch_size=7, progress=finished.append)
    assert finished == [7, 7, 7, 3]
    assert calls == same_calls
    assert torch.equal(whole.loss, parts.loss)
    assert torch.equal(whole.deferred, parts.deferred)


def test_a_free_completion_keeps_prefixes_and_ended_rows() -> None:
    """`complete` of an expert with `next`: prefixes of every length in one batch."""
    task = ToyTask(n=12)
    examples = task.split("test")
    drafted = draft(task.predictor, examples, task.spec).sequences
    kept = torch.minimum(torch.arange(12) % (task.spec.length + 1), drafted.lengths)
    completed = task.expert.complete(examples, drafted.truncate(kept), task.spec)
    for row, one in enumerate(rows_of(examples)):
        expected = write_all(task, one, hand_off(int(kept[row])))[0].tokens
        assert completed.tokens[row, : completed.lengths[row]].tolist() == expected


def test_spec_knows_the_end() -> None:
    tokens = torch.tensor([0, 3, 4])
    assert SequenceSpec(3, end=3).is_end(tokens).tolist() == [False, True, False]
    assert SequenceSpec(3).is_end(tokens).tolist() == [False, False, False]
