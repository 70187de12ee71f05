"""What all networks share: their inputs, standardised with statistics of the training set."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from networks import DRAFT_NETWORKS, SIZES, TOKEN_NETWORKS, make, proposals

from seqdefer.rejectors.base import MAX_DEVIATIONS
from seqdefer.rejectors.token import MLPRejector
from seqdefer.types import Proposal


def test_inputs_of_a_step() -> None:
    features, uncertainty, entropy = torch.rand(4, 3), torch.tensor([0.0, 1e-9, 1.0, 50.0]), torch.rand(4)
    step = replace(proposals(4, seed=0), features=features, uncertainty=uncertainty, entropy=entropy)
    seen = SIZES.step_inputs(step)
    assert seen.shape == (4, SIZES.step) == (4, 5)
    assert torch.equal(seen[:, :3], features)
    torch.testing.assert_close(seen[1:, 3], uncertainty[1:].log())
    assert seen[0].isfinite().all()  # a certain model has uncertainty 0
    assert torch.equal(seen[:, 4], entropy)
    for has in itertools.product((True, False), repeat=3):
        sizes = replace(SIZES, **dict(zip(("has_states", "has_confidence", "has_entropy"), has, strict=True)))
        columns = [column for column in range(5) if has[max(0, column - 2)]]
        assert sizes.step == len(columns)
        if columns:
            assert torch.equal(sizes.step_inputs(step), seen[:, columns])


@pytest.mark.parametrize("kind", [*TOKEN_NETWORKS, *DRAFT_NETWORKS])
def test_inputs_are_standardised(kind: Any) -> None:
    """Mean and scale come from training inputs; a constant column becomes 0, outliers are clipped."""
    network = make(kind)
    steps = torch.randn(50, network.sizes.step)
    steps[:, 1] = 3.0
    network.standardise(torch.randn(50, 2) * 100, steps)
    seen = network._steps(steps)
    varied = torch.arange(network.sizes.step) != 1
    torch.testing.assert_close(seen.mean(0), torch.zeros(network.sizes.step), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(0)[varied], torch.ones(int(varied.sum())))
    assert seen[:, 1].tolist() == [0.0] * 50
    assert network._steps(torch.full((1, network.sizes.step), 1e9)).max() == MAX_DEVIATIONS
    assert network._context(torch.full((1, 2), -1e9)).min() == -MAX_DEVIATIONS


def test_one_example_has_no_spread() -> None:
    network = make(MLPRejector)
    network.standardise(torch.ones(1, 2), torch.ones(1, network.sizes.step))
    assert network.context_scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", TOKEN_NETWORKS)
def test_rows_at_different_positions_are_scored_as_alone(kind: Any) -> None:
    network, seen = make(kind).eval(), proposals(3, seed=0)
    state, positions = network.start(torch.randn(3, 2)), torch.tensor([0, 4, 2])
    scores, _ = network.score(state, positions, seen)
    for row, position in enumerate(positions.tolist()):
        alone, _ = network.score(state[row : row + 1], position, seen.select(torch.tensor([row])))
        torch.testing.assert_close(scores[row], alone[0])
    other, _ = network.score(state, positions.flip(0), seen)
    assert not torch.equal(scores, other) or kind is not MLPRejector  # of the two, it alone sees the position


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", TOKEN_NETWORKS)
def test_scores_are_replayed_on_a_gpu(kind: Any) -> None:
    """The MLP once copied a number to the GPU at every step, which cannot be recorded: it ran without graphs."""
    network = make(kind).eval().to("cuda")
    seen = Proposal(*(part.to("cuda") for part in proposals(3, seed=0).tensors()))
    positions = torch.tensor([0, 4, 2], device="cuda")
    with torch.no_grad():
        state = network.start(torch.randn(3, 2, device="cuda"))
        several = [network.score(state, positions, seen)[0] for _ in range(3)]
    assert len(network._replayed._graphs) == 1
    torch.testing.assert_close(several[2], several[0])
