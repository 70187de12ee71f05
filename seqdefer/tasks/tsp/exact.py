"""Proven shortest completions of tours, independent of the solver.

A prefix of `kept` cities is fixed; the path from its last city through all others back to its first is chosen to
minimise the closed tour. The local search finds a tour for every prefix of a draft: an upper bound. For each prefix,
until the best tour meets the proven bound:
  1. solve the linear relaxation, warm from the last prefix, with the cuts of all prefixes so far: a lower bound. Cuts
     stay valid because they hold for every tour;
  2. solve an integer program of the few edges whose reduced costs fit between the two bounds. Fixed edges leave the
     program: the prefix counts as one edge, and N - kept + 2 cities remain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from seqdefer.tasks.tsp.completions import Floats, HandOffs, Ints, Stop, TourSolver
from seqdefer.tasks.tsp.programs import (
    LENGTH_TOLERANCE,
    Constraint,
    Deadline,
    Geometry,
    Program,
    Relaxation,
    RelaxedSolution,
)
from seqdefer.tasks.tsp.search import LocalSearch
from seqdefer.tasks.tsp.subtours import Mask, violated

TIME_LIMIT = 60.0  # seconds for each prefix


class ExactSolver(TourSolver):
    """A solver that proves its tours shortest within the time limit."""

    name: str
    batch_size = 64  # seconds of work

    def __init__(self, *, time_limit: float = TIME_LIMIT) -> None:
        self.time_limit, self.search = time_limit, LocalSearch()
        self.fingerprint = f"tsp-{self.name}-1 time_limit={time_limit:g}"

    @abstractmethod
    def relaxation(self, costs: Floats, rows: Sequence[Constraint]) -> Relaxation: ...

    @abstractmethod
    def solve_program(self, program: Program, deadline: Deadline) -> tuple[Floats | None, bool]:
        """Return the best choice of columns (C,) below the cutoff, or None, and whether that is proven."""

    def prepare(self) -> None:
        self.search.prepare()

    def hand_offs(self, cities: Floats, draft: Ints, kept: Ints, *, stop: Stop | None = None) -> HandOffs:
        known = self.search.hand_offs(cities, draft, kept).tours
        with closing(_Proofs(self, cities, stop)) as proofs:
            return proofs.hand_offs(draft, kept, known)


@dataclass(frozen=True)
class Solution:
    """A tour that begins with the prefix; no such tour is shorter than `bound`. In mean distances between cities."""

    tour: Ints  # (N,)
    length: float
    bound: float

    @property
    def is_optimal(self) -> bool:
        return self.length <= self.bound + LENGTH_TOLERANCE


class _Proofs:
    """The proofs for one instance; results for shorter prefixes serve longer ones."""

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

    def hand_offs(self, draft: Ints, kept: Ints, known: Ints) -> HandOffs:
        """Complete each prefix of the draft. known: (J, N), tours that begin with the prefixes"""
        solutions: list[Solution] = []
        runs = 0
        for k, tour in zip(kept.tolist(), known, strict=True):
            before = solutions[-1] if solutions else None
            solution = self._follows(draft, k, before)
            if solution is None:
                solution = self._complete(draft[:k], tour, 0.0 if before is None else before.bound)
                runs += 1
            solutions.append(solution)
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
        length = self.geometry.length(tour)
        return Solution(tour, length, length)

    def _share_later_tours(self, solutions: list[Solution], draft: Ints, kept: Ints) -> list[Solution]:
        """Replace unproven tours by shorter completions of longer prefixes, or by the draft."""
        later, better = self._only(draft), []
        for solution, k in zip(solutions[::-1], kept[::-1].tolist(), strict=True):
            if not solution.is_optimal and later.length < solution.length:
                later = Solution(_required(align(later.tour, draft[:k])), later.length, solution.bound)
            else:
                later = solution
            better.append(later)
        return better[::-1]

    def _complete(self, prefix: Ints, known: Ints, bound: float) -> Solution:
        """Complete a prefix. `known`: a tour that begins with it; `bound`: a lower bound of the length."""
        tour, bound = self._prove(prefix if len(prefix) else np.zeros(1, dtype=np.int64), known, bound)
        if len(prefix) <= 1:
            tour = _required(align(canonical(tour), prefix))
        length = self.geometry.length(tour)
        return Solution(tour, length, min(bound, length))

    def _prove(self, prefix: Ints, best: Ints, bound: float) -> tuple[Ints, float]:
        """Return a tour and a bound, which meet within the time limit."""
        length, deadline = self.geometry.length(best), Deadline(self.solver.time_limit, self.stop)
        if length <= bound + LENGTH_TOLERANCE:
            return best, bound
        self.relaxation.restrict(*self.geometry.bounds(prefix))
        relaxed, bound = self._relax(bound, length, deadline)
        if relaxed is None or length <= bound + LENGTH_TOLERANCE:
            return best, bound
        return self._branch(prefix, relaxed, best, bound, deadline)

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


def _required(tour: Ints | None) -> Ints:
    assert tour is not None
    return tour
