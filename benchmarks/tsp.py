"""The benchmark of labels for tours: every hand-off of a draft, by our experts and by a plain Gurobi solve of each.

All ways get the same drafts and the same threads. The plain way takes long, so it is timed on a few of the instances,
and ours on those alone beside it; `--full` takes them all. Lengths are compared first: Gurobi's must be the same, the
local search's no more than `ALLOWED_GAP` longer in the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Event

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import ResultsDifferError, Row, require_same
from benchmarks.weather import SEED, Bench
from seqdefer.environment import n_threads
from seqdefer.errors import MissingExtraError
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.experts import TourExpert, in_parallel, make_expert
from seqdefer.tasks.tsp.solvers import solve_cold
from seqdefer.tasks.tsp.task import greedy_tours, shipped_pointer
from seqdefer.tasks.tsp.tours import tour_lengths
from seqdefer.types import Examples, Sequences, SequenceSpec

ALLOWED_GAP = 0.1  # per cent
CLOSE = 1e-7  # what the solvers' tolerances leave of a length


def drafts_of(cities: Tensor) -> Tensor:
    """What is handed off: the tours of the predictor that ships with the package. (n, N, 2) -> (n, N)"""
    device = torch.device("cpu")
    return greedy_tours(shipped_pointer(device), cities, device)


@dataclass
class Labelling:
    """Instances with their drafts, and the ways to complete every prefix of them."""

    cities: Tensor  # (n, N, 2)
    drafts: Tensor  # (n, N)

    def first(self, n: int) -> Labelling:
        return Labelling(self.cities[:n], self.drafts[:n])

    @property
    def n_hand_offs(self) -> int:
        n, n_cities = self.drafts.shape
        return n * (n_cities + 1)

    def by(self, expert: TourExpert) -> tuple[Tensor, int]:
        """Tours (n x (N + 1), N), and how often the expert was run."""
        n, n_cities = self.drafts.shape
        examples = Examples(self.cities, self.drafts, torch.arange(n))
        drafts = Sequences(self.drafts, torch.full((n,), n_cities))
        handed, runs = expert.hand_offs(examples, drafts, torch.arange(n_cities + 1), SequenceSpec(n_cities))
        return handed.tokens, runs

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(n_threads())

    def cold(self) -> Tensor:
        """The same by Gurobi, each hand-off as if it were the only one."""
        cities, drafts, n_cities = self.cities.double().numpy(), self.drafts.numpy(), self.drafts.shape[1]

        def solve(number: int, stop: Event) -> np.ndarray:
            row, kept = divmod(number, n_cities + 1)
            return drafts[row] if stop.is_set() else solve_cold(cities[row], drafts[row, :kept])

        return torch.from_numpy(np.stack(in_parallel(self._pool, solve, self.n_hand_offs)))

    def lengths(self, tours: Tensor) -> Tensor:
        return tour_lengths(self.cities.repeat_interleave(self.drafts.shape[1] + 1, 0), tours)


def tours(bench: Bench) -> list[Row]:
    try:
        exact, search = make_expert("gurobi"), make_expert("search")
    except MissingExtraError as missing:
        bench.tell(f"left out: {missing}")
        return []
    cities = gaussian_instances(bench.sizes.n_tours, bench.sizes.n_tour_cities, SEED, "test")
    everything = Labelling(cities, drafts_of(cities))
    some = everything if bench.full else everything.first(bench.sizes.n_cold_tours)
    for expert in (exact, search):
        everything.first(1).by(expert)  # loads and compiles
    bench.tell("comparing")
    (found, runs), seconds_exact = _timed(lambda: everything.by(exact))
    (searched, _), seconds_search = _timed(lambda: everything.by(search))
    same = require_same(
        "tour lengths", (some.lengths(found[: some.n_hand_offs]), some.lengths(some.cold())), tolerance=CLOSE
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
    """Checks how much longer the local search's tours are, and says so."""
    over = 100 * (ours / shortest - 1)
    gap, n, n_equal = float(over.mean()), over.numel(), int((over <= 100 * CLOSE).sum())
    if not gap <= ALLOWED_GAP:
        raise ResultsDifferError(
            f"tours of the local search are {gap:.3g} % longer in the mean, and {ALLOWED_GAP} % is allowed; "
            "please report this"
        )
    return f"{n_equal:,} of {n:,} tour lengths equal, mean gap {gap:.2g} % (allowed: {ALLOWED_GAP} %)"


OURS: Mapping[str, str] = {"tours": "all hand-offs of tours, with bounds and short-cuts"}
BENCHMARKS: Mapping[str, Callable[[Bench], list[Row]]] = {"tours": tours}
