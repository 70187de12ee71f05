"""Decision trees of long sequences for training, grown along a few rollouts per example.

Training cannot see all 2^L ways to decide. Here each example is written `rollouts` times: by the predictor alone, by
the expert alone, and by both with a coin whose bias goes from one to the other; then the tree is closed. Training
rollouts follow the rejector as far as the tree goes and call neither model, so every seed, network and strategy learns
from the same trees. An example's coins depend on its index among all examples, not on its batch.

Branched trees also have, wherever the models differ on these rollouts, both decisions, and what the predictor writes
after each of them: `seqdefer.labels.regrets`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import Task
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees, join_trees
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.types import Examples

SKIPPED_ROWS = 4096  # examples whose coins are drawn and dropped at once
BRANCHES = 4  # nodes of a level of branched trees for each rollout, about


def explore_trees(
    task: Task,
    examples: Examples,
    rollouts: int,
    *,
    seed: int = 0,
    branched: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DecisionTrees:
    """Return closed trees of the nodes that `rollouts` rollouts per example visit, or branched ones."""
    defer = draw_decisions(0, len(examples), rollouts, task.spec.length, seed)
    trees = grow_along(task, examples, defer, progress, branched=branched)
    trees.close(branched=branched)
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
    branched: bool = False,
) -> DecisionTrees:
    """Return open trees grown along the decisions `defer` (n, R, L), and with `branched` along their alternatives."""
    parts = []
    for rows in torch.arange(len(examples)).split(task.predictor.batch_size):
        trees = DecisionTrees(task, examples.select(rows), reads_first=reads_first)
        parts.append(_explore_batch(trees, defer[rows], branched=branched))
        progress(len(rows))
    return join_trees(parts, task, examples)


def _explore_batch(trees: DecisionTrees, defer: Tensor, *, branched: bool) -> DecisionTrees:
    defer = defer.to(trees.device)
    width = defer.shape[1] * (BRANCHES if branched else 1)
    for rows in trees.parts(torch.arange(len(trees), device=trees.device), nodes=width):
        if trees.expert.pays_by_call:  # one call about the predictor's own sequence answers for all its prefixes
            _walk(trees, rows, torch.zeros_like(defer[rows, :1]))
            trees.ask_late()
        _walk(trees, rows, defer[rows], branched=branched)
    return trees


def _walk(trees: DecisionTrees, rows: Tensor, defer: Tensor, *, branched: bool = False) -> None:
    """Grow the trees of `rows` (n,) along the decisions `defer` (n, R, L). With `branched`, follow both decisions
    wherever the models differ on the way; off the way the predictor writes on. All nodes of a position grow together,
    as both models have just read what is before them."""
    nodes = trees.roots[rows][:, None].expand(defer.shape[:2])  # (n, R)
    beside = nodes.new_zeros(0)  # nodes off the way
    for choice in defer.unbind(2):
        live = nodes != END
        if not (bool(live.any()) or len(beside)):
            return
        on_way, decided = nodes[live], choice[live]
        if branched:
            differing = torch.unique(on_way)
            differing = differing[trees.differ(differing)]
            kept = torch.cat([beside, differing])
            asked = torch.cat([on_way, kept, differing])
            decided = torch.cat([decided, torch.zeros_like(kept, dtype=torch.bool), torch.ones_like(differing).bool()])
            grown = trees.children(asked, decided)
            beside = torch.unique(grown[len(on_way) :])
            grown = grown[: len(on_way)]
            beside = beside[(beside != END) & ~torch.isin(beside, grown)]
        else:
            grown = trees.children(on_way, decided)
        following = torch.full_like(nodes, END)
        following[live] = grown
        nodes = following
