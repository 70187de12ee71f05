"""The experts of the traveling salesman task: solvers that complete tours, with tensors in and out.

    gurobi   exact                              Gurobi, up to 63 cities without a licence
    highs    exact, slower                      HiGHS, free
    search   nearly exact, many times faster    compiled local search

`make_expert(name)` makes one. An example's input is its cities (N, 2); a sequence is a closed tour, a permutation of
the N cities. Examples are solved in parallel, each on one thread. Another package can offer an expert by an entry
point, and `--expert NAME` finds it:

    [project.entry-points."seqdefer.experts"]
    "tsp.NAME" = "my_package:make_expert"    # make_expert() returns an Expert with a fingerprint
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from seqdefer import environment
from seqdefer.errors import ContractError, InputError, OptionError, look_up
from seqdefer.interfaces import DraftExpert, Expert
from seqdefer.registry import EXPERTS, OWN, by_name, find_plugins, package_of
from seqdefer.tasks.tsp.completions import Floats, HandOffs, Ints, Stop, TourSolver
from seqdefer.tasks.tsp.exact import TIME_LIMIT
from seqdefer.tasks.tsp.reading import MIN_CITIES
from seqdefer.tasks.tsp.search import EFFORT, LocalSearch, load_compiled
from seqdefer.tasks.tsp.solvers import PACKAGES, Gurobi, Highs, load
from seqdefer.types import Examples, Sequences, SequenceSpec

MAX_EFFORT, MAX_SECONDS = 10**6, 1e9  # larger values are mistakes
POLL_SECONDS = 0.2  # between checks for Ctrl-C, whose signal another thread may receive
Result = TypeVar("Result")


class UnprovenTourWarning(UserWarning):
    """The time limit was reached before a tour was proven shortest; the best one found is used."""


class TourExpert(DraftExpert):
    """An expert that completes tours by a solver. `n_threads` share the rows (default: all cores).

    `unproven` counts tours that the time limit left without a proof."""

    deterministic = True
    unproven: int = 0

    def __init__(self, solver: TourSolver, *, n_threads: int | None = None) -> None:
        self.solver, self.n_threads = solver, n_threads or environment.n_threads()
        self.batch_size, self.fingerprint = solver.batch_size, solver.fingerprint

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        """Long-lived threads, because each requests a solver licence once. The main thread stays free for Ctrl-C."""
        return ThreadPoolExecutor(self.n_threads, thread_name_prefix="tsp")

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        cities, tokens, kept = _checked(examples, prefixes, spec)

        def solve(row: int, stop: Stop) -> HandOffs:
            draft = self.solver.fill(cities[row], tokens[row, : kept[row]])
            return self.solver.hand_offs(cities[row], draft, kept[row : row + 1], stop=stop)

        return self._solve(solve, prefixes, spec)[0]

    def hand_offs(
        self, examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        cities, tokens, lengths = _checked(examples, drafts, spec)
        if (lengths < spec.length).any():
            row = int((lengths < spec.length).argmax())
            raise InputError(f"row {row}: the draft has {lengths[row]} cities; it must visit all {spec.length}")
        columns = _checked_kept(kept, spec.length)

        def solve(row: int, stop: Stop) -> HandOffs:
            return self.solver.hand_offs(cities[row], tokens[row], columns, stop=stop)

        return self._solve(solve, drafts, spec)

    def _solve(
        self, solve: Callable[[int, Stop], HandOffs], given: Sequences, spec: SequenceSpec
    ) -> tuple[Sequences, int]:
        """Return the tours of all rows, on the device of `given`, and the number of solver runs."""
        self.solver.prepare()
        solved = in_parallel(self._pool, solve, len(given))
        tours = np.concatenate([np.zeros((0, spec.length), np.int64), *(one.tours for one in solved)])
        unproven = sum(one.unproven for one in solved)
        self.unproven += unproven
        if unproven:
            warnings.warn(
                f"{unproven:,} of {len(tours):,} tours may not be the shortest: the time limit was reached; "
                "raise --time-limit",
                UnprovenTourWarning,
                stacklevel=3,
            )
        tokens = torch.from_numpy(tours).to(given.tokens.device)
        lengths = torch.full((len(tours),), spec.length, device=given.tokens.device)
        return Sequences(tokens, lengths), sum(one.runs for one in solved)


def make_expert(
    name: str,
    *,
    effort: int | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    n_threads: int | None = None,
) -> Expert:
    """Return the expert `name`: gurobi, highs, search, or a plug-in's. `effort` and `seed` apply to search,
    `time_limit` (seconds for each prefix) to the exact ones; None is the default of each.

    The required package is imported at once, so that its absence does not stop a run midway."""
    if effort is not None and not 0 <= effort <= MAX_EFFORT:
        raise OptionError(f"--effort is {effort}; it must be between 0 and {MAX_EFFORT}")
    if time_limit is not None and not 0 < time_limit <= MAX_SECONDS:
        raise OptionError(f"--time-limit is {time_limit}; it must be above 0 and at most {MAX_SECONDS:g} seconds")
    if not 0 <= seed < 2**63:
        raise OptionError(f"seed is {seed}; it must be at least 0 and below 2**63")
    if n_threads is not None and n_threads < 1:
        raise OptionError(f"n_threads is {n_threads}; it must be at least 1")
    if (plugin := look_up("expert", name, _experts())) is not None:
        return _make_plugin(name, plugin)
    load_compiled()
    solver: TourSolver
    if name == "search":
        solver = LocalSearch(effort=EFFORT if effort is None else effort, seed=seed)
    else:
        load(PACKAGES[name], name)
        exact = Gurobi if name == "gurobi" else Highs
        solver = exact(time_limit=TIME_LIMIT if time_limit is None else time_limit)
    return TourExpert(solver, n_threads=n_threads)


def _experts() -> dict[str, EntryPoint | None]:
    """Return the experts by name: the entry point of a plug-in, None for a built-in."""
    found: list[tuple[str, str, EntryPoint | None]] = [(name, OWN, None) for name in (*PACKAGES, "search")]
    for key, point in find_plugins(EXPERTS).items():
        if key.startswith("tsp."):
            found.append((key.removeprefix("tsp."), package_of(point), point))
    return by_name("expert", found)


def _make_plugin(name: str, point: EntryPoint) -> Expert:
    expert: Expert = point.load()()
    if not expert.fingerprint:  # tours on disk are named by it
        raise ContractError(f"the expert plug-in {name!r} has no fingerprint; set one that names its settings")
    return expert


def in_parallel(pool: ThreadPoolExecutor, work: Callable[[int, Stop], Result], n: int) -> list[Result]:
    """Return `work(row, stop)` of rows 0..n-1, in order. After Ctrl-C or an error, no row starts and `stop` is set."""
    stop = np.zeros(1, np.bool_)
    futures = [pool.submit(work, row, stop) for row in range(n)]
    try:
        while True:
            done, left = wait(futures, POLL_SECONDS, FIRST_EXCEPTION)
            results = [future.result() for future in futures if future in done]  # raises the error of a row
            if not left:
                return results
    except BaseException:
        stop[0] = True
        for future in futures:
            future.cancel()
        wait(futures)
        raise


# -- tensors in, tensors out ---------------------------------------------------------------------------------------


def _checked(examples: Examples, sequences: Sequences, spec: SequenceSpec) -> tuple[Floats, Ints, Ints]:
    """Return cities (n, N, 2), tokens (n, N) and lengths (n,); raise InputError if they are invalid."""
    cities = _checked_cities(examples.inputs, spec.length)
    lengths = sequences.lengths.cpu().numpy()
    if len(cities) != len(lengths):
        raise InputError(f"{len(cities)} instances and {len(lengths)} prefixes; give one prefix for each instance")
    tokens = np.zeros((len(lengths), spec.length), dtype=np.int64)
    given = sequences.tokens.cpu().numpy()[:, : spec.length]
    tokens[:, : given.shape[1]] = given
    for row, (prefix, kept) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= kept <= spec.length:
            raise InputError(f"row {row}: kept is {kept}; it must be between 0 and {spec.length}")
        _check_prefix(prefix[:kept], row, spec.length)
    return cities, tokens, lengths


def _checked_cities(inputs: Tensor, n: int) -> Floats:
    if inputs.ndim != 3 or inputs.shape[1:] != (n, 2):
        raise InputError(f"inputs have shape {tuple(inputs.shape)}; {n} cities need (n, {n}, 2)")
    if n < MIN_CITIES:
        raise InputError(f"instances have {n} cities; a tour needs at least {MIN_CITIES}")
    cities: Floats = inputs.detach().cpu().numpy().astype(np.float64)
    is_bad = ~np.isfinite(cities).all(axis=(1, 2))
    if is_bad.any():
        row = int(is_bad.argmax())
        city = int((~np.isfinite(cities[row]).all(1)).argmax())
        raise InputError(
            f"row {row}: city {city} is at {tuple(cities[row, city].tolist())}; coordinates must be finite"
        )
    return cities


def _check_prefix(prefix: list[int], row: int, n: int) -> None:
    for position, city in enumerate(prefix):
        if not 0 <= city < n:
            raise InputError(f"row {row}: city {city} at position {position}; the cities are 0 to {n - 1}")
    if len(set(prefix)) < len(prefix):
        twice = next(city for position, city in enumerate(prefix) if city in prefix[:position])
        skipped = f" and city {min(set(range(n)) - set(prefix))} never" if len(prefix) == n else ""
        raise InputError(f"row {row}: city {twice} is visited twice{skipped}; a tour visits every city once")


def _checked_kept(kept: Tensor, n: int) -> Ints:
    numbers: Ints = kept.cpu().numpy().astype(np.int64)
    if not len(numbers) or (np.diff(numbers) <= 0).any() or numbers[0] < 0 or numbers[-1] > n:
        raise InputError(f"kept is {numbers.tolist()}; it must rise strictly within 0 to {n}")
    return numbers
