"""What a token-level rejector does at many thresholds, rolled through decision trees all at once.

After a deferral the prefix changes, so the scores of a draft alone do not tell what a threshold will spend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqdefer.interfaces import TokenRejector
from seqdefer.labels.trees import END, DecisionTrees

N_THRESHOLDS = 200  # of a sweep, at quantiles of the scores that rollouts meet
# (state, its rows before the nodes, position, nodes) -> scores, next state
Score = Callable[[Any, Tensor, int, Tensor], tuple[Tensor, Any]]


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
    """Roll all thresholds through the trees at once; each prefix is scored once however many thresholds reach it.

    Without `thresholds`, take quantiles of the scores that rollouts meet: first coarse (met while deferring all and
    nothing), then fine."""

    def score(state: Any, before: Tensor, position: int, nodes: Tensor) -> tuple[Tensor, Any]:
        return rejector.score(rejector.select(state, before), position, trees.proposal(nodes))

    return _sweep_all(score, rejector.start(trees.context), trees, rows, thresholds)


@torch.no_grad()
def sweep_hindsight(trees: DecisionTrees, rows: Tensor | None = None) -> TokenSweep:
    """Return the same for who knows the losses of both next tokens, but not what follows from them: the score is l - c,
    and at thresholds just above 0 the expert writes where l > c."""

    def score(_: Any, __: Tensor, ___: int, nodes: Tensor) -> tuple[Tensor, None]:
        loss, cost = trees.losses(nodes)
        return loss - cost, None

    return _sweep_all(score, None, trees, rows, None)


def _sweep_all(
    score: Score, state: Any, trees: DecisionTrees, rows: Tensor | None, thresholds: Tensor | None
) -> TokenSweep:
    trees.require_open()
    rows = torch.arange(len(trees), device=trees.device) if rows is None else rows.to(trees.device)
    if thresholds is not None:
        return _sweep(score, state, trees, rows, thresholds.to(trees.device))[0]
    ends = torch.tensor([-torch.inf, torch.inf], device=trees.device)
    for size in (N_THRESHOLDS // 8, N_THRESHOLDS):
        _, met = _sweep(score, state, trees, rows, ends if thresholds is None else thresholds)
        thresholds = torch.cat([ends[:1], _quantiles(met, size), ends[1:]])
    assert thresholds is not None
    return _sweep(score, state, trees, rows, thresholds)[0]


def _quantiles(scores: Tensor, size: int) -> Tensor:
    ordered: Tensor = scores.unique()  # sorted; equal scores need one threshold
    places = torch.linspace(0, len(ordered) - 1, min(size, len(ordered)), device=scores.device)
    return ordered[places.round().long()]


def _sweep(
    score: Score, state: Any, trees: DecisionTrees, rows: Tensor, thresholds: Tensor
) -> tuple[TokenSweep, Tensor]:
    """Return the sweep, and all the scores it met."""
    swept = [_sweep_part(score, state, trees, rows[part], thresholds) for part in trees.parts(rows)]
    deferred, lengths, loss = (torch.cat(parts, 1) for parts in list(zip(*swept, strict=True))[:3])
    return TokenSweep(thresholds, deferred, lengths, loss), torch.cat([met for *_, met in swept])


def _sweep_part(
    score: Score, state: Any, trees: DecisionTrees, rows: Tensor, thresholds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return deferred, lengths and losses (T, n) of some rows, and the scores met; `state` before any token."""
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
        scores, state = score(state, before, position, here)
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
