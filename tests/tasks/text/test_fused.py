"""Fused functions compute what the models compute, or are not used."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, documents, tiny_text_model
from torch import nn

from seqdefer.tasks.text.fused import Fused
from seqdefer.tasks.text.fused_functions import is_root_mean_square, merge

pytest.importorskip("transformers", reason="needs the extra 'text'")

FUSED = ("llama", "qwen2", "qwen3", "t5")  # they have root-mean-square norms; all but T5 rotate queries and keys


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_says_the_same(family: str) -> None:
    network = tiny_text_model(family, 2, seed=0).network
    inputs, tokens = documents(3).inputs, torch.tensor([[7, 9], [8, 6], [5, 5]])
    fused = Fused(network.model)
    plain = network.prefill(inputs, tokens)
    with fused():
        found = network.prefill(inputs, tokens)
    assert torch.allclose(found.logits, plain.logits, atol=1e-4)
    assert bool(fused._replacements) == (family in FUSED or family.startswith(("t5", "mt5")))
    assert torch.equal(network.prefill(inputs, tokens).logits, plain.logits)  # nothing stays replaced


def test_a_norm_of_another_kind_is_left_alone() -> None:
    class ShiftedNorm(nn.Module):
        """As in Gemma: the weight is added to 1."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.full((8,), 0.5)), 1e-6

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(hidden, (8,), 1 + self.weight, self.eps)

    assert not is_root_mean_square(ShiftedNorm())


@pytest.mark.parametrize("has_bias", [False, True])
def test_merged_layers_compute_what_each_computes(has_bias: bool) -> None:
    layers = [nn.Linear(6, size, bias=has_bias) for size in (4, 2, 3)]
    inputs = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    expected = [[layer(one) for layer in layers] for one in inputs]
    functions = merge(layers)
    for one, results in zip(inputs, expected, strict=True):
        for function, result in zip(functions, results, strict=True):
            assert torch.allclose(function(one), result, atol=1e-6)
    assert torch.allclose(functions[1](inputs[0]), expected[0][1], atol=1e-6)  # on its own, too
    for layer, result in zip(layers, expected[0], strict=True):
        assert torch.allclose(layer(inputs[0]), result, atol=1e-6)
