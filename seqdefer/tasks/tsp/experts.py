"""The experts of the traveling salesman task: solvers that complete tours, behind one face of tensors.

    gurobi   exact                                     Gurobi, up to 63 cities without a licence
    highs    exact, slower                             HiGHS, free
    search   nearly exact, many times faster           our own local search, compiled

`make_expert(name)` makes one. An example's input is its cities (N, 2); a sequence is a tour, a permutation of the N
cities that closes from the last to the first. Examples are worked on in parallel, each on one thread.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cached_property
from threading import Event
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from seqdefer import environment
from seqdefer.errors import InputError, OptionError, unknown
from seqdefer.interfaces import DraftExpert
from seqdefer.tasks.tsp import search
from seqdefer.tasks.tsp.exact import TIME_LIMIT, ExactSolver, Floats, HandOffs, Ints, Solution
from seqdefer.tasks.tsp.search import EFFORT
from seqdefer.tasks.tsp.solvers import PACKAGES, Gurobi, Highs, load
from seqdefer.types import Examples, Sequences, SequenceSpec

LEAST_CITIES = 4  # with three, all tours are the same
MOST_EFFORT, LONGEST = 10**6, 1e9  # perturbations a city, seconds: whatever is more was meant otherwise
PATIENCE = 0.2  # seconds: where another thread takes the signal of Ctrl-C, a longer wait would sleep through it
Result = TypeVar("Result")


class UnprovenTourWarning(UserWarning):
    """The time was over before a tour was proven to be the shortest: the best one found was kept."""


class TourExpert(DraftExpert):
    """Completes tours. `unproven` counts those so far that may not be the shortest because the time was over."""

    deterministic = True
    unproven: int = 0

    @abstractmethod
    def _complete(self, cities: Floats, prefixes: Ints, kept: Ints) -> tuple[Ints, int]:
        """Tours (n, N), and how many are unproven. cities: (n, N, 2), prefixes: (n, N), kept: (n,)"""

    @abstractmethod
    def _hand_offs(self, cities: Floats, drafts: Ints, kept: Ints) -> tuple[Ints, int, int]:
        """Tours (n, J, N), runs, and how many are unproven. drafts: (n, N), kept: (J,)"""

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        cities, tokens, kept = _checked(examples, prefixes, spec)
        tours, unproven = self._complete(cities, tokens, kept)
        self._tell(unproven, len(tours))
        return _sequences(tours, prefixes.tokens)

    def hand_offs(
        self, examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        cities, tokens, lengths = _checked(examples, drafts, spec)
        if (lengths < spec.length).any():
            row = int((lengths < spec.length).argmax())
            raise InputError(f"row {row}: a draft of {lengths[row]} cities; it must visit all {spec.length}")
        tours, runs, unproven = self._hand_offs(cities, tokens, _checked_kept(kept, spec.length))
        self._tell(unproven, tours.shape[0] * tours.shape[1])
        return _sequences(tours.reshape(-1, spec.length), drafts.tokens), runs

    def _tell(self, unproven: int, n: int) -> None:
        self.unproven += unproven
        if unproven:
            warnings.warn(
                f"{unproven:,} of {n:,} tours may not be the shortest: the time was over; give the expert more",
                UnprovenTourWarning,
                stacklevel=3,
            )


class ExactExpert(TourExpert):
    """Proves its tours. `solver`: `Gurobi` or `Highs`; rows are shared among `n_threads`, all cores by default."""

    batch_size = 64  # seconds of work: what is labelled is kept so often

    def __init__(self, solver: ExactSolver, *, n_threads: int | None = None) -> None:
        self.solver = solver
        self.n_threads = n_threads or environment.n_threads()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Threads that stay: a solver's licence is asked for once in each. Even one of them is not the main thread,
        which must be free for Ctrl-C."""
        return ThreadPoolExecutor(self.n_threads, thread_name_prefix=f"tsp-{self.solver.name}")

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # read only
        return f"tsp-{self.solver.name}-1 time_limit={self.solver.time_limit:g}"

    def _complete(self, cities: Floats, prefixes: Ints, kept: Ints) -> tuple[Ints, int]:
        def solve(row: int, stop: Event) -> Solution:
            return self.solver.complete(cities[row], prefixes[row, : kept[row]], stop=stop)

        solutions = in_parallel(self._pool, solve, len(cities))
        tours = np.array([each.tour for each in solutions], dtype=np.int64)
        return tours.reshape(prefixes.shape), sum(not each.is_optimal for each in solutions)

    def _hand_offs(self, cities: Floats, drafts: Ints, kept: Ints) -> tuple[Ints, int, int]:
        def solve(row: int, stop: Event) -> HandOffs:
            return self.solver.hand_offs(cities[row], drafts[row], kept, stop=stop)

        solved = in_parallel(self._pool, solve, len(cities))
        tours = np.array([each.tours for each in solved], dtype=np.int64).reshape(
            len(cities), len(kept), cities.shape[1]
        )
        return tours, sum(each.runs for each in solved), sum(each.unproven for each in solved)


class SearchExpert(TourExpert):
    """Local search with perturbation (`seqdefer.tasks.tsp.search`): more `effort`, shorter tours."""

    batch_size = 512

    def __init__(self, *, effort: int = EFFORT, seed: int = 0, n_threads: int | None = None) -> None:
        self.effort = effort
        self.seed = seed
        self.n_threads = n_threads

    @property
    def fingerprint(self) -> str:  # type: ignore[override]  # read only
        return f"tsp-search-1 effort={self.effort} seed={self.seed}"

    def _complete(self, cities: Floats, prefixes: Ints, kept: Ints) -> tuple[Ints, int]:
        return search.complete(cities, prefixes, kept, **self._options()), 0

    def _hand_offs(self, cities: Floats, drafts: Ints, kept: Ints) -> tuple[Ints, int, int]:
        return *search.hand_offs(cities, drafts, kept, **self._options()), 0

    def _options(self) -> dict[str, Any]:
        return {"effort": self.effort, "seed": self.seed, "threads": self.n_threads}


def make_expert(
    name: str,
    *,
    effort: int | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    n_threads: int | None = None,
) -> TourExpert:
    """The expert of that name: gurobi, highs or search. `effort` and `seed` are for search, `time_limit` (seconds for
    each prefix) is for the others; None is the default of each.

    What it needs is looked for at once, so that its absence is not found out in the middle of a run."""
    if name not in PACKAGES:
        raise unknown("expert", name, PACKAGES)
    if effort is not None and not 0 <= effort <= MOST_EFFORT:
        raise OptionError(f"effort {effort}: must be from 0 to {MOST_EFFORT}")
    if time_limit is not None and not 0 < time_limit <= LONGEST:
        raise OptionError(f"time limit {time_limit}: must be above 0 seconds, and at most {LONGEST:g}")
    if n_threads is not None and n_threads < 1:
        raise OptionError(f"{n_threads} threads: there must be at least 1")
    load(PACKAGES[name], name)
    if name == "search":
        return SearchExpert(effort=EFFORT if effort is None else effort, seed=seed, n_threads=n_threads)
    kind = Gurobi if name == "gurobi" else Highs
    return ExactExpert(kind(time_limit=TIME_LIMIT if time_limit is None else time_limit), n_threads=n_threads)


def in_parallel(pool: ThreadPoolExecutor, work: Callable[[int, Event], Result], n: int) -> list[Result]:
    """`work` of 0..n-1, in order. After Ctrl-C or an error no more begins, and what has begun sees its event set."""
    stop = Event()
    futures = [pool.submit(work, row, stop) for row in range(n)]
    try:
        while True:
            done, left = wait(futures, PATIENCE, FIRST_EXCEPTION)
            results = [future.result() for future in futures if future in done]  # or what one of them raised
            if not left:
                return results
    except BaseException:
        stop.set()
        for future in futures:
            future.cancel()
        wait(futures)
        raise


# -- tensors in, tensors out ---------------------------------------------------------------------------------------


def _checked(examples: Examples, sequences: Sequences, spec: SequenceSpec) -> tuple[Floats, Ints, Ints]:
    """Cities (n, N, 2), tokens (n, N) and lengths (n,), or what is wrong with them."""
    cities = _checked_cities(examples.inputs, spec.length)
    lengths = sequences.lengths.cpu().numpy()
    if len(cities) != len(lengths):
        raise InputError(f"{len(cities)} instances and {len(lengths)} prefixes: there must be as many of each")
    tokens = np.zeros((len(lengths), spec.length), dtype=np.int64)
    given = sequences.tokens.cpu().numpy()[:, : spec.length]
    tokens[:, : given.shape[1]] = given
    for row, (prefix, kept) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= kept <= spec.length:
            raise InputError(f"row {row}: {kept} cities are kept of {spec.length}")
        _check_prefix(prefix[:kept], row, spec.length)
    return cities, tokens, lengths


def _checked_cities(inputs: Tensor, n: int) -> Floats:
    if inputs.ndim != 3 or inputs.shape[1:] != (n, 2):
        raise InputError(f"inputs of shape {tuple(inputs.shape)}; instances of {n} cities have (n, {n}, 2)")
    if n < LEAST_CITIES:
        raise InputError(f"instances of {n} cities: a tour needs at least {LEAST_CITIES}")
    cities: Floats = inputs.detach().cpu().numpy().astype(np.float64)
    is_bad = ~np.isfinite(cities).all(axis=(1, 2))
    if is_bad.any():
        row = int(is_bad.argmax())
        city = int((~np.isfinite(cities[row]).all(1)).argmax())
        raise InputError(f"row {row}: city {city} is at {tuple(cities[row, city].tolist())}; coordinates are numbers")
    return cities


def _check_prefix(prefix: list[int], row: int, n: int) -> None:
    for position, city in enumerate(prefix):
        if not 0 <= city < n:
            raise InputError(f"row {row}: city {city} at position {position}; the cities are 0 to {n - 1}")
    if len(set(prefix)) < len(prefix):
        twice = next(city for position, city in enumerate(prefix) if city in prefix[:position])
        skipped = f", and leaves out city {min(set(range(n)) - set(prefix))}" if len(prefix) == n else ""
        raise InputError(f"row {row}: visits city {twice} twice{skipped}; a tour visits every city once")


def _checked_kept(kept: Tensor, n: int) -> Ints:
    numbers: Ints = kept.cpu().numpy().astype(np.int64)
    if not len(numbers) or (np.diff(numbers) <= 0).any() or numbers[0] < 0 or numbers[-1] > n:
        raise InputError(f"kept {numbers.tolist()}: must rise, from 0 or more to {n} or less")
    return numbers


def _sequences(tours: Ints, like: Tensor) -> Sequences:
    """On the device of the tokens that were given."""
    tokens = torch.from_numpy(tours).to(like.device)
    return Sequences(tokens, torch.full((len(tours),), tours.shape[1], dtype=torch.int64, device=like.device))
