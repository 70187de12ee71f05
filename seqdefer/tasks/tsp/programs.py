"""The linear and integer programs of `seqdefer.tasks.tsp.exact`, without a solver.

There is one edge variable x_e for each pair of cities. All degrees are 2, the edges of the prefix are 1, and subtours
are cut by `seqdefer.tasks.tsp.subtours`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from seqdefer.tasks.tsp.completions import Floats, Ints, Stop
from seqdefer.tasks.tsp.subtours import Mask, labels_of

LENGTH_TOLERANCE = 1e-7  # in mean distances between cities: about 1e-8 of a tour of 50


@dataclass(frozen=True)
class Constraint:
    """The sum of `columns` is at most `bound`, or equal to it."""

    columns: Ints
    bound: float
    is_equal: bool = False


@dataclass(frozen=True)
class RelaxedSolution:
    """An optimal solution of the linear relaxation."""

    values: Floats  # (E,)
    reduced: Floats  # (E,) reduced costs
    bound: float


class Deadline:
    """The time left for a prefix: none once `stop` is set (by Ctrl-C)."""

    def __init__(self, seconds: float, stop: Stop | None) -> None:
        self._end = time.monotonic() + seconds
        self._stop = stop

    @property
    def seconds_left(self) -> float:
        is_stopped = self._stop is not None and bool(self._stop[0])
        return 0.0 if is_stopped else max(self._end - time.monotonic(), 0.0)


class Geometry:
    """Distances of one instance in units of their mean, because solvers' tolerances are absolute."""

    def __init__(self, cities: Floats) -> None:
        self.n = len(cities)
        difference = cities[:, None, :] - cities[None, :, :]
        lengths = np.hypot(difference[..., 0], difference[..., 1])  # (N, N)
        self.unit = float(lengths.sum() / (self.n * (self.n - 1))) or 1.0
        self.distances: Floats = lengths / self.unit
        first, second = np.triu_indices(self.n, 1)
        self.first, self.second = first.astype(np.int64), second.astype(np.int64)  # (E,) the cities of each edge
        self.costs: Floats = self.distances[first, second]
        self.edges = np.zeros((self.n, self.n), dtype=np.int64)  # the edge of each pair of cities
        self.edges[first, second] = self.edges[second, first] = np.arange(len(first))

    def length(self, tour: Ints) -> float:
        return float(self.distances[tour, np.roll(tour, -1)].sum())

    def weights(self, values: Floats) -> Floats:
        """Return edge values as a symmetric matrix. (E,) -> (N, N)"""
        matrix = np.zeros((self.n, self.n))
        matrix[self.first, self.second] = matrix[self.second, self.first] = values
        return matrix

    def degree_rows(self) -> list[Constraint]:
        others = ~np.eye(self.n, dtype=np.bool_)
        return [Constraint(self.edges[city, others[city]], 2.0, is_equal=True) for city in range(self.n)]

    def cut_row(self, mask: Mask) -> Constraint:
        inside = np.flatnonzero(mask[self.first] & mask[self.second])
        return Constraint(inside, float(mask.sum()) - 1.0)

    def bounds(self, prefix: Ints) -> tuple[Floats, Floats]:
        """Return lower and upper bounds of edges: 1 along the prefix, 0 for edges that it excludes."""
        lower, upper = np.zeros(len(self.costs)), np.ones(len(self.costs))
        if 2 < len(prefix) < self.n:
            upper[self.edges[prefix[0], prefix[-1]]] = 0.0  # would close the tour too early
        inner = np.zeros(self.n, dtype=np.bool_)
        inner[prefix[1:-1]] = True
        upper[inner[self.first] | inner[self.second]] = 0.0
        fixed = self.edges[prefix[:-1], prefix[1:]]
        lower[fixed] = upper[fixed] = 1.0
        return lower, upper


@dataclass
class Program:
    """The problem to complete the `fixed` edges by some of `columns` to a tour shorter than `cutoff`."""

    geometry: Geometry
    columns: Ints  # (C,) free edges
    fixed: Ints  # edges in the tour
    cutoff: float
    floor: float  # no tour is shorter, so one within LENGTH_TOLERANCE is optimal
    masks: list[Mask]  # subtours cut from the start
    found: list[Mask] = field(default_factory=list)  # subtours found while solving

    @property
    def costs(self) -> Floats:
        return self.geometry.costs[self.columns]

    @property
    def offset(self) -> float:
        return float(self.geometry.costs[self.fixed].sum())

    def rows(self) -> list[Constraint]:
        rows = [*self.geometry.degree_rows(), *map(self.geometry.cut_row, self.masks)]
        return [row for row in self._contract(rows) if row.is_equal or len(row.columns) > row.bound]

    def _contract(self, rows: Iterable[Constraint]) -> list[Constraint]:
        """Restrict rows to the free columns."""
        place = np.full(len(self.geometry.costs), -1)
        place[self.columns] = np.arange(len(self.columns))
        is_fixed = np.zeros(len(self.geometry.costs), dtype=np.bool_)
        is_fixed[self.fixed] = True
        contracted = []
        for row in rows:
            left = place[row.columns]
            bound = row.bound - float(is_fixed[row.columns].sum())
            contracted.append(Constraint(left[left >= 0], bound, row.is_equal))
        return contracted

    def cuts(self, values: Floats) -> list[Constraint]:
        """Return the cuts that an integer solution violates, none if it is a tour. values: (C,)"""
        chosen = self.chosen(values)
        first, second = self.geometry.first[chosen], self.geometry.second[chosen]
        labels = np.array(labels_of(self.geometry.n, first.tolist(), second.tolist()))
        masks = [labels == label for label in range(labels.max() + 1)] if labels.any() else []
        self.found += masks
        return self._contract(map(self.geometry.cut_row, masks))

    def chosen(self, values: Floats) -> Ints:
        return np.concatenate([self.fixed, self.columns[values > 0.5]])


class Relaxation(ABC):
    """The linear relaxation of one instance, which keeps cuts and basis from prefix to prefix."""

    @abstractmethod
    def restrict(self, lower: Floats, upper: Floats) -> None: ...

    @abstractmethod
    def add(self, rows: Sequence[Constraint]) -> None: ...

    @abstractmethod
    def solve(self, seconds: float) -> RelaxedSolution | None:
        """Return None if the time limit was reached."""

    @abstractmethod
    def close(self) -> None:
        """Release the solver's resources."""
