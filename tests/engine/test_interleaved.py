"""The interleaved loop against the obvious one, and who is asked what."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from oracles import (
    Hashing,
    WithExpert,
    Written,
    by_threshold,
    completing,
    hand_off,
    padded,
    proposal_after,
    rows_of,
    score_after,
    write,
    write_all,
)

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, interleave, roll_out
from seqdefer.errors import ContractError
from seqdefer.interfaces import Policy, Task
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Rollout

Spy = Callable[[Any, str], list[tuple[Any, ...]]]

TOYS = {
    "lengths differ": ToyTask(n=16),
    "all of one length": ToyTask(n=8, length=4, ends=False),
    "one token": ToyTask(n=6, length=1),
    "two words": ToyTask(n=16, length=6, vocabulary=3, seed=1),
}
each_toy = pytest.mark.parametrize("task", TOYS.values(), ids=TOYS)


def run(task: Task, policy: Policy[Any], examples: Examples | None = None) -> Rollout:
    examples = task.split("test") if examples is None else examples
    return roll_out(task.predictor, task.expert, examples, policy, task.spec)


def keep(n: int, kept: int) -> HandOff:
    return HandOff(torch.full((n,), kept))


def same(rollout: Rollout, expected: list[Written], length: int) -> None:
    """Tokens, authors and lengths are those of the obvious loop, and nothing stands past the end."""
    assert rollout.sequences.tokens.tolist() == padded([one.tokens for one in expected], length).tolist()
    assert rollout.by_expert.tolist() == padded([one.by_expert for one in expected], length).bool().tolist()
    assert rollout.sequences.lengths.tolist() == [len(one) for one in expected]


# -- what is written -----------------------------------------------------------------------------------------------


@each_toy
def test_never_deferring_writes_the_predictors_sequence(task: ToyTask) -> None:
    expected = write_all(task, task.split("test"), hand_off(task.spec.length))
    same(run(task, keep(task.n, task.spec.length)), expected, task.spec.length)
    same(run(task, Threshold(Hashing(), torch.inf)), expected, task.spec.length)


@each_toy
def test_always_deferring_writes_the_experts_sequence(task: ToyTask) -> None:
    expected = write_all(task, task.split("test"), hand_off(0))
    same(run(task, keep(task.n, 0)), expected, task.spec.length)
    same(run(task, Threshold(Hashing(), -torch.inf)), expected, task.spec.length)


@each_toy
def test_hand_off_is_the_experts_completion_of_the_prefix(task: ToyTask) -> None:
    for kept in range(task.spec.length + 1):
        expected = write_all(task, task.split("test"), hand_off(kept))
        same(run(task, keep(task.n, kept)), expected, task.spec.length)


def test_rows_are_handed_off_each_at_its_own_place() -> None:
    task = TOYS["lengths differ"]
    kept = torch.arange(task.n) % (task.spec.length + 1)
    expected = [write(task, one, hand_off(int(k))) for one, k in zip(rows_of(task.split("test")), kept, strict=True)]
    same(run(task, HandOff(kept)), expected, task.spec.length)


def test_an_expert_that_only_completes_writes_the_same() -> None:
    task, plain = WithExpert(completing, n=16), ToyTask(n=16)
    for kept in range(task.spec.length + 1):
        expected = write_all(plain, plain.split("test"), hand_off(kept))
        same(run(task, keep(task.n, kept)), expected, task.spec.length)


@each_toy
@pytest.mark.parametrize("threshold", [0.3, 0.6])
@pytest.mark.parametrize("rejector", [Hashing(), Confidence("uncertainty"), Confidence("entropy")])
def test_token_level_policy_is_the_obvious_loop(task: ToyTask, rejector: Any, threshold: float) -> None:
    examples = task.split("test")
    rollout = run(task, Threshold(rejector, threshold))
    expected = [write(task, one, by_threshold(task, one, rejector, threshold)) for one in rows_of(examples)]
    same(rollout, expected, task.spec.length)
    prefixes = [[row.tokens[:j] for j in range(len(row))] for row in expected]
    scores = [[score_after(task, one, rejector, prefix) for prefix in row]
              for one, row in zip(rows_of(examples), prefixes, strict=True)]  # fmt: skip
    assert rollout.scores.tolist() == padded(scores, task.spec.length).tolist()


def test_a_network_that_remembers_decides_as_in_the_obvious_loop() -> None:
    """The state of an LSTM follows its row when other rows leave the batch."""
    task = TOYS["two words"]
    torch.manual_seed(0)
    rejector = LSTMRejector(Sizes(2, 3, task.spec.length, True, layers=2, units=5, dropout=0.5), "toy").eval()
    drafted = run(task, Threshold(rejector, torch.inf))
    threshold = float(drafted.scores[drafted.sequences.mask()].median()) + 1e-4
    expected = [write(task, one, by_threshold(task, one, rejector, threshold)) for one in rows_of(task.split("test"))]
    assert 0.1 < sum(map(sum, (one.by_expert for one in expected))) / sum(map(len, expected)) < 0.9
    same(run(task, Threshold(rejector, threshold)), expected, task.spec.length)


@each_toy
@pytest.mark.parametrize("final", [False, True])
def test_a_batch_equals_its_rows(task: ToyTask, final: bool) -> None:
    """A row that was handed off once kept its last score where no other row was left, and lost it where one was."""
    kept = torch.arange(task.n) % (task.spec.length + 1)
    together = run(task, HandOff(kept) if final else Threshold(Hashing(5), 0.4))
    for row, one in enumerate(rows_of(task.split("test"))):
        alone = run(task, HandOff(kept[row : row + 1]) if final else Threshold(Hashing(5), 0.4), one)
        assert torch.equal(alone.sequences.tokens[0], together.sequences.tokens[row])
        assert torch.equal(alone.by_expert[0], together.by_expert[row])
        assert torch.equal(alone.scores[0], together.scores[row])
        assert alone.sequences.lengths[0] == together.sequences.lengths[row]


def test_a_batch_of_real_numbers_equals_its_rows(weather: WeatherTask) -> None:
    examples = weather.split("test").select(torch.arange(12))
    threshold = float(draft(weather.predictor, examples, weather.spec).uncertainty.median()) + 1e-9
    policy = Threshold(Confidence(), threshold)
    together = run(weather, policy, examples)
    assert 0.2 < together.share < 0.8
    for row, one in enumerate(rows_of(examples)):
        alone = run(weather, policy, one)
        torch.testing.assert_close(alone.sequences.tokens[0], together.sequences.tokens[row])
        assert torch.equal(alone.by_expert[0], together.by_expert[row])


# -- the stream ----------------------------------------------------------------------------------------------------

POLICIES: dict[str, Callable[[int], Policy[Any]]] = {
    "token level": lambda n: Threshold(Hashing(), 0.5),
    "hand-offs": lambda n: HandOff(torch.arange(n) % 4),
    "all at once": lambda n: keep(n, 1),
}
each_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


@each_policy
def test_the_stream_is_the_rollout(make: Callable[[int], Policy[Any]]) -> None:
    task = TOYS["lengths differ"]
    examples, rollout = task.split("test"), run(task, make(task.n))
    steps = list(interleave(task.predictor, task.expert, examples, make(task.n), task.spec))
    assert [step.position for step in steps] == list(range(int(rollout.sequences.lengths.max())))
    for step in steps:
        assert torch.equal(step.tokens, rollout.sequences.tokens[:, step.position])
        assert torch.equal(step.by_expert, rollout.by_expert[:, step.position])
        assert torch.equal(step.scores, rollout.scores[:, step.position])
        assert torch.equal(step.active, rollout.sequences.mask()[:, step.position])
        assert torch.equal(step.context, task.predictor.start(examples.inputs)[1])


def test_the_loop_ends_with_its_last_row() -> None:
    task = TOYS["lengths differ"]
    lengths = run(task, keep(task.n, task.spec.length)).sequences.lengths
    short = task.split("test").select((lengths < task.spec.length).nonzero().squeeze(1))
    steps = list(interleave(task.predictor, None, short, keep(len(short), task.spec.length), task.spec))
    assert len(steps) == int(lengths[lengths < task.spec.length].max())


@each_policy
def test_a_step_tells_what_the_predictor_proposed(make: Callable[[int], Policy[Any]]) -> None:
    """Also where nobody is left to propose for: the proposals of an earlier position once stayed there."""
    task = TOYS["lengths differ"]
    examples, tokens = task.split("test"), run(task, make(task.n)).sequences.tokens
    for step in interleave(task.predictor, task.expert, examples, make(task.n), task.spec):
        expected = [
            proposal_after(task, examples.select(torch.tensor([row])), tokens[row, : step.position].tolist())
            for row in step.rows.tolist()
        ]
        assert step.proposal.tokens.tolist() == [one.tokens.item() for one in expected]
        assert step.proposal.features.tolist() == [one.features[0].tolist() for one in expected]
        assert step.proposal.uncertainty.tolist() == [one.uncertainty.item() for one in expected]


def test_steps_that_were_given_do_not_change() -> None:
    task = TOYS["lengths differ"]
    stream = interleave(task.predictor, task.expert, task.split("test"), Threshold(Hashing(), 0.5), task.spec)
    seen, copies = [], []
    for step in stream:
        seen.append((step.tokens, step.by_expert, step.scores, step.active, step.rows))
        copies.append(tuple(value.clone() for value in seen[-1]))
    assert all(
        torch.equal(a, b) for one, other in zip(seen, copies, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_a_stream_can_be_closed_early(spy: Spy) -> None:
    task = TOYS["lengths differ"]
    proposed, named = spy(task.predictor, "propose"), spy(task.expert, "next")
    stream = interleave(task.predictor, task.expert, task.split("test"), Threshold(Hashing(), -torch.inf), task.spec)
    next(stream)
    stream.close()
    assert (len(proposed), len(named)) == (1, 1)
    assert list(stream) == []


@each_policy
@pytest.mark.parametrize("unwanted", [[0], [2, 5, 11], list(range(16))])
def test_rows_that_nobody_wants_leave_and_the_others_are_unharmed(
    make: Callable[[int], Policy[Any]], unwanted: list[int], spy: Spy
) -> None:
    task, at = TOYS["lengths differ"], 2
    proposed = spy(task.predictor, "propose")
    whole = run(task, make(task.n))
    wanted = torch.tensor([row not in unwanted for row in range(task.n)])
    asked_for_all = len(proposed)
    stream = interleave(task.predictor, task.expert, task.split("test"), make(task.n), task.spec)
    steps = [next(stream) for _ in range(at)]
    try:
        steps.append(stream.send(torch.tensor(unwanted)))
        steps += stream
    except StopIteration:
        assert not bool(wanted.any())
    for step in steps:
        expected = whole.sequences.mask()[:, step.position] & (wanted | (step.position < at))
        assert torch.equal(step.active, expected)
        assert torch.equal(step.tokens, torch.where(expected, whole.sequences.tokens[:, step.position], 0))
        assert torch.equal(step.by_expert, whole.by_expert[:, step.position] & expected)
    for (state,) in proposed[asked_for_all + at :]:
        assert not set(state.inputs.tolist()) & set(task.split("test").inputs[~wanted].tolist())


def test_the_stream_leaves_gradients_to_its_consumer() -> None:
    task = TOYS["lengths differ"]
    for _ in interleave(task.predictor, task.expert, task.split("test"), Threshold(Hashing()), task.spec):
        assert torch.is_grad_enabled()


# -- who is asked --------------------------------------------------------------------------------------------------


@each_toy
def test_rows_that_ended_are_never_asked_again(task: ToyTask, spy: Spy) -> None:
    proposed, named = spy(task.predictor, "propose"), spy(task.expert, "next")
    rollout = run(task, Threshold(Hashing(), 0.5))
    positions = range(int(rollout.sequences.lengths.max()))
    assert [len(state.inputs) for (state,) in proposed] == [
        int((rollout.sequences.lengths > j).sum()) for j in positions
    ]
    asked = [int(rollout.by_expert[:, j].sum()) for j in positions]
    assert [len(rows) for _, rows in named] == [count for count in asked if count]


@each_toy
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_row_is_handed_off_in_one_call_and_left_alone(task: ToyTask, kept: int, spy: Spy) -> None:
    alone = draft(task.predictor, task.split("test"), task.spec).sequences.lengths
    proposed, completed = spy(task.predictor, "propose"), spy(task.expert, "complete")
    run(task, keep(task.n, kept))
    handed = int((alone > kept).sum())
    assert [len(examples) for examples, _, _ in completed] == ([handed] if handed else [])
    assert sum(len(state.inputs) for (state,) in proposed) == int(alone.clamp(max=kept + 1).sum())


def test_token_level_deferral_needs_next_tokens() -> None:
    task = WithExpert(completing, n=4)
    with pytest.raises(ContractError, match="FunctionExpert only completes; use a one-time or whole policy"):
        run(task, Threshold(Hashing()))


def test_deferring_needs_an_expert() -> None:
    task = TOYS["lengths differ"]
    with pytest.raises(ContractError, match="there is no expert"):
        roll_out(task.predictor, None, task.split("test"), keep(task.n, 2), task.spec)


# -- counts and drafts ---------------------------------------------------------------------------------------------


@each_toy
def test_counts_of_a_rollout(task: ToyTask) -> None:
    rejector = Hashing(2)
    rollout = run(task, Threshold(rejector, 0.5))
    expected = [write(task, one, by_threshold(task, one, rejector, 0.5)) for one in rows_of(task.split("test"))]
    assert rollout.deferred.tolist() == [sum(one.by_expert) for one in expected]
    assert rollout.switches.tolist() == [len(list(groupby(one.by_expert))) - 1 for one in expected]
    share = sum(sum(one.by_expert) for one in expected) / sum(map(len, expected))
    assert rollout.share == pytest.approx(share, abs=1e-7)
