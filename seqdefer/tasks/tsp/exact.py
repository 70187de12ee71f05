"""Shortest completions of tours, proven: what the exact experts share, whatever solver does the sums.

A prefix of `kept` cities is fixed; the path from its last city through all others back to its first is chosen so that
the closed tour is shortest. One edge variable x_e for each pair of cities, degrees of 2, subtour cuts as they are
needed. Prefix edges are fixed and leave the program, so only N - kept + 2 cities are in it: the prefix is one edge.

For each prefix, until the best tour found meets the bound proven:
  1. few cities left: try every order;
  2. improve the tours at hand (the last prefix's, the draft's): an upper bound;
  3. the linear relaxation, warm from the last prefix, with the cuts of all prefixes so far: a lower bound. Cuts stay
     valid, as they hold for every tour;
  4. a tour along the relaxed solution: a better upper bound;
  5. an integer program of the few edges whose reduced costs fit between the two bounds.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from seqdefer.tasks.tsp.improve import improve
from seqdefer.tasks.tsp.subtours import Mask, labels_of, violated

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLOSE = 1e-7  # two lengths are the same, in mean distances between cities: about 1e-8 of a tour of 50
N_ENUMERATE = 7  # cities left: 5,040 orders as one array cost less than a program
TIME_LIMIT = 60.0  # seconds for each prefix


@dataclass(frozen=True)
class Solution:
    """A tour that begins with the prefix, its length, and what is proven: no such tour is shorter than `bound`."""

    tour: Ints  # (N,)
    length: float
    bound: float
    is_optimal: bool


@dataclass(frozen=True)
class HandOffs:
    """The completions of several prefixes of one draft."""

    tours: Ints  # (J, N)
    runs: int  # prefixes that had to be solved; the others followed from the one before
    unproven: int  # prefixes whose tour may not be the shortest: the time was over


@dataclass(frozen=True)
class Row:
    """The sum of `columns` is at most `bound`, or exactly so."""

    columns: Ints
    bound: float
    is_equal: bool = False


@dataclass(frozen=True)
class Relaxed:
    """An optimal solution of the linear relaxation."""

    values: Floats  # (E,)
    reduced: Floats  # (E,) reduced costs
    bound: float


class Clock:
    """Seconds left for a prefix: none once `stop` is set (someone pressed Ctrl-C)."""

    def __init__(self, seconds: float, stop: threading.Event | None) -> None:
        self._end = time.monotonic() + seconds
        self._stop = stop

    @property
    def left(self) -> float:
        return 0.0 if self._stop and self._stop.is_set() else max(self._end - time.monotonic(), 0.0)


class Geometry:
    """Distances of one instance, with their mean as the unit: solvers' tolerances are absolute."""

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
        """Edge values as a symmetric matrix. (E,) -> (N, N)"""
        matrix = np.zeros((self.n, self.n))
        matrix[self.first, self.second] = matrix[self.second, self.first] = values
        return matrix

    def degree_rows(self) -> list[Row]:
        others = ~np.eye(self.n, dtype=np.bool_)
        return [Row(self.edges[city, others[city]], 2.0, is_equal=True) for city in range(self.n)]

    def cut_row(self, mask: Mask) -> Row:
        inside = np.flatnonzero(mask[self.first] & mask[self.second])
        return Row(inside, float(mask.sum()) - 1.0)

    def bounds(self, prefix: Ints) -> tuple[Floats, Floats]:
        """Least and largest value of each edge: 1 along the prefix, 0 at whatever else it rules out."""
        lower, upper = np.zeros(len(self.costs)), np.ones(len(self.costs))
        if 2 < len(prefix) < self.n:
            upper[self.edges[prefix[0], prefix[-1]]] = 0.0  # it would close the tour too early
        inner = np.zeros(self.n, dtype=np.bool_)
        inner[prefix[1:-1]] = True
        upper[inner[self.first] | inner[self.second]] = 0.0
        fixed = self.edges[prefix[:-1], prefix[1:]]
        lower[fixed] = upper[fixed] = 1.0
        return lower, upper


@dataclass
class Program:
    """Which of the `columns` (edges) complete those that are `fixed` to a tour shorter than `cutoff`?"""

    geometry: Geometry
    columns: Ints  # (C,) edges that are free
    fixed: Ints  # edges that are in the tour
    cutoff: float
    floor: float  # no tour is shorter: one that comes as near as CLOSE need not be beaten
    masks: list[Mask]  # subtours that are ruled out from the start
    found: list[Mask] = field(default_factory=list)  # those found on the way

    @property
    def costs(self) -> Floats:
        return self.geometry.costs[self.columns]

    @property
    def offset(self) -> float:
        return float(self.geometry.costs[self.fixed].sum())

    def rows(self) -> list[Row]:
        rows = [*self.geometry.degree_rows(), *map(self.geometry.cut_row, self.masks)]
        return [row for row in self._contract(rows) if row.is_equal or len(row.columns) > row.bound]

    def _contract(self, rows: Iterable[Row]) -> list[Row]:
        """The rows in the columns that are left."""
        place = np.full(len(self.geometry.costs), -1)
        place[self.columns] = np.arange(len(self.columns))
        is_fixed = np.zeros(len(self.geometry.costs), dtype=np.bool_)
        is_fixed[self.fixed] = True
        contracted = []
        for row in rows:
            left = place[row.columns]
            bound = row.bound - float(is_fixed[row.columns].sum())
            contracted.append(Row(left[left >= 0], bound, row.is_equal))
        return contracted

    def cuts(self, values: Floats) -> list[Row]:
        """Rows that a solution in whole numbers breaks: none if it is a tour. values: (C,)"""
        chosen = self.chosen(values)
        first, second = self.geometry.first[chosen], self.geometry.second[chosen]
        labels = np.array(labels_of(self.geometry.n, first.tolist(), second.tolist()))
        masks = [labels == label for label in range(labels.max() + 1)] if labels.any() else []
        self.found += masks
        return self._contract(map(self.geometry.cut_row, masks))

    def chosen(self, values: Floats) -> Ints:
        return np.concatenate([self.fixed, self.columns[values > 0.5]])


class Relaxation(ABC):
    """The linear relaxation of one instance. It keeps its cuts and its basis from one prefix to the next."""

    @abstractmethod
    def restrict(self, lower: Floats, upper: Floats) -> None: ...

    @abstractmethod
    def add(self, rows: Sequence[Row]) -> None: ...

    @abstractmethod
    def solve(self, seconds: float) -> Relaxed | None:
        """None if the time was over."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds."""


class ExactSolver(ABC):
    """Proves that its tours are the shortest, unless the time is over. Safe to use from several threads."""

    name: str

    def __init__(self, *, time_limit: float = TIME_LIMIT, n_enumerate: int = N_ENUMERATE) -> None:
        self.time_limit = time_limit
        self.n_enumerate = n_enumerate

    @abstractmethod
    def relaxation(self, costs: Floats, rows: Sequence[Row]) -> Relaxation: ...

    @abstractmethod
    def solve_program(self, program: Program, clock: Clock) -> tuple[Floats | None, bool]:
        """The best choice of columns (C,) below the cutoff, None where there is none, and whether that is proven."""

    def complete(
        self, cities: Floats, prefix: Ints, start: Ints | None = None, *, stop: threading.Event | None = None
    ) -> Solution:
        """The shortest tour of `cities` (N, 2) that begins with `prefix` (kept,). `start`: a tour to begin from.

        With no prefix it begins with city 0 and goes on to that neighbour whose number is smaller. `stop` ends it soon
        after it is set, with the best tour so far."""
        with closing(_Search(self, cities, stop)) as search:
            return search.complete(prefix, start)

    def hand_offs(self, cities: Floats, draft: Ints, kept: Ints, *, stop: threading.Event | None = None) -> HandOffs:
        """Completions of the first `kept` (J,), rising, cities of a draft (N,)."""
        with closing(_Search(self, cities, stop)) as search:
            return search.hand_offs(draft, kept)


class _Search:
    """One instance: what was found for shorter prefixes serves the longer ones."""

    def __init__(self, solver: ExactSolver, cities: Floats, stop: threading.Event | None) -> None:
        self.solver = solver
        self.stop = stop
        self.geometry = Geometry(cities)
        self.masks: list[Mask] = []
        self._relaxation: Relaxation | None = None

    @property
    def relaxation(self) -> Relaxation:
        if self._relaxation is None:
            self._relaxation = self.solver.relaxation(self.geometry.costs, self.geometry.degree_rows())
        return self._relaxation

    def close(self) -> None:
        if self._relaxation is not None:
            self._relaxation.close()

    def hand_offs(self, draft: Ints, kept: Ints) -> HandOffs:
        solutions: list[Solution] = []
        runs = 0
        for k in kept.tolist():
            before = solutions[-1] if solutions else None
            known = self._follows(draft, k, before)
            if known is None:
                start, bound = (draft, 0.0) if before is None else (before.tour, before.bound)
                known = self.complete(draft[:k], start, bound)
                runs += 1
            solutions.append(known)
        solutions = self._never_worse_than_later(solutions, draft, kept)
        unproven = sum(not solution.is_optimal for solution in solutions)
        return HandOffs(np.stack([solution.tour for solution in solutions]), runs, unproven)

    def _follows(self, draft: Ints, kept: int, before: Solution | None) -> Solution | None:
        """The completion of a prefix where there is nothing to choose, or where the one before begins with it."""
        if kept >= self.geometry.n - 1:
            return self._only(draft)
        tour = None if before is None else align(before.tour, draft[:kept])
        return None if before is None or tour is None else replace(before, tour=tour)

    def _only(self, tour: Ints) -> Solution:
        length = self.geometry.length(tour) * self.geometry.unit
        return Solution(tour, length, length, is_optimal=True)

    def _never_worse_than_later(self, solutions: list[Solution], draft: Ints, kept: Ints) -> list[Solution]:
        """A completion of a longer prefix, and the draft, complete the shorter ones too: they may beat a tour that the
        time cut short."""
        later, better = self._only(draft), []
        for solution, k in zip(solutions[::-1], kept[::-1].tolist(), strict=True):
            if not solution.is_optimal and later.length < solution.length:
                tour = _required(align(later.tour, draft[:k]))
                is_optimal = later.length <= solution.bound + CLOSE * self.geometry.unit
                later = Solution(tour, later.length, solution.bound, is_optimal)
            else:
                later = solution
            better.append(later)
        return better[::-1]

    def complete(self, prefix: Ints, start: Ints | None, bound: float = 0.0) -> Solution:
        """`start`: any tour; `bound`: a length that no completion undercuts."""
        unit, anchored = self.geometry.unit, prefix if len(prefix) else np.zeros(1, dtype=np.int64)
        if self.geometry.n - len(anchored) <= max(self.solver.n_enumerate, 1):
            tour = _best_of_all(anchored, self.geometry)
            bound = self.geometry.length(tour)
        else:
            tour, bound = self._prove(anchored, start, bound / unit)
        length = self.geometry.length(tour)
        if len(prefix) <= 1:
            tour = _required(align(canonical(tour), prefix))
        return Solution(tour, length * unit, min(bound, length) * unit, length <= bound + CLOSE)

    def _prove(self, prefix: Ints, start: Ints | None, bound: float) -> tuple[Ints, float]:
        """A tour and a bound, which meet unless the time was over."""
        geometry, clock = self.geometry, Clock(self.solver.time_limit, self.stop)
        if start is None:
            start = np.concatenate([prefix, nearest_neighbours(prefix, geometry.distances)])
        best = self._improved(prefix, start)
        if geometry.length(best) <= bound + CLOSE:
            return best, bound
        self.relaxation.restrict(*geometry.bounds(prefix))
        relaxed, bound = self._relax(bound, geometry.length(best), clock)
        if relaxed is None or geometry.length(best) <= bound + CLOSE:
            return best, bound
        rounded = self._improved(prefix, follow(prefix, geometry.weights(relaxed.values), geometry.distances))
        best = min(best, rounded, key=geometry.length)
        if geometry.length(best) <= bound + CLOSE:
            return best, bound
        return self._branch(prefix, relaxed, best, bound, clock)

    def _improved(self, prefix: Ints, tour: Ints) -> Ints:
        """A completion in the order of `tour`, improved."""
        taken = np.zeros(self.geometry.n, dtype=np.bool_)
        taken[prefix] = True
        path = np.concatenate([prefix[-1:], _after(tour, int(prefix[-1]), taken), prefix[:1]])
        return np.concatenate([prefix[:-1], improve(path, self.geometry.distances)[:-1]])

    def _relax(self, bound: float, length: float, clock: Clock) -> tuple[Relaxed | None, float]:
        """The relaxation with all the cuts it needs, and its bound; None where time or `length` stopped it."""
        while True:
            relaxed = self.relaxation.solve(clock.left)
            if relaxed is None:
                return None, bound
            bound = max(bound, relaxed.bound)
            if length <= bound + CLOSE:
                return relaxed, bound
            masks = violated(self.geometry.weights(relaxed.values))
            if not masks:
                return relaxed, bound
            self._add(masks)

    def _add(self, masks: Sequence[Mask]) -> None:
        self.masks += masks
        self.relaxation.add([self.geometry.cut_row(mask) for mask in masks])

    def _branch(self, prefix: Ints, relaxed: Relaxed, best: Ints, bound: float, clock: Clock) -> tuple[Ints, float]:
        """The integer program of the edges that a tour shorter than `best` may have."""
        length, (lower, upper) = self.geometry.length(best), self.geometry.bounds(prefix)
        slack = length - relaxed.bound + CLOSE
        is_in = (lower == 1) | ((relaxed.reduced < -slack) & (upper == 1))
        is_free = ~is_in & (relaxed.reduced <= slack) & (upper == 1)
        columns, fixed = np.flatnonzero(is_free), np.flatnonzero(is_in)
        program = Program(self.geometry, columns, fixed, length - CLOSE / 2, bound, self.masks)
        values, is_proven = self.solver.solve_program(program, clock)
        if program.found:
            self._add(program.found)
        if values is not None:
            found = walk(self.geometry, program.chosen(values), prefix)
            best = min(best, found, key=self.geometry.length)
        return best, self.geometry.length(best) if is_proven else bound


# -- tours ---------------------------------------------------------------------------------------------------------


def canonical(tour: Ints) -> Ints:
    """The same closed tour from city 0 on, in the direction whose second city has a smaller number than the last."""
    tour = np.roll(tour, -int(np.flatnonzero(tour == 0)[0]))
    return tour if tour[1] < tour[-1] else np.roll(tour[::-1], 1)


def align(tour: Ints, prefix: Ints) -> Ints | None:
    """The same closed tour so that it begins with `prefix`, turned round if need be; None where it does not hold it."""
    if not len(prefix):
        return canonical(tour)
    for direction in (tour, tour[::-1]):
        turned = np.roll(direction, -int(np.flatnonzero(direction == prefix[0])[0]))
        if np.array_equal(turned[: len(prefix)], prefix):
            return turned
    return None


def nearest_neighbours(prefix: Ints, distances: Floats) -> Ints:
    """The cities that `prefix` lacks, each the nearest to the one before."""
    far = distances.copy()
    far[:, prefix] = np.inf
    at, order = int(prefix[-1]), []
    for _ in range(len(distances) - len(prefix)):
        at = int(far[at].argmin())
        far[:, at] = np.inf
        order.append(at)
    return np.array(order, dtype=np.int64)


def follow(prefix: Ints, weights: Floats, distances: Floats) -> Ints:
    """A tour along a relaxed solution: the heaviest edge to a free city, the nearest city where there is none."""
    return np.concatenate([prefix, nearest_neighbours(prefix, distances - FAR * weights)])


FAR = 1e3  # mean distances: any edge of the solution comes before any other


def walk(geometry: Geometry, chosen: Ints, prefix: Ints) -> Ints:
    """The tour that the edges make, in the direction of the prefix."""
    neighbours: list[list[int]] = [[] for _ in range(geometry.n)]
    for i, j in zip(geometry.first[chosen].tolist(), geometry.second[chosen].tolist(), strict=True):
        neighbours[i].append(j)
        neighbours[j].append(i)
    tour = [int(prefix[0])]
    before = int(prefix[0])
    at = int(prefix[1]) if len(prefix) > 1 else neighbours[before][0]
    while at != prefix[0]:
        tour.append(at)
        one, other = neighbours[at]
        before, at = at, other if one == before else one
    return np.array(tour, dtype=np.int64)


def _after(tour: Ints, city: int, taken: Mask) -> Ints:
    """The cities not taken, in the order of the tour from `city` on."""
    turned = np.roll(tour, -int(np.flatnonzero(tour == city)[0]))
    return turned[~taken[turned]]


def _best_of_all(prefix: Ints, geometry: Geometry) -> Ints:
    """The shortest tour of all orders of the cities that the prefix lacks."""
    left = np.setdiff1d(np.arange(geometry.n), prefix)
    orders = left[_orders(len(left))]  # (orders, left)
    ends = np.full((2, len(orders)), prefix[[-1, 0]][:, None])
    path = np.vstack([ends[:1], orders.T, ends[1:]])  # (left + 2, orders)
    lengths = geometry.distances[path[:-1], path[1:]].sum(0)
    return np.concatenate([prefix, orders[int(lengths.argmin())]])


@cache
def _orders(n: int) -> Ints:
    return np.array(list(permutations(range(n))), dtype=np.int64)


def _required(tour: Ints | None) -> Ints:
    assert tour is not None
    return tour
