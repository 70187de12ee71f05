"""Rows of a pass that share documents: the queries of all rows of a document attend to it together.

A decoder attends to a document as to a set: which row a query belongs to does not matter. So R rows of U documents do
not need R copies of keys and values. A CPU takes one document after the other, a GPU all of those from the first to the
last in use at once, padded to the rows of the one that has most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Queries (U', H, N, D) and which documents they are for; returns (U', H, N, X).
Attend = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class DocumentRows:
    """Which of U documents each of R rows attends to."""

    documents: Tensor  # int64 (R,)
    n_documents: int

    def attend(self, queries: Tensor, attend: Attend) -> Tensor:
        """Return (R, H, T, X), what `attend` makes of queries (R, H, T, D). It is called with those of one document, or
        of several that follow each other."""
        return self._one_by_one(queries, attend) if queries.device.type == "cpu" else self._padded(queries, attend)

    def _one_by_one(self, queries: Tensor, attend: Attend) -> Tensor:
        _, heads, length, size = queries.shape
        used, counts = self.documents.unique(return_counts=True)
        parts = []
        for document, rows in zip(used.tolist(), queries[self._order].split(counts.tolist()), strict=True):
            together = rows.transpose(0, 1).reshape(1, heads, -1, size)
            mixed = attend(together, slice(document, document + 1))
            parts.append(mixed.view(heads, len(rows), length, -1).transpose(0, 1))
        return torch.cat(parts)[self._order.argsort()]

    def _padded(self, queries: Tensor, attend: Attend) -> Tensor:
        (first, last, highest), (_, heads, length, size) = self._extent, queries.shape
        n, n_rows, places = last - first + 1, highest + 1, (self.documents - first, self._rank)
        padded = queries.new_zeros(n, n_rows, heads, length, size)
        padded[places] = queries
        together = padded.transpose(1, 2).reshape(n, heads, -1, size)
        mixed = attend(together, slice(first, last + 1))
        return mixed.view(n, heads, n_rows, length, -1).transpose(1, 2)[places]

    @cached_property
    def _extent(self) -> tuple[int, int, int]:
        """The first and the last document in use, and the highest rank."""
        first, last = self.documents.aminmax()
        bounds: list[int] = torch.stack([first, last, self._rank.max()]).tolist()
        return bounds[0], bounds[1], bounds[2]

    @cached_property
    def _order(self) -> Tensor:
        return self.documents.argsort(stable=True)

    @cached_property
    def _rank(self) -> Tensor:
        """The place of each row among those of its document. int64 (R,)"""
        counts = torch.bincount(self.documents, minlength=self.n_documents)
        first = (counts.cumsum(0) - counts)[self.documents[self._order]]
        places = torch.arange(len(first), device=first.device) - first
        return torch.empty_like(places).scatter(0, self._order, places)
