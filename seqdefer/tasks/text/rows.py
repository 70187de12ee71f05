"""Rows of text predictors and experts, for the speculative loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqdefer.environment import send
from seqdefer.graphs import Replayed, rounded
from seqdefer.rows import Chunk, ExpertRows, PredictorRows
from seqdefer.tasks.text.caches import ROOM
from seqdefer.tasks.text.model_rows import ModelRows, RowsOf
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.reading import Reading
from seqdefer.tasks.text.row_passes import COLUMNS
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

STEPS = 16  # of a model that writes alone, between two looks at what it wrote
MAX_SHOWN_BYTES = 2**28  # of inputs that facts are drawn from at once: waveforms are large


class NamesTokens(Protocol):
    """What rows need of a text expert."""

    rows_of: RowsOf

    def start_reading(self, inputs: Tensor) -> Reading: ...


class ShowsTokens(NamesTokens, Protocol):
    """What rows need of a text predictor."""

    device: torch.device
    shown: str
    model: TextModel

    showing: Replayed  # `show` of inputs, tokens and the parts of proposals

    def show(self, proposal: Proposal, inputs: Tensor, tokens: Tensor) -> Proposal: ...

    def context_of(self, inputs: Tensor, states: Tensor) -> Tensor: ...


class TextPredictorRows(PredictorRows):
    """Rows of a text predictor."""

    def __init__(self, predictor: ShowsTokens) -> None:
        self.predictor, self.rows = predictor, predictor.rows_of.rows()
        self.inputs: Tensor | None = None  # (n, S), padded
        # What was written, (n, W), padded, where rejectors see it, and not only states.
        self.tokens = torch.zeros(0, 0, dtype=torch.long, device=predictor.device)
        self.counts: list[int] = []  # of each row, its tokens
        self._counts: Tensor | None = None  # the same on the device
        self.proposal: Proposal | None = None  # of all rows
        self._guessed: list[tuple[Tensor, Proposal]] = []  # at each position guessed: tokens before it, its proposal

    def admit(self, inputs: Tensor) -> Tensor:
        self.predictor.start_reading(inputs)  # checks them
        inputs = inputs.to(self.predictor.device)
        proposal, context = self.rows.admit(inputs)
        before, padding = inputs[:0] if self.inputs is None else self.inputs, self.predictor.model.network.padding
        self.inputs, self.counts = _stack(before, inputs, padding), [*self.counts, *[0] * len(inputs)]
        self.tokens, self._counts = _stack(self.tokens, self.tokens.new_zeros(len(inputs), 0), PADDING), None
        self.proposal = proposal if self.proposal is None else Proposal.join([self.proposal, proposal])
        return self.predictor.context_of(inputs, context)

    def propose(self) -> Proposal:
        assert self.proposal is not None
        return self._show([(self.tokens, self.proposal)])

    def guess(self) -> Tensor:
        assert self.proposal is not None
        self._guessed.append((self.tokens, self.proposal))
        return self.proposal.tokens

    def propose_guessed(self) -> Proposal:
        assert self.inputs is not None
        at_once = max(1, MAX_SHOWN_BYTES // max(1, self.inputs.nbytes))
        guessed, self._guessed = self._guessed, []
        parts = [self._show(guessed[place : place + at_once]) for place in range(0, len(guessed), at_once)]
        return Proposal.join(parts)

    def _show(self, positions: Sequence[tuple[Tensor, Proposal]]) -> Proposal:
        """Return what rejectors see at several positions of all rows, one after the other."""
        assert self.inputs is not None
        proposal = Proposal.join([proposal for _, proposal in positions])
        if self.predictor.shown == "states":  # they are part of the proposal
            return self.predictor.show(proposal, self.inputs, self.tokens)
        inputs, tokens = self.inputs, positions[0][0]
        if len(positions) > 1:
            width = self.tokens.shape[1]  # it may have grown
            inputs = inputs.repeat(len(positions), 1)
            tokens = torch.cat([pad(one, (0, width - one.shape[1]), value=PADDING) for one, _ in positions])
        return Proposal(*self.predictor.showing.padded([inputs, tokens, *proposal.tensors()]))

    def append(self, tokens: Tensor) -> None:
        self.proposal = self.rows.step(tokens)
        if self.predictor.shown == "states":
            return
        if max(self.counts) == self.tokens.shape[1]:
            self.tokens = pad(self.tokens, (0, ROOM), value=PADDING)
        at = send(self.counts, tokens.device) if self._counts is None else self._counts
        self.tokens = self.tokens.scatter(1, at[:, None], tokens[:, None])
        self.counts, self._counts = [count + 1 for count in self.counts], at + 1

    def go_back(self, steps: Sequence[int]) -> None:
        self.rows.go_back(steps)
        self._guessed = []  # some are left where a turn broke off
        if self.predictor.shown == "states" or not any(steps):
            return
        self.counts = [count - n for count, n in zip(self.counts, steps, strict=True)]
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        self._counts = send(self.counts, self.tokens.device)
        self.tokens = self.tokens.masked_fill(columns >= self._counts[:, None], PADDING)

    def keep(self, rows: Sequence[int]) -> None:
        assert self.inputs is not None
        self.rows.keep(rows)
        kept = send(list(rows), self.predictor.device, torch.long)
        self.inputs, self.tokens, self._counts = self.inputs[kept], self.tokens[kept], None
        self.counts = [self.counts[row] for row in rows]
        self.proposal = self.proposal and self.proposal.select(kept)


class TextExpertRows(ExpertRows):
    """Rows of a text expert. A row reads its input when it first asks."""

    def __init__(self, expert: NamesTokens) -> None:
        self.expert, self.rows = expert, expert.rows_of.rows()

    def admit(self, examples: Examples) -> None:
        self.expert.start_reading(examples.inputs)  # checks them
        self.rows.add(examples.inputs)

    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        self.tokens_read += sum(self.rows.size(chunk) for chunk in chunks)
        named = iter(self.rows.read(chunks).tokens.tolist())
        return [[next(named) for _ in chunk.asked] for chunk in chunks]

    def go_back(self, steps: Sequence[int]) -> None:
        self.rows.go_back(steps)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows.keep(rows)


def complete_rows(rows: ModelRows, inputs: Tensor, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
    """Let a model complete prefixes, none of which is over. It looks at what it wrote only now and then, as each look
    makes a GPU wait."""
    written = [line[:n] for line, n in zip(prefixes.tokens.tolist(), prefixes.lengths.tolist(), strict=True)]
    rows.add(inputs)
    tokens = rows.read([Chunk(row, line, [len(line)]) for row, line in enumerate(written)]).tokens
    going = list(range(len(written)))
    while going:
        columns = [tokens]
        for _ in range(min(STEPS, spec.length - max(len(written[row]) for row in going)) - 1):
            columns.append(rows.step(columns[-1]).tokens)
        for row, line in zip(going, torch.stack(columns, 1).tolist(), strict=True):
            written[row] += line[: line.index(spec.end) + 1] if spec.end in line else line
        kept = [place for place, row in enumerate(going) if written[row][-1] != spec.end]
        kept = [place for place in kept if len(written[going[place]]) < spec.length]
        if kept and len(kept) < len(going):
            rows.keep(kept)
        going = [going[place] for place in kept]
        if going:
            tokens = rows.step(columns[-1][torch.tensor(kept, device=tokens.device)]).tokens
    lengths = torch.tensor([len(line) for line in written])
    padded = [[*line, *[0] * (prefixes.tokens.shape[1] - len(line))] for line in written]
    return Sequences(torch.tensor(padded).to(prefixes.tokens), lengths.to(prefixes.lengths))


def _stack(old: Tensor, new: Tensor, padding: int) -> Tensor:
    """Put rows under others, padded to one width, one of few on a GPU."""
    width = max(old.shape[1], new.shape[1])
    width = COLUMNS * rounded(-(-width // COLUMNS)) if new.is_cuda else width
    return torch.cat([pad(one, (0, width - one.shape[1]), value=padding) for one in (old, new)])
