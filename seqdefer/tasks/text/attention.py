"""Attention of rows that stand at their own positions to their caches, in place of a model's own.

In a packed pass all tokens are one row of the model's batch. On a CPU, `Segment`s say which belong to which row; on a
GPU, `Blocks` do, and a kernel computes attention (`seqdefer.tasks.text.kernels`).
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

from seqdefer.tasks.text.caches import Blocks, LayerCache, Target

PACKED, BLOCKED, GROUPED = "seqdefer_packed", "seqdefer_blocked", "seqdefer_grouped"  # our attentions' names


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
    layers: list[LayerCache]
    segments: list[tuple[Segment, Tensor | None]]  # with their masks


@dataclass(frozen=True)
class BlockedPass:
    """What a packed pass on a GPU writes and sees."""

    layers: list[LayerCache]
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
def packed(model: Any, layers: list[LayerCache], segments: list[Segment]) -> Iterator[None]:
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
