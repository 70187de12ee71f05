"""Networks with random weights, and what they score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.draft import HEAD_SIZE, DraftMLP, DraftTransformer
from seqdefer.rejectors.token import LSTMRejector, MLPRejector, TokenNetwork
from seqdefer.testing import ToyTask
from seqdefer.types import Draft, Proposal

TASK = ToyTask(n=10)
SIZES = Sizes(context=2, features=3, length=5, has_entropy=True, layers=2, units=4, dropout=0.5)
TOKEN_NETWORKS = [LSTMRejector, MLPRejector]
DRAFT_NETWORKS = [DraftMLP, DraftTransformer]


def make(kind: Any, seed: int = 0, **sizes: Any) -> Any:
    """Return a network with random weights and statistics, ready to score."""
    torch.manual_seed(seed)
    chosen = replace(SIZES, **{"units": 2 * HEAD_SIZE if kind is DraftTransformer else SIZES.units, **sizes})
    network = kind(chosen, TASK.predictor.fingerprint, {"made": "up"}).eval()
    network.standardise(torch.randn(20, network.sizes.context), 1 + torch.randn(20, network.sizes.step))
    if chosen.rule == "cost":
        network.standardise_losses(torch.rand(20, chosen.outputs))
    return network


def proposals(n: int, seed: int) -> Proposal:
    generator = torch.Generator().manual_seed(seed)
    random = [torch.rand(n, 3, generator=generator), *(torch.rand(n, generator=generator) for _ in range(2))]
    return Proposal(torch.zeros(n), *random)


def drafted() -> Draft:
    return draft(TASK.predictor, TASK.split("test"), TASK.spec)


@torch.no_grad()
def score_along(network: TokenNetwork, context: Tensor, steps: list[Proposal]) -> Tensor:
    """Return the scores of all positions. (B, positions)"""
    state, scores = network.start(context), []
    for position, proposal in enumerate(steps):
        score, state = network.score(state, position, proposal)
        scores.append(score)
    return torch.stack(scores, 1)
