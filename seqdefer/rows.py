"""Rows that stand at their own positions: what the speculative loop needs of a predictor and of an expert.

A model's state is a batch whose rows have read equally much. Rows read on one by one, go back to earlier positions,
leave, and join others that are further ahead. `seqdefer.engine.rows` makes them of the states of any model; a model
with a faster way returns its own from `Predictor.rows` or `NextTokenExpert.rows`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from seqdefer.types import Examples, Proposal

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class PredictorRows(ABC):
    """Rows of a predictor. All write one token at a time; each may go back. `runs_past_end`: see `Predictor`."""

    runs_past_end: bool = True

    @abstractmethod
    def admit(self, inputs: Tensor) -> Tensor:
        """Add rows that have read their inputs (B, ...); return their context (B, C)."""

    @abstractmethod
    def propose(self) -> Proposal:
        """Propose the next token of every row."""

    def guess(self) -> Tensor | None:
        """Return the tokens that `propose` would propose, where they are known before the rest of it. The rest is left
        to `propose_guessed`: one call for several positions takes a GPU hardly longer than for one."""
        return None

    def propose_guessed(self) -> Proposal:
        """Propose at every position since the last call at which `guess` was asked instead: all rows of the first
        position, then all of the next."""
        raise NotImplementedError

    @abstractmethod
    def append(self, tokens: Tensor) -> None:
        """Every row reads one of `tokens` (n,)."""

    @abstractmethod
    def go_back(self, steps: Sequence[int]) -> None:
        """Every row forgets its last `steps` tokens. The next step reads one of every row."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keep `rows`, none twice, in that order; the others leave."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that a row of an expert reads next, and where it asks for the expert's: `asked` are places, rising; 0 is
    before the first of the tokens (only where the row has read nothing), n after n of them."""

    row: int
    tokens: Sequence[Any]
    asked: Sequence[int]
    guesses: Sequence[Any] = ()  # what the predictor wrote at these places


class ExpertRows(ABC):
    """Rows of an expert that names next tokens. Only the rows that ask read. `tokens_read` counts all tokens so far,
    those of inputs too where a model reads them as it reads others."""

    tokens_read: int = 0
    foresees: bool = True  # whether one more place asked costs no more than reading up to it

    @abstractmethod
    def admit(self, examples: Examples) -> None:
        """Add rows that have read nothing yet."""

    @abstractmethod
    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        """Read chunks of different rows, in one pass where possible. Return the expert's tokens at the places asked."""

    def submit(self, chunks: Sequence[Chunk]) -> Future[list[list[Any]]] | None:
        """Start `read` without waiting for its result, where the expert is called over a network; None: it cannot. No
        other method is called until the result is there. Cancelling it cancels the calls."""
        return None

    @abstractmethod
    def go_back(self, steps: Sequence[int]) -> None:
        """Every row forgets the last `steps` tokens that it has read; no more than its last chunk had."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Keep `rows`, none twice, in that order; the others leave."""


def run_turn(turning: Generator[Question, Answer, Result], answer: Callable[[Question], Answer]) -> Result:
    """Run a turn that yields questions to its end, and answer each at once."""
    try:
        question = next(turning)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    while True:
        answered = answer(question)
        try:
            question = turning.send(answered)
        except StopIteration as stop:
            result = stop.value
            return result
