"""Fast local search for tours: Or-opt and 2-opt with perturbation, compiled. Nearly exact at N = 50.

Many prefixes of a draft are far cheaper together than one by one: every prefix starts from the previous tour, prefixes
that the previous tour begins with are skipped, the last few are read off one exact table, and shorter prefixes get the
better tours found for longer ones. So lengths never fall as `kept` rises, and none exceeds the draft's.

Tours depend on the cities, the draft, `kept`, the effort and the seed. Needs the extra `tsp`; the first call compiles
(seconds) and caches the result on disk.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from seqdefer.errors import import_extra
from seqdefer.tasks.tsp.completions import Floats, HandOffs, Ints, Stop, TourSolver

EFFORT = 3  # perturbations per remaining city
N_EXACT = 10  # remaining cities up to which dynamic programming is faster than the search


class LocalSearch(TourSolver):
    """Local search with perturbation; more `effort` gives shorter tours."""

    batch_size = 512

    def __init__(self, *, effort: int = EFFORT, seed: int = 0) -> None:
        self.effort, self.seed = effort, seed
        self.fingerprint = f"tsp-search-1 effort={effort} seed={seed}"

    def prepare(self) -> None:
        if not load_compiled().hand_offs.signatures:
            self.hand_offs(np.zeros((4, 2)), np.arange(4), np.zeros(1, np.int64))

    def hand_offs(self, cities: Floats, draft: Ints, kept: Ints, *, stop: Stop | None = None) -> HandOffs:
        # Contiguous, writable arrays of one type: numba would recompile for others.
        cities, draft = np.require(cities, np.float64, ["C", "W"]), np.require(draft, np.int64, ["C", "W"])
        kept, tours = np.require(kept, np.int64, ["C", "W"]), np.empty((len(kept), len(draft)), np.int64)
        stop = np.zeros(1, np.bool_) if stop is None else stop
        runs = load_compiled().hand_offs(cities, draft, kept, int(self.effort), int(self.seed), N_EXACT, stop, tours)
        return HandOffs(tours, runs)


def load_compiled() -> ModuleType:
    """Import the compiled functions, and numba with them."""
    module: ModuleType = import_extra("seqdefer.tasks.tsp.compiled", "tsp", "an expert for tours")
    return module
