"""The cost of a decision up to the end of the sequence, if the predictor writes the rest.

The paper's token losses l and c say what a token costs by itself. A token also changes what follows: after the expert's
first syllable of a name the predictor may find the rest, after its own it cannot. With v(w) the sum of the token losses
of the predictor after a prefix w, and h and e the tokens of predictor and expert, the decisions at w cost

    keep   l + v(w h)        defer   c + v(w e)

and a *regret* is how much more a decision costs than the other one, 0 for the better. Regrets take the places of l and
c in the token surrogate. Both decisions must have been followed: see `explore_trees(..., branched=True)`. Where one was
not, the two are taken to go on alike, and the regrets are those of l and c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.labels.nodes import UNKNOWN, NodeTable


def regrets(table: NodeTable) -> Tensor:
    """Return the regrets of keeping and of deferring at every node. (N, 2)"""
    columns = table.used()
    children, losses = columns["children"], columns["losses"]
    children = torch.where(children == UNKNOWN, children.flip(1), children)
    value, total = losses.new_zeros(len(losses) + 1), torch.zeros_like(losses)  # the last value is that of END, 0
    for level in _levels(columns["position"]):
        total[level] = losses[level] + value[children[level]]
        value[level] = total[level, 0]
    return total - total.amin(1, keepdim=True)


def _levels(position: Tensor) -> list[Tensor]:
    """Return the nodes of each position, the last one first."""
    order = position.argsort(stable=True)
    return list(reversed(order.split(torch.bincount(position).tolist())))
