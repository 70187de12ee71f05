"""Rows of a Hugging Face model, each at its own position, in caches that are written in place.

Every row of a cache holds its prompt (or start token) and its tokens from column 0 on, without padding. A row forgets
tokens by moving its end back; they are overwritten later. What a query may see, and its position, therefore differ from
row to row: masks and positions are given to the model, and what it would derive from the width of the cache is
replaced (`_positions`): the relative bias of T5 and the learned positions of BART.

Rows that leave make room for the last ones, so that the rows at work are always the first of the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.engine.rows import ExpertRows, PredictorRows
from seqdefer.tasks.text.pairs import TextExpert, TextPredictor
from seqdefer.tasks.text.passes import PADDING, EncoderDecoder, KeyValueCache, Network
from seqdefer.types import Examples, Proposal

ROOM = 64  # columns that a cache grows by, at least


@dataclass(frozen=True)
class ReadTokens:
    """What a model says after each of T tokens of R rows."""

    hidden: Tensor  # (R, T, H): the output layer's input
    logits: Tensor  # (R, T, V)


class _Buffer:
    """One tensor (P, H, W, D), with P rows and W columns of room."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def room_for(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """Return the tensor with at least so many rows and columns; grow it where it is smaller."""
        old = self.tensor
        if old is None or old.shape[0] < rows or old.shape[2] < columns:
            n_rows, n_columns = (0, 0) if old is None else (old.shape[0], old.shape[2])
            n_rows = n_rows if n_rows >= rows else max(rows, 2 * n_rows)
            n_columns = n_columns if n_columns >= columns else columns + ROOM
            grown = like.new_zeros(n_rows, like.shape[1], n_columns, like.shape[3])
            if old is not None:
                grown[: old.shape[0], :, : old.shape[2]] = old
            self.tensor = grown
        assert self.tensor is not None
        return self.tensor


class _Layer:
    """One layer of keys and values: new columns go to their places, and all come back."""

    def __init__(self) -> None:
        self.buffers = _Buffer(), _Buffer()
        self.rows: slice | Tensor = slice(0)
        self.columns = torch.zeros(0, 0, dtype=torch.long)  # (R, T)
        self.reach = 0
        self.keys = self.values = torch.zeros(0)

    def place(self, rows: slice | Tensor, columns: Tensor, reach: int) -> None:
        self.rows, self.columns, self.reach = rows, columns, reach

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        last = self.rows.stop if isinstance(self.rows, slice) else int(self.rows.max()) + 1
        self.keys, self.values = (
            self._write(buffer.room_for(last, self.reach, new), new)
            for buffer, new in zip(self.buffers, (keys, values), strict=True)
        )
        return self.keys, self.values

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        rows = self.rows
        index = torch.arange(rows.stop, device=new.device) if isinstance(rows, slice) else rows
        buffer[index[:, None], :, self.columns] = new.transpose(1, 2)
        return buffer[rows, :, : self.reach]

    def move(self, source: Tensor, target: Tensor) -> None:
        for buffer in self.buffers:
            if buffer.tensor is not None:
                buffer.tensor[target] = buffer.tensor[source]


class ModelRows:
    """Rows of one model. `admit` reads inputs, `read` tokens after them; a row may go back or leave at any time."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.layers: list[_Layer] = []
        self.sources: list[_Layer] = []  # cross-attention, of models with an encoder
        self.source_mask = torch.zeros(0, 0, dtype=torch.bool, device=network.device)  # (P, S)
        self.lengths = torch.zeros(0, dtype=torch.long, device=network.device)  # (P,) columns in use
        self.places: list[int] = []  # of each row, its place in the caches

    def __len__(self) -> int:
        return len(self.places)

    @torch.no_grad()
    def admit(self, inputs: Tensor) -> tuple[ReadTokens, Tensor]:
        """Add rows with inputs (R, S), padded on the right with PADDING. Return what the model says before the first
        token, (R, 1, ...), and the context (R, C)."""
        n, new = len(self.places), len(inputs)
        self.places += range(n, n + new)
        inputs = inputs.to(self.network.device)
        lengths = (inputs != PADDING).sum(1)
        if isinstance(self.network, EncoderDecoder):
            run = self.network.prefill(inputs, inputs[:, :0])
            self._add(run.cache, inputs != PADDING, slice(n, n + new))
            self.lengths = torch.cat([self.lengths, torch.ones_like(lengths)])  # the start token
            assert run.context is not None
            return ReadTokens(run.hidden[:, None], run.logits[:, None]), run.context
        self.lengths = torch.cat([self.lengths, torch.zeros_like(lengths)])
        said = self._pass(torch.arange(n, n + new, device=inputs.device), inputs.clamp(min=0), lengths)
        given = (inputs != PADDING)[:, :, None]
        context = (said.hidden * given).sum(1, dtype=torch.float32) / lengths[:, None]
        last = (lengths - 1)[:, None]
        every = torch.arange(new, device=inputs.device)[:, None]
        return ReadTokens(said.hidden[every, last], said.logits[every, last]), context

    @torch.no_grad()
    def read(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> ReadTokens:
        """Let `rows` (R,) read the first `counts` (R,) of `tokens` (R, T). What is said after further ones is void."""
        return self._pass(torch.tensor(self.places, device=rows.device)[rows], tokens, counts)

    def go_back(self, steps: Tensor) -> None:
        self.lengths[torch.tensor(self.places, device=steps.device)] -= steps

    def keep(self, rows: Tensor) -> None:
        """Keep `rows`, in that order. The last ones of the caches take the places of those that leave."""
        kept = [self.places[row] for row in rows.tolist()]
        free = sorted(set(range(len(kept))) - set(kept))
        moved = dict(zip(sorted(place for place in kept if place >= len(kept)), free, strict=True))
        if moved:
            source, target = (torch.tensor(list(one), device=self.lengths.device) for one in (moved, moved.values()))
            for layer in (*self.layers, *self.sources):
                layer.move(source, target)
            self.lengths[target] = self.lengths[source]
            if len(self.source_mask):
                self.source_mask[target] = self.source_mask[source]
        self.lengths, self.source_mask = self.lengths[: len(kept)], self.source_mask[: len(kept)]
        self.places = [moved.get(place, place) for place in kept]

    def _pass(self, places: Tensor, tokens: Tensor, counts: Tensor) -> ReadTokens:
        order = places.argsort()
        is_first = torch.equal(places[order], torch.arange(len(places), device=places.device))
        where = slice(len(places)) if is_first else places[order]
        begin = self.lengths[places[order]]
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # (R, T)
        reach = int(positions.max()) + 1
        seen = torch.arange(reach, device=tokens.device) <= positions[:, :, None]  # (R, T, reach)
        said = self._run(where, tokens[order], positions, seen[:, None], reach)
        self.lengths[places] += counts
        back = order.argsort()
        return ReadTokens(said.hidden[back], said.logits[back])

    def _run(self, where: slice | Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, reach: int) -> ReadTokens:
        model = self.network.model
        if not self.layers:
            self.layers = [_Layer() for _ in range(_n_layers(model))]
        for layer in self.layers:
            layer.place(where, positions, reach)
        own = self._cache(self.layers)
        seen: list[Tensor] = []
        with _positions(model, positions, reach), _watched(self.network.head, seen):
            if isinstance(self.network, EncoderDecoder):
                cache, states, source_mask = self._source(own, where)
                output = model(
                    encoder_outputs=(states,), attention_mask=source_mask, decoder_input_ids=tokens,
                    decoder_attention_mask=_to_bias(mask, model.dtype), past_key_values=cache, use_cache=True,
                )  # fmt: skip
            else:
                output = model(
                    input_ids=tokens, attention_mask=_to_bias(mask, model.dtype), position_ids=positions,
                    past_key_values=own, use_cache=True,
                )  # fmt: skip
        return ReadTokens(seen[-1], output.logits)

    def _cache(self, layers: list[_Layer]) -> Any:
        """Return the layers as transformers expects them. It asks for their length, which differs from row to row, only
        to derive masks and positions; these are given."""
        cache = self.network.cache_classes.DynamicCache()
        for layer in layers:
            wrapped = self.network.cache_classes.DynamicLayer()
            wrapped.keys, wrapped.values, wrapped.is_initialized = layer.keys, layer.values, True
            wrapped.update, wrapped.get_seq_length = layer.update, lambda: 0
            cache.layers.append(wrapped)
        return cache

    def _add(self, cache: KeyValueCache, given: Tensor, where: slice) -> None:
        """Put the keys and values of new rows, of their inputs and of the start token, at `where`."""
        if not self.sources:
            self.sources, self.layers = [_Layer() for _ in cache.source], [_Layer() for _ in cache.own]
        n_columns, before = given.shape[1], self.source_mask
        mask = torch.zeros(where.stop, max(n_columns, before.shape[1]), dtype=torch.bool, device=given.device)
        mask[: where.start, : before.shape[1]] = before
        mask[where.start :, :n_columns] = given
        self.source_mask = mask
        for layer, both in zip((*self.sources, *self.layers), (*cache.source, *cache.own), strict=True):
            for buffer, new in zip(layer.buffers, both, strict=True):
                room = buffer.room_for(where.stop, max(new.shape[2], mask.shape[1] * (layer in self.sources)), new)
                room[where, :, : new.shape[2]] = new

    def _source(self, own: Any, where: slice | Tensor) -> tuple[Any, Tensor, Tensor]:
        mask = self.source_mask[where]
        width = mask.shape[1]
        for layer in self.sources:
            for name, buffer in zip(("keys", "values"), layer.buffers, strict=True):
                assert buffer.tensor is not None
                setattr(layer, name, buffer.tensor[where, :, :width])
        cache = self.network.cache_classes.EncoderDecoderCache(own, self._cache(self.sources))
        cache.is_updated = dict.fromkeys(range(len(self.sources)), True)
        keys = self.sources[0].keys
        states = keys.new_zeros(1, 1, 1).expand(len(keys), width, self.network.model.config.hidden_size)
        return cache, states, mask.long()


def _n_layers(model: Any) -> int:
    config = model.config
    return int(
        getattr(config, "num_decoder_layers", None)
        or getattr(config, "decoder_layers", None)
        or config.num_hidden_layers
    )


def _to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query may look and the least number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


@contextmanager
def _watched(head: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    """Collect the inputs of the output layer."""
    handle = head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _positions(model: Any, positions: Tensor, reach: int) -> Iterator[None]:
    """Give each row its own positions (R, T) where the model would count columns."""
    with ExitStack() as stack:
        if model.config.is_encoder_decoder:
            decoder = model.get_decoder()
            for module in decoder.modules():
                if getattr(module, "has_relative_attention_bias", False):
                    stack.enter_context(_relative(module, positions, reach))
            if isinstance(places := getattr(decoder, "embed_positions", None), nn.Embedding):
                own = nn.functional.embedding(positions + getattr(places, "offset", 0), places.weight)
                stack.callback(places.register_forward_hook(lambda *_: own).remove)
        yield


@contextmanager
def _relative(attention: Any, positions: Tensor, reach: int) -> Iterator[None]:
    def compute_bias(*_: Any, **__: Any) -> Tensor:
        distance = torch.arange(reach, device=positions.device) - positions[:, :, None]  # (R, T, reach)
        buckets = attention._relative_position_bucket(
            distance,
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias: Tensor = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)  # (R, H, T, reach)
        return bias

    attention.compute_bias = compute_bias
    try:
        yield
    finally:
        del attention.compute_bias


class TextPredictorRows(PredictorRows):
    """Rows of a text predictor."""

    def __init__(self, predictor: TextPredictor) -> None:
        self.predictor, self.rows = predictor, ModelRows(predictor.model.network)
        self.inputs = torch.zeros(0, 0, dtype=torch.long, device=predictor.device)
        self.tokens = torch.zeros(0, 0, dtype=torch.long, device=predictor.device)  # (n, W), padded
        self.counts = torch.zeros(0, dtype=torch.long, device=predictor.device)
        self.proposals: list[Proposal] = []  # of all rows, after each of the last tokens

    def admit(self, inputs: Tensor) -> Tensor:
        self.predictor.start_reading(inputs)  # checks them
        inputs = inputs.to(self.predictor.device)
        said, context = self.rows.admit(inputs)
        new = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
        proposal = self.predictor.to_proposal(said.hidden[:, 0], said.logits[:, 0], new)
        self.inputs, self.counts = _stack(self.inputs, inputs), torch.cat([self.counts, torch.zeros_like(new).long()])
        self.tokens = _stack(self.tokens, inputs[:, :0])
        self.proposals = [_join_proposals(self.proposals[-1], proposal) if self.proposals else proposal]
        length = (inputs != PADDING).sum(1, keepdim=True).float().log()
        parts = {"states": [context], "facts": [length], "both": [context, length]}
        return torch.cat(parts[self.predictor.shown], 1)

    def propose(self) -> Proposal:
        return self.predictor.show(self.proposals[-1], self.inputs, self.tokens)

    def append(self, tokens: Tensor) -> None:
        every, tokens = torch.arange(len(self.rows), device=tokens.device), tokens[:, None]
        said = self.rows.read(every, tokens, torch.ones_like(every))
        if int(self.counts.max()) == self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(self.tokens, (0, ROOM), value=PADDING)
        self.tokens[every, self.counts] = tokens[:, 0]
        self.counts = self.counts + 1
        self.proposals.append(
            self.predictor.to_proposal(said.hidden[:, 0], said.logits[:, 0], torch.zeros_like(every, dtype=torch.bool))
        )

    def go_back(self, steps: Tensor) -> None:
        self.rows.go_back(steps)
        self.counts = self.counts - steps
        columns = torch.arange(self.tokens.shape[1], device=steps.device)
        self.tokens = self.tokens.masked_fill(columns >= self.counts[:, None], PADDING)
        self.proposals = self.proposals[-1:]  # the last token is read next, and makes new ones

    def keep(self, rows: Tensor) -> None:
        self.rows.keep(rows)
        self.inputs, self.tokens, self.counts = self.inputs[rows], self.tokens[rows], self.counts[rows]
        self.proposals = [self.proposals[-1].select(rows)] if self.proposals else []


class TextExpertRows(ExpertRows):
    """Rows of a text expert. A row reads its input when it first asks."""

    def __init__(self, expert: TextExpert) -> None:
        self.expert, self.rows = expert, ModelRows(expert.model.network)
        self.inputs: list[Tensor] = []  # of each row
        self.places: list[int | None] = []  # of each row, its row among those that have asked
        self.named: list[list[Any]] = []  # of each row that has asked: its next token, after each of the last tokens

    def admit(self, examples: Examples) -> None:
        self.inputs += [line[line != PADDING] for line in examples.inputs]
        self.places += [None] * len(examples)

    def read(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        new = [row for row in rows.tolist() if self.places[row] is None]
        if new:
            inputs = torch.nn.utils.rnn.pad_sequence([self.inputs[row] for row in new], True, PADDING)
            said, _ = self.rows.admit(inputs)
            first = self._names(said, torch.ones(len(new), 1, dtype=torch.bool, device=self.expert.device))
            for row, token in zip(new, first[:, 0].tolist(), strict=True):
                self.places[row] = len(self.named)
                self.named.append([token])
        own = [self.places[row] for row in rows.tolist()]
        before = torch.tensor([self.named[place][-1] for place in own], device=tokens.device)[:, None]
        if not tokens.shape[1]:
            return before
        at = torch.tensor(own, device=tokens.device)
        said = self.rows.read(at, tokens, counts)
        after = self._names(said, torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device))
        named = torch.cat([before, after], 1)
        for place, line, count in zip(own, named.tolist(), counts.tolist(), strict=True):
            self.named[place] = line[: count + 1]
        return named.to(tokens.dtype)

    def _names(self, said: ReadTokens, is_first: Tensor) -> Tensor:
        (n, length), expert = is_first.shape, self.expert
        flat = expert.to_proposal(said.hidden.flatten(0, 1), said.logits.flatten(0, 1), is_first.flatten())
        return flat.tokens.view(n, length)

    def go_back(self, steps: Tensor) -> None:
        back = [0] * len(self.named)
        for place, n in zip(self.places, steps.tolist(), strict=True):
            if n:
                assert place is not None
                back[place] = n
                del self.named[place][len(self.named[place]) - n :]
        self.rows.go_back(torch.tensor(back, dtype=torch.long, device=steps.device))

    def keep(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self.inputs = [self.inputs[row] for row in kept]
        asked = [place for row in kept if (place := self.places[row]) is not None]
        self.rows.keep(torch.tensor(asked, dtype=torch.long, device=rows.device))
        self.named = [self.named[place] for place in asked]
        numbers = iter(range(len(asked)))
        self.places = [None if self.places[row] is None else next(numbers) for row in kept]


def _stack(old: Tensor, new: Tensor) -> Tensor:
    """Put rows under others, padded to one width."""
    width = max(old.shape[1], new.shape[1])
    pad = torch.nn.functional.pad
    return torch.cat([pad(one, (0, width - one.shape[1]), value=PADDING) for one in (old, new)])


def _join_proposals(one: Proposal, other: Proposal) -> Proposal:
    assert one.entropy is not None and other.entropy is not None
    return Proposal(
        torch.cat([one.tokens, other.tokens]), torch.cat([one.features, other.features]),
        torch.cat([one.uncertainty, other.uncertainty]), torch.cat([one.entropy, other.entropy]),
    )  # fmt: skip
