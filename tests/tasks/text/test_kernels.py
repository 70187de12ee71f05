"""Kernels compute what plain functions compute; Triton interprets them on a CPU."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted_kernels
from torch import nn

from seqdefer.tasks.text.caches import Blocks, Growth, LayerCache, Target
from seqdefer.tasks.text.fused_functions import Rotation

PLACES, COLUMNS, N_KEYS = 5, 140, 2


def layer_of(size: int, random: torch.Generator) -> LayerCache:
    layer = LayerCache(Growth())
    layer.make_room(Target(slice(0), PLACES, torch.zeros(0), torch.zeros(0), COLUMNS), torch.zeros(1, N_KEYS, 0, size))
    for tensor in layer.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    return layer


@pytest.mark.parametrize(("group", "size", "block"), [(1, 16, 4), (3, 8, 2), (7, 24, 1)])
def test_tokens_attend_to_the_cache_of_their_row(group: int, size: int, block: int) -> None:
    kernels, random = interpreted_kernels(), torch.Generator().manual_seed(0)
    layer = layer_of(size, random)
    lines = [(3, 0, 1), (0, 129, 5), (4, 7, 4), (1, 62, 3)]  # place, columns before, tokens
    n = sum(count for _, _, count in lines)
    queries = torch.randn(n + 1, N_KEYS * group, size, generator=random)  # the last one only pads
    blocks, expected, start = list[tuple[int, ...]](), [], 0
    for place, begin, count in lines:
        for first in range(0, count, block):
            blocks.append((start + first, min(block, count - first), place, begin + first))
        for token in range(count):
            keys, values = (tensor[place, :, : begin + token + 1] for tensor in layer.tensors)
            query = queries[start + token].view(N_KEYS, group, size)
            expected.append(nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.3).flatten(0, 1))
        start += count
    blocks.append((0, 0, PLACES - 1, 0))
    found = kernels.attend(queries, layer, Blocks(block, *torch.tensor(blocks).T.contiguous()), 0.3)
    assert torch.allclose(found[:n], torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("size", [8, 24])
def test_queries_and_keys_turn_and_keys_and_values_are_stored(size: int, has_norms: bool) -> None:
    kernels, random, n_queries = interpreted_kernels(), torch.Generator().manual_seed(0), 6
    layer = layer_of(size, random)
    before = [tensor.clone() for tensor in layer.tensors]
    given = torch.randn(4, (n_queries + 2 * N_KEYS) * size, generator=random)
    places, columns = torch.tensor([2, 0, 2, 4]), torch.tensor([7, 0, 8, 139])
    angles = torch.randn(4, size // 2, generator=random).repeat(1, 2)
    norms = (*torch.randn(2, size, generator=random), 1e-5) if has_norms else None
    found = kernels.rotate_and_store(given, (angles.cos(), angles.sin()), layer, places, columns, norms)
    queries, keys, values = given.view(4, -1, size).split([n_queries, N_KEYS, N_KEYS], 1)
    if norms is not None:
        queries, keys = (
            nn.functional.rms_norm(one, (size,), weight, norms[2])
            for one, weight in zip((queries, keys), norms[:2], strict=True)
        )
    turned = [one[0].transpose(0, 1) for one in Rotation()(
        queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], angles.cos()[None], angles.sin()[None]
    )]  # fmt: skip
    assert torch.allclose(found, turned[0], atol=1e-5)
    for tensor, old, new in zip(layer.tensors, before, (turned[1], values), strict=True):
        old[places, :, columns] = new
        assert torch.allclose(tensor, old, atol=1e-5)


def test_halves_are_gated() -> None:
    kernels, random = interpreted_kernels(), torch.Generator().manual_seed(0)
    given = torch.randn(3, 2 * 1500, generator=random)
    gate, up = given.chunk(2, 1)
    assert torch.allclose(kernels.gate(given), nn.functional.silu(gate) * up, atol=1e-6)
