"""Lazy reading of batches whose rows have read different numbers of tokens.

A `Reading` is the state of a predictor or expert. All its rows have equally many tokens; each row points to the
`Block` (the result of one forward pass) that has read most of it, or to none. Appending tokens and selecting rows only
change pointers. `Reader.catch_up` reads all unread tokens of some rows in one forward pass, which starts where the row
that is furthest behind stopped. The other rows read those tokens again, which is exact for relative and absolute
positions and cheaper than a second pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from seqdefer.errors import DataError
from seqdefer.tasks.text.batches import AdaptiveBatch, group_by_length
from seqdefer.tasks.text.passes import ForwardPass, KeyValueCache, Network
from seqdefer.types import Proposal

UNREAD = -1
# A pass includes a block's unused rows while at least this share is in use: copying the caches would cost more.
MIN_SHARE_IN_USE = 0.8
INPUT_TOKENS_PER_PASS = {"cpu": 2048, "gpu": 2**30}  # on a CPU, padding costs more than further passes


@dataclass(frozen=True)
class Block:
    """The result of a forward pass over P rows, which have all read `n_read` tokens."""

    cache: KeyValueCache
    proposal: Proposal  # P rows
    context: Tensor | None  # (P, C), from the pass that read the input
    n_read: int
    logits: Tensor | None = None  # (P, V) at the last position, where the reader keeps them


@dataclass(frozen=True)
class Reading:
    """B rows with T tokens each."""

    inputs: Tensor  # (B, S)
    lengths: Tensor  # int64 (B,) of the inputs, on the CPU
    tokens: Tensor  # (B, T)
    blocks: tuple[Block, ...]
    where: Tensor  # int64 (B, 2) on the CPU: each row's block and its row in the block, or UNREAD

    @classmethod
    def of(cls, inputs: Tensor, network: Network) -> Reading:
        """Return a reading of inputs (B, S), padded on the right, before anything is read."""
        lengths, inputs = (inputs != network.padding).sum(1).cpu(), inputs.to(network.device)
        if 0 in lengths:
            raise DataError(f"input {int(lengths.argmin())} of {len(inputs)} is empty; remove it")
        tokens = torch.zeros(len(inputs), 0, dtype=torch.long, device=network.device)
        return cls(inputs, lengths, tokens, (), torch.full((len(inputs), 2), UNREAD))

    def append(self, tokens: Tensor) -> Reading:
        """Append tokens (B, T') from any device."""
        return replace(self, tokens=torch.cat([self.tokens, tokens.to(self.tokens)], 1))

    def select(self, rows: Tensor) -> Reading:
        here, there = rows.cpu(), rows.to(self.tokens.device)
        lengths, where = self.lengths[here], self.where[here]
        return Reading(self.inputs[there], lengths, self.tokens[there], self.blocks, where)

    def started_rows(self) -> Tensor:
        """Return the rows that have read something. int64, on the CPU"""
        return (self.where[:, 0] != UNREAD).nonzero().squeeze(1)

    def proposal(self, rows: Tensor | None = None) -> Proposal:
        """Return the proposals for `rows` (default: all), which must have read all their tokens."""
        where = self.where if rows is None else self.where[rows.cpu()]
        parts, order = [], []
        for number in where[:, 0].unique().tolist():
            members = (where[:, 0] == number).nonzero().squeeze(1)
            block = self.blocks[number]
            assert block.n_read == self.tokens.shape[1]
            parts.append(_select(block.proposal, where[members, 1]))
            order.append(members)
        if len(parts) == 1:
            return parts[0]
        return Proposal.join(parts).select(torch.cat(order).argsort().to(self.tokens.device))

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """Return the logits (R, V) behind the proposals for `rows`, from a reader that keeps them."""
        where = self.where if rows is None else self.where[rows.cpu()]
        found = torch.zeros(0, device=self.tokens.device)
        for number in where[:, 0].unique().tolist():
            members, logits = (where[:, 0] == number).nonzero().squeeze(1), self.blocks[number].logits
            assert logits is not None
            found = found if len(found) else logits.new_zeros(len(where), logits.shape[1])
            found[members.to(found.device)] = logits[where[members, 1].to(found.device)]
        return found

    def context(self) -> Tensor:
        """Return the context (B, C), before the first token is appended."""
        context = self.inputs.new_zeros(0, dtype=torch.float32)
        for number, block in enumerate(self.blocks):
            assert block.context is not None
            members = (self.where[:, 0] == number).nonzero().squeeze(1)
            context = context if len(context) else block.context.new_zeros(len(self.where), block.context.shape[1])
            context[members.to(context.device)] = block.context[self.where[members, 1].to(context.device)]
        return context


@dataclass(frozen=True)
class _NewBlock:
    """A new block and the rows of a reading that it holds."""

    rows: Tensor  # int64 (R,) of the reading
    index: Tensor  # int64 (R,) of the block
    block: Block
    named: Tensor  # (R, T): the tokens proposed after each token of the pass, or after the last one


class Reader:
    """Reads with a network. `to_proposal` turns hidden states, logits and which rows have read nothing into proposals.

    `batch` limits the rows of a pass. With `keeps_logits`, readings have the logits of their last position.
    """

    def __init__(
        self,
        network: Network,
        to_proposal: Callable[[Tensor, Tensor, Tensor], Proposal],
        batch: AdaptiveBatch,
        *,
        keeps_logits: bool = False,
    ) -> None:
        self.network, self.to_proposal, self.batch, self.keeps_logits = network, to_proposal, batch, keeps_logits
        self._tokens_per_pass = INPUT_TOKENS_PER_PASS["cpu" if network.device.type == "cpu" else "gpu"]

    @torch.no_grad()
    def catch_up(self, reading: Reading, rows: Tensor | None = None) -> Reading:
        """Return the reading after `rows` (default: all) have read all their tokens."""
        rows = torch.arange(len(reading.where)) if rows is None else rows.cpu().unique()
        place = reading.where[rows, 0]
        n_read = torch.tensor([*(block.n_read for block in reading.blocks), UNREAD])[place]  # index -1 is UNREAD
        behind = rows[(n_read != UNREAD) & (n_read < reading.tokens.shape[1])]
        behind = _by_block(reading, behind)
        new: list[_NewBlock] = []
        for group in group_by_length(rows[n_read == UNREAD], reading.lengths, self._tokens_per_pass):
            new += self.batch.map(group, partial(self._prefill, reading))
        new = _pooled(new) if self.network.attends_by_document and len(new) > 1 else new
        new += self.batch.map(behind, partial(self._extend, reading))
        return _with_blocks(reading, new) if new else reading

    def read(self, reading: Reading, tokens: Tensor) -> tuple[Tensor, Reading]:
        """Let all rows read a chunk (B, T) in one pass. Return the tokens proposed before the first and after each of
        its tokens, (B, T + 1), and the reading."""
        reading = self.catch_up(reading)
        before = reading.proposal().tokens[:, None]
        if not tokens.shape[1]:
            return before, reading
        reading = reading.append(tokens)
        rows = _by_block(reading, torch.arange(len(tokens)))
        new = self.batch.map(rows, partial(self._extend, reading, says_all=True))
        after = torch.cat([each.named for each in new])[rows.argsort().to(before.device)]
        return torch.cat([before, after], 1), _with_blocks(reading, new)

    def _prefill(self, reading: Reading, rows: Tensor) -> _NewBlock:
        there = rows.to(reading.tokens.device)
        inputs = reading.inputs[there, : int(reading.lengths[rows].max())]
        run = self.network.prefill(inputs, reading.tokens[there])
        return self._new_block(reading, rows, torch.arange(len(rows)), run)

    def _extend(self, reading: Reading, rows: Tensor, *, says_all: bool = False) -> _NewBlock:
        cache, index, n_read = _cache_of(reading, rows, shares=self.network.attends_by_document)
        there = rows.to(reading.tokens.device)
        tokens = reading.tokens[there, n_read:]
        if len(cache) > len(rows):  # unused rows read zeros
            tokens = tokens.new_zeros(len(cache), tokens.shape[1]).index_copy(0, index.to(there), tokens)
        return self._new_block(reading, rows, index, self.network.extend(cache, tokens, says_all=says_all))

    def _new_block(self, reading: Reading, rows: Tensor, index: Tensor, run: ForwardPass) -> _NewBlock:
        n_read, n = reading.tokens.shape[1], len(run.hidden)
        hidden, logits = run.hidden.flatten(0, -2), run.logits.flatten(0, -2)
        proposal = self.to_proposal(hidden, logits, torch.full((len(hidden),), n_read == 0, device=hidden.device))
        named, last = proposal.tokens.view(n, -1), torch.arange(1, n + 1, device=hidden.device) * (len(hidden) // n) - 1
        if len(hidden) > n:
            proposal = proposal.select(last)
        kept = logits[last] if self.keeps_logits else None
        block = Block(run.cache, proposal, run.context, n_read, kept)
        return _NewBlock(rows, index, block, named[index.to(named.device)])


def _pooled(new: list[_NewBlock]) -> list[_NewBlock]:
    caches = KeyValueCache.pooled([each.block.cache for each in new])
    return [replace(each, block=replace(each.block, cache=cache)) for each, cache in zip(new, caches, strict=True)]


def _by_block(reading: Reading, rows: Tensor) -> Tensor:
    """Sort rows by their blocks, and keep their order within a block."""
    return rows[(reading.where[rows] * torch.tensor([2**32, 1])).sum(1).argsort()]


def _cache_of(reading: Reading, rows: Tensor, *, shares: bool) -> tuple[KeyValueCache, Tensor, int]:
    """Return a cache that holds `rows` (sorted by block), their places in it, and how many tokens it has read."""
    where, blocks = reading.where[rows], reading.blocks
    numbers = where[:, 0].unique().tolist()
    n_read = min(blocks[number].n_read for number in numbers)
    if len(numbers) == 1:
        cache, index = blocks[numbers[0]].cache, where[:, 1]
        is_rising = bool((index[1:] > index[:-1]).all())  # no row twice
        if is_rising and len(index) >= MIN_SHARE_IN_USE * len(cache):
            return cache, index, n_read
    parts = []
    for number in numbers:
        index = where[where[:, 0] == number, 1]
        taken = _slice_or_index(index, reading.tokens.device)
        parts.append(blocks[number].cache.take(taken, n_read, shares=shares))
    return KeyValueCache.join(parts), torch.arange(len(rows)), n_read


def _slice_or_index(index: Tensor, device: torch.device) -> Tensor | slice:
    """Return consecutive rows as a slice, which copies nothing."""
    first, n = int(index[0]), len(index)
    is_run = torch.equal(index, torch.arange(first, first + n))
    return slice(first, first + n) if is_run else index.to(device)


def _with_blocks(reading: Reading, new: list[_NewBlock]) -> Reading:
    """Point rows to their new blocks; drop blocks that no row points to."""
    blocks, where = list(reading.blocks), reading.where.clone()
    for each in new:
        where[each.rows] = torch.stack([torch.full_like(each.index, len(blocks)), each.index], 1)
        blocks.append(each.block)
    used = where[:, 0].unique()
    used = used[used != UNREAD]
    renumbered = torch.full((len(blocks) + 1,), UNREAD)
    renumbered[used] = torch.arange(len(used))
    where[:, 0] = renumbered[where[:, 0]]  # UNREAD indexes the last entry, which is UNREAD
    return replace(reading, blocks=tuple(blocks[number] for number in used.tolist()), where=where)


def _select(proposal: Proposal, index: Tensor) -> Proposal:
    is_all = len(index) == len(proposal.tokens) and torch.equal(index, torch.arange(len(index)))
    return proposal if is_all else proposal.select(index.to(proposal.tokens.device))
