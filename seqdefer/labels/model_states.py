"""States of both models after recent nodes, from which children continue without reading their prefixes again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ModelStates:
    """Both models after the prefixes of R nodes, or at the start of R examples."""

    ids: Tensor  # int64 (R,) nodes or examples, rising
    state: Any
    expert_state: Any


@dataclass
class StateCache:
    """Model states of the examples that a caller is working on."""

    examples: Tensor  # int64 (E,) rising
    start: ModelStates | None = None  # of all examples; filled on first use
    recent: list[ModelStates] = field(default_factory=list)  # the latest last

    def keep(self, states: ModelStates, capacity: int) -> None:
        """Add states and drop the oldest beyond `capacity` nodes."""
        self.recent.append(states)
        while sum(len(one.ids) for one in self.recent) > capacity:
            self.recent.pop(0)


def group_by_states(
    nodes: Tensor, recent: list[ModelStates], n_worthwhile: int
) -> list[tuple[ModelStates | None, Tensor]]:
    """Group `nodes` (by index) by the states to continue from, the latest first; None groups those to replay, together
    with groups that are neither `n_worthwhile` nodes nor all that are left."""
    groups: list[tuple[ModelStates | None, Tensor]] = []
    left = torch.ones_like(nodes, dtype=torch.bool)
    for states in reversed(recent):
        found = torch.isin(nodes, states.ids) & left
        if bool(found.any()) and int(found.sum()) >= min(n_worthwhile, int(left.sum())):
            groups.append((states, found.nonzero().squeeze(1)))
            left &= ~found
    return [*groups, (None, left.nonzero().squeeze(1))] if bool(left.any()) else groups
