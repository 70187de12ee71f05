"""The local search: against brute force, monotone lengths, and cities in degenerate places."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tours import Floats, check_tours, lengths_of, random_instance, shortest

from seqdefer.errors import MissingExtraError
from seqdefer.tasks.tsp import search
from seqdefer.tasks.tsp.experts import TourExpert
from seqdefer.tasks.tsp.search import LocalSearch
from seqdefer.types import Examples, Sequences, SequenceSpec

pytest.importorskip("numba", reason="needs the extra `tsp`")


@pytest.fixture(params=["exact tail", "search alone"])
def tail(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with and without the exact tail, which would do all the work on so few cities."""
    if request.param == "search alone":
        monkeypatch.setattr(search, "N_EXACT", 0)
    return str(request.param)


@pytest.mark.usefixtures("tail")
@pytest.mark.parametrize("n_cities", [4, 5, 6, 7, 8, 9])
def test_every_prefix_equals_brute_force(n_cities: int) -> None:
    (cities, draft), kept = random_instance(n_cities), np.arange(n_cities + 1)
    tours = LocalSearch(effort=20).hand_offs(cities, draft, kept).tours
    check_tours(cities, draft, kept, tours)
    np.testing.assert_allclose(lengths_of(cities, tours), shortest(cities, draft, kept), rtol=1e-12)


@pytest.mark.usefixtures("tail")
@settings(max_examples=30)
@given(
    points=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=4, max_size=7),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_lattice_points_equal_brute_force(points: list[tuple[int, int]], seed: int, data: st.DataObject) -> None:
    """Duplicate cities, cities on a line and many ties."""
    cities, draft = np.array(points, dtype=float), np.array(data.draw(st.permutations(range(len(points)))))
    kept = np.array(sorted(data.draw(st.sets(st.integers(0, len(points)), min_size=1))))
    solved = LocalSearch(effort=30, seed=seed).hand_offs(cities, draft, kept)
    check_tours(cities, draft, kept, solved.tours)
    assert 0 <= solved.runs <= len(kept)
    np.testing.assert_allclose(lengths_of(cities, solved.tours), shortest(cities, draft, kept), rtol=1e-12)


@pytest.mark.parametrize("kept", [[0], [1], [2], [0, 2], [1, 7, 19], [3, 4, 30], [0, 10, 20, 30, 40], [40]])
def test_any_rising_grid(kept: list[int]) -> None:
    cities, draft = random_instance(40)
    solved = LocalSearch().hand_offs(cities, draft, np.array(kept))
    check_tours(cities, draft, np.array(kept), solved.tours)
    assert solved.runs <= len(kept)


def test_arrays_of_any_kind() -> None:
    """Read-only, of other types, in other layouts."""
    (cities, draft), kept = random_instance(16), np.arange(17)
    solved = LocalSearch().hand_offs(cities.astype(np.float32).astype(float), draft, kept)
    odd: Any = np.asfortranarray(cities.astype(np.float32))
    odd.flags.writeable = False
    small: Any = np.repeat(draft.astype(np.int32), 2)[::2]
    again = LocalSearch().hand_offs(odd, small, kept)
    assert (again.tours == solved.tours).all()


def test_more_effort_is_no_worse_on_average() -> None:
    def mean(effort: int) -> float:
        solver, instances = LocalSearch(effort=effort), [random_instance(50, seed) for seed in range(20)]
        return float(np.mean([lengths_of(c, solver.hand_offs(c, d, np.zeros(1, int)).tours) for c, d in instances]))

    assert mean(0) > mean(1) >= mean(10)


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
def test_degenerate_cities(cities: Floats) -> None:
    draft, kept = np.random.default_rng(4).permutation(40), np.arange(41)
    check_tours(cities, draft, kept, LocalSearch().hand_offs(cities, draft, kept).tours)


def test_a_line_is_walked_there_and_back() -> None:
    cities = np.stack([np.random.default_rng(5).permutation(np.arange(200.0)), np.zeros(200)], axis=1)
    tours = LocalSearch().hand_offs(cities, np.arange(200), np.zeros(1, int)).tours
    assert lengths_of(cities, tours)[0] == pytest.approx(2 * 199)


@pytest.mark.parametrize("kept", [0, 400])
def test_a_thousand_cities(kept: int) -> None:
    cities, draft = random_instance(1000)
    draft = LocalSearch(effort=0).hand_offs(cities, draft, np.zeros(1, int)).tours[0]
    tours = LocalSearch(effort=1).hand_offs(cities, draft, np.array([kept])).tours
    check_tours(cities, draft, np.array([kept]), tours)
    assert lengths_of(cities, tours)[0] < lengths_of(cities, draft)


def test_without_numba_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "seqdefer.tasks.tsp.compiled", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'seqdefer\[tsp\]'"):
        LocalSearch().prepare()


def test_importing_it_loads_neither_numba_nor_torch() -> None:
    code = "import sys, seqdefer.tasks.tsp.search; print({'numba', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_interrupt() -> None:
    """Hours of work stop within seconds."""
    examples = Examples(torch.randn(8, 300, 2), torch.zeros(8, 300, dtype=torch.long), torch.arange(8))
    drafts = Sequences(torch.arange(300).repeat(8, 1), torch.full((8,), 300))

    def work_for_hours() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        TourExpert(LocalSearch(effort=1000)).hand_offs(examples, drafts, torch.arange(301), SequenceSpec(300))

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
