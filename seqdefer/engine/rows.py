"""Rows that stand at their own positions: the batches behind the speculative loop.

A model's state is a batch whose rows have read equally much. Here rows go back to earlier positions one by one, leave,
and join others that are further ahead. `StateRows` does this for any state that can be selected from: it keeps the
states of the last steps, and rows whose states cannot be joined run as batches of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from seqdefer.interfaces import NextTokenExpert, Policy, Predictor
from seqdefer.types import Examples, Proposal

State = TypeVar("State")
Result = TypeVar("Result")


class PredictorRows(ABC):
    """Rows of a predictor. All of them write one token at a time; each may go back."""

    @abstractmethod
    def admit(self, inputs: Tensor) -> Tensor:
        """Add rows that have read their inputs (B, ...); return their context (B, C)."""

    @abstractmethod
    def propose(self) -> Proposal:
        """Propose the next token of every row."""

    @abstractmethod
    def append(self, tokens: Tensor) -> None:
        """Every row reads one of `tokens` (n,)."""

    @abstractmethod
    def go_back(self, steps: Tensor) -> None:
        """Every row forgets its last `steps` (n,) tokens."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, none twice), in that order; the others leave."""


class ExpertRows(ABC):
    """Rows of an expert that names next tokens. Only the rows that ask read."""

    @abstractmethod
    def admit(self, examples: Examples) -> None:
        """Add rows that have read nothing yet."""

    @abstractmethod
    def read(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Let `rows` (R,) read the first `counts` (R,) of `tokens` (R, T). Return the tokens that the expert names before
        the first and after each of them, (R, T + 1); those past `counts` mean nothing."""

    @abstractmethod
    def go_back(self, steps: Tensor) -> None:
        """Every row forgets the last `steps` (n,) tokens that it has read."""

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, none twice), in that order; the others leave."""


@dataclass
class _Batch(Generic[State]):
    """Rows in step with each other, with their states after each of the last tokens, the latest last."""

    rows: Tensor  # int64 (B,) places among all rows, rising
    states: list[State]


class StateRows(Generic[State]):
    """Rows of immutable states. `join` makes one batch of several, or raises NotImplementedError."""

    def __init__(
        self, select: Callable[[State, Tensor], State], join: Callable[[Sequence[State]], State], history: int
    ) -> None:
        self.select, self.join, self.history = select, join, history
        self.batches: list[_Batch[State]] = []
        self.n = 0

    def admit(self, state: State, n: int, device: torch.device) -> None:
        self.batches.append(_Batch(torch.arange(self.n, self.n + n, device=device), [state]))
        self.n += n
        self._merge()

    def advance(self, step: Callable[[State, Tensor], State]) -> None:
        """Replace the state of every batch by `step(state, rows)`."""
        for batch in self.batches:
            batch.states = [*batch.states[-self.history :], step(batch.states[-1], batch.rows)]

    def ask(self, question: Callable[[State, Tensor], list[Tensor]]) -> list[Tensor]:
        """Ask every batch `question(state, rows)`; return the answers in the order of all rows."""
        answers = [question(batch.states[-1], batch.rows) for batch in self.batches]
        if len(answers) == 1:
            return answers[0]
        order = torch.cat([batch.rows for batch in self.batches]).argsort()
        return [torch.cat(parts)[order] for parts in zip(*answers, strict=True)]

    def go_back(self, steps: Tensor) -> None:
        batches = []
        for batch in self.batches:
            for n in steps[batch.rows].unique().tolist():
                members = (steps[batch.rows] == n).nonzero().squeeze(1)
                is_all = len(members) == len(batch.rows)
                kept = batch.states[: len(batch.states) - n]
                states = kept if is_all else [self.select(state, members) for state in kept[-1:]]
                batches.append(_Batch(batch.rows[members], states))
        self.batches = batches
        self._merge()

    def keep(self, rows: Tensor) -> None:
        place = torch.full((self.n,), -1, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        batches = []
        for batch in self.batches:
            new = place[batch.rows]
            members = (new >= 0).nonzero().squeeze(1)
            if len(members):
                members = members[new[members].argsort()]
                is_all = torch.equal(members, torch.arange(len(batch.rows), device=rows.device))
                states = batch.states if is_all else [self.select(state, members) for state in batch.states]
                batches.append(_Batch(new[members], states))
        self.batches, self.n = batches, len(rows)

    def _merge(self) -> None:
        """Make one batch of all, where their states can be joined. Earlier states are forgotten."""
        if len(self.batches) < 2:
            return
        try:
            joined = self.join([batch.states[-1] for batch in self.batches])
        except NotImplementedError:
            return
        rows = torch.cat([batch.rows for batch in self.batches])
        order = rows.argsort()
        self.batches = [_Batch(rows[order], [self.select(joined, order)])]


class StatePredictorRows(PredictorRows):
    """Rows of any predictor."""

    def __init__(self, predictor: Predictor[Any], history: int) -> None:
        self.predictor = predictor
        self.states: StateRows[Any] = StateRows(predictor.select, predictor.join, history)

    def admit(self, inputs: Tensor) -> Tensor:
        state, context = self.predictor.start(inputs)
        self.states.admit(state, len(inputs), context.device)
        return context

    def propose(self) -> Proposal:
        def ask(state: Any, _: Tensor) -> list[Tensor]:
            proposal = self.predictor.propose(state)
            entropy = [] if proposal.entropy is None else [proposal.entropy]
            return [proposal.tokens, proposal.features, proposal.uncertainty, *entropy]

        return Proposal(*self.states.ask(ask))

    def append(self, tokens: Tensor) -> None:
        self.states.advance(lambda state, rows: self.predictor.append(state, tokens[rows]))

    def go_back(self, steps: Tensor) -> None:
        self.states.go_back(steps)

    def keep(self, rows: Tensor) -> None:
        self.states.keep(rows)


@dataclass(frozen=True)
class _Place:
    """A row of a state."""

    state: Any
    row: int


class StateExpertRows(ExpertRows):
    """Rows of any expert that names next tokens. Rows that have read equally much since they were last one batch read
    together."""

    def __init__(self, expert: NextTokenExpert[Any]) -> None:
        self.expert = expert
        self.places: list[list[_Place]] = []  # of each row, after each token of its last chunk

    def admit(self, examples: Examples) -> None:
        state = self.expert.start(examples)
        self.places += [[_Place(state, row)] for row in range(len(examples))]

    def read(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        named = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=tokens.dtype, device=tokens.device)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            groups.setdefault((id(self.places[row][-1].state), count), []).append(index)
        for (_, count), members in groups.items():
            here = torch.tensor(members, device=tokens.device)
            own = rows[here].tolist()
            last = [self.places[row][-1] for row in own]
            state = self.expert.select(last[0].state, torch.tensor([one.row for one in last], device=tokens.device))
            every = torch.arange(len(own), device=tokens.device)
            passed = [state]
            for position in range(count + 1):
                answer, state = self.expert.next(state, every)
                named[here, position] = answer.to(named)
                passed[-1] = state
                if position < count:
                    state = self.expert.append(state, tokens[here, position])
                    passed.append(state)
            for place, row in enumerate(own):
                self.places[row] = [_Place(one, place) for one in passed]
        return named

    def go_back(self, steps: Tensor) -> None:
        for places, n in zip(self.places, steps.tolist(), strict=True):
            del places[len(places) - n :]

    def keep(self, rows: Tensor) -> None:
        self.places = [self.places[row] for row in rows.tolist()]
