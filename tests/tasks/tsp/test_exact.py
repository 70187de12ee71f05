"""The parts of the exact experts that need no solver: tours and subtours."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from tours import random_instance

from seqdefer.tasks.tsp.exact import align, canonical, walk
from seqdefer.tasks.tsp.programs import Geometry
from seqdefer.tasks.tsp.subtours import violated

# -- tours ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", range(5))
@pytest.mark.parametrize("step", [1, -1])
def test_canonical_is_unique(shift: int, step: int) -> None:
    tour = np.array([0, 3, 1, 4, 2])
    assert canonical(np.roll(tour, shift)[::step]).tolist() == [0, 2, 4, 1, 3]


def test_align() -> None:
    tour = np.array([0, 3, 1, 4, 2])
    assert align(tour, np.array([1]))[:2].tolist() == [1, 4], "it keeps its direction where it may"
    assert align(tour, np.array([1, 3, 0])).tolist() == [1, 3, 0, 2, 4]
    assert align(tour, np.array([1, 0])) is None
    assert align(tour, np.zeros(0, dtype=np.int64)).tolist() == [0, 2, 4, 1, 3]


def test_walk_follows_the_edges() -> None:
    geometry = Geometry(random_instance(7)[0])
    tour = np.array([4, 0, 2, 6, 1, 5, 3])
    chosen = geometry.edges[tour, np.roll(tour, -1)]
    assert walk(geometry, chosen, tour[:3]).tolist() == tour.tolist()
    assert walk(geometry, chosen, tour[::-1][:2]).tolist() == tour[::-1].tolist()
    assert align(walk(geometry, chosen, tour[:1]), tour) is not None


def test_geometry_of_equal_cities() -> None:
    assert not Geometry(np.ones((5, 2))).distances.any()


# -- subtours ------------------------------------------------------------------------------------------------------


def mixture(n: int, seed: int) -> np.ndarray:
    """Return a relaxed solution: a mixture of tours and pairs of subtours, with degrees 2."""
    generator = np.random.default_rng(seed)
    weights = np.zeros((n, n))
    for share in generator.dirichlet(np.ones(3)):
        order, cut = generator.permutation(n), int(generator.integers(3, n - 2))
        parts = [order] if generator.random() < 0.6 else [order[:cut], order[cut:]]
        for part in parts:
            weights[part, np.roll(part, -1)] += share
            weights[np.roll(part, -1), part] += share
    return weights


def least_cut(weights: np.ndarray) -> float:
    n = len(weights)
    sets = [list(inside) for size in range(1, n // 2 + 1) for inside in combinations(range(n), size)]
    return min(weights[np.ix_(inside, [i for i in range(n) if i not in inside])].sum() for inside in sets)


@pytest.mark.parametrize("seed", range(40))
def test_violated_finds_a_set_whenever_there_is_one(seed: int) -> None:
    weights = mixture(8, seed)
    found = violated(weights)
    assert bool(found) == (least_cut(weights) < 2 - 1e-6)
    for mask in found:
        assert 0 < mask.sum() <= 4
        assert weights[mask][:, ~mask].sum() < 2 - 1e-6


def test_violated_of_integer_solutions() -> None:
    tour = np.roll(np.eye(6), 1, axis=1)
    assert not violated(tour + tour.T)
    triangles = np.kron(np.eye(2), 1 - np.eye(3))
    assert {tuple(np.flatnonzero(mask)) for mask in violated(triangles)} == {(0, 1, 2), (3, 4, 5)}
