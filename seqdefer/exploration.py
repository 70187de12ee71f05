"""Decision trees of long sequences to train on: a few rollouts at every budget are grown, and no more.

Of 2^L ways to decide, training can see some. Here each example is written `rollouts` times, by the predictor alone, by
the expert alone, and by both with a coin whose bias goes from one to the other; then the tree is closed. Training
rollouts go where the rejector steers them as far as the tree goes, and touch neither model; every seed, network and
strategy learns from the same trees. In a folder the trees are kept batch by batch, like the labels of hand-offs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.engine import Progress
from seqdefer.errors import OptionError
from seqdefer.interfaces import Task
from seqdefer.labels import Calls
from seqdefer.store import fingerprint, kept_tensors
from seqdefer.trees import END, DecisionTrees, join_trees
from seqdefer.types import Examples


def explore_trees(
    task: Task,
    examples: Examples,
    rollouts: int,
    *,
    seed: int = 0,
    folder: Path | None = None,
    progress: Progress = lambda _: None,
) -> DecisionTrees:
    """Closed trees with the nodes that `rollouts` rollouts an example pass."""
    if rollouts < 2:
        raise OptionError(f"{rollouts} rollouts an example; the predictor alone and the expert alone are two already")
    coins = torch.rand(len(examples), rollouts, task.spec.length, generator=torch.Generator().manual_seed(seed))
    defer = coins < torch.linspace(0, 1, rollouts)[:, None]  # (n, R, L)
    parts = []
    for rows in torch.arange(len(examples)).split(task.predictor.batch_size):
        parts.append(_kept_batch(task, examples.select(rows), defer[rows], folder))
        progress(len(rows))
    trees = join_trees(parts, task, examples)
    trees.close()
    return trees


def _kept_batch(task: Task, examples: Examples, defer: Tensor, folder: Path | None) -> DecisionTrees:
    """The trees of a batch, from the folder where they are there already."""
    if folder is None or not task.expert.fingerprint:
        return _explored(task, examples, defer)
    models = (task.predictor.fingerprint, task.expert.fingerprint)
    rules = (task.name, task.spec.length, task.spec.end, task.token_rule, task.loss_key(examples), defer)
    name = fingerprint(__version__, "trees", *models, *rules, examples.inputs, examples.targets, examples.ids)

    def make() -> dict[str, Tensor]:
        trees = _explored(task, examples, defer)
        return {**trees.tensors(), "calls": torch.tensor([trees.calls.made, trees.calls.saved])}

    kept = kept_tensors(folder / f"{name}.safetensors", {*DecisionTrees.columns(), "calls"}, make)
    calls = Calls(*kept.pop("calls").tolist())
    trees = DecisionTrees(task, examples, grown=kept)
    trees.calls = calls
    return trees


def _explored(task: Task, examples: Examples, defer: Tensor) -> DecisionTrees:
    """The trees along the decisions `defer` (n, R, L)."""
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
