"""What BiLD does at many thresholds, rolled through decision trees (Kim et al., "Speculative Decoding with Big Little
Decoder", 2023, algorithm 1).

The predictor writes while it is sure: max q >= alpha. Elsewhere it falls back on the expert, whose one pass reads all
that is written. If the expert finds a token v that the predictor wrote with -log p(v) > rho, the sequence is rolled
back to the first of these and the expert writes there; otherwise it writes at the open position. Tokens before that
have passed for good, so every pass leaves exactly one token of the expert: passes and written tokens are the same
number. The end of a sequence is not checked.

As a sweep, 1 - max q is the score of falling back, and the threshold is 1 - alpha.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from seqdefer.budgets.token_sweeps import TokenSweep, require_statistics, sweep_all
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees


@torch.no_grad()
def sweep_rollbacks(
    trees: DecisionTrees, rho: float, rows: Tensor | None = None, thresholds: Tensor | None = None
) -> TokenSweep:
    """Roll all thresholds through trees with pair statistics. `rows` and `thresholds` as in `sweep_thresholds`."""
    require_statistics(trees, reads_first=True)
    return sweep_all(partial(_roll, trees, rho), trees, rows, thresholds)


def _roll(trees: DecisionTrees, rho: float, rows: Tensor, thresholds: Tensor) -> tuple[TokenSweep, Tensor]:
    limits = thresholds.repeat_interleave(len(rows))  # (R,): rollouts of all examples at each threshold
    writer, met = _RollbackWriter(trees, trees.roots[rows].repeat(len(thresholds)), rho), []
    going = torch.arange(len(limits), device=trees.device)
    while len(going):
        pair = trees.proposal(writer.nodes[going]).pair
        assert pair is not None
        scores = 1 - pair.max_q
        met.append(scores)
        going = writer.advance(going, scores >= limits[going])
    loss, lengths = trees.outcomes(*writer.last())
    deferred = writer.by_expert.sum(1)
    shape = (len(thresholds), len(rows))
    counts = (column.view(shape) for column in (deferred, lengths, loss, deferred))
    return TokenSweep(thresholds, *counts), torch.cat(met).unique()


class _RollbackWriter:
    """R rollouts, each at its own position. `path` holds the nodes that a rollout has passed, by position."""

    def __init__(self, trees: DecisionTrees, roots: Tensor, rho: float) -> None:
        self.trees, self.nodes, self.lowest = trees, roots.clone(), math.exp(-rho)
        shape = (len(roots), trees.task.spec.length)
        self.path = torch.full(shape, END, device=roots.device)
        self.by_expert = torch.zeros(shape, dtype=torch.bool, device=roots.device)
        self.position = torch.zeros_like(roots)
        self.checked = torch.zeros_like(roots)  # tokens that the expert has accepted or written

    def advance(self, rows: Tensor, falls_back: Tensor) -> Tensor:
        """Write one token of each of `rows`; return those that go on."""
        self.path[rows, self.position[rows]] = self.nodes[rows]
        asking = rows[falls_back]
        place = self._first_refused(asking)
        self.position[asking], self.checked[asking] = place, place + 1
        is_after = torch.arange(self.path.shape[1], device=rows.device) > place[:, None]
        self.path[asking] = self.path[asking].masked_fill(is_after, END)
        at = self.position[rows]
        self.by_expert[rows, at] = falls_back
        self.nodes[rows] = self.trees.children(self.path[rows, at], falls_back)
        self.position[rows] += 1
        return rows[self.nodes[rows] != END]

    def _first_refused(self, rows: Tensor) -> Tensor:
        """Return where the expert writes: at the first token that it refuses, or at the open position."""
        positions = torch.arange(self.path.shape[1], device=rows.device)
        pair = self.trees.proposal(self.path[rows].clamp(min=0).flatten()).pair
        assert pair is not None
        is_open = (positions >= self.checked[rows, None]) & (positions < self.position[rows, None])
        refused = is_open & (pair.p_v.view(is_open.shape) < self.lowest)
        return torch.where(refused.any(1), refused.int().argmax(1), self.position[rows])

    def last(self) -> tuple[Tensor, Tensor]:
        """Return the last node of each rollout, and whether the expert wrote there."""
        at = self.position[:, None] - 1
        return self.path.gather(1, at).squeeze(1), self.by_expert.gather(1, at).squeeze(1)
