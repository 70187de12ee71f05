"""Trees with all their nodes: one for each mixture of both models' tokens, where these are few enough."""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import Task
from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.nodes import UNKNOWN
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.types import Examples

MAX_ENUMERATED_LENGTH = 12  # 2^12 nodes per example: more would not fit into memory


def is_enumerable(task: Task) -> bool:
    """Tell whether all 2^L - 1 nodes of an example are few enough for both models (`max_tree_nodes`). Declared, not
    timed: the same task is labelled the same way on every machine."""
    most = min(task.predictor.max_tree_nodes, task.expert.max_tree_nodes, 1 << MAX_ENUMERATED_LENGTH)
    return (1 << task.spec.length) - 1 <= most


@torch.no_grad()
def enumerate_trees(
    task: Task,
    examples: Examples,
    *,
    batch_size: int | None = None,
    reads_first: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DecisionTrees:
    """Return trees with all their nodes, made level by level from live states: no prefix is replayed.

    The default batches fit a processor's cache or fill a GPU, unless the expert's `examples_at_once` is smaller."""
    if task.spec.length > MAX_ENUMERATED_LENGTH:
        raise OptionError(
            f"cannot enumerate 2^{task.spec.length} decisions per example: "
            f"the limit is {MAX_ENUMERATED_LENGTH} tokens; grow longer sequences with DecisionTrees(task, examples)"
        )
    trees = DecisionTrees(task, examples, reads_first=reads_first)
    batch_size = batch_size or min(128 if trees.device.type == "cpu" else 8192, trees.expert.examples_at_once)
    for rows in torch.arange(len(examples), device=trees.device).split(batch_size):
        _enumerate_batch(trees, rows)
        progress(len(rows))
    trees.ask_late()
    trees.is_complete = True
    return trees


def _enumerate_batch(trees: DecisionTrees, rows: Tensor) -> None:
    batch = trees.examples.select(rows)
    state, _ = trees.predictor.start(batch.inputs)
    expert_state = trees.expert.start(batch)
    nodes = trees.roots[rows]
    prefix = trees.nodes.tokens[nodes][:, :0]  # (B, 0) of the tokens' dtype
    paths = torch.ones_like(rows)  # ways to decide that lead to each node: the calls of the naive way
    for _ in range(trees.task.spec.length - 1):
        trees.ask_late(nodes)
        table = trees.nodes
        is_open = table.children[nodes] == UNKNOWN  # (B, 2)
        agree = table.tokens[nodes, 0] == table.tokens[nodes, 1]
        is_open[:, 1] &= ~agree
        branch, choice = is_open.nonzero(as_tuple=True)
        if len(branch) == 0:
            return
        tokens = table.tokens[nodes[branch], choice]
        state = trees.predictor.append(trees.predictor.select(state, branch), tokens)
        expert_state = trees.expert.append(trees.expert.select(expert_state, branch), tokens)
        parents = nodes[branch]
        example = table.example[parents]
        prefix = torch.cat([prefix[branch], tokens[:, None]], 1)
        made, expert_state = trees.ask(state, expert_state, example, prefix, parents)
        trees.link(parents, choice, made)
        paths = paths[branch] * torch.where(agree[branch], 2, 1)
        trees.calls = trees.calls + Calls(0, int(paths.sum()) - len(made))
        nodes = made
