"""The choices of the token oracle: loss and deferred tokens of every way to decide, or of the good ones.

The oracle's curve is `curves.optimal_curve` of these outcomes. All of them are 2^L; of sequences too long for that, a
beam over decisions finds the best it can, and the curve is a bound: the true optimum may be lower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import NO_PROGRESS, Progress

BEAM_WIDTH = 8  # of two T5 models' summaries; the area with 32 is one in a thousand smaller


def all_outcomes(trees: DecisionTrees, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return loss and deferred tokens of every way to decide, (n, 2^L) each: what the token oracle chooses from."""
    trees.require_open()
    roots = trees.roots if rows is None else trees.roots[rows.to(trees.device)]
    n, length = len(roots), trees.task.spec.length
    nodes = roots[:, None]
    last, last_choice = nodes, torch.zeros_like(nodes, dtype=torch.bool)
    deferred = torch.zeros_like(nodes)
    for _ in range(length):
        nodes, last, last_choice, deferred = (x.repeat_interleave(2, 1) for x in (nodes, last, last_choice, deferred))
        choice = torch.arange(nodes.shape[1], device=trees.device).remainder(2).bool().expand_as(nodes)
        live = nodes != END
        last, last_choice = torch.where(live, nodes, last), torch.where(live, choice, last_choice)
        deferred = deferred + (choice & live)
        following = torch.full_like(nodes, END)
        following[live] = trees.children(nodes[live], choice[live])
        nodes = following
    loss, _ = trees.outcomes(last.flatten(), last_choice.flatten())
    return loss.view(n, -1), deferred


@torch.no_grad()
def beam_outcomes(
    trees: DecisionTrees, rows: Tensor | None = None, *, width: int = BEAM_WIDTH, progress: Progress = NO_PROGRESS
) -> tuple[Tensor, Tensor]:
    """Return loss and deferred tokens of good ways to decide, (n, D) each; rows with fewer have infinite losses:
    a stand-in for `all_outcomes` where sequences are too long. Each can be reached; better ones may be missed.

    Level by level both decisions are tried (where the writers agree, only the free one). A prefix is dropped when
    `width` others of its example defer no more and have no more loss, if they ended here."""
    trees.require_open()
    rows = torch.arange(len(trees), device=trees.device) if rows is None else rows.to(trees.device)
    found = []
    for part in trees.parts(rows, nodes=4 * width):
        found.append(_beam_part(trees, trees.roots[rows[part]], width))
        progress(len(part))
    widest = max(loss.shape[1] for loss, _ in found)
    padded = [[_pad_columns(loss, widest, torch.inf), _pad_columns(count, widest, 0)] for loss, count in found]
    loss, deferred = (torch.cat(parts) for parts in zip(*padded, strict=True))
    return loss, deferred


def _beam_part(trees: DecisionTrees, nodes: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the undominated outcomes that the beam finds from the roots `nodes` (n,). (n, D) each"""
    n, row = len(nodes), torch.arange(len(nodes), device=trees.device)
    deferred, ended = torch.zeros_like(nodes), []
    while len(nodes):
        # 1. what either writer would add, and what the prefix is then worth
        asking = trees.differ(nodes).nonzero().squeeze(1)
        choice = torch.arange(len(nodes) + len(asking), device=trees.device) >= len(nodes)
        row, nodes, deferred = (torch.cat([values, values[asking]]) for values in (row, nodes, deferred))
        deferred = deferred + choice
        loss, _ = trees.outcomes(nodes, choice)
        # 2. sequences that are over are outcomes, and the best of the others go on
        over = trees.nodes.children[nodes, choice.long()] == END
        ended.append((row[over], loss[over], deferred[over]))
        row, nodes, choice, loss, deferred = (values[~over] for values in (row, nodes, choice, loss, deferred))
        best = _undominated(row, loss, deferred, width)
        row, deferred, nodes = row[best], deferred[best], trees.children(nodes[best], choice[best])
    row, loss, deferred = (torch.cat(parts) for parts in zip(*ended, strict=True))
    best = _undominated(row, loss, deferred, 1)
    places = _places(row[best])
    shape = (n, int(places.max()) + 1)
    losses, counts = loss.new_full(shape, torch.inf), deferred.new_zeros(shape)
    losses[row[best], places], counts[row[best], places] = loss[best], deferred[best]
    return losses, counts


def _undominated(row: Tensor, loss: Tensor, deferred: Tensor, width: int) -> Tensor:
    """Return the candidates (int64 indices, by row, then by tokens deferred) with fewer than `width` others of their
    row that defer no more and lose no more; of equal ones the first count as better."""
    order = loss.argsort(stable=True)
    order = order[deferred[order].argsort(stable=True)]
    order = order[row[order].argsort(stable=True)]
    if len(order) == 0:
        return order
    row, places = row[order], _places(row[order])
    # Those before a candidate defer no more than it does.
    table = loss.new_full((int(row.max()) + 1, int(places.max()) + 1), torch.inf)  # (n, M)
    table[row, places] = loss[order]
    rivals = (table[:, None, :] <= table[:, :, None]).tril(-1).sum(2)  # (n, M)
    return order[rivals[row, places] < width]


def _places(row: Tensor) -> Tensor:
    """Return the place of each entry among the equal ones: 0 0 0 2 2 -> 0 1 2 0 1."""
    _, counts = torch.unique_consecutive(row, return_counts=True)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.arange(len(row), device=row.device) - first


def _pad_columns(values: Tensor, width: int, value: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=value)
