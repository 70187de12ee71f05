"""Rows of a Hugging Face model, each at its own position.

Every row of the caches holds its prompt (or start token) and its tokens from column 0 on, without padding. A row
forgets tokens by moving its end back; they are overwritten later. Rows that leave make room for the last ones, so that
the rows at work are always the first of the caches. On a GPU, where a few idle rows cost nothing, they leave room for
new ones instead; and the caches outlive the rows: the next rows of the model use them, and the graphs of their passes,
again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from seqdefer.environment import send
from seqdefer.rows import Chunk
from seqdefer.tasks.text.passes import EncoderDecoder, Network
from seqdefer.tasks.text.row_passes import Place, RowPasses, TokenLine, ToProposal
from seqdefer.types import Proposal

TOKENS_PER_PASS = {"cpu": 2048, "gpu": 2**13}  # of new rows


class RowsOf:
    """Makes the rows of one model, and keeps caches on a GPU that are free."""

    def __init__(self, network: Network, to_proposal: ToProposal) -> None:
        self.network, self.to_proposal = network, to_proposal
        self.free: list[RowPasses] = []

    def rows(self) -> ModelRows:
        try:
            passes = self.free.pop()
        except IndexError:
            passes = RowPasses(self.network, self.to_proposal)
        rows = ModelRows(passes)
        if passes.is_rounded:
            weakref.finalize(rows, self.free.append, passes)
        return rows


class ModelRows:
    """Rows of one model. `add` adds rows that have read nothing; `read` reads their inputs, if need be, and tokens. A
    row may go back or leave at any time."""

    def __init__(self, passes: RowPasses) -> None:
        self.passes, self.network, self.device = passes, passes.network, passes.device
        self.inputs: list[Any] = []  # of each row, without padding
        self.places: list[int | None] = []  # of each row, its place in the caches once it has read its input
        self.ends: list[int] = []  # of each place, the columns in use
        self.per_pass = TOKENS_PER_PASS["cpu" if self.device.type == "cpu" else "gpu"]
        self._steps: _Steps | None = None

    def __len__(self) -> int:
        return len(self.places)

    def add(self, inputs: Tensor) -> None:
        """Add rows with inputs (R, S), padded on the right."""
        self.inputs += self.network.split_inputs(inputs)
        self.places += [None] * len(inputs)

    @torch.no_grad()
    def admit(self, inputs: Tensor) -> tuple[Proposal, Tensor]:
        """Add rows and let them read their inputs. Return what the model says before the first token, and the context
        (R, C)."""
        first = len(self)
        self.add(inputs)
        chunks = [Chunk(row, [], [0]) for row in range(first, len(self))]
        contexts = torch.zeros(len(chunks), 0)
        said = []
        try:
            for numbers in self._passes(chunks):
                part, own = self._read_new([chunks[number] for number in numbers])
                contexts = contexts if contexts.shape[1] else own.new_zeros(len(chunks), own.shape[1])
                contexts[send(numbers, own.device)] = own
                said.append((numbers, part))
        except BaseException:
            self.keep(range(first))
            raise
        return _in_order(said, chunks), contexts

    @torch.no_grad()
    def read(self, chunks: Sequence[Chunk]) -> Proposal:
        """Read chunks of different rows. Return what the model says at the places asked, chunk by chunk."""
        said = []
        for numbers in self._passes(chunks):
            part = [chunks[number] for number in numbers]
            is_new = self._is_new(part[0]) and not self.passes.is_packed
            said.append((numbers, self._read_new(part)[0] if is_new else self._read(part)[0]))
        return _in_order(said, chunks)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Proposal:
        """Every row, all of which have begun, reads one of `tokens` (n,)."""
        steps = self._steps = self._steps or self._begin_steps()
        ordered = tokens.new_zeros(len(steps.ends)).index_copy_(0, steps.places, tokens)
        proposal = self.passes.step(ordered, steps.ends, steps.reach, steps.wanted)
        steps.ends, steps.reach = steps.ends + 1, steps.reach + 1
        self.ends = [end + 1 for end in self.ends]
        return proposal if len(steps.wanted) == len(tokens) else proposal.select(steps.every)

    def go_back(self, steps: Sequence[int]) -> None:
        if any(steps):
            self._steps = None
        for place, n in zip(self.places, steps, strict=True):
            if place is not None:
                self.ends[place] -= n
        self._clear_free()
        if self.ends and not isinstance(self.network, EncoderDecoder):
            self.network.check_width(max(self.ends))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep `rows`, in that order. The last ones of the caches may take the places of those that leave."""
        self._steps = None
        self.inputs = [self.inputs[row] for row in rows]
        self.places = [self.places[row] for row in rows]
        used = sorted(place for place in self.places if place is not None)
        n = max(used, default=-1) + 1
        if self.passes.rows_of(n) > self.passes.rows_of(len(used)):
            free = sorted(set(range(len(used))) - set(used))
            moved = dict(zip((place for place in used if place >= len(used)), free, strict=True))
            self.passes.move(list(moved), list(moved.values()))
            for old, new in moved.items():
                self.ends[new] = self.ends[old]
            self.places = [place if place is None else moved.get(place, place) for place in self.places]
            n = len(used)
        self.ends = self.ends[:n]
        self._clear_free()

    def _clear_free(self) -> None:
        """Let idle rows begin anew: steps move them on, too."""
        used = set(self.places)
        self.ends = [end if place in used else 0 for place, end in enumerate(self.ends)]

    def size(self, chunk: Chunk) -> int:
        """Return how many tokens are read for a chunk, those of the input included where it is not read yet."""
        size = self.network.input_size(self.inputs[chunk.row]) if self._is_new(chunk) else 0
        return len(chunk.tokens) + size

    # -- passes ----------------------------------------------------------------------------------------------------

    def _passes(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Yield the chunks that are read together. Unless they are packed, new rows are apart from others, and long
        ones from short ones."""
        sizes = [self.size(chunk) for chunk in chunks]
        numbers, is_packed = list(range(len(chunks))), self.passes.is_packed
        old = [] if is_packed else [number for number in numbers if not self._is_new(chunks[number])]
        if old:
            yield old
        new = sorted(set(numbers) - set(old), key=lambda number: -sizes[number])
        while new:
            n, total = 0, 0
            while n < len(new) and (not n or total + sizes[new[n if is_packed else 0]] <= self.per_pass):
                total += sizes[new[n if is_packed else 0]]
                n += 1
            yield new[:n]
            new = new[n:]

    def _is_new(self, chunk: Chunk) -> bool:
        return self.places[chunk.row] is None

    def _read_new(self, chunks: Sequence[Chunk]) -> tuple[Proposal, Tensor]:
        """Read inputs and tokens of new rows. Return what the model says where it is asked, and the context (R, C)."""
        if isinstance(self.network, EncoderDecoder):
            return self._encode(chunks)
        said, contexts = self._read(chunks)
        return said, torch.stack(contexts)

    def _encode(self, chunks: Sequence[Chunk]) -> tuple[Proposal, Tensor]:
        assert isinstance(self.network, EncoderDecoder)
        inputs = self.network.stack_inputs([self.inputs[chunk.row] for chunk in chunks])
        tokens = _padded([chunk.tokens for chunk in chunks], self.device)
        places = [self._begin(chunk, self.network.base + len(chunk.tokens)) for chunk in chunks]
        hidden, logits, context = self.passes.encode(inputs, tokens, places)
        asked = [(number, place) for number, chunk in enumerate(chunks) for place in chunk.asked]
        wanted = send([number * hidden.shape[1] + place for number, place in asked], self.device)
        is_first = send([place == 0 for _, place in asked], self.device)
        said = self.passes.to_proposal(hidden.flatten(0, 1)[wanted], logits.flatten(0, 1)[wanted], is_first)
        return said, context

    def _read(self, chunks: Sequence[Chunk]) -> tuple[Proposal, list[Tensor]]:
        """Read chunks, after their inputs where rows are new. Return also the means (H,) of new rows' inputs."""
        lines, asked, new = list[TokenLine](), list[Place](), list[tuple[int, int]]()
        for number, chunk in enumerate(chunks):
            is_new = self._is_new(chunk)
            given = self.inputs[chunk.row] if is_new else []
            if is_new:
                self._begin(chunk, 0)
                new.append((number, len(given)))
            place = self.places[chunk.row]
            assert place is not None
            lines.append(TokenLine(place, self.ends[place], [*given, *chunk.tokens]))
            asked += [Place(number, len(given) - 1 + one, is_new and one == 0) for one in chunk.asked]
        if not isinstance(self.network, EncoderDecoder):
            self.network.check_width(max(line.begin + len(line.tokens) for line in lines))
        said = self.passes.read(lines, asked, self.ends)
        for line in lines:
            self.ends[line.place] += len(line.tokens)
        self._steps = None
        return said.proposal, [
            said.hidden[said.starts[number] :][:size].sum(0, dtype=torch.float32) / size for number, size in new
        ]

    def _begin(self, chunk: Chunk, end: int) -> int:
        """Give a row the first free place of the caches; return it."""
        self._steps = None
        used = set(self.places)
        place = self.places[chunk.row] = next(place for place in range(len(self.ends) + 1) if place not in used)
        self.ends[place : place + 1] = [end]
        self.passes.make_room(len(self.ends))
        return place

    def _begin_steps(self) -> _Steps:
        n = self.passes.rows_of(len(self.ends))
        places = send(self.places, self.device)
        ends = send([*self.ends, *[0] * (n - len(self.ends))], self.device)
        wanted = torch.cat([places, places.new_zeros(n - len(places))])
        every = torch.arange(len(places), device=self.device)
        return _Steps(places, ends, max(self.ends) + 1, wanted, every)


@dataclass
class _Steps:
    """What steps of all rows need, on the device: to bring it there would make each wait for the one before."""

    places: Tensor  # (n,) of the rows
    ends: Tensor  # (P,) of the places, padded
    reach: int
    wanted: Tensor  # (P,) the places of the rows, padded
    every: Tensor  # (n,)


def _padded(lines: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, lines))
    rows = [[*line, *[0] * (longest - len(line))] for line in lines]
    return send(rows, device, torch.long).view(len(lines), longest)


def _in_order(said: list[tuple[list[int], Proposal]], chunks: Sequence[Chunk]) -> Proposal:
    """Join what was said in several passes, by the numbers of their chunks, in the order of the chunks."""
    if len(said) == 1 and said[0][0] == list(range(len(chunks))):
        return said[0][1]
    numbers = [number for part, _ in said for number in part]
    starts = [0, *torch.tensor([len(chunks[number].asked) for number in numbers]).cumsum(0).tolist()]
    spans = dict(zip(numbers, pairwise(starts), strict=True))
    order = [place for number in range(len(chunks)) for place in range(*spans[number])]
    every = Proposal.join([part for _, part in said])
    return every.select(send(order, every.tokens.device))
