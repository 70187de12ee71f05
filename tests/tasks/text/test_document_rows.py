"""Rows that share documents attend to them as they would to copies of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqdefer.tasks.text.document_rows import DocumentRows

HEADS, SIZE, STATES = 2, 4, 5
PLACES = {"sorted": [0, 0, 1, 3], "mixed": [3, 0, 3, 1, 0, 0], "one": [2, 2, 2], "each its own": [1, 0, 3, 2]}


def random_tensors(*sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("way", ["_one_by_one", "_padded"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("places", PLACES.values(), ids=list(PLACES))
def test_attention_equals_that_to_copies(way: str, length: int, places: list[int]) -> None:
    documents = torch.tensor(places)
    sizes = (len(places), HEADS, length, SIZE), (4, HEADS, STATES, SIZE), (4, HEADS, STATES, SIZE)
    queries, keys, values = random_tensors(*sizes)
    want = scaled_dot_product_attention(queries, keys[documents], values[documents])
    rows = DocumentRows(documents, 4)
    found = getattr(rows, way)(queries, lambda some, at: scaled_dot_product_attention(some, keys[at], values[at]))
    torch.testing.assert_close(found, want)
