"""The local search: against brute force, monotone lengths, and independence of batch and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from seqdefer.errors import MissingExtraError
from seqdefer.tasks.tsp import search
from seqdefer.tasks.tsp.experts import TourExpert
from seqdefer.tasks.tsp.search import EFFORT, LocalSearch
from seqdefer.types import Examples, Sequences, SequenceSpec

pytest.importorskip("numba", reason="needs the extra `tsp`")

Array = NDArray[np.float64]
Tours = NDArray[np.int64]


def complete(cities: Array, prefixes: Tours, kept: Tours, *, effort: int = EFFORT, seed: int = 0) -> Tours:
    """Complete the first `kept` (n,) cities of each row of `prefixes` (n, N). (n, N)"""
    examples, n_cities = examples_of(cities, prefixes), prefixes.shape[1]
    given = Sequences(torch.from_numpy(prefixes.copy()), torch.from_numpy(np.asarray(kept, np.int64)))
    expert = TourExpert(LocalSearch(effort=effort, seed=seed))
    return expert.complete(examples, given, SequenceSpec(n_cities)).tokens.numpy()


def hand_offs(
    cities: Array, drafts: Tours, kept: Tours, *, effort: int = EFFORT, seed: int = 0, threads: int | None = None
) -> tuple[Tours, int]:
    """Complete the first `kept` (J,) cities of each draft (n, N). (n, J, N)"""
    examples, (n, n_cities) = examples_of(cities, drafts), drafts.shape
    whole = Sequences(torch.from_numpy(drafts.copy()), torch.full((n,), n_cities))
    expert = TourExpert(LocalSearch(effort=effort, seed=seed), n_threads=threads)
    handed, runs = expert.hand_offs(examples, whole, torch.from_numpy(kept), SequenceSpec(n_cities))
    return handed.tokens.numpy().reshape(n, len(kept), n_cities), runs


def examples_of(cities: Array, drafts: Tours) -> Examples:
    return Examples(torch.from_numpy(cities.copy()), torch.from_numpy(drafts.copy()), torch.arange(len(cities)))


def lengths(cities: Array, tours: Tours) -> Array:
    """cities (n, N, 2), tours (n, ..., N) -> (n, ...)"""
    points = np.stack([city[tour] for city, tour in zip(cities, tours, strict=True)])
    steps = points - np.roll(points, -1, -2)
    return np.asarray(np.hypot(steps[..., 0], steps[..., 1]).sum(-1))


def shortest(cities: Array, prefix: Tours) -> float:
    """Return the shortest length over every order of the remaining cities."""
    others = np.setdiff1d(np.arange(len(cities)), prefix)
    tours = np.array([[*prefix, *tail] for tail in permutations(others)], dtype=np.int64)
    return float(lengths(cities[None], tours[None]).min())


def instances(n: int, n_cities: int, seed: int = 0) -> tuple[Array, Tours]:
    """Return cities from a standard normal, and drafts in random order."""
    rng = np.random.default_rng(seed)
    drafts = rng.permuted(np.tile(np.arange(n_cities), (n, 1)), axis=1)
    return rng.normal(size=(n, n_cities, 2)), drafts


def check_table(cities: Array, drafts: Tours, kept: Tours, tours: Tours) -> None:
    """Check that rows are tours that begin with their prefix, and that lengths never fall nor exceed the draft's."""
    assert tours.shape == (len(cities), len(kept), cities.shape[1])
    assert (np.sort(tours, axis=2) == np.arange(cities.shape[1])).all()
    for j, k in enumerate(kept):
        assert (tours[:, j, :k] == drafts[:, :k]).all()
        if k == 0:
            assert (tours[:, j, 0] == 0).all()
        if k <= 1:
            assert (tours[:, j, 1] < tours[:, j, -1]).all()
    found = lengths(cities, tours)
    slack = 1e-9 * found.max()
    assert (np.diff(found, axis=1) >= -slack).all()
    assert (found <= lengths(cities, drafts)[:, None] + slack).all()


@pytest.fixture(params=["exact tail", "search alone"])
def tail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with and without the exact tail, which would do all the work on so few cities."""
    if request.param == "search alone":
        monkeypatch.setattr(search, "N_EXACT", 0)
    return str(request.param)


@pytest.mark.usefixtures("tail")
@pytest.mark.parametrize("n_cities", [4, 5, 6, 7, 8])
def test_every_prefix_equals_brute_force(n_cities: int) -> None:
    cities, drafts = instances(3, n_cities, seed=n_cities)
    kept = np.arange(n_cities + 1)
    tours, _ = hand_offs(cities, drafts, kept, effort=20)
    check_table(cities, drafts, kept, tours)
    best = [[shortest(city, draft[:k]) for k in kept] for city, draft in zip(cities, drafts, strict=True)]
    np.testing.assert_allclose(lengths(cities, tours), best, rtol=1e-12)


@pytest.mark.usefixtures("tail")
def test_nine_cities_equal_brute_force() -> None:
    cities, drafts = instances(1, 9)
    kept = np.arange(1, 10)  # 9! orders of a free tour are too many; with one city kept they are 8!
    tours, _ = hand_offs(cities, drafts, kept, effort=20)
    best = [shortest(cities[0], drafts[0, :k]) for k in kept]
    np.testing.assert_allclose(lengths(cities, tours)[0], best, rtol=1e-12)
    alone = complete(cities, drafts, np.array([0]), effort=20)
    np.testing.assert_allclose(lengths(cities, alone), best[0], rtol=1e-12)


@pytest.mark.usefixtures("tail")
@settings(max_examples=30)
@given(
    points=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=4, max_size=7),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_lattice_points_equal_brute_force(points: list[tuple[int, int]], seed: int, data: st.DataObject) -> None:
    """Duplicate cities, cities on a line and many ties."""
    cities = np.array([points], dtype=float)
    draft = np.array([data.draw(st.permutations(range(len(points))))])
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, len(points)), min_size=1))))
    tours, runs = hand_offs(cities, draft, kept, effort=30, seed=seed, threads=1)
    check_table(cities, draft, kept, tours)
    assert 0 <= runs <= len(kept)
    best = [shortest(cities[0], draft[0, :k]) for k in kept]
    np.testing.assert_allclose(lengths(cities, tours)[0], best, rtol=1e-12)


def test_hand_offs_equal_complete() -> None:
    cities, drafts = instances(4, 24)
    kept = np.arange(25)
    tours, runs = hand_offs(cities, drafts, kept, effort=20)
    check_table(cities, drafts, kept, tours)
    alone = np.stack([complete(cities, drafts, np.full(4, k), effort=20) for k in kept], axis=1)
    together, apart = lengths(cities, tours), lengths(cities, alone)
    np.testing.assert_allclose(together, apart, rtol=2e-2)
    assert abs(together.mean() / apart.mean() - 1) < 1e-3
    is_exact = kept >= 24 - search.N_EXACT
    np.testing.assert_allclose(together[:, is_exact], apart[:, is_exact], rtol=1e-12)
    assert (together[:, 0] <= apart[:, 0] * (1 + 1e-9)).all()
    assert runs < tours.shape[0] * tours.shape[1]


def test_a_draft_that_is_optimal_needs_one_run() -> None:
    """The free completion agrees with the draft, in either direction."""
    cities, drafts = instances(3, 30)
    best = complete(cities, drafts, np.zeros(3, np.int64))
    for draft in (best, np.roll(best, 7, axis=1), np.roll(best, 7, axis=1)[:, ::-1]):
        tours, runs = hand_offs(cities, draft, np.arange(31))
        assert runs == 3
        assert (tours[:, 2:] == draft[:, None]).all()
        assert (tours[:, 1, 0] == draft[:, 0]).all()
        assert (tours[:, 0] == best).all()


def test_the_draft_is_returned_if_nothing_remains() -> None:
    cities, drafts = instances(2, 12)
    tours, runs = hand_offs(cities, drafts, np.array([11, 12]))
    assert runs == 0
    assert (tours == drafts[:, None]).all()


@pytest.mark.parametrize("kept", [[0], [1], [2], [0, 2], [1, 7, 19], [3, 4, 30], [0, 10, 20, 30, 40], [40]])
def test_any_rising_grid(kept: list[int]) -> None:
    cities, drafts = instances(3, 40)
    tours, runs = hand_offs(cities, drafts, np.array(kept))
    check_table(cities, drafts, np.array(kept), tours)
    assert runs <= 3 * len(kept)


def test_independence_of_batch_and_threads() -> None:
    cities, drafts = instances(5, 30)
    kept = np.arange(0, 31, 3)
    tours, runs = hand_offs(cities, drafts, kept, seed=3, threads=1)
    for threads in (2, 5):
        again, same = hand_offs(cities, drafts, kept, seed=3, threads=threads)
        assert (again == tours).all()
        assert same == runs
    rows = np.array([4, 1, 1])
    again, _ = hand_offs(cities[rows], drafts[rows], kept, seed=3)
    assert (again == tours[rows]).all()
    alone = complete(cities, drafts, np.array([0, 5, 10, 20, 30]), seed=3)
    one = complete(cities[2:3], drafts[2:3], np.array([10]), seed=3)
    assert (one == alone[2:3]).all()


def test_tokens_past_the_prefix_are_ignored() -> None:
    cities, drafts = instances(3, 20)
    kept = np.array([0, 3, 5])
    junk = np.where(np.arange(20) < kept[:, None], drafts, -1)
    assert (complete(cities, junk, kept) == complete(cities, drafts, kept)).all()


def test_arrays_of_any_kind() -> None:
    """Read-only, of other types, in other layouts."""
    (cities,), (draft,) = instances(1, 16)
    kept = np.arange(17)
    solved = LocalSearch().hand_offs(cities.astype(np.float32).astype(float), draft, kept)
    odd: Any = np.asfortranarray(cities.astype(np.float32))
    odd.flags.writeable = False
    small: Any = np.repeat(draft.astype(np.int32), 2)[::2]
    again = LocalSearch().hand_offs(odd, small, kept)
    assert (again.tours == solved.tours).all()


def test_more_effort_is_no_worse_on_average() -> None:
    cities, drafts = instances(20, 50)
    nothing = np.zeros(20, np.int64)
    means = [lengths(cities, complete(cities, drafts, nothing, effort=e)).mean() for e in (0, 1, 10)]
    assert means[0] > means[1] >= means[2]


@pytest.mark.parametrize(
    "cities",
    [
        np.zeros((40, 2)),
        np.stack([np.arange(40.0), np.zeros(40)], axis=1),
        np.stack([np.linspace(0, 1, 40), np.linspace(0, 1, 40) / 3], axis=1),
        np.repeat(np.random.default_rng(0).normal(size=(10, 2)), 4, axis=0),
        np.stack(np.divmod(np.arange(40.0), 8), axis=1),
        1e9 + np.random.default_rng(1).normal(size=(40, 2)),
        1e-12 * np.random.default_rng(2).normal(size=(40, 2)),
        np.vstack([np.random.default_rng(3).normal(size=(39, 2)), [[1e8, 1e8]]]),
    ],
    ids=["one point", "a line", "a slope", "fours", "a lattice", "far away", "tiny", "an outlier"],
)
def test_degenerate_cities(cities: Array) -> None:
    draft = np.random.default_rng(4).permutation(40)[None]
    kept = np.arange(41)
    tours, _ = hand_offs(cities[None], draft, kept)
    check_table(cities[None], draft, kept, tours)


def test_a_line_is_walked_there_and_back() -> None:
    cities = np.stack([np.random.default_rng(5).permutation(np.arange(200.0)), np.zeros(200)], axis=1)[None]
    tour = complete(cities, np.zeros((1, 200), np.int64), np.array([0]))
    assert lengths(cities, tour)[0] == pytest.approx(2 * 199)


@pytest.mark.parametrize("kept", [0, 400])
def test_a_thousand_cities(kept: int) -> None:
    cities, drafts = instances(1, 1000)
    drafts = complete(cities, drafts, np.array([0]), effort=0)
    tours = complete(cities, drafts, np.array([kept]), effort=1)
    check_table(cities, drafts, np.array([kept]), tours[:, None])
    assert lengths(cities, tours)[0] < lengths(cities, drafts)[0]


def test_no_instances() -> None:
    tours, runs = hand_offs(np.empty((0, 9, 2)), np.empty((0, 9), np.int64), np.arange(3))
    assert tours.shape == (0, 3, 9)
    assert runs == 0
    assert complete(np.empty((0, 9, 2)), np.empty((0, 9), np.int64), np.empty(0, np.int64)).shape == (0, 9)


def test_without_numba_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "seqdefer.tasks.tsp.compiled", raising=False)
    monkeypatch.delattr("seqdefer.tasks.tsp.compiled", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'seqdefer\[tsp\]'"):
        hand_offs(*instances(1, 6), np.arange(7))


def test_importing_it_loads_neither_numba_nor_torch() -> None:
    code = "import sys, seqdefer.tasks.tsp.search; print({'numba', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_interrupt() -> None:
    """Hours of work stop within seconds."""
    cities, drafts = instances(8, 300)

    def work_for_hours() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        hand_offs(cities, drafts, np.arange(301), effort=1000)

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work_for_hours()
    assert time.monotonic() - begin < 60  # on a busy machine


def test_no_writable_cache(tmp_path: Path) -> None:
    """With a read-only package and user cache, the code compiles without caching."""
    code = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from seqdefer.tasks.tsp import compiled\n"
        "print(compiled._lap(5, 4))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "1\n"
