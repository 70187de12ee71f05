"""Token-level networks: what they compute, and that rows do not mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import TOKEN_NETWORKS, make, proposals, score_along
from torch import Tensor, nn

from seqdefer.rejectors.base import MAX_DEVIATIONS
from seqdefer.rejectors.token import LSTMRejector, MLPRejector

each_network = pytest.mark.parametrize("kind", TOKEN_NETWORKS)


def test_the_lstm_is_an_lstm_that_starts_from_the_context() -> None:
    network = make(LSTMRejector, layers=3)
    context, steps = torch.randn(6, 2), [proposals(6, seed) for seed in range(5)]
    sizes = network.sizes
    oracle = nn.LSTM(sizes.step, sizes.units, num_layers=3, batch_first=True)
    for layer, cell in enumerate(network.cells):
        for name, value in cell.named_parameters():
            getattr(oracle, f"{name}_l{layer}").data.copy_(value.data)
    begun = torch.tanh(network.begin(standard(context, network.context_mean, network.context_scale)))
    hidden, memory = begun.view(6, 3, 2, sizes.units).permute(2, 1, 0, 3).contiguous()
    seen = [sizes.step_inputs(one) for one in steps]
    inputs = standard(torch.stack(seen, 1), network.step_mean, network.step_scale)
    expected = network.head(oracle(inputs, (hidden, memory))[0]).squeeze(2)
    torch.testing.assert_close(score_along(network, context, steps), expected.detach())


def standard(values: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return ((values - mean) / scale).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)


def test_the_mlp_sees_context_step_and_position() -> None:
    network, steps = make(MLPRejector), [proposals(4, 0)] * 5
    scores = score_along(network, torch.randn(4, 2), steps)
    assert scores.unique().numel() == scores.numel()  # the same step at five positions, four contexts


@each_network
def test_selecting_rows_commutes_with_scoring(kind: Any) -> None:
    network, rows = make(kind), torch.tensor([4, 0, 0, 5])
    context, steps = torch.randn(6, 2), [proposals(6, seed) for seed in range(5)]
    expected = score_along(network, context, steps)[rows]
    for leave in range(5):
        state, scores = network.start(context), []
        for position, proposal in enumerate(steps):
            if position == leave:
                state = network.select(state, rows)
            score, state = network.score(state, position, proposal if position < leave else proposal.select(rows))
            scores.append(score[rows] if position < leave else score)
        torch.testing.assert_close(torch.stack(scores, 1), expected)


@each_network
def test_a_score_is_a_function_of_the_prefix(kind: Any) -> None:
    """Later steps change nothing, and only the LSTM remembers earlier ones."""
    network, context = make(kind), torch.randn(6, 2)
    steps, others = [proposals(6, seed) for seed in range(4)], [proposals(6, seed) for seed in range(10, 14)]
    plain = score_along(network, context, steps)
    assert torch.equal(score_along(network, context, [*steps[:2], *others[2:]])[:, :2], plain[:, :2])
    changed = score_along(network, context, [others[0], *steps[1:]])[:, 1:]
    assert torch.equal(changed, plain[:, 1:]) == (kind is MLPRejector)
