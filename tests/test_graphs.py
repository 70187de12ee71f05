"""Shapes are rounded, and functions are called where there are no graphs."""

from __future__ import annotations

import copy

import pytest
import torch

from seqdefer.graphs import Replayed, finely_rounded, rounded


def test_numbers_are_rounded_up() -> None:
    assert [rounded(n) for n in (1, 2, 3, 4, 5, 8, 9, 33)] == [1, 2, 4, 4, 8, 8, 16, 64]
    assert [finely_rounded(n) for n in (1, 2, 3, 4, 5, 7, 9, 13, 33)] == [1, 2, 3, 4, 6, 8, 12, 16, 48]


def test_a_function_is_called_on_a_cpu() -> None:
    replayed = Replayed(lambda factor, one, other: [factor * one + other])
    one, other = torch.arange(3.0), torch.ones(3)
    assert torch.equal(replayed([one, other], (2,))[0], 2 * one + other)
    assert torch.equal(Replayed(lambda one: [one + 1]).padded([one])[0], one + 1)


def test_a_copy_calls_the_copied_function() -> None:
    class Model:
        def __init__(self) -> None:
            self.weight = 2.0
            self.replayed = Replayed(self.double)

        def double(self, one: torch.Tensor) -> list[torch.Tensor]:
            return [self.weight * one]

    model = Model()
    other = copy.deepcopy(model)
    other.weight = 3.0
    assert model.replayed([torch.ones(1)])[0] == 2
    assert other.replayed([torch.ones(1)])[0] == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_function_computes_the_same_for_every_shape() -> None:
    weight = torch.randn(4, 5, device="cuda")
    replayed = Replayed(lambda given: [given @ weight, given.sum(1)])
    with torch.no_grad():
        for _ in range(4):
            for n in (3, 8):
                given = torch.randn(n, 4, device="cuda")
                product, total = replayed.padded([given])
                assert torch.allclose(product, given @ weight, atol=1e-5)
                assert torch.allclose(total, given.sum(1), atol=1e-5)
    assert len(replayed._graphs) == 2
