"""Forward passes over rows that stand at their own positions, and the caches that they write.

What a query may see, and its position, differ from row to row: masks and positions are given to the model, and what it
would derive from the width of the cache is replaced (`_positions`): the relative bias of T5, learned positions of BART.

Padding costs as much as tokens do, so the lines of a decoder-only model are packed: all tokens of a pass are one row,
and each attends to the cache of its own row. On a GPU that takes kernels (`seqdefer.tasks.text.kernels`), without which
lines are padded; shapes are rounded up, and passes are replayed as CUDA graphs (`seqdefer.graphs`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.environment import send
from seqdefer.graphs import Replayed, finely_rounded, rounded, weakly
from seqdefer.tasks.text.attention import BlockedPass, Segment, blocked, can_replace_attention, grouped, packed
from seqdefer.tasks.text.caches import Blocks, Growth, LayerCache, Target, as_cache
from seqdefer.tasks.text.fused import Fused
from seqdefer.tasks.text.passes import PADDING, EncoderDecoder, KeyValueCache, Network, to_bias
from seqdefer.types import Proposal

LEAST = 16  # tokens of a packed pass, and places asked, on a GPU
QUERIES = 64  # tokens times heads that share keys, in a block of a packed pass
COLUMNS = 128  # the least width of caches and inputs on a GPU, which are this times a power of two

ToProposal = Callable[[Tensor, Tensor, Tensor], Proposal]


@dataclass(frozen=True)
class TokenLine:
    """Tokens that a row reads in a pass."""

    place: int  # of the row in the caches
    begin: int  # columns before them
    tokens: Sequence[int]


@dataclass(frozen=True)
class Place:
    """A token of a pass at which the model is asked: the number of its line, its place there, and whether the row has
    then read nothing but its input."""

    line: int
    token: int
    is_first: bool


@dataclass(frozen=True)
class Said:
    """What a model says at M places of a pass."""

    proposal: Proposal  # M rows
    hidden: Tensor  # (N, H): the output layer's input at all tokens
    starts: list[int]  # of each line among them


class RowPasses:
    """Caches of rows and the passes of one model over them. `to_proposal`: see `TextPredictor.to_proposal`."""

    def __init__(self, network: Network, to_proposal: ToProposal) -> None:
        self.network, self.to_proposal, self.device = network, to_proposal, network.device
        self.growth, self._known_growth, self._widest = Growth(), 0, 0
        self.layers: list[LayerCache] = []
        self.sources: list[LayerCache] = []  # cross-attention, of models with an encoder
        self.source_mask = torch.zeros(0, 0, dtype=torch.bool, device=network.device)  # (P, S)
        self.replaces_attention = can_replace_attention(network.model)
        if network.fused.has_kernels and not self.replaces_attention:
            network.fused = Fused(network.model, with_kernels=False)
        self.is_rounded = network.device.type == "cuda"
        self.is_packed = network.fused.has_kernels or (self.replaces_attention and network.device.type == "cpu")
        self.replayed = Replayed(weakly(self._padded), network.fused)
        self.replayed_encoding = Replayed(weakly(self._encode), network.fused)
        self.replayed_blocks, self.replayed_steps = Replayed(weakly(self._blocked)), Replayed(weakly(self._stepped))
        self._reserved = (0, 0, 0)  # rows, columns and width of the inputs
        self._n_columns = 0  # that a packed pass on a GPU needs

    def read(self, lines: Sequence[TokenLine], asked: Sequence[Place], ends: Sequence[int]) -> Said:
        """Read lines of different rows. `ends`: of each place of the caches, the columns in use before."""
        with self.network.lock:
            if not self.is_packed:
                return self._read_padded(lines, asked, ends)
            return self._read_blocks(lines, asked) if self.is_rounded else self._read_packed(lines, asked)

    def step(self, tokens: Tensor, ends: Tensor, reach: int, wanted: Tensor) -> Proposal:
        """Every row at the first places reads one of `tokens` (P,), which may be padded. Return the proposals at the
        places `wanted`."""
        reach = self._wide(reach)
        self._reserve(reach)
        with self.network.lock:
            if self.is_packed and self.is_rounded:
                return Proposal(*self.replayed_steps((tokens, ends, wanted)))
            rows, first = torch.arange(len(tokens), device=self.device), torch.zeros_like(wanted, dtype=torch.bool)
            return Proposal(*self.replayed((tokens[:, None], ends, rows, wanted, first), (reach, 0))[1:])

    def encode(self, inputs: Tensor, tokens: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Read inputs (R, S) and tokens (R, T) of new rows at `places`. Return hidden states (R, T + 1, H), logits, and
        the context (R, C)."""
        network, (n, length) = self.network, tokens.shape
        assert isinstance(network, EncoderDecoder)
        if not self.is_rounded or not network.reads_ids or network.encoder_cache.n_bytes:
            run = network.prefill(inputs, tokens, says_all=True)
            assert run.context is not None
            width, mask = run.cache.n_inputs, run.cache.mask
            given = torch.ones(n, width, dtype=torch.bool, device=self.device) if mask is None else mask
            self._add(run.cache, given, send(list(places), self.device))
            return run.hidden, run.logits, run.context
        network.check_width(inputs.shape[1])
        most = network.limit() or sys.maxsize
        width = min(COLUMNS * rounded(-(-inputs.shape[1] // COLUMNS)), most)
        rows, longest = rounded(n) - n, min(rounded(1 + length), most)
        inputs = nn.functional.pad(inputs, (0, width - inputs.shape[1], 0, rows), value=PADDING)
        tokens = nn.functional.pad(tokens, (0, longest - 1 - length, 0, rows))
        where = send([*places, *[self._n_rows - 1] * rows], self.device)
        self._reserve(1 + tokens.shape[1], width)
        with network.lock:
            hidden, logits, context = (part[:n] for part in self.replayed_encoding((inputs, tokens, where)))
        return hidden, logits, context

    def _encode(self, inputs: Tensor, tokens: Tensor, places: Tensor) -> Sequence[Tensor]:
        network = self.network
        assert isinstance(network, EncoderDecoder)
        run = network.prefill_unseen(inputs, tokens)
        assert run.context is not None
        self._add(run.cache, inputs != PADDING, places)
        return [run.hidden, run.logits, run.context]

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy rows to other places."""
        old, new = (send(list(one), self.device) for one in (source, target))
        for layer in (*self.layers, *self.sources):
            layer.move(old, new)
        if len(self.source_mask):
            self.source_mask[new] = self.source_mask[old]

    def rows_of(self, n: int) -> int:
        """Return the number of rows that a pass over n has."""
        return rounded(n) if self.is_rounded else n

    # -- packed ----------------------------------------------------------------------------------------------------

    def _read_packed(self, lines: Sequence[TokenLine], asked: Sequence[Place]) -> Said:
        """Read lines, one after the other, as one row."""
        sizes = [0, *(len(line.tokens) for line in lines)]
        starts = [sum(sizes[: number + 1]) for number in range(len(lines))]
        segments = [
            Segment(line.place, start, start + len(line.tokens), line.begin)
            for line, start in zip(lines, starts, strict=True)
        ]
        tokens = torch.tensor([[token for line in lines for token in line.tokens]])
        columns = torch.cat([torch.arange(one.begin, one.reach) for one in segments])
        index = torch.tensor([one.place for one in segments for _ in range(one.start, one.stop)])
        n_rows, reach = max(one.place for one in segments) + 1, max(one.reach for one in segments)
        self._place(Target(slice(0), n_rows, index, columns, reach, is_packed=True))
        wanted = torch.tensor([starts[one.line] + one.token for one in asked])
        with packed(self.network.model, self.layers, segments):
            hidden, picked, logits = self._call(
                wanted, input_ids=tokens, position_ids=columns[None], past_key_values=self._cache()
            )
        is_first = torch.tensor([one.is_first for one in asked])
        return Said(self.to_proposal(picked, logits, is_first), hidden.flatten(0, 1), starts)

    def _read_blocks(self, lines: Sequence[TokenLine], asked: Sequence[Place]) -> Said:
        """Read lines, one after the other, as one row, in blocks of tokens; see `Blocks`."""
        sizes = [len(line.tokens) for line in lines]
        block = max(1, QUERIES // rounded(_heads_per_key(self.network.model)))
        starts = [sum(sizes[:number]) for number in range(len(lines))]
        total, m = finely_rounded(max(sum(sizes), LEAST)), rounded(max(len(asked), LEAST))
        more, unused = total - sum(sizes), self._n_rows - 1  # the last row is never used
        blocks = [
            (line, start, n)
            for line, start in zip(lines, starts, strict=True)
            for n in range(0, len(line.tokens), block)
        ]
        idle = finely_rounded(len(blocks)) - len(blocks)
        given = self._bring(
            [*(token for line in lines for token in line.tokens), *[0] * more],
            [*(line.place for line in lines for _ in line.tokens), *[unused] * more],
            [*(line.begin + n for line in lines for n in range(len(line.tokens))), *[0] * more],
            [*(start + n for _, start, n in blocks), *[0] * idle],
            [*(min(block, len(line.tokens) - n) for line, _, n in blocks), *[0] * idle],
            [*(line.place for line, _, _ in blocks), *[unused] * idle],
            [*(line.begin + n for line, _, n in blocks), *[0] * idle],
            [*(starts[one.line] + one.token for one in asked), *[0] * (m - len(asked))],
            [*(one.is_first for one in asked), *[False] * (m - len(asked))],
        )  # fmt: skip
        given[8] = given[8].bool()
        self._reserve(self._wide(max(line.begin + len(line.tokens) for line in lines)))
        hidden, *parts = self.replayed_blocks(given, (block,))
        return Said(Proposal(*(part[: len(asked)] for part in parts)), hidden[0], starts)

    def _blocked(
        self, size: int, tokens: Tensor, places: Tensor, columns: Tensor, starts: Tensor, counts: Tensor,
        block_places: Tensor, block_columns: Tensor, wanted: Tensor, first: Tensor,
    ) -> Sequence[Tensor]:  # fmt: skip
        """Read tokens (N,) at their places and columns, in blocks of up to `size`."""
        target = Target(slice(0), self._n_rows, places, columns, self._n_columns, is_packed=True)
        self._place(target)
        blocks = Blocks(size, starts, counts, block_places, block_columns)
        limit = self.network.limit()
        positions = columns if limit is None else columns.clamp(max=limit - 1)  # rows may run past their end
        one = BlockedPass(self.layers, target, blocks)
        with self._on_device(), self.network.fused(), blocked(self.network.model, one):
            hidden, picked, logits = self._call(
                wanted, input_ids=tokens[None], position_ids=positions[None], past_key_values=self._cache()
            )
        return [hidden, *self.to_proposal(picked, logits, first).tensors()]

    def _on_device(self) -> AbstractContextManager[Any]:
        """Let Triton, which launches kernels on the current GPU, launch them on that of the model."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _stepped(self, tokens: Tensor, ends: Tensor, wanted: Tensor) -> Sequence[Tensor]:
        """Read one token of every row at the first places."""
        rows, first = torch.arange(len(tokens), device=self.device), torch.zeros_like(wanted, dtype=torch.bool)
        blocks = rows, torch.ones_like(rows), rows, ends
        return self._blocked(1, tokens, rows, ends, *blocks, wanted, first)[1:]

    # -- padded ----------------------------------------------------------------------------------------------------

    def _read_padded(self, lines: Sequence[TokenLine], asked: Sequence[Place], ends: Sequence[int]) -> Said:
        order = sorted(range(len(lines)), key=lambda number: lines[number].place)
        rank = {number: place for place, number in enumerate(order)}
        n, length, m = self._shape(len(lines), max(len(line.tokens) for line in lines), len(asked), len(ends))
        more = n - len(lines)
        tokens = [token for one in order for token in (*lines[one].tokens, *[0] * (length - len(lines[one].tokens)))]
        places, begins = [lines[one].place for one in order], [lines[one].begin for one in order]
        are_neighbours = not self.is_rounded and places == list(range(places[0], places[0] + n))
        wanted = [rank[one.line] * length + one.token for one in asked]
        given = self._bring(
            [*tokens, *[0] * length * more], [*begins, *[0] * more],
            [*places, *[self._n_rows - 1] * more],  # the row that is never used
            [*wanted, *[0] * (m - len(asked))], [*(one.is_first for one in asked), *[False] * (m - len(asked))],
        )  # fmt: skip
        given[0], given[4] = given[0].view(n, length), given[4].bool()
        reach = self._wide(max(begins) + length)
        self._reserve(reach)
        hidden, *parts = self.replayed(given, (reach, places[0] if are_neighbours else None))
        proposal = Proposal(*(part[: len(asked)] for part in parts))
        return Said(proposal, hidden.flatten(0, 1), [rank[number] * length for number in range(len(lines))])

    def _bring(self, *lists: list[int]) -> list[Tensor]:
        """Return lists of numbers as tensors on the device, which are sent there at once."""
        every = send([number for one in lists for number in one], self.device, torch.long)
        return list(every.split([len(one) for one in lists]))

    def _shape(self, n: int, length: int, asked: int, n_rows: int) -> tuple[int, int, int]:
        """Return the rows, tokens of a row and places asked of a pass over n rows of `n_rows`. On a GPU few shapes are
        worth more than little padding."""
        if not self.is_rounded:
            return n, length, asked
        n, length = rounded(max(n, min(4, n_rows))), 1 if length == 1 else 1 + rounded(max(length - 1, 4))
        return n, length, n * length

    def _padded(
        self,
        reach: int,
        start: int | None,
        tokens: Tensor,
        begins: Tensor,
        places: Tensor,
        wanted: Tensor,
        first: Tensor,
    ) -> Sequence[Tensor]:
        """Read tokens (R, T) of the rows at `places`, after the columns `begins` (R,). Return the hidden states of all
        tokens and the parts of the proposals at `wanted`. Places that follow each other from `start` on are a slice of
        the caches, which copies nothing."""
        model, (n, length) = self.network.model, tokens.shape
        columns = begins[:, None] + torch.arange(length, device=self.device)  # (R, T)
        where = places if start is None else slice(start, start + n)
        index = places[:, None].expand(n, length)
        self._place(Target(where, self._n_rows, index, columns, reach))
        seen = torch.arange(reach, device=self.device) <= columns[:, :, None]  # (R, T, reach)
        bias = to_bias(seen[:, None], model.dtype)
        limit = self.network.limit()
        positions = columns if limit is None else columns.clamp(max=limit - 1)  # padding may lie beyond
        attention: AbstractContextManager[None] = nullcontext()
        if self.replaces_attention:
            attention, bias = grouped(model), bias.repeat(1, 1, _heads_per_key(model), 1)
        with _positions(model, positions, reach), attention:
            if not self.sources:
                hidden, picked, logits = self._call(
                    wanted, input_ids=tokens, attention_mask=bias, position_ids=positions, past_key_values=self._cache()
                )
            else:
                cache, states, source_mask = self._source(where, tokens)
                hidden, picked, logits = self._call(
                    wanted, encoder_outputs=(states,), attention_mask=source_mask, decoder_input_ids=tokens,
                    decoder_attention_mask=bias, past_key_values=cache,
                )  # fmt: skip
        return [hidden, *self.to_proposal(picked, logits, first).tensors()]

    def _call(self, wanted: Tensor, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Run the model. Its output layer, the slowest one of small models, sees the tokens `wanted` (M,) alone. Return
        its input at all tokens, at these, and their logits."""
        seen: list[Tensor] = []

        def pick(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden = noted(given[0])
            seen.extend([hidden, hidden.flatten(0, 1)[wanted]])
            return (given[0].flatten(0, 1)[wanted][None], *given[1:])

        with self.network.watching() as noted:
            handle = self.network.head.register_forward_pre_hook(pick)
            try:
                logits = self.network.model(use_cache=True, **arguments).logits
            finally:
                handle.remove()
        return seen[0], seen[1], logits[0]

    # -- caches ----------------------------------------------------------------------------------------------------

    def make_room(self, n: int) -> None:
        """Say that n places are in use."""
        self._n_rows = self.rows_of(n) + self.is_rounded

    def _reserve(self, columns: int, width: int = 0) -> None:
        """Make room in buffers that are there before a pass, as graphs know their addresses; forget the graphs of
        buffers that were replaced. `width`: of the inputs."""
        self._n_columns = columns
        if self._reserved == (self._n_rows, columns, width):
            return
        self._reserved = self._n_rows, columns, width
        for layers, needed in ((self.layers, columns), (self.sources, width)):
            for layer in layers:
                layer.reserve(self._n_rows, needed)
        old = self.source_mask
        if width and (len(old) < self._n_rows or old.shape[1] < width):
            more = (0, max(width - old.shape[1], 0), 0, max(self._n_rows - len(old), 0))
            self.source_mask = nn.functional.pad(old, more)
            self.growth.count += 1
        if self.growth.count != self._known_growth:
            for one in (self.replayed, self.replayed_encoding, self.replayed_blocks, self.replayed_steps):
                one.forget()
            self._known_growth = self.growth.count

    def _wide(self, n: int) -> int:
        """Return the width of a pass that needs n columns. The largest so far will do for much narrower ones."""
        if not self.is_rounded:
            return n
        wide = COLUMNS * rounded(-(-n // COLUMNS))
        self._widest = max(wide, self._widest)
        return self._widest if self._widest <= 4 * wide else wide

    def _place(self, target: Target) -> None:
        if not self.layers:
            self.layers = [LayerCache(self.growth) for _ in range(_n_layers(self.network.model))]
        for layer in self.layers:
            layer.place(target)

    def _cache(self) -> Any:
        return as_cache(self.layers, self.network.cache_classes)

    def _add(self, cache: KeyValueCache, given: Tensor, where: slice | Tensor) -> None:
        """Put the keys and values of new rows, of their inputs and first tokens, at `where`."""
        if not self.sources:
            self.sources, self.layers = ([LayerCache(self.growth) for _ in one] for one in (cache.source, cache.own))
        self._reserve(0, given.shape[1])
        width = self.source_mask.shape[1]
        self.source_mask[where] = nn.functional.pad(given, (0, width - given.shape[1]))
        for layers, parts, columns in ((self.sources, cache.source, width), (self.layers, cache.own, 0)):
            for layer, both in zip(layers, parts, strict=True):
                layer.write(where, self._n_rows, columns, both)

    def _source(self, where: slice | Tensor, tokens: Tensor) -> tuple[Any, Tensor, Tensor]:
        mask, classes, (n, length) = self.source_mask[where], self.network.cache_classes, tokens.shape
        for layer in self.sources:
            layer.show(where, mask.shape[1])
        cache = classes.EncoderDecoderCache(self._cache(), as_cache(self.sources, classes))
        cache.is_updated = dict.fromkeys(range(len(self.sources)), True)
        # The model takes the input's keys and values from the cache; of the states it uses only the shape.
        keys = self.sources[0].keys
        states = keys.new_zeros(1, 1, 1).expand(n, mask.shape[1], self.network.model.config.hidden_size)
        bias = to_bias(mask[:, None, None], states.dtype).expand(-1, -1, length, -1)
        return cache, states, bias


def _n_layers(model: Any) -> int:
    config = model.config
    return int(
        getattr(config, "num_decoder_layers", None)
        or getattr(config, "decoder_layers", None)
        or config.num_hidden_layers
    )


def _heads_per_key(model: Any) -> int:
    heads = int(model.config.num_attention_heads)
    return heads // int(getattr(model.config, "num_key_value_heads", None) or heads)


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
