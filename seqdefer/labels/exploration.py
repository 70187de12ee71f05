"""Decision trees of long sequences for training, grown along a few rollouts per example.

Training cannot see all 2^L ways to decide. Here each example is written `rollouts` times: by the predictor alone, by
the expert alone, and by both with a coin whose bias goes from one to the other; then the tree is closed. Training
rollouts follow the rejector as far as the tree goes and call neither model, so every seed, network and strategy learns
from the same trees. An example's coins depend on its index among all examples, not on its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import Task
from seqdefer.labels.trees import END, DecisionTrees, join_trees
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.types import Examples

SKIPPED_ROWS = 4096  # examples whose coins are drawn and dropped at once


def explore_trees(
    task: Task, examples: Examples, rollouts: int, *, seed: int = 0, progress: Progress = NO_PROGRESS
) -> DecisionTrees:
    """Return closed trees of the nodes that `rollouts` rollouts per example visit."""
    trees = grow_along(task, examples, draw_decisions(0, len(examples), rollouts, task.spec.length, seed), progress)
    trees.close()
    return trees


def draw_decisions(first: int, n: int, rollouts: int, length: int, seed: int = 0) -> Tensor:
    """Draw the decisions of examples `first` to `first + n - 1`, bool (n, R, L)."""
    if rollouts < 2:
        raise OptionError(f"{rollouts} rollouts per example; at least 2 are needed: predictor alone and expert alone")
    generator = torch.Generator().manual_seed(seed)
    for skipped in torch.arange(first).split(SKIPPED_ROWS):  # the same coins for a row, whatever range is drawn
        torch.rand(len(skipped), rollouts, length, generator=generator)
    coins = torch.rand(n, rollouts, length, generator=generator)
    return coins < torch.linspace(0, 1, rollouts)[:, None]


def grow_along(
    task: Task,
    examples: Examples,
    defer: Tensor,
    progress: Progress = NO_PROGRESS,
    *,
    reads_first: bool = False,
) -> DecisionTrees:
    """Return open trees grown along the decisions `defer` (n, R, L)."""
    parts = []
    for rows in torch.arange(len(examples)).split(task.predictor.batch_size):
        trees = DecisionTrees(task, examples.select(rows), reads_first=reads_first)
        parts.append(_explore_batch(trees, defer[rows]))
        progress(len(rows))
    return join_trees(parts, task, examples)


def _explore_batch(trees: DecisionTrees, defer: Tensor) -> DecisionTrees:
    defer = defer.to(trees.device)
    for rows in trees.parts(torch.arange(len(trees), device=trees.device), nodes=defer.shape[1]):
        if trees.expert.pays_by_call:  # one call about the predictor's own sequence answers for all its prefixes
            _walk(trees, rows, torch.zeros_like(defer[rows, :1]))
            trees.ask_late()
        _walk(trees, rows, defer[rows])
    return trees


def _walk(trees: DecisionTrees, rows: Tensor, defer: Tensor) -> None:
    """Grow the trees of `rows` (n,) along the decisions `defer` (n, R, L)."""
    nodes = trees.roots[rows][:, None].expand(defer.shape[:2])  # (n, R)
    for choice in defer.unbind(2):
        live = nodes != END
        if not bool(live.any()):
            return
        following = torch.full_like(nodes, END)
        following[live] = trees.children(nodes[live], choice[live])
        nodes = following
