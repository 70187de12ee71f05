"""Rows of any model, made of its states.

`StateRows` keeps the states of the last steps; rows whose states cannot be joined run as batches of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from seqdefer.engine.interleaved import only_completes
from seqdefer.engine.pace import MAX_STEPS_AHEAD
from seqdefer.environment import send
from seqdefer.interfaces import Expert, NextTokenExpert, Predictor
from seqdefer.rows import Chunk, ExpertRows, PredictorRows
from seqdefer.types import Examples, Proposal

State = TypeVar("State")
Rows = Tensor | slice  # int64 (B,) places among all rows; a slice: all of them


@dataclass
class _Batch(Generic[State]):
    """Rows in step with each other, with their states after each of the last tokens, the latest last."""

    rows: list[int]  # places among all rows, rising
    states: list[State]


class StateRows(Generic[State]):
    """Rows of immutable states. `join` makes one batch of several, or raises NotImplementedError."""

    def __init__(
        self, select: Callable[[State, Tensor], State], join: Callable[[Sequence[State]], State], history: int
    ) -> None:
        self.select, self.join, self.history = select, join, history
        self.batches: list[_Batch[State]] = []
        self.n, self.device = 0, torch.device("cpu")

    def admit(self, state: State, n: int, device: torch.device) -> None:
        self.device = device
        self.batches.append(_Batch(list(range(self.n, self.n + n)), [state]))
        self.n += n
        self._merge()

    def advance(self, step: Callable[[State, Rows], State]) -> None:
        """Replace the state of every batch by `step(state, rows)`."""
        for batch in self.batches:
            batch.states = [*batch.states[-self.history :], step(batch.states[-1], self._index(batch))]

    def ask(self, question: Callable[[State], list[Tensor]]) -> list[Tensor]:
        """Ask every batch `question(state)`; return the answers in the order of all rows."""
        answers = [question(batch.states[-1]) for batch in self.batches]
        return [self.in_order(parts) for parts in zip(*answers, strict=True)]

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """Return parts of the batches, one after the other, in the order of all rows."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))[self._order()]

    def _order(self) -> Tensor:
        rows = [row for batch in self.batches for row in batch.rows]
        return send(sorted(range(len(rows)), key=rows.__getitem__), self.device)

    def _index(self, batch: _Batch[State]) -> Rows:
        return slice(None) if len(batch.rows) == self.n else send(batch.rows, self.device)

    def go_back(self, steps: Sequence[int]) -> None:
        batches = []
        for batch in self.batches:
            back = [steps[row] for row in batch.rows]
            for n in sorted(set(back)):
                members = [place for place, m in enumerate(back) if m == n]
                kept = batch.states[: len(batch.states) - n]
                states = kept if len(members) == len(back) else self._select(kept[-1:], members)
                batches.append(_Batch([batch.rows[place] for place in members], states))
        self.batches = batches
        self._merge()

    def keep(self, rows: Sequence[int]) -> None:
        new = {row: place for place, row in enumerate(rows)}
        batches = []
        for batch in self.batches:
            members = sorted(
                (place for place, row in enumerate(batch.rows) if row in new), key=lambda place: new[batch.rows[place]]
            )
            if members:
                is_all = members == list(range(len(batch.rows)))
                states = batch.states if is_all else self._select(batch.states, members)
                batches.append(_Batch([new[batch.rows[place]] for place in members], states))
        self.batches, self.n = batches, len(rows)

    def _select(self, states: Sequence[State], members: list[int]) -> list[State]:
        index = send(members, self.device)
        return [self.select(state, index) for state in states]

    def _merge(self) -> None:
        """Make one batch of all, where their states can be joined. Earlier states are forgotten."""
        if len(self.batches) < 2:
            return
        try:
            joined = self.join([batch.states[-1] for batch in self.batches])
        except NotImplementedError:
            return
        rows = [row for batch in self.batches for row in batch.rows]
        in_order = joined if rows == sorted(rows) else self.select(joined, self._order())
        self.batches = [_Batch(sorted(rows), [in_order])]


class StatePredictorRows(PredictorRows):
    """Rows of any predictor."""

    def __init__(self, predictor: Predictor[Any], history: int) -> None:
        self.predictor = predictor
        self.runs_past_end = predictor.runs_past_end
        self.states: StateRows[Any] = StateRows(predictor.select, predictor.join, history)

    def admit(self, inputs: Tensor) -> Tensor:
        state, context = self.predictor.start(inputs)
        self.states.admit(state, len(inputs), context.device)
        return context

    def propose(self) -> Proposal:
        return Proposal(*self.states.ask(lambda state: self.predictor.propose(state).tensors()))

    def append(self, tokens: Tensor) -> None:
        self.states.advance(lambda state, rows: self.predictor.append(state, tokens[rows]))

    def go_back(self, steps: Sequence[int]) -> None:
        self.states.go_back(steps)

    def keep(self, rows: Sequence[int]) -> None:
        self.states.keep(rows)


@dataclass
class _ExpertRow:
    """A row of a state, and the tokens that it has read since."""

    state: Any
    place: int
    since: list[Any]
    after: tuple[Any, int] | None = None  # the state after those tokens, and the row's place in it


class StateExpertRows(ExpertRows):
    """Rows of any expert that names next tokens. Rows with equally many unread tokens read together, where their states
    can be joined; others one batch after the other. A row that goes back reads its chunk again."""

    def __init__(self, expert: NextTokenExpert[Any]) -> None:
        self.expert, self.device = expert, torch.device("cpu")
        self.rows: list[_ExpertRow] = []

    def admit(self, examples: Examples) -> None:
        state = self.expert.start(examples)
        self.device = examples.inputs.device
        self.rows += [_ExpertRow(state, place, []) for place in range(len(examples))]

    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        read_before = []
        for chunk in chunks:
            row = self.rows[chunk.row]
            if row.after is not None:
                row.state, row.place, row.since, row.after = *row.after, [], None
            read_before.append(len(row.since))
            row.since = [*row.since, *chunk.tokens]
        rows = [self.rows[chunk.row] for chunk in chunks]
        self.tokens_read += sum(len(row.since) for row in rows)
        named: list[list[Any]] = [[] for _ in rows]
        for group, state in self._groups(rows):
            for place, line in zip(group, self._read_batch([rows[place] for place in group], state), strict=True):
                named[place] = line
        return [
            [line[before + place] for place in chunk.asked]
            for line, before, chunk in zip(named, read_before, chunks, strict=True)
        ]

    def _groups(self, rows: Sequence[_ExpertRow]) -> Iterator[tuple[list[int], Any]]:
        """Yield places of rows that read together, and their state."""
        groups: dict[tuple[int, int], list[int]] = {}  # by the number of tokens and the state
        for place, row in enumerate(rows):
            groups.setdefault((len(row.since), id(row.state)), []).append(place)
        for n in {n for n, _ in groups}:
            parts = [places for (length, _), places in groups.items() if length == n]
            states = [self._select([rows[place] for place in places]) for places in parts]
            try:
                joined = states[0] if len(states) == 1 else self.expert.join(states)
            except NotImplementedError:
                yield from zip(parts, states, strict=True)
            else:
                yield [place for places in parts for place in places], joined

    def _select(self, rows: Sequence[_ExpertRow]) -> Any:
        return self.expert.select(rows[0].state, torch.tensor([row.place for row in rows], device=self.device))

    def _read_batch(self, rows: Sequence[_ExpertRow], state: Any) -> list[list[Any]]:
        """Let rows with equally many tokens read them."""
        lines = [row.since for row in rows]
        tokens = torch.tensor(lines, device=self.device, dtype=None if lines[0] else torch.long)
        named, state = self.expert.read(state, tokens.view(len(rows), -1))
        for place, row in enumerate(rows):
            row.after = state, place
        answers: list[list[Any]] = named.tolist()
        return answers

    def go_back(self, steps: Sequence[int]) -> None:
        for row, n in zip(self.rows, steps, strict=True):
            if n:
                row.since, row.after = row.since[:-n], None

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


def rows_of_predictor(predictor: Predictor[Any]) -> PredictorRows:
    """Return a predictor's rows, without any row."""
    rows = predictor.rows()
    return StatePredictorRows(predictor, MAX_STEPS_AHEAD) if rows is None else rows


def rows_of_expert(expert: Expert) -> ExpertRows:
    """Return an expert's rows, without any row."""
    if not isinstance(expert, NextTokenExpert):
        raise only_completes(expert)
    rows = expert.rows()
    return StateExpertRows(expert) if rows is None else rows
