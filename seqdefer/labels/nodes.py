"""The table of nodes behind decision trees."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

END, UNKNOWN = -1, -2  # children that are not nodes: the sequence is over; not grown yet


@dataclass
class NodeTable:
    """Columns with one row per node. Capacity doubles; the first `size` rows are in use."""

    size: int
    example: Tensor  # int64 (N,)
    position: Tensor  # int64 (N,) tokens before this node
    parent: Tensor  # int64 (N,) -1 for roots
    tokens: Tensor  # (N, 2) predictor's, expert's
    losses: Tensor  # (N, 2) l and c
    children: Tensor  # int64 (N, 2) after keeping, after deferring
    features: Tensor  # (N, F)
    uncertainty: Tensor  # (N,)
    entropy: Tensor  # (N,), or (N, 0) where there is none
    statistics: Tensor  # (N, 7) of `PairStatistics`, or (N, 0) where trees are made without

    def extend(self, other: NodeTable) -> None:
        needed = self.size + other.size
        if needed > len(self.example):
            capacity = max(needed, 2 * len(self.example))
            for column in self.columns():
                old = getattr(self, column)
                grown = torch.empty(capacity, *old.shape[1:], dtype=old.dtype, device=old.device)
                grown[: self.size] = old[: self.size]
                setattr(self, column, grown)
        for column in self.columns():
            getattr(self, column)[self.size : needed] = getattr(other, column)[: other.size]
        self.size = needed

    @classmethod
    def columns(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name != "size"]

    def used(self) -> dict[str, Tensor]:
        """Return the columns without their spare capacity."""
        return {name: getattr(self, name)[: self.size] for name in self.columns()}

    def shifted(self, nodes: int, examples: int) -> dict[str, Tensor]:
        """Return the columns renumbered to follow `nodes` other nodes of `examples` other examples."""
        columns = self.used()
        for name in ("parent", "children"):
            columns[name] = torch.where(columns[name] >= 0, columns[name] + nodes, columns[name])
        return {**columns, "example": columns["example"] + examples}
