"""Rows of a remote expert, each at its own position: all rows that ask make their calls at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from seqdefer.remote.client import EndpointClient
from seqdefer.rows import Chunk, ExpertRows
from seqdefer.tasks.text.remote import unpad_inputs
from seqdefer.tasks.text.token_ids import Answers, Place
from seqdefer.types import Examples


class RemoteRows(ExpertRows):
    """Documents and the tokens that the expert knows of. Nothing is asked twice: `ask` adds the answers at all places
    of some texts to those that are known."""

    foresees = False  # a place may cost a call

    def __init__(self, client: EndpointClient, ask: Callable[[list[list[Place]], Answers], Awaitable[None]]) -> None:
        self.client, self.ask = client, ask
        self.inputs: list[tuple[int, ...]] = []
        self.written: list[tuple[int, ...]] = []
        self.answers: Answers = {}

    def admit(self, examples: Examples) -> None:
        new = unpad_inputs(examples.inputs)
        self.inputs += new
        self.written += [()] * len(new)

    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        return self.client.run(self._named(self._places(chunks)))

    def submit(self, chunks: Sequence[Chunk]) -> Future[list[list[Any]]]:
        return self.client.submit(self._named(self._places(chunks)))

    def _places(self, chunks: Sequence[Chunk]) -> list[list[Place]]:
        """Read chunks, and return the places that they ask about."""
        places = []
        for chunk in chunks:
            before, inputs = self.written[chunk.row], self.inputs[chunk.row]
            self.written[chunk.row] = (*before, *chunk.tokens)
            self.tokens_read += len(chunk.tokens)
            places.append([(inputs, self.written[chunk.row][: len(before) + at]) for at in chunk.asked])
        return places

    async def _named(self, places: Sequence[Sequence[Place]]) -> list[list[Any]]:
        await self.ask([[place for place in line if place not in self.answers] for line in places], self.answers)
        return [[self.answers[place] for place in line] for line in places]

    def go_back(self, steps: Sequence[int]) -> None:
        self.written = [
            written[: len(written) - n] if n else written for written, n in zip(self.written, steps, strict=True)
        ]

    def keep(self, rows: Sequence[int]) -> None:
        self.inputs, self.written = [self.inputs[row] for row in rows], [self.written[row] for row in rows]
