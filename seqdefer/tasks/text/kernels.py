"""Triton kernels for rows that stand at their own positions, on a GPU.

The tokens of a pass, of whatever rows, lie one after the other. `attend` lets each look at the cache of its own row, up
to its own column: no masks, no padding. `rotate_and_store` turns queries and keys by their positions and puts keys and
values where they belong in the caches; `gate` multiplies the halves of a feed-forward layer.

Importing this module needs Triton, which comes with PyTorch for CUDA; see `are_available`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqdefer.graphs import rounded
from seqdefer.tasks.text.caches import Blocks, LayerCache

ATTENDED = 64  # columns that a program looks at in one go
GATED = 1024  # numbers that a program multiplies
LEAST_QUERIES = 16  # of a matrix product


@triton.jit
def _attend(
    queries, keys, values, result, starts, counts, places, columns, scale, row_stride, head_stride,
    group: tl.constexpr, padded_group: tl.constexpr, size: tl.constexpr, padded_size: tl.constexpr,
    n_queries: tl.constexpr, attended: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Let the tokens of one block, and the heads that share keys, look at their row's cache."""
    block, head, n_keys = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    count = tl.load(counts + block)
    if count == 0:
        return
    start, column = tl.load(starts + block), tl.load(columns + block)
    base = tl.load(places + block) * row_stride + head * head_stride
    each, part = tl.arange(0, n_queries), tl.arange(0, padded_size)
    token, member = each // padded_group, each % padded_group
    is_query = (token < count) & (member < group)
    where = ((start + token) * n_keys * group + head * group + member)[:, None] * size + part[None, :]
    is_used = is_query[:, None] & (part < size)[None, :]
    query = tl.load(queries + where, mask=is_used, other=0.0)
    highest = tl.full([n_queries], float("-inf"), tl.float32)
    total = tl.zeros([n_queries], tl.float32)
    mixed = tl.zeros([n_queries, padded_size], tl.float32)
    end = column + count
    for first in range(0, end, attended):
        seen = first + tl.arange(0, attended)
        is_there = (seen < end)[:, None] & (part < size)[None, :]
        at = base + seen[:, None] * size + part[None, :]
        key = tl.load(keys + at, mask=is_there, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=precision) * scale
        score = tl.where(seen[None, :] <= (column + token)[:, None], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        less = tl.exp(highest - higher)
        value = tl.load(values + at, mask=is_there, other=0.0)
        mixed = mixed * less[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=precision)
        total, highest = total * less + tl.sum(weight, 1), higher
    tl.store(result + where, (mixed / total[:, None]).to(result.dtype.element_ty), mask=is_used)


@triton.jit
def _rotate_and_store(
    given, cos, sin, query_norm, key_norm, queries, keys, values, places, columns, epsilon, row_stride, head_stride,
    n_queries: tl.constexpr, n_keys: tl.constexpr, size: tl.constexpr, padded_half: tl.constexpr,
    has_norms: tl.constexpr,
):  # fmt: skip
    """Turn one head of one token, and put it where it belongs."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = size // 2
    part = tl.arange(0, padded_half)
    is_used = part < half
    base = given + (token * (n_queries + 2 * n_keys) + head) * size
    left = tl.load(base + part, mask=is_used, other=0.0).to(tl.float32)
    right = tl.load(base + half + part, mask=is_used, other=0.0).to(tl.float32)
    if head < n_queries + n_keys:
        if has_norms:
            weights = query_norm if head < n_queries else key_norm
            mean = (tl.sum(left * left) + tl.sum(right * right)) / size
            root = tl.rsqrt(mean + epsilon)
            left = left * root * tl.load(weights + part, mask=is_used, other=0.0).to(tl.float32)
            right = right * root * tl.load(weights + half + part, mask=is_used, other=0.0).to(tl.float32)
        turn = token * size + part
        turned_left = left * tl.load(cos + turn, mask=is_used, other=0.0).to(tl.float32)
        turned_left -= right * tl.load(sin + turn, mask=is_used, other=0.0).to(tl.float32)
        turned_right = right * tl.load(cos + half + turn, mask=is_used, other=0.0).to(tl.float32)
        turned_right += left * tl.load(sin + half + turn, mask=is_used, other=0.0).to(tl.float32)
        left, right = turned_left, turned_right
    if head < n_queries:
        target = queries + (token * n_queries + head) * size
    else:
        at = tl.load(places + token) * row_stride + tl.load(columns + token) * size
        if head < n_queries + n_keys:
            target = keys + at + (head - n_queries) * head_stride
        else:
            target = values + at + (head - n_queries - n_keys) * head_stride
    tl.store(target + part, left.to(queries.dtype.element_ty), mask=is_used)
    tl.store(target + half + part, right.to(queries.dtype.element_ty), mask=is_used)


@triton.jit
def _gate(given, result, width, n: tl.constexpr):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1) * n + tl.arange(0, n)
    base = given + token * 2 * width
    gate = tl.load(base + part, mask=part < width, other=0.0).to(tl.float32)
    up = tl.load(base + width + part, mask=part < width, other=0.0).to(tl.float32)
    tl.store(
        result + token * width + part, (gate * tl.sigmoid(gate) * up).to(given.dtype.element_ty), mask=part < width
    )


def _strides(cache: Tensor) -> tuple[int, int]:
    return cache.stride(0), cache.stride(1)


def attend(queries: Tensor, layer: LayerCache, blocks: Blocks, scale: float) -> Tensor:
    """Return what queries (N, H, D) see in the caches (P, G, W, D) of a layer, (N, H, D)."""
    keys, values = layer.tensors
    (_, heads, size), n_keys = queries.shape, keys.shape[1]
    queries, make = queries.contiguous(), torch.empty_like if blocks.size == 1 else torch.zeros_like
    result = make(queries)  # tokens that only pad are in no block
    group = heads // n_keys
    padded_group = rounded(group)
    precision: Any = "ieee" if queries.dtype == torch.float32 else "tf32"
    _attend[(len(blocks.starts), n_keys)](
        queries, keys, values, result, blocks.starts, blocks.counts, blocks.places, blocks.columns, scale,
        *_strides(keys), group=group, padded_group=padded_group, size=size, padded_size=rounded(max(size, 16)),
        n_queries=max(LEAST_QUERIES, blocks.size * padded_group), attended=ATTENDED, precision=precision,
    )  # fmt: skip
    return result


def rotate_and_store(
    given: Tensor,
    rotation: tuple[Tensor, Tensor],
    layer: LayerCache,
    places: Tensor,
    columns: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Split given (N, (H + 2 G) D) into queries, keys and values; turn the first two by rotation, the cosines and sines
    (N, D); store the last two in the caches of a layer at `places` and `columns` (N,). Return the queries (N, H, D).
    `norms`: weights (D,) of root-mean-square norms of queries and of keys before, and their epsilon."""
    keys, values = layer.tensors
    n_keys, size = keys.shape[1], keys.shape[3]
    n_queries = given.shape[1] // size - 2 * n_keys
    queries = given.new_empty(len(given), n_queries, size)
    cos, sin = (one.contiguous() for one in rotation)
    of_queries, of_keys, epsilon = norms or (given, given, 0.0)
    _rotate_and_store[(len(given), n_queries + 2 * n_keys)](
        given, cos, sin, of_queries, of_keys, queries, keys, values, places, columns, epsilon, *_strides(keys),
        n_queries=n_queries, n_keys=n_keys, size=size, padded_half=rounded(size // 2), has_norms=norms is not None,
        num_warps=1,
    )  # fmt: skip
    return queries


def gate(given: Tensor) -> Tensor:
    """Return silu(first half) * second half of given (N, 2 M), (N, M)."""
    n, width = len(given), given.shape[1] // 2
    result = given.new_empty(n, width)
    _gate[(n, triton.cdiv(width, GATED))](given, result, width, n=GATED)
    return result
