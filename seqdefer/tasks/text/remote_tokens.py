"""A remote expert that names next tokens.

A server that takes and returns token ids (`seqdefer.tasks.text.token_ids`; vLLM) and has the predictor's vocabulary is
read in chunks: one call tells its tokens after every prefix of what is written, and those that it would write next. Any
other server exchanges texts, with a call for every token. Which it is, one call finds out on first use.
Questions are coroutines of the client's event loop, so that a server can ask many without waiting.
"""

from __future__ import annotations

import asyncio
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from seqdefer.interfaces import NextTokenExpert
from seqdefer.remote.client import EndpointClient, EndpointCompletion, EndpointRequest
from seqdefer.tasks.text.remote import (
    ExpertCallsWarning,
    PromptAdapter,
    RemoteExpert,
    pad_sequences,
    unpad_inputs,
    unpad_sequences,
)
from seqdefer.tasks.text.remote_rows import RemoteRows
from seqdefer.tasks.text.token_ids import Answers, NamedTokens, Place, Tokens, find_obstacle, ids_request, parse_ids
from seqdefer.types import Examples, Sequences, SequenceSpec

MAX_TOKENS_PER_LETTER = 4
MAX_TREE_NODES = 2**4  # of a decision tree to enumerate, with a call for every other node


@dataclass(frozen=True)
class RemoteState:
    """Documents and the tokens written so far. States of one start share `answers`, so that equal prefixes get equal
    tokens and nothing is asked twice. A call may write on up to `length` tokens."""

    inputs: list[Tokens]
    written: list[Tokens]
    answers: Answers
    length: int = 0

    def places(self) -> list[Place]:
        return list(zip(self.inputs, self.written, strict=True))


class Exchange(ABC):
    """How questions about tokens are put to an endpoint."""

    def __init__(self, adapter: PromptAdapter, client: EndpointClient) -> None:
        self.adapter, self.client = adapter, client

    @abstractmethod
    async def ask(self, places: Sequence[Place], answers: Answers, length: int = 0) -> None:
        """Ask for the tokens at `places`, no two alike, with concurrent calls. Add them to `answers`, and whatever else
        the calls tell; known answers stay. Calls may write on up to `length` tokens."""


class TextExchange(Exchange):
    """Texts go out and come back, for servers with a vocabulary of their own: one call per token."""

    async def ask(self, places: Sequence[Place], answers: Answers, length: int = 0) -> None:
        """Ask for one of the expert's tokens and take the first of ours in it. Ask again for a few tokens if it holds
        none of ours, such as a part of a letter or a space that our tokenizer drops."""
        first = self.adapter.model.first_token
        if first is not None:
            answers.update({place: first for place in places if not place[1]})
        for n_tokens in (1, MAX_TOKENS_PER_LETTER):
            missing = [place for place in places if place not in answers]
            requests = [EndpointRequest(self.adapter.prompt(*place), n_tokens) for place in missing]
            for place, answer in zip(missing, await self.client.complete(requests), strict=True):
                tokens = self.adapter.tokens(*place, answer)
                if tokens or answer.is_finished or n_tokens == MAX_TOKENS_PER_LETTER:
                    answers[place] = tokens[0] if tokens else self.adapter.end


class IdExchange(Exchange):
    """Token ids go out and come back: one call tells the tokens at a place and at all earlier ones of its text."""

    async def ask(self, places: Sequence[Place], answers: Answers, length: int = 0) -> None:
        requests = []
        for inputs, written in places:
            # What is known already is not requested again: without prompt_logprobs, a server can use its prefix cache.
            is_new = any((inputs, written[:n]) not in answers for n in range(len(written)))
            requests.append(self._request((inputs, written), length, within=is_new))
        for place, named in zip(places, await self._call(requests), strict=True):
            self._learn(place, named, answers)

    async def complete(self, places: Sequence[Place], length: int) -> list[Tokens]:
        """Return what follows at each place: tokens up to the end, or to `length` in all."""
        requests = [self._request(place, length, within=False) for place in places]
        answers = zip(places, await self._call(requests), strict=True)
        return [named.after[: length - len(written)] for (_, written), named in answers]

    def _request(self, place: Place, length: int, *, within: bool) -> EndpointRequest:
        return ids_request(self.adapter.ids(*place), max(1, length - len(place[1])), within=within)

    async def _call(self, requests: Sequence[EndpointRequest]) -> list[NamedTokens]:
        answers = await self.client.complete(requests)
        return [self._parse(*both) for both in zip(requests, answers, strict=True)]

    def _parse(self, request: EndpointRequest, answer: EndpointCompletion) -> NamedTokens:
        try:
            named = parse_ids(request, answer)
        except ValueError as error:
            raise self.client.error(f"was read in chunks until now, but {error}", "restart it as it was") from None
        after = [self._own(token) for token in named.after[: request.max_tokens]]
        if not after:
            raise self.client.error("wrote no token", "check that it respects max_tokens")
        if answer.is_finished:  # by an end token, of which a server may have others
            after[-1:] = [self.adapter.end]
        n_kept = after.index(self.adapter.end) + 1 if self.adapter.end in after else len(after)
        return NamedTokens(tuple(self._own(token) for token in named.within), tuple(after[:n_kept]))

    def _own(self, token: int) -> int:
        """Return a token of the server as the predictor's: there, one end token stands for all."""
        model = self.adapter.model
        if not 0 <= token < model.n_tokens:
            what = f"names token {token}, but the predictor {model.name} has only {model.n_tokens:,}"
            raise self.client.error(what, "choose two models of one family")
        return self.adapter.end if token in model.ends else token

    def _learn(self, place: Place, named: NamedTokens, answers: Answers) -> None:
        inputs, written = place
        for n, token in enumerate(named.within[len(named.within) - len(written) :] if named.within else ()):
            answers.setdefault((inputs, written[:n]), token)
        for token in named.after:
            answers.setdefault((inputs, written), token)
            written = (*written, token)


class RemoteTokenExpert(RemoteExpert, NextTokenExpert[RemoteState]):
    """A remote expert that also names next tokens, in chunks where the server allows it."""

    pays_by_call = True
    max_tree_nodes = MAX_TREE_NODES

    def __init__(self, adapter: PromptAdapter, client: EndpointClient) -> None:
        super().__init__(adapter, client)
        self._choosing = asyncio.Lock()
        self._exchange: Exchange | None = None

    @property
    def n_calls(self) -> int:
        return self.client.n_calls

    @property
    def exchange(self) -> Exchange:
        """How the server is asked. The first use makes a call to find out, and warns if chunks cannot be read."""
        return self._exchange or self.client.run(self._choose())

    async def _choose(self) -> Exchange:
        async with self._choosing:
            if self._exchange is None:
                obstacle = await self._obstacle()
                kind = TextExchange if obstacle else IdExchange
                self._exchange = kind(self.adapter, self.client)
                if obstacle:
                    warnings.warn(
                        f"{self.client.endpoint.url} is called for every token that it names, because it cannot be "
                        f"read in chunks: {obstacle}; serve a model of the predictor's family with vLLM to make fewer "
                        "calls",
                        ExpertCallsWarning,
                        stacklevel=1,
                    )
            return self._exchange

    async def _obstacle(self) -> str:
        model = self.adapter.model
        if model.is_encoder_decoder:
            return f"the predictor {model.name} has an encoder, so its tokens do not continue a prompt"
        return await find_obstacle(self.client, model.tokenizer)

    def start(self, examples: Examples) -> RemoteState:
        inputs = unpad_inputs(examples.inputs)
        return RemoteState(inputs, [()] * len(inputs), {})

    def write_ahead(self, state: RemoteState, length: int) -> RemoteState:
        return replace(state, length=length)

    def next(self, state: RemoteState, rows: Tensor) -> tuple[Tensor, RemoteState]:
        places = [(state.inputs[row], state.written[row]) for row in rows.tolist()]
        self._find(places, state)
        return torch.tensor([state.answers[place] for place in places], device=rows.device), state

    def read(self, state: RemoteState, tokens: Tensor) -> tuple[Tensor, RemoteState]:
        """Make one concurrent call per row in which anything is unknown, at its last unknown place."""
        if not isinstance(self.exchange, IdExchange):
            return super().read(state, tokens)
        after, length = self.extend(state, tokens), tokens.shape[1]
        rows = [
            [(inputs, written[: len(written) - length + n]) for n in range(length + 1)]
            for inputs, written in after.places()
        ]
        unknown = [[place for place in row if place not in state.answers] for row in rows]
        self._find([places[-1] for places in unknown if places], state)
        named = [[state.answers[place] for place in row] for row in rows]
        return torch.tensor(named, device=tokens.device).view(len(rows), length + 1), after

    def rows(self) -> RemoteRows:
        return RemoteRows(self.client, self.ask)

    async def ask(self, texts: Sequence[Sequence[Place]], answers: Answers) -> None:
        """Add the answers at all places of some texts. A server that is read in chunks needs the last one of each."""
        exchange = await self._choose()
        places = [place for text in texts for place in (text[-1:] if isinstance(exchange, IdExchange) else text)]
        if places:
            await exchange.ask(list(dict.fromkeys(places)), answers)

    def _find(self, places: Sequence[Place], state: RemoteState) -> None:
        """Add the answers at `places` that are not known yet."""
        new = [place for place in dict.fromkeys(places) if place not in state.answers]
        if new:
            self.client.run(self.exchange.ask(new, state.answers, state.length))

    def append(self, state: RemoteState, tokens: Tensor) -> RemoteState:
        return self.extend(state, tokens[:, None])

    def extend(self, state: RemoteState, tokens: Tensor) -> RemoteState:
        return replace(state, written=[(*row, *new) for row, new in zip(state.written, tokens.tolist(), strict=True)])

    def select(self, state: RemoteState, rows: Tensor) -> RemoteState:
        chosen = rows.tolist()
        return replace(
            state, inputs=[state.inputs[row] for row in chosen], written=[state.written[row] for row in chosen]
        )

    async def completed(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        exchange = await self._choose()
        if not isinstance(exchange, IdExchange):
            return await super().completed(examples, prefixes, spec)
        rows, inputs = unpad_sequences(prefixes), unpad_inputs(examples.inputs)
        is_over = spec.is_over(prefixes).tolist()
        places = {row: (inputs[row], rows[row]) for row in range(len(rows)) if not is_over[row]}
        for row, new in zip(places, await exchange.complete(list(places.values()), spec.length), strict=True):
            rows[row] = rows[row] + new
        return pad_sequences(rows, prefixes)
