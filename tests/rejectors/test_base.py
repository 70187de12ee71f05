"""What all networks share: their inputs, standardised with statistics of the training set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import DRAFT_NETWORKS, TOKEN_NETWORKS, make

from seqdefer.rejectors.base import MAX_DEVIATIONS, step_inputs
from seqdefer.rejectors.token import MLPRejector


def test_inputs_of_a_step() -> None:
    features, uncertainty, entropy = torch.rand(4, 3), torch.tensor([0.0, 1e-9, 1.0, 50.0]), torch.rand(4)
    seen = step_inputs(features, uncertainty, entropy)
    assert seen.shape == (4, 5)
    assert torch.equal(seen[:, :3], features)
    torch.testing.assert_close(seen[1:, 3], uncertainty[1:].log())
    assert seen[0].isfinite().all()  # a certain model has uncertainty 0
    assert torch.equal(seen[:, 4], entropy)
    assert step_inputs(features, uncertainty, None).shape == (4, 4)


@pytest.mark.parametrize("kind", [*TOKEN_NETWORKS, *DRAFT_NETWORKS])
def test_inputs_are_standardised(kind: Any) -> None:
    """Mean and scale come from training inputs; a constant column becomes 0, outliers are clipped."""
    network = make(kind)
    steps = torch.randn(50, network.step_size)
    steps[:, 1] = 3.0
    network.standardise(torch.randn(50, 2) * 100, steps)
    seen = network._steps(steps)
    varied = torch.arange(network.step_size) != 1
    torch.testing.assert_close(seen.mean(0), torch.zeros(network.step_size), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(0)[varied], torch.ones(int(varied.sum())))
    assert seen[:, 1].tolist() == [0.0] * 50
    assert network._steps(torch.full((1, network.step_size), 1e9)).max() == MAX_DEVIATIONS
    assert network._context(torch.full((1, 2), -1e9)).min() == -MAX_DEVIATIONS


def test_one_example_has_no_spread() -> None:
    network = make(MLPRejector)
    network.standardise(torch.ones(1, 2), torch.ones(1, network.step_size))
    assert network.context_scale.tolist() == [1.0, 1.0]
