"""From scores to decisions: a threshold, or the threshold for a budget, and what happens as the threshold moves.

By token, `Threshold` defers where the score reaches it. Whole and one-time decisions are hand-offs (`engine.HandOff`),
chosen here from the scores of a draft. `threshold_for` finds the threshold whose rollouts on validation data spend a
budget: after a deferral the prefix changes, so the scores of a draft alone do not tell what will be spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqdefer.budgets.convex_hull import first_vertices, priced_steps
from seqdefer.errors import OptionError
from seqdefer.interfaces import Policy, TokenRejector
from seqdefer.labels.trees import END, DecisionTrees
from seqdefer.rejectors.networks import DraftNetwork
from seqdefer.types import Draft, HandOffTable, Proposal

N_THRESHOLDS = 200  # of a token-level sweep, at quantiles of the scores that rollouts meet


class Threshold(Policy[Any]):
    """Defers a token when the rejector's score is at least the threshold (the paper's rule at 0)."""

    def __init__(self, rejector: TokenRejector[Any], threshold: float = 0.0) -> None:
        self.rejector, self.threshold = rejector, threshold

    def start(self, context: Tensor) -> Any:
        return self.rejector.start(context)

    def decide(self, state: Any, position: int, proposal: Proposal) -> tuple[Tensor, Tensor, Any]:
        scores, state = self.rejector.score(state, position, proposal)
        return scores, scores >= self.threshold, state

    def select(self, state: Any, rows: Tensor) -> Any:
        return self.rejector.select(state, rows)


def deferral_odds(scores: Tensor) -> Tensor:
    """Log odds of deferring at all, by one-time scores (n, J) whose last is no deferral. (n,)

    The paper keeps the prediction while the no-deferral score exceeds a threshold. A score means something only beside
    the others (the losses see differences), so it is normalised, and turned round: the higher, the better to defer."""
    return scores[:, :-1].logsumexp(1) - scores[:, -1]


def choose_hand_off(scores: Tensor, grid: Tensor, threshold: float) -> Tensor:
    """kept (n,): the best-scored kept < L where the odds of deferring reach the threshold, else all."""
    best = grid[scores[:, :-1].argmax(1)]
    return torch.where(deferral_odds(scores) >= threshold, best, grid[-1])


def choose_by_cost(scores: Tensor, grid: Tensor, lengths: Tensor, price: float) -> Tensor:
    """kept (n,): the hand-off of the least estimated loss + price x tokens deferred; among equals the smallest.

    scores (n, J): minus the loss expected of each hand-off; lengths (n,) of the drafts: what a hand-off will defer is
    taken to be what the draft has left."""
    ahead = (lengths[:, None] - grid).clamp(min=0)  # (n, J)
    spent = torch.where(ahead > 0, price * ahead.double(), 0.0)  # at an infinite price, what is free stays free
    total = torch.where(scores == -torch.inf, torch.inf, spent - scores.double())  # and what is none stays none
    return grid[total.argmin(1)]


def choose_kept(rejector: DraftNetwork, scores: Tensor, drafted: Draft, threshold: float) -> Tensor:
    """kept (n,) of drafts by their one-time scores (n, J), by the rejector's own rule."""
    grid = torch.tensor(rejector.sizes.hand_offs)
    if rejector.sizes.rule == "cost":
        return choose_by_cost(scores, grid, drafted.sequences.lengths, threshold)
    return choose_hand_off(scores, grid, threshold)


def by_position(scores: Tensor, hand_offs: Sequence[int]) -> Tensor:
    """One-time scores (n, J), compared with that of no deferral, where the hand-offs would be. (n, L), 0 elsewhere"""
    *kept, length = hand_offs
    compared = scores[:, :-1] - scores[:, -1:]
    placed = torch.zeros(len(scores), length, dtype=scores.dtype)
    placed[:, kept] = torch.where(compared.isfinite(), compared, 0.0)  # past a draft's end there is none
    return placed


def choose_whole(scores: Tensor, length: int, threshold: float) -> Tensor:
    """kept (n,): nothing where the score reaches the threshold, else all."""
    return torch.where(scores >= threshold, 0, length)


@dataclass(frozen=True)
class TokenSweep:
    """What a token-level rejector does to n examples at each of T thresholds."""

    thresholds: Tensor  # (T,) rising: the first defers everything, the last nothing
    deferred: Tensor  # int64 (T, n)
    lengths: Tensor  # int64 (T, n)
    loss: Tensor  # (T, n) sequence loss

    @property
    def share(self) -> Tensor:
        """The realised budget at each threshold. (T,)"""
        return self.deferred.sum(1) / self.lengths.sum(1)


@torch.no_grad()
def sweep_thresholds(
    rejector: TokenRejector[Any], trees: DecisionTrees, rows: Tensor | None = None, thresholds: Tensor | None = None
) -> TokenSweep:
    """Rolls all thresholds through the trees at once; each prefix is scored once however many thresholds reach it.

    Without `thresholds`, quantiles of the scores that rollouts meet: first coarse (met while deferring all and
    nothing), then fine."""
    trees.require_open()
    rows = torch.arange(len(trees), device=trees.device) if rows is None else rows.to(trees.device)
    if thresholds is not None:
        return _sweep(rejector, trees, rows, thresholds.to(trees.device))[0]
    ends = torch.tensor([-torch.inf, torch.inf], device=trees.device)
    for size in (N_THRESHOLDS // 8, N_THRESHOLDS):
        _, met = _sweep(rejector, trees, rows, ends if thresholds is None else thresholds)
        thresholds = torch.cat([ends[:1], _quantiles(met, size), ends[1:]])
    assert thresholds is not None
    return _sweep(rejector, trees, rows, thresholds)[0]


def _quantiles(scores: Tensor, size: int) -> Tensor:
    ordered: Tensor = scores.unique()  # sorted; equal scores need one threshold
    places = torch.linspace(0, len(ordered) - 1, min(size, len(ordered)), device=scores.device)
    return ordered[places.round().long()]


def _sweep(
    rejector: TokenRejector[Any], trees: DecisionTrees, rows: Tensor, thresholds: Tensor
) -> tuple[TokenSweep, Tensor]:
    """The sweep, and all the scores it met."""
    state = rejector.start(trees.context)
    swept = [_sweep_part(rejector, state, trees, rows[part], thresholds) for part in trees.parts(rows)]
    deferred, lengths, loss = (torch.cat(parts, 1) for parts in list(zip(*swept, strict=True))[:3])
    return TokenSweep(thresholds, deferred, lengths, loss), torch.cat([met for *_, met in swept])


def _sweep_part(
    rejector: TokenRejector[Any], state: Any, trees: DecisionTrees, rows: Tensor, thresholds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Deferred, lengths and losses (T, n) of some rows, and the scores met. `state`: before the first token, of all."""
    shape = (len(thresholds), len(rows))
    nodes = trees.roots[rows].expand(shape)
    last, last_choice = nodes.clone(), torch.zeros(shape, dtype=torch.bool, device=trees.device)
    deferred = torch.zeros(shape, dtype=torch.long, device=trees.device)
    known, met = torch.arange(0), []
    for position in range(trees.task.spec.length):
        live = nodes != END
        here, back = torch.unique(nodes[live], return_inverse=True)
        # The state before a node is its parent's, however many thresholds lead there; roots start from the context.
        parents = trees.nodes.parent[here]
        before = trees.nodes.example[here] if position == 0 else torch.searchsorted(known, parents)
        scores, state = rejector.score(rejector.select(state, before), position, trees.proposal(here))
        known = here
        met.append(scores)
        defer = torch.zeros(shape, dtype=torch.bool, device=trees.device)
        defer[live] = scores[back] >= thresholds[:, None].expand(shape)[live]
        deferred += defer
        last, last_choice = torch.where(live, nodes, last), torch.where(live, defer, last_choice)
        following = torch.full_like(nodes, END)
        following[live] = trees.children(nodes[live], defer[live])
        nodes = following
        if not bool((nodes != END).any()):
            break
    loss, lengths = trees.outcomes(last.flatten(), last_choice.flatten())
    return deferred, lengths.view(shape), loss.view(shape), torch.cat(met)


@dataclass(frozen=True)
class Calibrated:
    """A threshold and the share of tokens it was seen to spend."""

    threshold: float
    share: float


def threshold_for(budget: float, sweep: TokenSweep) -> Calibrated:
    """The token-level threshold whose realised share on validation rollouts is nearest to the budget (0..1)."""
    _check_budget(budget)
    best = int((sweep.share - budget).abs().argmin())
    return Calibrated(float(sweep.thresholds[best]), float(sweep.share[best]))


def whole_threshold_for(budget: float, scores: Tensor, lengths: Tensor, table: HandOffTable) -> Calibrated:
    """As `threshold_for`, for whole deferral by scores (n,): the sequences with the highest scores are deferred.
    lengths (n,) of the drafts."""
    return _hand_off_threshold(budget, scores, torch.zeros(len(table), dtype=torch.long), lengths, table)


def once_threshold_for(budget: float, scores: Tensor, grid: Tensor, lengths: Tensor, table: HandOffTable) -> Calibrated:
    """As `threshold_for`, for one-time scores (n, J): a threshold on the odds of deferring.

    By the odds a sequence is handed off at its best place, seldom at the first token: what that defers of all sequences
    is the most that can be spent. A larger budget is not met; `share` tells."""
    return _hand_off_threshold(budget, deferral_odds(scores), grid[scores[:, :-1].argmax(1)], lengths, table)


def cost_price_for(budget: float, scores: Tensor, grid: Tensor, lengths: Tensor, table: HandOffTable) -> Calibrated:
    """As `threshold_for`, for estimated losses: the price of a token at which `choose_by_cost` spends the budget.

    The price stands half way between two at which a choice changes: nothing hangs on rounding."""
    _check_budget(budget)
    estimates, ahead = -scores.double().numpy(), (lengths[:, None] - grid).clamp(min=0).double().numpy()
    deferred = table.deferred[:, grid].numpy()
    written = torch.minimum(grid, lengths[:, None]).numpy() + deferred
    first, (prices, row, here, there) = first_vertices(ahead, estimates), priced_steps(ahead, estimates)
    order = np.argsort(-prices, kind="stable")
    falling = prices[order]
    is_last_of_ties = np.append(falling[:-1] != falling[1:], True)[: len(falling)]

    def totals(counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of all rows before any choice has changed, and after the changes at each price."""
        start = counts[np.arange(len(counts)), first].sum()
        changes = (counts[row, there] - counts[row, here])[order]
        return np.append(start, start + changes.cumsum()[is_last_of_ties])

    nearest = np.abs(totals(deferred) / totals(written) - budget).argmin()
    changing = falling[is_last_of_ties]
    price = float(np.concatenate([[np.inf], (changing[:-1] + changing[1:]) / 2, [-np.inf]])[nearest])
    kept = choose_by_cost(scores, grid, lengths, price)
    spent = int(table.deferred.gather(1, kept[:, None]).sum())
    return Calibrated(price, spent / (spent + int(torch.minimum(kept, lengths).sum())))


def _hand_off_threshold(
    budget: float, scores: Tensor, kept: Tensor, lengths: Tensor, table: HandOffTable
) -> Calibrated:
    """The threshold on scores (n,) from which rows are handed off after kept (n,) tokens."""
    _check_budget(budget)
    deferred = table.deferred.gather(1, kept[:, None]).squeeze(1)
    longer = torch.minimum(kept, lengths) + deferred - lengths  # than the draft, and so are all tokens written
    order = scores.argsort(descending=True, stable=True)
    spent = deferred[order].cumsum(0).double() / (lengths.sum() + longer[order].cumsum(0))
    is_last_of_ties = torch.cat([scores[order].diff() != 0, torch.tensor([True])])
    candidates = torch.cat([torch.tensor([torch.inf], dtype=scores.dtype), scores[order][is_last_of_ties]])
    shares = torch.cat([torch.zeros(1, dtype=torch.double), spent[is_last_of_ties]])
    best = int((shares - budget).abs().argmin())
    return Calibrated(float(candidates[best]), float(shares[best]))


def _check_budget(budget: float) -> None:
    if not 0.0 <= budget <= 1.0:
        raise OptionError(f"budget is {budget}; it is the share of tokens the expert writes, from 0 to 1")
