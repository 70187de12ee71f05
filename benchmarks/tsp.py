"""Benchmark of labels for tours: every hand-off of a draft, by our experts and by a plain Gurobi solve of each.

All ways get the same drafts and threads. The plain way is slow, so the comparison uses a few of the instances; `--full`
uses them all. Lengths are compared first: Gurobi's must be equal, and those of the local search at most `ALLOWED_GAP`
longer on average.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import ResultsDifferError, Row, require_same
from benchmarks.weather import SEED, Bench, Benchmarks
from seqdefer.environment import n_threads
from seqdefer.tasks.tsp.completions import Stop
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.experts import TourExpert, in_parallel, make_expert
from seqdefer.tasks.tsp.solvers import solve_cold
from seqdefer.tasks.tsp.task import greedy_tours, shipped_pointer
from seqdefer.tasks.tsp.tours import tour_lengths
from seqdefer.types import Examples, Sequences, SequenceSpec

ALLOWED_GAP = 0.1  # per cent
TOLERANCE = 1e-7  # relative, of a length: the solvers have tolerances


def drafts_of(cities: Tensor) -> Tensor:
    """Return the tours of the predictor in the package. (n, N, 2) -> (n, N)"""
    device = torch.device("cpu")
    return greedy_tours(shipped_pointer(device), cities, device)


@dataclass
class TourLabels:
    """Instances with their drafts, and ways to complete every prefix of them."""

    cities: Tensor  # (n, N, 2)
    drafts: Tensor  # (n, N)

    def first(self, n: int) -> TourLabels:
        return TourLabels(self.cities[:n], self.drafts[:n])

    @property
    def n_hand_offs(self) -> int:
        n, n_cities = self.drafts.shape
        return n * (n_cities + 1)

    def by(self, expert: TourExpert) -> tuple[Tensor, int]:
        """Return tours (n x (N + 1), N) and the number of solves."""
        n, n_cities = self.drafts.shape
        examples = Examples(self.cities, self.drafts, torch.arange(n))
        drafts = Sequences(self.drafts, torch.full((n,), n_cities))
        handed, runs = expert.hand_offs(examples, drafts, torch.arange(n_cities + 1), SequenceSpec(n_cities))
        return handed.tokens, runs

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(n_threads())

    def cold(self) -> Tensor:
        """Return the same tours by an independent Gurobi solve for each hand-off."""
        cities, drafts, n_cities = self.cities.double().numpy(), self.drafts.numpy(), self.drafts.shape[1]

        def solve(number: int, stop: Stop) -> np.ndarray:
            row, kept = divmod(number, n_cities + 1)
            return drafts[row] if stop[0] else solve_cold(cities[row], drafts[row, :kept])

        return torch.from_numpy(np.stack(in_parallel(self._pool, solve, self.n_hand_offs)))

    def lengths(self, tours: Tensor) -> Tensor:
        return tour_lengths(self.cities.repeat_interleave(self.drafts.shape[1] + 1, 0), tours)


def tours(bench: Bench) -> list[Row]:
    """Compare the exact expert and the local search with cold solves."""
    exact, search = make_expert("gurobi"), make_expert("search")
    cities = gaussian_instances(bench.sizes.n_tours, bench.sizes.n_tour_cities, SEED, "test")
    everything = TourLabels(cities, drafts_of(cities))
    some = everything if bench.full else everything.first(bench.sizes.n_cold_tours)
    for expert in (exact, search):
        everything.first(1).by(expert)  # warm up: load and compile
    bench.log("comparing")
    (found, runs), seconds_exact = _timed(lambda: everything.by(exact))
    (searched, _), seconds_search = _timed(lambda: everything.by(search))
    same = require_same(
        "tour lengths", (some.lengths(found[: some.n_hand_offs]), some.lengths(some.cold())), tolerance=TOLERANCE
    )
    gap = require_near(everything.lengths(searched), everything.lengths(found))
    seconds = bench.race(exact=lambda: some.by(exact), search=lambda: some.by(search), cold=some.cold)
    n, n_cities = everything.drafts.shape
    size = f"{len(some.drafts)} instances, {n_cities + 1} hand-offs each, {n_threads()} threads"
    of_all = f"{n} instances take {{:.3g}} s"
    note = f"{of_all.format(seconds_exact)}, {runs:,} of {everything.n_hand_offs:,} hand-offs solved"
    return [
        Row.faster(
            "tours", f"a cold Gurobi solve of each; ours exact ({size})", seconds["exact"], seconds["cold"], same, note
        ),
        Row.faster(
            "tours", "the same; ours the local search", seconds["search"], seconds["cold"], gap,
            of_all.format(seconds_search),
        ),
    ]  # fmt: skip


def _timed(way: Callable[[], tuple[Tensor, int]]) -> tuple[tuple[Tensor, int], float]:
    begun = time.perf_counter()
    return way(), time.perf_counter() - begun


def require_near(ours: Tensor, shortest: Tensor) -> str:
    """Check how much longer the tours of the local search are; return a description."""
    over = 100 * (ours / shortest - 1)
    gap, n, n_equal = float(over.mean()), over.numel(), int((over <= 100 * TOLERANCE).sum())
    if not gap <= ALLOWED_GAP:
        raise ResultsDifferError(
            f"tours of the local search are {gap:.3g} % longer on average, more than the allowed {ALLOWED_GAP} %; "
            "please report this"
        )
    return f"{n_equal:,} of {n:,} tour lengths equal, mean gap {gap:.2g} % (allowed: {ALLOWED_GAP} %)"


BENCHMARKS: Benchmarks = {"tours": (tours, "all hand-offs of tours, with bounds and short-cuts")}
