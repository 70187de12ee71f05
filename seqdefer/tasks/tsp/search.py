"""Fast local search for tours: Or-opt and 2-opt with perturbation, compiled. Nearly exact at N = 50.

    tours = complete(cities, prefixes, kept)             # (n, N): one prefix of every instance
    tours, runs = hand_offs(cities, drafts, kept)        # (n, J, N): many prefixes of every draft

`hand_offs` is far cheaper than J calls of `complete`: it starts every prefix from the previous tour, skips prefixes
that the previous tour begins with, reads the last few off one exact table, and gives shorter prefixes the better tours
found for longer ones. So lengths never fall as `kept` rises, and none exceeds the draft's.

`complete` depends on the cities, the prefix, `effort` and `seed`; `hand_offs` also on the whole draft. Neither depends
on other instances or on the number of threads. Needs the extra `tsp`; the first call compiles (seconds) and caches the
result on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from seqdefer import environment
from seqdefer.errors import DataError, OptionError, missing_extra

EFFORT = 3  # perturbations per remaining city
N_EXACT = 10  # remaining cities up to which dynamic programming is faster than the search

Cities = NDArray[np.float64]
Tours = NDArray[np.int64]
Scalar = TypeVar("Scalar", np.float64, np.int64)


def complete(
    cities: Cities,
    prefixes: Tours,
    kept: Tours,
    *,
    effort: int = EFFORT,
    seed: int = 0,
    threads: int | None = None,
) -> Tours:
    """Return the shortest closed tours found that begin with the first `kept` (n,) cities of `prefixes` (n, N). (n, N)

    `prefixes` past `kept` are ignored. With nothing kept, the tour goes from city 0 towards its smaller neighbour."""
    cities = _check_cities(cities)
    kept = _own(kept, np.int64)
    n, n_cities = cities.shape[:2]
    prefixes = _own(prefixes, np.int64)
    if prefixes.shape != (n, n_cities) or kept.shape != (n,):
        raise DataError(
            f"{n} instances of {n_cities} cities need prefixes of shape {(n, n_cities)} and kept of shape {(n,)}; "
            f"got {prefixes.shape} and {kept.shape}"
        )
    _check_kept(kept, n_cities)
    drafts = np.stack([_fill(row, int(k)) for row, k in zip(prefixes, kept, strict=True)]) if n else prefixes
    tours = np.empty((n, 1, n_cities), np.int64)
    _run(cities, drafts, lambda i: kept[i : i + 1], tours, effort=effort, seed=seed, threads=threads)
    return tours[:, 0]


def hand_offs(
    cities: Cities,
    drafts: Tours,
    kept: Tours,
    *,
    effort: int = EFFORT,
    seed: int = 0,
    threads: int | None = None,
) -> tuple[Tours, int]:
    """Complete the first `kept` (J,), rising, cities of every draft (n, N). Return tours (n, J, N), and how many of the
    n x J needed a search."""
    cities = _check_cities(cities)
    kept = _own(kept, np.int64)
    drafts = _own(drafts, np.int64)
    n, n_cities = cities.shape[:2]
    if drafts.shape != (n, n_cities):
        raise DataError(f"{n} instances of {n_cities} cities need drafts of shape {(n, n_cities)}; got {drafts.shape}")
    if kept.ndim != 1 or not (np.diff(kept) > 0).all():
        raise OptionError(f"kept must rise strictly; got {kept.tolist()}")
    _check_kept(kept, n_cities)
    wrong = np.flatnonzero((np.sort(drafts, axis=1) != np.arange(n_cities)).any(axis=1))
    if len(wrong):
        raise DataError(f"draft {wrong[0]} is not a tour; it must visit each of the cities 0 to {n_cities - 1} once")
    tours = np.empty((n, len(kept), n_cities), np.int64)
    runs = _run(cities, drafts, lambda i: kept, tours, effort=effort, seed=seed, threads=threads)
    return tours, runs


def _own(values: NDArray[Any], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return a contiguous, writable array of this type: numba would recompile for another."""
    return np.require(values, dtype, ["C", "W"])


def _check_cities(cities: Cities) -> Cities:
    cities = _own(cities, np.float64)
    if cities.ndim != 3 or cities.shape[2] != 2:
        raise DataError(f"cities must have the shape (instances, cities, 2); got {cities.shape}")
    if cities.shape[1] < 4:
        raise DataError(f"a tour needs at least 4 cities; got {cities.shape[1]}")
    wrong = np.flatnonzero(~np.isfinite(cities).all(axis=(1, 2)))
    if len(wrong):
        raise DataError(f"instance {wrong[0]} has a city whose coordinates are not finite")
    return cities


def _check_kept(kept: Tours, n_cities: int) -> None:
    if len(kept) and not 0 <= kept.min() <= kept.max() <= n_cities:
        raise OptionError(f"kept must be between 0 and {n_cities}, the number of cities; got {kept.tolist()}")


def _fill(prefix: Tours, kept: int) -> Tours:
    """Return a draft that begins with the prefix: the kept cities, then the others in rising order."""
    n_cities = len(prefix)
    used = prefix[:kept]
    if len(np.unique(used)) < kept or (kept and not 0 <= used.min() <= used.max() < n_cities):
        raise DataError(f"prefix {used.tolist()} repeats a city or names one outside 0 to {n_cities - 1}")
    return np.concatenate([used, np.setdiff1d(np.arange(n_cities), used)])


def _check_options(effort: int, seed: int, threads: int | None) -> None:
    if effort < 0:
        raise OptionError(f"effort must be at least 0; got {effort}")
    if not 0 <= seed < 2**63:
        raise OptionError(f"seed must be at least 0 and below 2**63; got {seed}")
    if threads is not None and threads < 1:
        raise OptionError(f"threads must be at least 1, or None for all cores; got {threads}")


def _compiled() -> ModuleType:
    """Return the compiled module. Compilation runs in this thread, which receives interrupts."""
    try:
        from seqdefer.tasks.tsp import compiled
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] not in {"numba", "llvmlite"}:
            raise
        raise missing_extra("numba", "tsp", "the local search for tours") from error
    if not compiled.hand_offs.signatures:  # type: ignore[attr-defined]
        kept, draft = np.zeros(1, np.int64), np.arange(4)
        compiled.hand_offs(np.zeros((4, 2)), draft, kept, 0, 0, N_EXACT, np.zeros(1, np.bool_), draft[None].copy())
    return compiled


def _run(
    cities: Cities,
    drafts: Tours,
    kept: Callable[[int], Tours],
    tours: Tours,
    *,
    effort: int,
    seed: int,
    threads: int | None,
) -> int:
    """Write the tours of every instance and return how many searches ran. The compiled code holds no lock, so plain
    threads work in parallel; `stop` interrupts them."""
    _check_options(effort, seed, threads)
    module = _compiled()
    rows = count()
    stop = np.zeros(1, np.bool_)

    def work() -> int:
        runs = 0
        for i in rows:  # one counter for all threads
            if i >= len(cities) or stop[0]:
                break
            runs += module.hand_offs(cities[i], drafts[i], kept(i), int(effort), int(seed), N_EXACT, stop, tours[i])
        return runs

    n_threads = max(1, min(threads or environment.n_threads(), len(cities)))
    with ThreadPoolExecutor(n_threads) as pool:
        futures = [pool.submit(work) for _ in range(n_threads)]
        try:
            while wait(futures, timeout=0.5).not_done:  # some systems ignore interrupts in an endless wait
                pass
        finally:
            stop[0] = True
    return sum(future.result() for future in futures)
