"""Proven shortest completions of tours, independent of the solver.

A prefix of `kept` cities is fixed; the path from its last city through all others back to its first is chosen to
minimise the closed tour. There is one edge variable x_e for each pair of cities, degrees are 2, and subtour cuts are
added as needed. Fixed edges leave the program: the prefix counts as one edge, and N - kept + 2 cities remain.

For each prefix, until the best tour meets the proven bound:
  1. if few cities remain, try every order;
  2. improve known tours (the last prefix's, the draft's): an upper bound;
  3. solve the linear relaxation, warm from the last prefix, with the cuts of all prefixes so far: a lower bound. Cuts
     stay valid because they hold for every tour;
  4. build a tour along the relaxed solution: a better upper bound;
  5. solve an integer program of the few edges whose reduced costs fit between the two bounds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations

import numpy as np

from seqdefer.tasks.tsp.completions import Floats, HandOffs, Ints, Stop, TourSolver
from seqdefer.tasks.tsp.improve import improve
from seqdefer.tasks.tsp.subtours import Mask, labels_of, violated

LENGTH_TOLERANCE = 1e-7  # in mean distances between cities: about 1e-8 of a tour of 50
N_ENUMERATE = 7  # cities: 5,040 orders as one array cost less than a program
TIME_LIMIT = 60.0  # seconds for each prefix


@dataclass(frozen=True)
class Solution:
    """A tour that begins with the prefix; no such tour is shorter than `bound`."""

    tour: Ints  # (N,)
    length: float
    bound: float
    is_optimal: bool


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


class ExactSolver(TourSolver):
    """A solver that proves its tours shortest within the time limit."""

    name: str
    batch_size = 64  # seconds of work

    def __init__(self, *, time_limit: float = TIME_LIMIT, n_enumerate: int = N_ENUMERATE) -> None:
        self.time_limit, self.n_enumerate = time_limit, n_enumerate
        self.fingerprint = f"tsp-{self.name}-1 time_limit={time_limit:g}"

    @abstractmethod
    def relaxation(self, costs: Floats, rows: Sequence[Constraint]) -> Relaxation: ...

    @abstractmethod
    def solve_program(self, program: Program, deadline: Deadline) -> tuple[Floats | None, bool]:
        """Return the best choice of columns (C,) below the cutoff, or None, and whether that is proven."""

    def complete(self, cities: Floats, prefix: Ints, start: Ints | None = None) -> Solution:
        """Return the shortest tour of `cities` (N, 2) that begins with `prefix` (kept,). `start`: a tour to improve."""
        with closing(_Search(self, cities, None)) as search:
            return search.complete(prefix, self.fill(cities, prefix) if start is None else start)

    def fill(self, cities: Floats, prefix: Ints) -> Ints:
        """Go to the nearest city each time."""
        anchored = prefix if len(prefix) else np.zeros(1, dtype=np.int64)
        return np.concatenate([anchored, nearest_neighbours(anchored, Geometry(cities).distances)])

    def hand_offs(self, cities: Floats, draft: Ints, kept: Ints, *, stop: Stop | None = None) -> HandOffs:
        with closing(_Search(self, cities, stop)) as search:
            return search.hand_offs(draft, kept)


class _Search:
    """The search on one instance; results for shorter prefixes serve longer ones."""

    def __init__(self, solver: ExactSolver, cities: Floats, stop: Stop | None) -> None:
        self.solver, self.stop = solver, stop
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
        solutions = self._share_later_tours(solutions, draft, kept)
        unproven = sum(not solution.is_optimal for solution in solutions)
        return HandOffs(np.stack([solution.tour for solution in solutions]), runs, unproven)

    def _follows(self, draft: Ints, kept: int, before: Solution | None) -> Solution | None:
        """Return the completion if there is no choice, or if the previous tour begins with the prefix."""
        if kept >= self.geometry.n - 1:
            return self._only(draft)
        tour = None if before is None else align(before.tour, draft[:kept])
        return None if before is None or tour is None else replace(before, tour=tour)

    def _only(self, tour: Ints) -> Solution:
        length = self.geometry.length(tour) * self.geometry.unit
        return Solution(tour, length, length, is_optimal=True)

    def _share_later_tours(self, solutions: list[Solution], draft: Ints, kept: Ints) -> list[Solution]:
        """Replace unproven tours by shorter completions of longer prefixes, or by the draft."""
        later, better = self._only(draft), []
        for solution, k in zip(solutions[::-1], kept[::-1].tolist(), strict=True):
            if not solution.is_optimal and later.length < solution.length:
                tour = _required(align(later.tour, draft[:k]))
                is_optimal = later.length <= solution.bound + LENGTH_TOLERANCE * self.geometry.unit
                later = Solution(tour, later.length, solution.bound, is_optimal)
            else:
                later = solution
            better.append(later)
        return better[::-1]

    def complete(self, prefix: Ints, start: Ints, bound: float = 0.0) -> Solution:
        """Complete a prefix. `start`: any tour; `bound`: a lower bound of the length."""
        unit, anchored = self.geometry.unit, prefix if len(prefix) else np.zeros(1, dtype=np.int64)
        if self.geometry.n - len(anchored) <= max(self.solver.n_enumerate, 1):
            tour = _best_of_all(anchored, self.geometry)
            bound = self.geometry.length(tour)
        else:
            tour, bound = self._prove(anchored, start, bound / unit)
        length = self.geometry.length(tour)
        if len(prefix) <= 1:
            tour = _required(align(canonical(tour), prefix))
        return Solution(tour, length * unit, min(bound, length) * unit, length <= bound + LENGTH_TOLERANCE)

    def _prove(self, prefix: Ints, start: Ints, bound: float) -> tuple[Ints, float]:
        """Return a tour and a bound, which meet within the time limit."""
        geometry, deadline = self.geometry, Deadline(self.solver.time_limit, self.stop)
        best = self._improved(prefix, start)
        if geometry.length(best) <= bound + LENGTH_TOLERANCE:
            return best, bound
        self.relaxation.restrict(*geometry.bounds(prefix))
        relaxed, bound = self._relax(bound, geometry.length(best), deadline)
        if relaxed is None or geometry.length(best) <= bound + LENGTH_TOLERANCE:
            return best, bound
        rounded = self._improved(prefix, follow(prefix, geometry.weights(relaxed.values), geometry.distances))
        best = min(best, rounded, key=geometry.length)
        if geometry.length(best) <= bound + LENGTH_TOLERANCE:
            return best, bound
        return self._branch(prefix, relaxed, best, bound, deadline)

    def _improved(self, prefix: Ints, tour: Ints) -> Ints:
        """Complete the prefix in the order of `tour`, and improve the result."""
        taken = np.zeros(self.geometry.n, dtype=np.bool_)
        taken[prefix] = True
        path = np.concatenate([prefix[-1:], _after(tour, int(prefix[-1]), taken), prefix[:1]])
        return np.concatenate([prefix[:-1], improve(path, self.geometry.distances)[:-1]])

    def _relax(self, bound: float, length: float, deadline: Deadline) -> tuple[RelaxedSolution | None, float]:
        """Solve the relaxation with all violated cuts; return it and its bound. None if the time limit was reached."""
        while True:
            relaxed = self.relaxation.solve(deadline.seconds_left)
            if relaxed is None:
                return None, bound
            bound = max(bound, relaxed.bound)
            if length <= bound + LENGTH_TOLERANCE:
                return relaxed, bound
            masks = violated(self.geometry.weights(relaxed.values))
            if not masks:
                return relaxed, bound
            self._add(masks)

    def _add(self, masks: Sequence[Mask]) -> None:
        self.masks += masks
        self.relaxation.add([self.geometry.cut_row(mask) for mask in masks])

    def _branch(
        self, prefix: Ints, relaxed: RelaxedSolution, best: Ints, bound: float, deadline: Deadline
    ) -> tuple[Ints, float]:
        """Solve the integer program of the edges that a tour shorter than `best` can contain."""
        length, (lower, upper) = self.geometry.length(best), self.geometry.bounds(prefix)
        slack = length - relaxed.bound + LENGTH_TOLERANCE
        is_in = (lower == 1) | ((relaxed.reduced < -slack) & (upper == 1))
        is_free = ~is_in & (relaxed.reduced <= slack) & (upper == 1)
        columns, fixed = np.flatnonzero(is_free), np.flatnonzero(is_in)
        program = Program(self.geometry, columns, fixed, length - LENGTH_TOLERANCE / 2, bound, self.masks)
        values, is_proven = self.solver.solve_program(program, deadline)
        if program.found:
            self._add(program.found)
        if values is not None:
            found = walk(self.geometry, program.chosen(values), prefix)
            best = min(best, found, key=self.geometry.length)
        return best, self.geometry.length(best) if is_proven else bound


# -- tours ---------------------------------------------------------------------------------------------------------


def canonical(tour: Ints) -> Ints:
    """Return the closed tour from city 0, in the direction whose second city is smaller than the last."""
    tour = np.roll(tour, -int(np.flatnonzero(tour == 0)[0]))
    return tour if tour[1] < tour[-1] else np.roll(tour[::-1], 1)


def align(tour: Ints, prefix: Ints) -> Ints | None:
    """Rotate or reverse a closed tour to begin with `prefix`; return None if it does not contain it."""
    if not len(prefix):
        return canonical(tour)
    for direction in (tour, tour[::-1]):
        turned = np.roll(direction, -int(np.flatnonzero(direction == prefix[0])[0]))
        if np.array_equal(turned[: len(prefix)], prefix):
            return turned
    return None


def nearest_neighbours(prefix: Ints, distances: Floats) -> Ints:
    """Return the cities not in `prefix`, each the nearest to the one before."""
    far = distances.copy()
    far[:, prefix] = np.inf
    at, order = int(prefix[-1]), []
    for _ in range(len(distances) - len(prefix)):
        at = int(far[at].argmin())
        far[:, at] = np.inf
        order.append(at)
    return np.array(order, dtype=np.int64)


def follow(prefix: Ints, weights: Floats, distances: Floats) -> Ints:
    """Return a tour along a relaxed solution: the heaviest edge to a free city, else the nearest city."""
    far = 1e3  # mean distances: edges of the solution come before all others
    return np.concatenate([prefix, nearest_neighbours(prefix, distances - far * weights)])


def walk(geometry: Geometry, chosen: Ints, prefix: Ints) -> Ints:
    """Return the tour that the edges form, in the direction of the prefix."""
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
    """Return the cities not taken, in the order of the tour from `city`."""
    turned = np.roll(tour, -int(np.flatnonzero(tour == city)[0]))
    return turned[~taken[turned]]


def _best_of_all(prefix: Ints, geometry: Geometry) -> Ints:
    """Return the shortest tour over all orders of the cities not in the prefix."""
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
