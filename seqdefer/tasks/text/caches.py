"""Caches of keys and values that are written in place.

A layer's buffers (P, H, W, D) grow as rows and columns are needed. Before a pass, `LayerCache.place` says where its new
columns go. `seqdefer.tasks.text.attention` looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROOM = 64  # columns that a cache grows by, at least


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


class LayerCache:
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


def as_cache(layers: list[LayerCache], classes: Any) -> Any:
    """Return the layers as transformers expects them. It asks for their length, which differs from row to row, only to
    derive masks and positions; these are given."""
    cache = classes.DynamicCache()
    for layer in layers:
        wrapped = classes.DynamicLayer()
        wrapped.keys, wrapped.values, wrapped.is_initialized = layer.keys, layer.values, True
        wrapped.update, wrapped.get_seq_length = layer.update, lambda: 0
        cache.layers.append(wrapped)
    return cache


@dataclass(frozen=True)
class Blocks:
    """The tokens of a packed pass on a GPU, in B blocks of up to `size` tokens of one row."""

    size: int
    starts: Tensor  # (B,): the first token of each among all
    counts: Tensor  # (B,): its tokens; none in blocks that only pad
    places: Tensor  # (B,): of its row in the caches
    columns: Tensor  # (B,): of its first token
