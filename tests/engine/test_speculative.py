"""The speculative loop writes what the interleaved loop writes, whatever it guesses and whoever joins."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from thresholds import interleaved

from seqdefer.budgets.policies import Threshold
from seqdefer.engine import speculative
from seqdefer.engine.interleaved import roll_out
from seqdefer.engine.pace import FixedPace, Pace
from seqdefer.engine.speculative import collect, run_all, speculative_loop
from seqdefer.rejectors.confidence import Confidence
from seqdefer.testing import FunctionPredictor, ToyTask
from seqdefer.testing.fakes import ToyExpert, ToyPredictor
from seqdefer.types import Rollout

TOYS = {
    "lengths differ": ToyTask(n=16),
    "all of one length": ToyTask(n=8, length=4, ends=False),
    "one token": ToyTask(n=6, length=1),
    "two words": ToyTask(n=16, length=6, vocabulary=3, seed=1),
    "long": ToyTask(n=12, length=17, vocabulary=3, seed=2),
}
each_toy = pytest.mark.parametrize("task", TOYS.values(), ids=TOYS)


def same(found: Rollout, expected: Rollout, rows: slice = slice(None)) -> None:
    assert torch.equal(found.sequences.lengths, expected.sequences.lengths[rows])
    assert torch.equal(found.sequences.tokens, expected.sequences.tokens[rows])
    assert torch.equal(found.authors, expected.authors[rows])
    assert torch.allclose(found.scores, expected.scores[rows].float(), atol=1e-6)


PACES: dict[str, Callable[[], Any]] = {
    **{f"{ahead} ahead": partial(FixedPace, ahead) for ahead in (1, 2, 3, 8, 30)},
    **{f"{ahead} ahead, foreseeing": partial(FixedPace, ahead, foresees=True) for ahead in (1, 2, 3, 8, 30)},
    "measured": Pace,
}


@cache
def written(task: ToyTask) -> dict[float, Rollout]:
    return interleaved(task.predictor, task.expert, task.split("test"), task.spec, shares=(0.1, 0.5, 0.9))


@pytest.mark.parametrize("at_once", [None, 1, 3])
@pytest.mark.parametrize("pace", PACES.values(), ids=PACES)
@each_toy
def test_writes_what_the_interleaved_loop_writes(task: ToyTask, pace: Callable[[], Any], at_once: int | None) -> None:
    examples = task.split("test")
    rows = slice(4) if at_once == 1 else slice(None)  # one row after the other takes long
    for threshold, expected in written(task).items():
        policy = Threshold(Confidence(), threshold)
        loop = speculative_loop(task.predictor, task.expert, policy, task.spec, pace())
        same(run_all(loop, examples.select(torch.arange(len(examples))[rows]), at_once), expected, rows)


class Agreeing(ToyExpert):
    """Names the predictor's tokens."""

    def next(self, state: Any, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.task.predictor.propose(state).tokens[rows], state


@pytest.mark.parametrize(("foresees", "passes"), [(False, 9), (True, 5)])
def test_a_foreseen_token_is_not_asked_for(foresees: bool, passes: int) -> None:
    """One token a turn, all deferred: with each answer the expert also gives that to the next question."""
    task = ToyTask(n=1, length=9, ends=False)
    policy = Threshold(Confidence(), -9e9)
    loop = speculative_loop(task.predictor, Agreeing(task), policy, task.spec, FixedPace(1, foresees=foresees))
    rollout = run_all(loop, task.split("test"))
    assert bool(rollout.by_expert.all())
    assert loop.work.expert_passes == passes


def test_no_row_is_asked_past_its_last_token() -> None:
    """Unless its predictor says that it may be: rows stand at different positions, and run ahead together."""
    task = ToyTask(n=12, length=5, ends=False)
    longest = 0

    def write(given: torch.Tensor, prefix: list[int]) -> tuple[int, float]:
        nonlocal longest
        longest = max(longest, len(prefix))
        return (int(given.sum()) + len(prefix)) % 3, float((int(given.sum()) + len(prefix)) % 4)

    predictor = FunctionPredictor(write, "function")
    policy = Threshold(Confidence(), 2.0)
    loop = speculative_loop(predictor, task.expert, policy, task.spec, FixedPace(4))
    found = run_all(loop, task.split("test"), at_once=4)
    same(found, roll_out(predictor, task.expert, task.split("test"), policy, task.spec))
    assert longest == task.spec.length - 1
    predictor.runs_past_end = True
    run_all(speculative_loop(predictor, task.expert, policy, task.spec, FixedPace(4)), task.split("test"), at_once=4)
    assert longest >= task.spec.length


def test_no_row_is_asked_past_its_end_token() -> None:
    task = ToyTask(n=12, length=6, vocabulary=3)
    asked = list[list[int]]()

    def write(given: torch.Tensor, prefix: list[int]) -> tuple[int, float]:
        asked.append(prefix)
        return (int(given.sum()) + len(prefix)) % 3, float((int(given.sum()) + len(prefix)) % 4)

    predictor, policy = FunctionPredictor(write, "function"), Threshold(Confidence(), 2.0)
    run_all(speculative_loop(predictor, task.expert, policy, task.spec, FixedPace(4)), task.split("test"), at_once=4)
    assert not any(task.spec.end in prefix for prefix in asked)


def test_a_failed_admission_adds_no_row() -> None:
    """Rows at work go on as if nothing had been tried."""
    task = ToyTask(n=6, length=5)
    examples, policy = task.split("test"), Threshold(Confidence(), 0.5)

    class Failing(Threshold):
        def start(self, context: torch.Tensor) -> Any:
            raise RuntimeError("no start")

    loop = speculative_loop(task.predictor, task.expert, policy, task.spec, FixedPace(2))
    rows = loop.admit(examples.select(torch.arange(3)))
    loop.turn()
    with pytest.raises(RuntimeError, match="no start"):
        loop.admit(examples.select(torch.arange(3, 5)), Failing(Confidence()))
    while loop.rows:
        loop.turn()
    expected = roll_out(task.predictor, task.expert, examples.select(torch.arange(3)), policy, task.spec)
    same(collect(rows, task.spec), expected)


class Clock:
    """Tells a time that passes only where models work."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0

    def perf_counter(self) -> float:
        return self.seconds


def steps_taken(
    monkeypatch: pytest.MonkeyPatch, agreement: float, *, step: float, reading: float, length: int = 40
) -> int:
    """Return the predictor's steps for one row that is deferred everywhere. A pass takes 20 ms, and `reading` a
    token."""
    task, clock = ToyTask(n=1, length=length, ends=False), Clock()

    class Stepping(ToyPredictor):
        def append(self, state: Any, tokens: torch.Tensor) -> Any:
            clock.seconds, clock.steps = clock.seconds + step, clock.steps + 1
            return super().append(state, tokens)

    class Reading(ToyExpert):
        def read(self, state: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
            clock.seconds += 0.02 + reading * tokens.shape[1]
            return super().read(state, tokens)

        def next(self, state: Any, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
            proposed = task.predictor.propose(state).tokens[rows]
            return torch.where(proposed % 4 < 4 * agreement, proposed, (proposed + 1) % task.vocabulary), state

    monkeypatch.setattr(speculative, "time", clock)
    loop = speculative_loop(Stepping(task), Reading(task), Threshold(Confidence(), -9e9), task.spec)
    run_all(loop, task.split("test"))
    return clock.steps


def test_no_step_is_taken_past_a_guess_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that reads the expert's answer was thought to take no time. So all steps seemed cheap where turns are
    short, and the predictor ran ahead in vain."""
    assert steps_taken(monkeypatch, 0.0, step=0.01, reading=0.0) < 46


def test_no_step_is_taken_past_a_question_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expert reads too slowly to be asked twice in a pass, so a turn ends at the second question."""
    assert steps_taken(monkeypatch, 1.0, step=0.001, reading=0.5) < 90
