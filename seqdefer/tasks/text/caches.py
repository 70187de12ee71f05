"""Caches of keys and values that are written in place, and attention to them.

A layer's buffers (P, H, W, D) grow as rows and columns are needed. Before a pass, `Layer.place` says where its new
columns go. In a packed pass all tokens are one row of the model's batch; `Segment`s say which belong to which row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

ROOM = 64  # columns that a cache grows by, at least
PACKED, BLOCKED, GROUPED = "seqdefer_packed", "seqdefer_blocked", "seqdefer_grouped"  # our attentions' names


class Growth:
    """Counts how often buffers were replaced by larger ones."""

    count = 0


class _Buffer:
    """One tensor (P, H, W, D), with P rows and W columns of room."""

    def __init__(self, growth: Growth) -> None:
        self.tensor: Tensor | None = None
        self.growth = growth

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
            self.growth.count += 1
        assert self.tensor is not None
        return self.tensor


@dataclass(frozen=True)
class Target:
    """Where the new columns of a pass go, and what comes back."""

    rows: slice | Tensor  # places of the rows in the caches, rising
    n_rows: int  # the last place and one
    index: Tensor  # (R, T) or, packed, (T,): the place of each token's row
    columns: Tensor  # of the same shape
    reach: int  # columns that are seen
    is_packed: bool = False


class Layer:
    """Keys and values of one layer: new columns go to their places, and all that rows may see come back."""

    def __init__(self, growth: Growth) -> None:
        self.buffers = _Buffer(growth), _Buffer(growth)
        self.target = Target(slice(0), 0, torch.zeros(0), torch.zeros(0), 0)
        self.keys = self.values = torch.zeros(0)

    def place(self, target: Target) -> None:
        self.target = target

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        target = self.target
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            columns = new.transpose(1, 2)  # (R, T, H, D)
            room = buffer.room_for(target.n_rows, target.reach, new)
            room[target.index, :, target.columns] = columns[0] if target.is_packed else columns
        if not target.is_packed:  # otherwise `_attend_packed` looks into the buffers itself
            keys, values = (tensor[target.rows, :, : target.reach] for tensor in self.tensors)
        return keys, values

    def make_room(self, target: Target, like: Tensor) -> None:
        """Make room for a pass whose keys and values are like a tensor (R, H, T, D)."""
        for buffer in self.buffers:
            buffer.room_for(target.n_rows, target.reach, like)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer.tensor for buffer in self.buffers)
        assert keys is not None
        assert values is not None
        return keys, values

    def reserve(self, rows: int, columns: int) -> None:
        """Make room, unless nothing was written yet."""
        for buffer in self.buffers:
            if buffer.tensor is not None:
                buffer.room_for(rows, columns, buffer.tensor)

    def write(self, rows: slice | Tensor, n_rows: int, columns: int, both: tuple[Tensor, Tensor]) -> None:
        """Put keys and values (R, H, T, D) at the first columns of `rows`; make room for so many rows and columns."""
        for buffer, new in zip(self.buffers, both, strict=True):
            room = buffer.room_for(n_rows, max(new.shape[2], columns), new)
            room[rows, :, : new.shape[2]] = new

    def show(self, rows: slice | Tensor, columns: int) -> None:
        """Let a pass see the first columns of `rows`, without an update."""
        self.keys, self.values = (tensor[rows, :, :columns] for tensor in self.tensors)

    def move(self, source: Tensor, target: Tensor) -> None:
        for buffer in self.buffers:
            if buffer.tensor is not None:
                buffer.tensor[target] = buffer.tensor[source]


def as_cache(layers: list[Layer], classes: Any) -> Any:
    """Return the layers as transformers expects them. It asks for their length, which differs from row to row, only to
    derive masks and positions; these are given."""
    cache = classes.DynamicCache()
    for layer in layers:
        wrapped = classes.DynamicLayer()
        wrapped.keys, wrapped.values, wrapped.is_initialized = layer.keys, layer.values, True
        wrapped.update, wrapped.get_seq_length = layer.update, lambda: 0
        cache.layers.append(wrapped)
    return cache


# -- packed passes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """The tokens of one row in a packed pass."""

    place: int  # of the row in the caches
    start: int  # of its tokens in the pass
    stop: int
    begin: int  # columns before them

    @property
    def reach(self) -> int:
        """The columns that the last token sees."""
        return self.begin + self.stop - self.start

    def mask(self) -> Tensor | None:
        """Return what each token sees, bool (T, reach); None for one token, which sees all."""
        n = self.stop - self.start
        return None if n == 1 else torch.ones(n, self.reach, dtype=torch.bool).tril(self.begin)


@dataclass(frozen=True)
class _Packing:
    layers: list[Layer]
    segments: list[tuple[Segment, Tensor | None]]  # with their masks


@dataclass(frozen=True)
class Blocks:
    """The tokens of a packed pass on a GPU, in B blocks of up to `size` tokens of one row."""

    size: int
    starts: Tensor  # (B,): the first token of each among all
    counts: Tensor  # (B,): its tokens; none in blocks that only pad
    places: Tensor  # (B,): of its row in the caches
    columns: Tensor  # (B,): of its first token


@dataclass(frozen=True)
class BlockedPass:
    """What a packed pass on a GPU writes and sees."""

    layers: list[Layer]
    target: Target
    blocks: Blocks


_packing: ContextVar[_Packing] = ContextVar("packing")
current_pass: ContextVar[BlockedPass] = ContextVar("current_pass")


def can_replace_attention(model: Any) -> bool:
    """Tell whether the attention of a model can be replaced: it has a name, no window and nothing added to it."""
    config, attention = model.config, import_module("transformers").AttentionInterface
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    is_plain = not (has_window or getattr(config, "attn_logit_softcapping", None))
    if config.is_encoder_decoder or not is_plain or not getattr(model, "_supports_attention_backend", False):
        return False
    attention.register(PACKED, _attend_packed)
    attention.register(BLOCKED, _attend_blocked)
    attention.register(GROUPED, _attend_grouped)
    return True


@contextmanager
def packed(model: Any, layers: list[Layer], segments: list[Segment]) -> Iterator[None]:
    """Let each segment's tokens attend to the cache of their own row."""
    token = _packing.set(_Packing(layers, [(one, one.mask()) for one in segments]))
    try:
        with _attention(model, PACKED):
            yield
    finally:
        _packing.reset(token)


@contextmanager
def blocked(model: Any, one: BlockedPass) -> Iterator[None]:
    """Let the tokens of a packed pass attend to the caches of their rows by kernels."""
    token = current_pass.set(one)
    try:
        with _attention(model, BLOCKED):
            yield
    finally:
        current_pass.reset(token)


@contextmanager
def grouped(model: Any) -> Iterator[None]:
    """Let the queries that share keys and values attend to them as one longer query. Masks are repeated for them."""
    with _attention(model, GROUPED):
        yield


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    before, model.config._attn_implementation = model.config._attn_implementation, name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _attend_grouped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention (R, T, H, D) of query (R, H, T, D), with a mask (R, 1, H / G T, W) where G is the number of
    heads of keys. They are not copied for each head of queries."""
    n, heads, length, size = query.shape
    result = nn.functional.scaled_dot_product_attention(
        query.reshape(n, key.shape[1], -1, size), key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return result.reshape(n, heads, length, size).transpose(1, 2), None


def _attend_blocked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention of a packed pass, (1, N, H, D), of query (1, H, N, D)."""
    from seqdefer.tasks.text.kernels import attend

    one, scale = current_pass.get(), options.get("scaling")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return attend(query[0].transpose(0, 1), one.layers[module.layer_idx], one.blocks, scale)[None], None


def _attend_packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention of a packed pass, (1, T, H, D), of query (1, H, T, D)."""
    packing = _packing.get()
    keys, values = packing.layers[module.layer_idx].tensors
    parts = [
        nn.functional.scaled_dot_product_attention(
            query[:, :, one.start : one.stop],
            keys[one.place : one.place + 1, :, : one.reach],
            values[one.place : one.place + 1, :, : one.reach],
            attn_mask=mask,
            scale=options.get("scaling"),
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        for one, mask in packing.segments
    ]
    return torch.cat(parts, 2).transpose(1, 2), None
