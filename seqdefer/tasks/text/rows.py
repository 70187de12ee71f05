"""Rows of text predictors and experts, for the speculative loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from seqdefer.rows import Chunk, ExpertRows, PredictorRows
from seqdefer.tasks.text.caches import ROOM
from seqdefer.tasks.text.model_rows import ModelRows
from seqdefer.tasks.text.models import TextModel
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.reading import Reading
from seqdefer.types import Examples, Proposal


class NamesTokens(Protocol):
    """What rows need of a text expert."""

    model: TextModel

    def start_reading(self, inputs: Tensor) -> Reading: ...
    def to_proposal(self, hidden: Tensor, logits: Tensor, is_first: Tensor) -> Proposal: ...


class ShowsTokens(NamesTokens, Protocol):
    """What rows need of a text predictor."""

    device: torch.device
    shown: str

    def show(self, proposal: Proposal, inputs: Tensor, tokens: Tensor) -> Proposal: ...


class TextPredictorRows(PredictorRows):
    """Rows of a text predictor."""

    def __init__(self, predictor: ShowsTokens) -> None:
        self.predictor, self.rows = predictor, ModelRows(predictor.model.network)
        self.inputs = torch.zeros(0, 0, dtype=torch.long, device=predictor.device)
        self.tokens = torch.zeros(0, 0, dtype=torch.long, device=predictor.device)  # (n, W), padded
        self.counts: list[int] = []  # of each row, its tokens
        self.proposal: Proposal | None = None  # of all rows

    def admit(self, inputs: Tensor) -> Tensor:
        self.predictor.start_reading(inputs)  # checks them
        inputs = inputs.to(self.predictor.device)
        said, context = self.rows.admit(inputs)
        new = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
        proposal = self.predictor.to_proposal(said.hidden, said.logits, new)
        self.inputs, self.counts = _stack(self.inputs, inputs), [*self.counts, *[0] * len(inputs)]
        self.tokens = _stack(self.tokens, inputs[:, :0])
        self.proposal = proposal if self.proposal is None else _join_proposals(self.proposal, proposal)
        length = (inputs != PADDING).sum(1, keepdim=True).float().log()
        parts = {"states": [context], "facts": [length], "both": [context, length]}
        return torch.cat(parts[self.predictor.shown], 1)

    def propose(self) -> Proposal:
        assert self.proposal is not None
        return self.predictor.show(self.proposal, self.inputs, self.tokens)

    def append(self, tokens: Tensor) -> None:
        said = self.rows.step(tokens)
        if max(self.counts) == self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, ROOM), value=PADDING)
        every, at = torch.arange(len(tokens), device=tokens.device), torch.tensor(self.counts, device=tokens.device)
        self.tokens[every, at] = tokens
        self.counts = [count + 1 for count in self.counts]
        self.proposal = self.predictor.to_proposal(said.hidden, said.logits, torch.zeros_like(every, dtype=torch.bool))

    def go_back(self, steps: Sequence[int]) -> None:
        self.rows.go_back(steps)
        self.counts = [count - n for count, n in zip(self.counts, steps, strict=True)]
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        counts = torch.tensor(self.counts, device=self.tokens.device)
        self.tokens = self.tokens.masked_fill(columns >= counts[:, None], PADDING)

    def keep(self, rows: Tensor) -> None:
        listed = rows.tolist()
        self.rows.keep(listed)
        self.inputs, self.tokens, self.counts = (
            self.inputs[rows],
            self.tokens[rows],
            [self.counts[row] for row in listed],
        )
        self.proposal = self.proposal and self.proposal.select(rows)


class TextExpertRows(ExpertRows):
    """Rows of a text expert. A row reads its input when it first asks."""

    def __init__(self, expert: NamesTokens) -> None:
        self.expert, self.rows = expert, ModelRows(expert.model.network)

    def admit(self, examples: Examples) -> None:
        self.expert.start_reading(examples.inputs)  # checks them
        self.rows.add(examples.inputs)

    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        is_first = [self.rows.places[chunk.row] is None and place == 0 for chunk in chunks for place in chunk.asked]
        self.tokens_read += sum(self.rows.size(chunk) for chunk in chunks)
        said = self.rows.read(chunks)
        first = torch.tensor(is_first, device=said.hidden.device)
        named = iter(self.expert.to_proposal(said.hidden, said.logits, first).tokens.tolist())
        return [[next(named) for _ in chunk.asked] for chunk in chunks]

    def go_back(self, steps: Sequence[int]) -> None:
        self.rows.go_back(steps)

    def keep(self, rows: Tensor) -> None:
        self.rows.keep(rows.tolist())


def _stack(old: Tensor, new: Tensor) -> Tensor:
    """Put rows under others, padded to one width."""
    width = max(old.shape[1], new.shape[1])
    pad = torch.nn.functional.pad
    return torch.cat([pad(one, (0, width - one.shape[1]), value=PADDING) for one in (old, new)])


def _join_proposals(one: Proposal, other: Proposal) -> Proposal:
    assert one.entropy is not None
    assert other.entropy is not None
    return Proposal(
        torch.cat([one.tokens, other.tokens]), torch.cat([one.features, other.features]),
        torch.cat([one.uncertainty, other.uncertainty]), torch.cat([one.entropy, other.entropy]),
    )  # fmt: skip
