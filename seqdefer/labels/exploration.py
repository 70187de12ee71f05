"""Decision trees of long sequences to train on: a few rollouts at every budget are grown, and no more.

Of 2^L ways to decide, training can see some. Here each example is written `rollouts` times, by the predictor alone, by
the expert alone, and by both with a coin whose bias goes from one to the other; then the tree is closed. Training
rollouts go where the rejector steers them as far as the tree goes, and touch neither model; every seed, network and
strategy learns from the same trees. The coins of an example depend on where it stands among all, not on its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import Task
from seqdefer.labels.trees import END, DecisionTrees, join_trees
from seqdefer.progress import Progress
from seqdefer.types import Examples

AT_ONCE = 4096  # examples whose coins are tossed together


def explore_trees(
    task: Task, examples: Examples, rollouts: int, *, seed: int = 0, progress: Progress = lambda _: None
) -> DecisionTrees:
    """Closed trees with the nodes that `rollouts` rollouts an example pass."""
    trees = grow_along(task, examples, toss(0, len(examples), rollouts, task.spec.length, seed), progress)
    trees.close()
    return trees


def toss(first: int, n: int, rollouts: int, length: int, seed: int = 0) -> Tensor:
    """The decisions of `n` examples behind `first` others, bool (n, R, L)."""
    if rollouts < 2:
        raise OptionError(f"{rollouts} rollouts an example; the predictor alone and the expert alone are two already")
    generator = torch.Generator().manual_seed(seed)
    for skipped in torch.arange(first).split(AT_ONCE):  # one row of coins after the other, whoever asks for which
        torch.rand(len(skipped), rollouts, length, generator=generator)
    coins = torch.rand(n, rollouts, length, generator=generator)
    return coins < torch.linspace(0, 1, rollouts)[:, None]


def grow_along(task: Task, examples: Examples, defer: Tensor, progress: Progress = lambda _: None) -> DecisionTrees:
    """The trees along the decisions `defer` (n, R, L), still open."""
    parts = []
    for rows in torch.arange(len(examples)).split(task.predictor.batch_size):
        parts.append(_explored(task, examples.select(rows), defer[rows]))
        progress(len(rows))
    return join_trees(parts, task, examples)


def _explored(task: Task, examples: Examples, defer: Tensor) -> DecisionTrees:
    """Those of a batch."""
    trees = DecisionTrees(task, examples)
    defer = defer.to(trees.device)
    for rows in trees.parts(torch.arange(len(examples), device=trees.device), nodes=defer.shape[1]):
        _walk(trees, rows, defer[rows])
    return trees


def _walk(trees: DecisionTrees, rows: Tensor, defer: Tensor) -> None:
    """Grows the trees of `rows` (n,) along the decisions `defer` (n, R, L)."""
    nodes = trees.roots[rows][:, None].expand(defer.shape[:2])  # (n, R)
    for choice in defer.unbind(2):
        live = nodes != END
        if not bool(live.any()):
            return
        following = torch.full_like(nodes, END)
        following[live] = trees.children(nodes[live], choice[live])
        nodes = following
