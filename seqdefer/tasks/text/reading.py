"""How far each row has read, and reading on: rows of one batch may stand at different places.

A `Reading` is the state of predictor and expert alike. All its rows hold equally many tokens; each row points to the
`Block` (what one forward pass left behind) that has read it furthest, or to none. Appending tokens and selecting rows
only move pointers. `Reader.catch_up` then reads, for the rows that are asked about and in one forward pass, all that
they have not read: from the point the one of them that is furthest behind has reached. The others read those tokens
again, which is exact for every kind of position, relative or absolute, and costs less than a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from seqdefer.errors import DataError
from seqdefer.tasks.text.encodings import alike
from seqdefer.tasks.text.memory import Halving
from seqdefer.tasks.text.passes import PADDING, Memory, Network, Pass
from seqdefer.types import Proposal

NOWHERE = -1
# A block is read on as it is, rows that have left included, until so few are alive that copying their caches pays.
WORTH_KEEPING = 0.8
AT_ONCE = {"cpu": 2048, "gpu": 2**30}  # tokens of inputs that one pass reads: on a CPU, padding costs more than passes


@dataclass(frozen=True)
class Block:
    """What a forward pass over P rows left behind, all of which have read `read` tokens."""

    memory: Memory
    said: Proposal  # P rows
    context: Tensor | None  # (P, C), of the pass that read the input
    read: int


@dataclass(frozen=True)
class Reading:
    """B rows with T tokens each."""

    inputs: Tensor  # (B, S)
    lengths: Tensor  # int64 (B,) of the inputs, on the CPU
    tokens: Tensor  # (B, T)
    blocks: tuple[Block, ...]
    where: Tensor  # int64 (B, 2) on the CPU: a row's block and its row there; NOWHERE before anything is read

    @classmethod
    def of(cls, inputs: Tensor, device: torch.device) -> Reading:
        """Inputs (B, S) whose rows end with PADDING where they are shorter; nothing is read yet."""
        lengths, inputs = (inputs != PADDING).sum(1).cpu(), inputs.to(device)
        if 0 in lengths:
            raise DataError(f"input {int(lengths.argmin())} of {len(inputs)} is empty: give it a token or leave it out")
        return cls(inputs, lengths, inputs[:, :0], (), torch.full((len(inputs), 2), NOWHERE))

    def append(self, tokens: Tensor) -> Reading:
        """tokens: (B, T') of any device."""
        return replace(self, tokens=torch.cat([self.tokens, tokens.to(self.tokens)], 1))

    def select(self, rows: Tensor) -> Reading:
        here, there = rows.cpu(), rows.to(self.tokens.device)
        lengths, where = self.lengths[here], self.where[here]
        return Reading(self.inputs[there], lengths, self.tokens[there], self.blocks, where)

    def begun(self) -> Tensor:
        """Rows of which something was read. int64, on the CPU"""
        return (self.where[:, 0] != NOWHERE).nonzero().squeeze(1)

    def said(self, rows: Tensor | None = None) -> Proposal:
        """What was said of `rows` (all by default) after all their tokens, which must have been read."""
        where = self.where if rows is None else self.where[rows.cpu()]
        parts, order = [], []
        for number in where[:, 0].unique().tolist():
            members = (where[:, 0] == number).nonzero().squeeze(1)
            block = self.blocks[number]
            assert block.read == self.tokens.shape[1]
            parts.append(_pick(block.said, where[members, 1]))
            order.append(members)
        if len(parts) == 1:
            return parts[0]
        return _join(parts).select(torch.cat(order).argsort().to(self.tokens.device))

    def context(self) -> Tensor:
        """(B, C) before the first token."""
        context = self.inputs.new_zeros(0, dtype=torch.float32)
        for number, block in enumerate(self.blocks):
            assert block.context is not None
            members = (self.where[:, 0] == number).nonzero().squeeze(1)
            context = context if len(context) else block.context.new_zeros(len(self.where), block.context.shape[1])
            context[members.to(context.device)] = block.context[self.where[members, 1].to(context.device)]
        return context


@dataclass(frozen=True)
class Made:
    """Which rows of a reading were read, and where they now are."""

    rows: Tensor  # int64 (R,)
    index: Tensor  # int64 (R,) rows of the block
    block: Block


class Reader:
    """Reads on with a network. `judge` makes of a pass, and of how many tokens it has read, what is said of its rows.

    `batch` bounds the rows of a pass; it shrinks where they do not fit into the memory of a GPU."""

    def __init__(self, network: Network, judge: Callable[[Pass, int], Proposal], batch: Halving) -> None:
        self.network, self.judge, self.batch = network, judge, batch
        self._at_once = AT_ONCE["cpu" if network.device.type == "cpu" else "gpu"]

    @torch.no_grad()
    def catch_up(self, reading: Reading, rows: Tensor | None = None) -> Reading:
        """The reading after `rows` (all by default) have read all their tokens."""
        asked = torch.arange(len(reading.where)) if rows is None else rows.cpu().unique()
        place = reading.where[asked, 0]
        far = torch.tensor([*(block.read for block in reading.blocks), NOWHERE])[place]  # NOWHERE is the last one
        behind = asked[(far != NOWHERE) & (far < reading.tokens.shape[1])]
        if len(behind):  # neighbours in a block stay neighbours
            behind = behind[(reading.where[behind] * torch.tensor([2**32, 1])).sum(1).argsort()]
        made: list[Made] = []
        for group in alike(asked[far == NOWHERE], reading.lengths, self._at_once):
            made += self.batch.over(group, partial(self._begin, reading))
        made += self.batch.over(behind, partial(self._go_on, reading))
        return _with_blocks(reading, made) if made else reading

    def _begin(self, reading: Reading, rows: Tensor) -> Made:
        there = rows.to(reading.tokens.device)
        inputs = reading.inputs[there, : int(reading.lengths[rows].max())]
        run = self.network.begin(inputs, reading.tokens[there])
        return Made(rows, torch.arange(len(rows)), self._block(reading, run))

    def _go_on(self, reading: Reading, rows: Tensor) -> Made:
        memory, index, read = _memory_of(reading, rows)
        there = rows.to(reading.tokens.device)
        tokens = reading.tokens[there, read:]
        if len(memory) > len(rows):  # rows that have left read anything
            tokens = tokens.new_zeros(len(memory), tokens.shape[1]).index_copy(0, index.to(there), tokens)
        return Made(rows, index, self._block(reading, self.network.go_on(memory, tokens)))

    def _block(self, reading: Reading, run: Pass) -> Block:
        read = reading.tokens.shape[1]
        return Block(run.memory, self.judge(run, read), run.context, read)


def _memory_of(reading: Reading, rows: Tensor) -> tuple[Memory, Tensor, int]:
    """A memory with `rows`, sorted by block, where they are in it, and how many tokens it has read."""
    where, blocks = reading.where[rows], reading.blocks
    numbers = where[:, 0].unique().tolist()
    read = min(blocks[number].read for number in numbers)
    if len(numbers) == 1:
        memory, index = blocks[numbers[0]].memory, where[:, 1]
        is_rising = bool((index[1:] > index[:-1]).all())  # no row twice
        if is_rising and len(index) >= WORTH_KEEPING * len(memory):
            return memory, index, read
    parts = []
    for number in numbers:
        index = where[where[:, 0] == number, 1]
        parts.append(blocks[number].memory.take(_compact(index, reading.tokens.device), read))
    return Memory.join(parts), torch.arange(len(rows)), read


def _compact(index: Tensor, device: torch.device) -> Tensor | slice:
    """A slice where the rows follow each other: it copies nothing."""
    first, n = int(index[0]), len(index)
    is_run = torch.equal(index, torch.arange(first, first + n))
    return slice(first, first + n) if is_run else index.to(device)


def _with_blocks(reading: Reading, made: list[Made]) -> Reading:
    """The rows that were read point to their new blocks; blocks that no row points to are dropped."""
    blocks, where = list(reading.blocks), reading.where.clone()
    for each in made:
        where[each.rows] = torch.stack([torch.full_like(each.index, len(blocks)), each.index], 1)
        blocks.append(each.block)
    used = where[:, 0].unique()
    used = used[used != NOWHERE]
    renumbered = torch.full((len(blocks) + 1,), NOWHERE)
    renumbered[used] = torch.arange(len(used))
    where[:, 0] = renumbered[where[:, 0]]  # NOWHERE finds the last entry, itself
    return replace(reading, blocks=tuple(blocks[number] for number in used.tolist()), where=where)


def _pick(said: Proposal, index: Tensor) -> Proposal:
    is_all = len(index) == len(said.tokens) and torch.equal(index, torch.arange(len(index)))
    return said if is_all else said.select(index.to(said.tokens.device))


def _join(parts: list[Proposal]) -> Proposal:
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return Proposal(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.features for part in parts]),
        torch.cat([part.uncertainty for part in parts]),
        torch.cat(entropies) if entropies else None,
    )
