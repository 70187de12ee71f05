"""The training loop of every rejector: AdamW, early stopping, and the weights of the best validation epoch.

Validation data decides when to stop and nothing else; test data never comes here. What is minimised is in
`token_training` and `draft_training`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.errors import OptionError
from seqdefer.hyperparameters import Settings
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.rejectors.base import Sizes

MIN_BATCH = 16


@dataclass
class History:
    """Losses of a fit, one per epoch. Epochs count from 0; `best` is the one whose weights were kept.

    `overridden` are shares of the decisions in training rollouts: `token_training.Overridden`."""

    training: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    best: int = 0
    batch_size: int = 0
    overridden: dict[str, float] = field(default_factory=dict)


def fit(
    network: nn.Module,
    n_examples: int,
    batch_loss: Callable[[Tensor], Tensor],
    validation_loss: Callable[[], Tensor],
    settings: Settings,
    *,
    seed: int,
    before_epoch: Callable[[int], None] = lambda _: None,
    warm_up: int = 0,
    progress: Progress = NO_PROGRESS,
) -> History:
    """Minimise `batch_loss(rows)`; stop when `validation_loss()` has not improved by delta for `patience` epochs.

    The first `warm_up` epochs are neither kept nor counted, unless there are no others."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    batch_size = min(settings.batch_size, max(MIN_BATCH, n_examples // settings.least_steps))
    history, best_weights = History(batch_size=batch_size), copy.deepcopy(network.state_dict())
    lowest, waited = math.inf, 0
    for epoch in range(settings.epochs):
        before_epoch(epoch)
        network.train()
        total = 0.0
        for rows in torch.randperm(n_examples, generator=order).split(batch_size):
            loss = batch_loss(rows)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), settings.clip_norm)
            optimizer.step()
            total += loss.item() * len(rows)
        network.eval()
        with torch.no_grad():
            reached = validation_loss().item()
        history.training.append(total / n_examples)
        history.validation.append(reached)
        progress(1)
        if epoch < min(warm_up, settings.epochs - 1):
            continue
        if reached < lowest - settings.delta:
            lowest, waited, history.best = reached, 0, epoch
            best_weights = copy.deepcopy(network.state_dict())
        else:
            waited += 1
        if waited >= settings.patience:
            break
    if lowest == math.inf:
        raise OptionError(
            f"the validation loss was {reached} after the last of {epoch + 1} epochs and never a finite number; "
            "lower the learning rate, or look for labels that are not finite"
        )
    network.load_state_dict(best_weights)
    network.eval()
    return history


def network_sizes(
    context: Tensor, features: Tensor, entropy: Tensor | None, length: int, settings: Settings, **kind: Any
) -> Sizes:
    """Return the sizes of a network for these inputs; `kind` sets the fields that belong to a kind of network."""
    return Sizes(
        context=context.shape[1],
        features=features.shape[-1],
        length=length,
        has_states="states" in settings.inputs,
        has_confidence="confidence" in settings.inputs,
        has_entropy="entropy" in settings.inputs and entropy is not None,
        layers=settings.layers,
        units=settings.units,
        dropout=settings.dropout,
        **kind,
    )
