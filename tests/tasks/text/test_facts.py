"""Facts about a proposed token equal counting one document at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqdefer.tasks.text.facts import facts_of
from seqdefer.tasks.text.passes import PADDING

Case = tuple[list[list[int]], list[list[int]], list[list[int]], list[list[float]]]
token = st.integers(0, 6)  # few, so that many are equal


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw documents of different lengths, prefixes of one length, and two tokens with their log p."""
    n, n_written = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    documents = draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=n, max_size=n))
    prefixes = draw(st.lists(st.lists(token, min_size=n_written, max_size=n_written), min_size=n, max_size=n))
    likeliest = draw(st.lists(st.lists(token, min_size=2, max_size=2, unique=True), min_size=n, max_size=n))
    log_p = st.floats(-20, 0, width=32)
    return (
        documents,
        prefixes,
        likeliest,
        draw(st.lists(st.lists(log_p, min_size=2, max_size=2), min_size=n, max_size=n)),
    )


def padded(rows: list[list[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[PADDING] * (width - len(row))] for row in rows], dtype=torch.long)


def facts(case: Case, more: int = 0) -> Tensor:
    documents, prefixes, likeliest, log_probs = case
    inputs = padded(documents, max(map(len, documents)) + more)
    written = torch.tensor(prefixes, dtype=torch.long).view(len(documents), -1)
    return facts_of(inputs, written, torch.tensor(likeliest), torch.tensor(log_probs))


def counted(document: list[int], prefix: list[int], likeliest: list[int], log_probs: list[float]) -> list[float]:
    """Return the values of `facts_of`, in its order."""
    first, second = likeliest
    n_last = document.count(prefix[-1]) if prefix else 0
    found = [log_probs[1], math.log(len(document)), math.log1p(n_last)]
    for each in (first, second):
        found += [math.log1p(document.count(each)), math.log1p(prefix.count(each)), math.log1p(each)]
    place = document.index(first) if first in document else len(document)
    pairs = list(pairwise(document))
    together = pairs.count((prefix[-1], first)) if prefix else 0
    return [*found, place / len(document), math.log1p(together), len(prefix)]


@given(cases())
def test_facts_equal_counting(case: Case) -> None:
    expected = torch.tensor([counted(*row) for row in zip(*case, strict=True)])
    found = facts(case)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@given(cases())
def test_facts_ignore_padding_and_other_rows(case: Case) -> None:
    together = facts(case)
    assert torch.equal(facts(case, more=3), together)
    for row, one in enumerate(zip(*case, strict=True)):
        assert torch.equal(facts(tuple([part] for part in one)), together[row : row + 1])  # type: ignore[arg-type]


def test_an_example_by_hand() -> None:
    """The document 5 3 5 3 9 after the tokens 4 5; proposed are 3, then 5."""
    found = facts_of(torch.tensor([[5, 3, 5, 3, 9, PADDING]]), torch.tensor([[4, 5]]), torch.tensor([[3, 5]]),
                     torch.tensor([[-0.5, -1.5]]))  # fmt: skip
    log = math.log
    expected = [-1.5, log(5), log(3), log(3), log(1), log(4), log(3), log(2), log(6), 1 / 5, log(3), 2]
    torch.testing.assert_close(found, torch.tensor([expected]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_exact(dtype: torch.dtype) -> None:
    """Ids and counts stay exact."""
    inputs, prefix, likeliest = (
        torch.tensor([[32_000, 4001, 32_000]]),
        torch.tensor([[4001]]),
        torch.tensor([[32_000, 4001]]),
    )
    fine = facts_of(inputs, prefix, likeliest, torch.tensor([[-0.5, -1.5]]))
    assert torch.equal(facts_of(inputs, prefix, likeliest, torch.tensor([[-0.5, -1.5]], dtype=dtype)), fine)


@pytest.mark.gpu
def test_a_gpu_computes_the_facts_of_a_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    parts = (torch.tensor([[5, 3, 5, PADDING], [1, 2, 3, 4]]), torch.tensor([[3], [9]]), torch.tensor([[5, 3], [2, 7]]),
             torch.tensor([[-0.5, -1.5], [-0.1, -3.0]]))  # fmt: skip
    torch.testing.assert_close(facts_of(*(part.cuda() for part in parts)).cpu(), facts_of(*parts))
