"""What the tests compare with: the obvious loops, one row and one token at a time, everything computed anew."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from seqdefer.interfaces import Expert, NextTokenExpert, Policy, Task, TokenRejector
from seqdefer.paper.theory import Floats
from seqdefer.progress import Silent
from seqdefer.rejectors.losses import PHIS, PSIS, Phi, Psi, get_phi, get_psi
from seqdefer.tasks.weather.task import WeatherOptions, WeatherTask, prepare
from seqdefer.testing import FunctionExpert, ToyTask
from seqdefer.testing.fakes import mix
from seqdefer.types import Examples, Proposal

Token = int | float
Decide = Callable[[int, list[Token], Proposal], bool]  # position, prefix, the predictor's proposal for one row


@dataclass(frozen=True)
class Written:
    """One sequence of the obvious loop, with what the predictor had proposed at every position."""

    tokens: list[Token]
    by_expert: list[bool]
    proposals: list[Proposal]

    def __len__(self) -> int:
        return len(self.tokens)


def toy_tasks(longest: int) -> st.SearchStrategy[ToyTask]:
    """Toys of all kinds, for properties that must hold of each."""
    return st.builds(
        ToyTask,
        n=st.integers(1, 7),
        length=st.integers(1, longest),
        vocabulary=st.integers(2, 5),
        seed=st.integers(0, 10**6),
        ends=st.booleans(),
    )


def rows_of(examples: Examples) -> list[Examples]:
    return [examples.select(torch.tensor([row])) for row in range(len(examples))]


def column(token: Token) -> Tensor:
    return torch.tensor([token])


def proposal_after(task: Task, one: Examples, prefix: list[Token]) -> Proposal:
    return _proposal_after(task, _Alone(one), tuple(prefix))


def expert_after(task: Task, one: Examples, prefix: list[Token]) -> Token:
    return _expert_after(task, _Alone(one), tuple(prefix))


class _Alone:
    """An example as a key: the oracles are asked the same again and again, and seconds matter."""

    def __init__(self, one: Examples) -> None:
        self.one, self.key = one, (*one.inputs.flatten().tolist(), *one.ids.tolist())

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alone) and self.key == other.key


@cache
@torch.no_grad()
def _proposal_after(task: Task, alone: _Alone, prefix: tuple[Token, ...]) -> Proposal:
    state, _ = task.predictor.start(alone.one.inputs)
    for token in prefix:
        state = task.predictor.append(state, column(token))
    return task.predictor.propose(state)


@cache
@torch.no_grad()
def _expert_after(task: Task, alone: _Alone, prefix: tuple[Token, ...]) -> Token:
    expert = task.expert
    assert isinstance(expert, NextTokenExpert)
    state = expert.start(alone.one)
    for token in prefix:
        state = expert.append(state, column(token))
    token: Token = expert.next(state, torch.tensor([0]))[0].item()
    return token


def has_ended(task: Task, tokens: list[Token]) -> bool:
    return len(tokens) == task.spec.length or (bool(tokens) and tokens[-1] == task.spec.end)


def write(task: Task, one: Examples, decide: Decide) -> Written:
    """The interleaved loop of the paper for a single row."""
    written = Written([], [], [])
    while not has_ended(task, written.tokens):
        prefix = list(written.tokens)
        proposal = proposal_after(task, one, prefix)
        defer = decide(len(prefix), prefix, proposal)
        written.tokens.append(expert_after(task, one, prefix) if defer else proposal.tokens.item())
        written.by_expert.append(defer)
        written.proposals.append(proposal)
    return written


def write_all(task: Task, examples: Examples, decide: Decide) -> list[Written]:
    return [write(task, one, decide) for one in rows_of(examples)]


def hand_off(kept: int) -> Decide:
    return lambda position, prefix, proposal: position >= kept


def by_threshold(task: Task, one: Examples, rejector: TokenRejector[Any], threshold: float) -> Decide:
    """Defers where the score reaches the threshold; the rejector reads the whole prefix anew each time."""

    def decide(position: int, prefix: list[Token], proposal: Proposal) -> bool:
        return score_after(task, one, rejector, prefix) >= threshold

    return decide


@torch.no_grad()
def score_after(task: Task, one: Examples, rejector: TokenRejector[Any], prefix: list[Token]) -> float:
    _, context = task.predictor.start(one.inputs)
    state = rejector.start(context)
    for position in range(len(prefix) + 1):
        score, state = rejector.score(state, position, proposal_after(task, one, prefix[:position]))
    return float(score)


def padded(rows: list[list[Any]], length: int) -> Tensor:
    return torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])


class Hashing(TokenRejector[Tensor]):
    """Scores that look random, with many ties, from all proposals along the prefix; exact, so that equals are equal."""

    def __init__(self, seed: int = 0, levels: int = 16) -> None:
        self.seed, self.levels = seed, levels

    def start(self, context: Tensor) -> Tensor:
        return mix((context * 8).long().sum(1), self.seed)

    def score(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor]:
        state = mix(state, proposal.tokens, position)
        return (state % self.levels) / self.levels, state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


def completing(task: ToyTask) -> FunctionExpert:
    """The toy's expert without `next`: it can only complete."""

    def complete(row: Tensor, prefix: list[Any]) -> list[Any]:
        one, tokens = Examples(row[None], row[None, None], torch.zeros(1, dtype=torch.long)), list(prefix)
        while not has_ended(task, tokens):
            tokens.append(expert_after(task, one, tokens))
        return tokens

    return FunctionExpert(complete)


class WithExpert(ToyTask):
    """The toy with another expert."""

    def __init__(self, expert: Callable[[ToyTask], Expert], **sizes: Any) -> None:
        super().__init__(**sizes)
        self.expert = expert(ToyTask(**sizes))  # type: ignore[assignment]


# -- weather -------------------------------------------------------------------------------------------------------

START = datetime(2021, 1, 7)  # a Thursday, like 1970-01-01: weeks are counted from there


def temperatures(weeks: int = 8, seed: int = 0) -> NDArray[np.float64]:
    """A daily wave, slow weather and noise, every 10 minutes."""
    steps = np.arange(weeks * 7 * 144)
    noise = np.random.default_rng(seed).normal(0, 0.3, len(steps))
    slow = 3 * np.sin(2 * math.pi * steps / 700)
    return np.asarray(np.round(8 + 6 * np.sin(2 * math.pi * steps / 144) + slow + noise, 2))


def write_record(path: Path, celsius: NDArray[np.float64]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Date Time", "T (degC)"])
        writer.writerows([str(START + timedelta(minutes=10 * row)), value] for row, value in enumerate(celsius))
    return path


def prepare_weather(record: Path, folder: Path, **options: Any) -> WeatherTask:
    chosen = {"data": str(record), "stride": 12, "hidden": 4, "epochs": 2, "passes": 3, **options}
    return prepare(WeatherOptions(**chosen), folder, torch.device("cpu"), Silent())


class PlannedHandOff(Policy[tuple[Tensor, Tensor]]):
    """As `engine.HandOff`: keeps `kept` (n,) tokens, then hands off; and shows what the rejector thought, (n, L)."""

    final: ClassVar[bool] = True

    def __init__(self, kept: Tensor, scores: Tensor) -> None:
        self.kept, self.scores = kept, scores

    def start(self, context: Tensor) -> tuple[Tensor, Tensor]:
        return self.kept.to(context.device), self.scores.to(context.device)

    def decide(
        self, state: tuple[Tensor, Tensor], position: int, proposal: Proposal
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        kept, scores = state
        return scores[:, position], position >= kept, state

    def select(self, state: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        return state[0][rows], state[1][rows]


# -- theory --------------------------------------------------------------------------------------------------------

LOGISTIC, SQUARE = get_phi("logistic"), get_phi("square")
CROSS_ENTROPY, MEAN_ABSOLUTE_ERROR = get_psi("cross_entropy"), get_psi("mean_absolute_error")
each_phi = pytest.mark.parametrize("phi", PHIS.values(), ids=lambda phi: phi.name)
each_psi = pytest.mark.parametrize("psi", PSIS.values(), ids=lambda psi: psi.name)
some, seeds = settings(max_examples=40), st.integers(0, 2**32 - 1)
ROUNDING = 1e-12  # goes inside Gamma, whose slope at 0 may be infinite
BEST_MARGIN: dict[str, Callable[[Floats], Floats]] = {
    "logistic": lambda p: np.log(p / (1 - p)),
    "exponential": lambda p: np.log(p / (1 - p)) / 2,
    "square": lambda p: 2 * p - 1,
    "squared_hinge": lambda p: 2 * p - 1,
}


def xlogx(x: float) -> float:
    return x * math.log(x) if x > 0 else 0.0


def value_of(loss: Phi | Psi, scores: Any) -> Floats:
    result: Floats = loss(torch.tensor(np.asarray(scores, float))).numpy()
    return result


def random_scores(random: np.random.Generator, *shape: int) -> Floats:
    """Of all sizes, some exactly 0."""
    scores = random.normal(size=shape) * 10 ** random.uniform(-2, 0.7, shape)
    return np.where(random.random(shape) < 0.2, 0.0, scores)
