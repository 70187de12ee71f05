"""Fused functions compute what the models compute, or are not used."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, documents, tiny_text_model
from torch import nn

from seqdefer.tasks.text.fused import Fused

pytest.importorskip("transformers", reason="needs the extra 'text'")

FUSED = ("llama", "qwen2", "t5")  # they have root-mean-square norms; the first two rotate queries and keys


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

    assert not Fused(nn.Sequential(ShiftedNorm()))._replacements
