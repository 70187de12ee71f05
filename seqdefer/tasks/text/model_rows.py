"""Rows of a Hugging Face model, each at its own position, in caches that are written in place.

Every row of a cache holds its prompt (or start token) and its tokens from column 0 on, without padding. A row forgets
tokens by moving its end back; they are overwritten later. What a query may see, and its position, therefore differ from
row to row: masks and positions are given to the model, and what it would derive from the width of the cache is
replaced (`_positions`): the relative bias of T5 and the learned positions of BART.

On a CPU padding costs as much as tokens do. There the chunks of a decoder-only model are packed: all tokens of a pass
are one row without padding, and each attends to the cache of its own row (`seqdefer.tasks.text.caches`).

Rows that leave make room for the last ones, so that the rows at work are always the first of the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.rows import Chunk
from seqdefer.tasks.text.caches import Layer, Segment, Target, as_cache, can_pack, packed
from seqdefer.tasks.text.passes import PADDING, EncoderDecoder, KeyValueCache, Network
from seqdefer.tasks.text.reading import INPUT_TOKENS_PER_PASS


@dataclass(frozen=True)
class ReadTokens:
    """What a model says at M places."""

    hidden: Tensor  # (M, H): the output layer's input
    logits: Tensor  # (M, V)
    every: Tensor  # (R, T, H) or, packed, (1, T, H): the hidden states of all tokens of the pass


class ModelRows:
    """Rows of one model. `add` adds rows that have read nothing; `read` reads their inputs, if need be, and tokens. A
    row may go back or leave at any time."""

    def __init__(self, network: Network) -> None:
        self.network, self.device = network, network.device
        self.layers: list[Layer] = []
        self.sources: list[Layer] = []  # cross-attention, of models with an encoder
        self.source_mask = torch.zeros(0, 0, dtype=torch.bool, device=network.device)  # (P, S)
        self.inputs: list[list[int]] = []  # of each row
        self.places: list[int | None] = []  # of each row, its place in the caches once it has read its input
        self.ends: list[int] = []  # of each place, the columns in use
        self.is_packed = network.device.type == "cpu" and can_pack(network.model)
        self.per_pass = INPUT_TOKENS_PER_PASS["cpu" if network.device.type == "cpu" else "gpu"]

    def __len__(self) -> int:
        return len(self.places)

    def add(self, inputs: Tensor) -> None:
        """Add rows with inputs (R, S), padded on the right with PADDING."""
        self.inputs += [[token for token in line if token != PADDING] for line in inputs.tolist()]
        self.places += [None] * len(inputs)

    @torch.no_grad()
    def admit(self, inputs: Tensor) -> tuple[ReadTokens, Tensor]:
        """Add rows and let them read their inputs. Return what the model says before the first token, and the context
        (R, C)."""
        first = len(self)
        self.add(inputs)
        chunks = [Chunk(row, [], [0]) for row in range(first, len(self))]
        contexts = torch.zeros(len(chunks), 0)
        said = []
        for numbers in self._passes(chunks):
            part, own = self._read_new([chunks[number] for number in numbers])
            contexts = contexts if contexts.shape[1] else own.new_zeros(len(chunks), own.shape[1])
            contexts[numbers] = own
            said.append((numbers, part))
        return _in_order(said, chunks), contexts

    @torch.no_grad()
    def read(self, chunks: Sequence[Chunk]) -> ReadTokens:
        """Read chunks of different rows. Return what the model says at the places asked, chunk by chunk."""
        said = []
        for numbers in self._passes(chunks):
            part = [chunks[number] for number in numbers]
            is_new = self.places[part[0].row] is None and not self.is_packed
            said.append((numbers, self._read_new(part)[0] if is_new else self._read(part)[0]))
        return _in_order(said, chunks)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> ReadTokens:
        """Every row reads one of `tokens` (n,)."""
        places = torch.tensor(self.places, device=self.device)
        ordered = torch.empty_like(tokens).index_copy_(0, places, tokens)
        said = self._pass(slice(len(tokens)), ordered[:, None], self.ends, places)
        self.ends = [end + 1 for end in self.ends]
        return said

    def go_back(self, steps: Sequence[int]) -> None:
        for place, n in zip(self.places, steps, strict=True):
            if place is not None:
                self.ends[place] -= n
        if not self.sources and self.ends:
            self.network.check_width(max(self.ends))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep `rows`, in that order. The last ones of the caches take the places of those that leave."""
        self.inputs = [self.inputs[row] for row in rows]
        kept = [self.places[row] for row in rows]
        used = [place for place in kept if place is not None]
        free = sorted(set(range(len(used))) - set(used))
        moved = dict(zip(sorted(place for place in used if place >= len(used)), free, strict=True))
        if moved:
            source, target = (torch.tensor(list(one), device=self.device) for one in (moved, moved.values()))
            for layer in (*self.layers, *self.sources):
                layer.move(source, target)
            if len(self.source_mask):
                self.source_mask[target] = self.source_mask[source]
            for old, new in moved.items():
                self.ends[new] = self.ends[old]
        self.ends, self.source_mask = self.ends[: len(used)], self.source_mask[: len(used)]
        self.places = [None if place is None else moved.get(place, place) for place in kept]

    def size(self, chunk: Chunk) -> int:
        """Return how many tokens are read for a chunk, those of the input included where it is not read yet."""
        return len(chunk.tokens) + (len(self.inputs[chunk.row]) if self._is_new(chunk) else 0)

    # -- passes ----------------------------------------------------------------------------------------------------

    def _passes(self, chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Yield the chunks that are read together. Unless they are packed, new rows are apart from others, and long
        ones from short ones."""
        sizes = [self.size(chunk) for chunk in chunks]
        numbers = list(range(len(chunks)))
        old = [] if self.is_packed else [number for number in numbers if not self._is_new(chunks[number])]
        if old:
            yield old
        new = sorted(set(numbers) - set(old), key=lambda number: -sizes[number])
        while new:
            n, total = 0, 0
            while n < len(new) and (not n or total + sizes[new[n if self.is_packed else 0]] <= self.per_pass):
                total += sizes[new[n if self.is_packed else 0]]
                n += 1
            yield new[:n]
            new = new[n:]

    def _is_new(self, chunk: Chunk) -> bool:
        return self.places[chunk.row] is None

    def _read_new(self, chunks: Sequence[Chunk]) -> tuple[ReadTokens, Tensor]:
        """Read inputs and tokens of new rows. Return what the model says where it is asked, and the context (R, C)."""
        inputs = [self.inputs[chunk.row] for chunk in chunks]
        if isinstance(self.network, EncoderDecoder):
            return self._encode(self.network, chunks, _padded(inputs, self.device, PADDING))
        said, starts = self._read(chunks)
        flat = said.every.flatten(0, 1)
        means = [
            flat[start : start + len(line)].sum(0, dtype=torch.float32) / len(line)
            for start, line in zip(starts, inputs, strict=True)
        ]
        return said, torch.stack(means)

    def _encode(self, network: EncoderDecoder, chunks: Sequence[Chunk], inputs: Tensor) -> tuple[ReadTokens, Tensor]:
        tokens = _padded([chunk.tokens for chunk in chunks], self.device)
        run, where = network.prefill(inputs, tokens, says_all=True), slice(len(self.ends), len(self.ends) + len(chunks))
        self._add(run.cache, inputs != PADDING, where)
        for place, chunk in enumerate(chunks, where.start):
            self.places[chunk.row] = place
            self.ends.append(1 + len(chunk.tokens))
        wanted = [
            number * (1 + tokens.shape[1]) + place for number, chunk in enumerate(chunks) for place in chunk.asked
        ]
        assert run.context is not None
        hidden, logits = run.hidden.flatten(0, 1)[wanted], run.logits.flatten(0, 1)[wanted]
        return ReadTokens(hidden, logits, run.hidden), run.context

    def _read(self, chunks: Sequence[Chunk]) -> tuple[ReadTokens, list[int]]:
        """Read chunks, after their inputs where rows are new. Return also where each begins among all tokens."""
        lines = []
        for chunk in chunks:
            given = self.inputs[chunk.row] if self._is_new(chunk) else []
            if self._is_new(chunk):
                self.places[chunk.row] = len(self.ends)
                self.ends.append(0)
            lines.append([*given, *chunk.tokens])
        places = [place for chunk in chunks if (place := self.places[chunk.row]) is not None]
        width = max(self.ends[place] + len(line) for place, line in zip(places, lines, strict=True))
        if not self.sources:
            self.network.check_width(width)
        longest = max(map(len, lines))
        order = sorted(range(len(lines)), key=lambda number: places[number])
        rank = {number: place for place, number in enumerate(order)}
        sizes = [0, *map(len, lines)]
        starts = (
            [sum(sizes[: number + 1]) for number in range(len(lines))]
            if self.is_packed
            else [rank[number] * longest for number in range(len(lines))]
        )
        wanted = torch.tensor(
            [
                start + len(line) - len(chunk.tokens) - 1 + place
                for start, line, chunk in zip(starts, lines, chunks, strict=True)
                for place in chunk.asked
            ],
            device=self.device,
        )
        if self.is_packed:
            said = self._pass_packed(places, lines, starts, wanted)
        else:
            lines, places = [lines[number] for number in order], [places[number] for number in order]
            is_first = places == list(range(len(places)))
            where = slice(len(places)) if is_first else torch.tensor(places, device=self.device)
            said = self._pass(where, _padded(lines, self.device), [self.ends[place] for place in places], wanted)
        for place, line in zip(places, lines, strict=True):
            self.ends[place] += len(line)
        return said, starts

    def _pass_packed(self, places: list[int], lines: list[list[int]], starts: list[int], wanted: Tensor) -> ReadTokens:
        """Read the lines of the rows at `places`, one after the other, as one row."""
        segments = [
            Segment(place, start, start + len(line), self.ends[place])
            for place, start, line in zip(places, starts, lines, strict=True)
        ]
        tokens = torch.tensor([[token for line in lines for token in line]])
        columns = torch.cat([torch.arange(one.begin, one.reach) for one in segments])
        index = torch.tensor([one.place for one in segments for _ in range(one.start, one.stop)])
        reach = max(one.reach for one in segments)
        self._place(Target(slice(0), len(self.ends), index, columns, reach, is_packed=True))
        with packed(self.network.model, self.layers, segments):
            return self._call(wanted, input_ids=tokens, position_ids=columns[None], past_key_values=self._cache())

    def _pass(self, where: slice | Tensor, tokens: Tensor, ends: list[int], wanted: Tensor) -> ReadTokens:
        """Read tokens (R, T) of the rows at `where`, which have read as far as `ends`."""
        model, (n, length) = self.network.model, tokens.shape
        steps = torch.arange(length, device=self.device)
        columns = torch.tensor(ends, device=self.device)[:, None] + steps  # (R, T)
        reach = max(ends) + length
        every = torch.arange(n, device=self.device) if isinstance(where, slice) else where
        n_rows = len(self.ends)
        self._place(Target(where, n_rows, every[:, None].expand(n, length), columns, reach))
        seen = torch.arange(reach, device=self.device) <= columns[:, :, None]  # (R, T, reach)
        bias = _to_bias(seen[:, None], model.dtype)
        limit = self.network.limit()
        positions = columns if limit is None else columns.clamp(max=limit - 1)  # padding may lie beyond
        with _positions(model, positions, reach):
            if not self.sources:
                return self._call(
                    wanted, input_ids=tokens, attention_mask=bias, position_ids=positions, past_key_values=self._cache()
                )
            cache, states, source_mask = self._source(where, n)
            return self._call(
                wanted, encoder_outputs=(states,), attention_mask=source_mask, decoder_input_ids=tokens,
                decoder_attention_mask=bias, past_key_values=cache,
            )  # fmt: skip

    def _call(self, wanted: Tensor, **arguments: Any) -> ReadTokens:
        """Run the model. Its output layer, the slowest one of small models, sees the tokens `wanted` (M,) alone."""
        seen: list[Tensor] = []

        def pick(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            picked = given[0].flatten(0, 1)[wanted][None]
            seen.extend([given[0], picked[0]])
            return (picked, *given[1:])

        handle = self.network.head.register_forward_pre_hook(pick)
        try:
            logits = self.network.model(use_cache=True, **arguments).logits
        finally:
            handle.remove()
        return ReadTokens(seen[1], logits[0], seen[0])

    # -- caches ----------------------------------------------------------------------------------------------------

    def _place(self, target: Target) -> None:
        if not self.layers:
            self.layers = [Layer() for _ in range(_n_layers(self.network.model))]
        for layer in self.layers:
            layer.place(target)

    def _cache(self) -> Any:
        return as_cache(self.layers, self.network.cache_classes)

    def _add(self, cache: KeyValueCache, given: Tensor, where: slice) -> None:
        """Put the keys and values of new rows, of their inputs and first tokens, at `where`."""
        if not self.sources:
            self.sources, self.layers = [Layer() for _ in cache.source], [Layer() for _ in cache.own]
        n_columns, before = given.shape[1], self.source_mask
        mask = torch.zeros(where.stop, max(n_columns, before.shape[1]), dtype=torch.bool, device=given.device)
        mask[: where.start, : before.shape[1]] = before
        mask[where.start :, :n_columns] = given
        self.source_mask = mask
        for layers, parts, columns in ((self.sources, cache.source, mask.shape[1]), (self.layers, cache.own, 0)):
            for layer, both in zip(layers, parts, strict=True):
                layer.write(where, columns, both)

    def _source(self, where: slice | Tensor, n: int) -> tuple[Any, Tensor, Tensor]:
        mask, classes = self.source_mask[where], self.network.cache_classes
        for layer in self.sources:
            layer.show(where, mask.shape[1])
        cache = classes.EncoderDecoderCache(self._cache(), as_cache(self.sources, classes))
        cache.is_updated = dict.fromkeys(range(len(self.sources)), True)
        # The model takes the input's keys and values from the cache; of the states it uses only the shape.
        keys = self.sources[0].keys
        states = keys.new_zeros(1, 1, 1).expand(n, mask.shape[1], self.network.model.config.hidden_size)
        return cache, states, mask.long()


def _padded(lines: Sequence[Sequence[int]], device: torch.device, padding: int = 0) -> Tensor:
    longest = max(map(len, lines))
    rows = [[*line, *[padding] * (longest - len(line))] for line in lines]
    return torch.tensor(rows, dtype=torch.long, device=device).view(len(lines), longest)


def _in_order(said: list[tuple[list[int], ReadTokens]], chunks: Sequence[Chunk]) -> ReadTokens:
    """Join what was said in several passes, by the numbers of their chunks, in the order of the chunks."""
    if len(said) == 1 and said[0][0] == list(range(len(chunks))):
        return said[0][1]
    places: dict[int, list[int]] = {}
    n = 0
    for number in (number for numbers, _ in said for number in numbers):
        places[number] = list(range(n, n + len(chunks[number].asked)))
        n += len(chunks[number].asked)
    order = [place for number in range(len(chunks)) for place in places[number]]
    hidden, logits = (torch.cat([getattr(part, name) for _, part in said]) for name in ("hidden", "logits"))
    return ReadTokens(hidden[order], logits[order], said[0][1].every)


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
def _positions(model: Any, positions: Tensor, reach: int) -> Iterator[None]:
    """Give each row its own positions (R, T) where the model would count columns."""
    with ExitStack() as stack:
        if model.config.is_encoder_decoder:
            decoder = model.get_decoder()
            for module in decoder.modules():
                if getattr(module, "has_relative_attention_bias", False):
                    stack.enter_context(_relative(module, positions, reach))
            if isinstance(places := getattr(decoder, "embed_positions", None), nn.Embedding):
                last, offset = len(places.weight) - 1, getattr(places, "offset", 0)
                own = nn.functional.embedding((positions + offset).clamp(max=last), places.weight)
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
