"""Fitting rejectors of whole drafts: the one-time surrogate, estimates of losses, and whole deferral."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.errors import look_up
from seqdefer.hyperparameters import Settings
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.checkpoints import draft_networks
from seqdefer.rejectors.draft import SCORING_BATCH, DraftNetwork
from seqdefer.rejectors.losses import get_psi, is_ended, one_time_surrogate, query_costs
from seqdefer.rejectors.training import History, fit, network_sizes
from seqdefer.types import Draft, HandOffTable

DraftLabels = tuple[Draft, HandOffTable]  # drafts, and the outcomes of handing them off


def fit_once(
    train: DraftLabels,
    validation: DraftLabels,
    grid: Tensor,
    settings: Settings,
    *,
    alpha: float,
    fingerprint: str,
    seed: int,
    psi: str = "cross_entropy",
    device: torch.device | str = "cpu",
    progress: Progress = NO_PROGRESS,
) -> tuple[DraftNetwork, History]:
    """Fit OneTimeModel: minimise the one-time surrogate over the hand-offs in `grid`; alpha is alpha_1 of the paper."""
    loss_of = get_psi(psi)

    def total(drafted: Draft, table: HandOffTable) -> Tensor:
        length = table.loss.shape[1] - 1
        totals = (table.loss + query_costs(table.deferred, alpha, length))[:, grid]
        # Weight 0 for hand-offs past a draft's end: they equal no deferral, which has its weight already.
        return torch.where(is_ended(grid, drafted.sequences.lengths), totals.amax(1, keepdim=True), totals)

    notes = {"grid": grid.tolist(), "alpha": alpha, "psi": psi}
    sizes = _draft_sizes(train[0], settings, hand_offs=tuple(grid.tolist()))
    torch.manual_seed(seed)
    network = _draft_network(sizes, settings, fingerprint, notes)

    def surrogate(scores: Tensor, totals: Tensor) -> Tensor:
        return one_time_surrogate(scores, totals, loss_of)

    labels = total(*train), total(*validation)
    return network, _fit_draft(network, train[0], validation[0], labels, surrogate, settings, seed, device, progress)


def fit_cost(
    train: DraftLabels,
    validation: DraftLabels,
    grid: Tensor,
    settings: Settings,
    *,
    fingerprint: str,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = NO_PROGRESS,
) -> tuple[DraftNetwork, History]:
    """Fit OneTimeCost: estimate the loss of every hand-off in `grid` by least squares. The price of a token is not
    known here; the rule `cost` of `seqdefer.budgets.hand_off_rules` brings it."""
    sizes = _draft_sizes(train[0], settings, hand_offs=tuple(grid.tolist()), rule="cost")
    torch.manual_seed(seed)
    network = _draft_network(sizes, settings, fingerprint, {"grid": grid.tolist()})
    losses = train[1].loss[:, grid].float()
    network.standardise_losses(losses)
    unit = losses.std(0).mean().clamp(min=1e-6) if len(losses) > 1 else torch.ones(())

    def squares(scores: Tensor, losses: Tensor) -> Tensor:
        # Hand-offs past a draft's end score -inf and add no error; a NaN score must not be masked.
        error = torch.where(scores == -torch.inf, 0.0, (scores + losses) / unit.to(scores))
        return error.square().mean()

    labels = losses, validation[1].loss[:, grid].float()
    return network, _fit_draft(network, train[0], validation[0], labels, squares, settings, seed, device, progress)


def fit_whole(
    train: DraftLabels,
    validation: DraftLabels,
    settings: Settings,
    *,
    fingerprint: str,
    seed: int,
    device: torch.device | str = "cpu",
    progress: Progress = NO_PROGRESS,
) -> tuple[DraftNetwork, History]:
    """Fit WholeModelEmbed: learn whether the expert is more accurate than the predictor on the whole sequence."""

    def expert_wins(table: HandOffTable) -> Tensor:
        return (table.loss[:, :1] < table.loss[:, -1:]).float()

    torch.manual_seed(seed)
    network = _draft_network(_draft_sizes(train[0], settings), settings, fingerprint, {})
    loss_of = nn.functional.binary_cross_entropy_with_logits
    labels = expert_wins(train[1]), expert_wins(validation[1])
    return network, _fit_draft(network, train[0], validation[0], labels, loss_of, settings, seed, device, progress)


def _draft_network(sizes: Sizes, settings: Settings, fingerprint: str, notes: dict[str, Any]) -> DraftNetwork:
    return look_up("draft architecture", settings.architecture, draft_networks())(sizes, fingerprint, notes)


def _fit_draft(
    network: DraftNetwork,
    train: Draft,
    validation: Draft,
    labels: tuple[Tensor, Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    settings: Settings,
    seed: int,
    device: torch.device | str,
    progress: Progress,
) -> History:
    """Fit on `device`, and return the network to the CPU, where drafts are kept."""
    context, steps, mask = network.draft_inputs(train)
    network.standardise(context, steps[mask])
    network.to(device)
    inputs, judged = ([part.to(device) for part in network.draft_inputs(draft)] for draft in (train, validation))
    wanted, judged_labels = (part.to(device) for part in labels)

    def batch_loss(rows: Tensor) -> Tensor:
        rows = rows.to(device)
        return loss_of(network(*(part[rows] for part in inputs)), wanted[rows])

    def validation_loss() -> Tensor:
        scores = [
            network(*(part[rows] for part in judged)) for rows in torch.arange(len(validation)).split(SCORING_BATCH)
        ]
        return loss_of(torch.cat(scores), judged_labels)

    history = fit(network, len(train), batch_loss, validation_loss, settings, seed=seed, progress=progress)
    network.cpu()
    return history


def _draft_sizes(draft: Draft, settings: Settings, **kind: Any) -> Sizes:
    return network_sizes(draft.context, draft.features, draft.entropy, draft.features.shape[1], settings, **kind)
