"""Random instances and shortest tours by brute force, and a small pair fitted with an untrained predictor."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqdefer.evaluation.settings import experiment_settings
from seqdefer.model.fitting import fit_model
from seqdefer.tasks.tsp.pointer import PointerNet, save_pointer
from seqdefer.tasks.tsp.task import ENTRY, TSPOptions

Floats, Ints = NDArray[np.float64], NDArray[np.int64]


def random_instance(n_cities: int, seed: int = 0) -> tuple[Floats, Ints]:
    """Return cities from a standard normal (N, 2), and a draft in random order (N,)."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n_cities, 2)), generator.permutation(n_cities)


def near_draft(cities: Floats) -> Ints:
    """Return a nearest-neighbour tour from the last city, as good as a weak predictor's."""
    left, draft = set(range(len(cities) - 1)), [len(cities) - 1]
    while left:
        draft.append(min(left, key=lambda city: float(np.linalg.norm(cities[city] - cities[draft[-1]]))))
        left.remove(draft[-1])
    return np.array(draft)


def lengths_of(cities: Floats, tours: Ints) -> Floats:
    """Return lengths of closed tours (..., N) through cities (N, 2)."""
    steps = cities[tours] - cities[np.roll(tours, -1, -1)]
    return np.asarray(np.hypot(steps[..., 0], steps[..., 1]).sum(-1))


@cache
def orders(n: int) -> Ints:
    return np.array(list(permutations(range(n))), dtype=np.int64)


def shortest(cities: Floats, draft: Ints, kept: Ints) -> list[float]:
    """Return the shortest length over all orders of the other cities, for each number of cities kept."""
    lengths = []
    for k in kept.tolist():
        prefix = draft[: max(k, 1)]
        others = np.setdiff1d(draft, prefix)[orders(len(cities) - len(prefix))]
        tours = np.hstack([np.tile(prefix, (len(others), 1)), others])
        lengths.append(float(lengths_of(cities, tours).min()))
    return lengths


def check_tours(cities: Floats, draft: Ints, kept: Ints, tours: Ints) -> None:
    """Check that each tour begins with its prefix, and that lengths never fall nor exceed the draft's."""
    assert tours.shape == (len(kept), len(cities))
    assert (np.sort(tours, axis=1) == np.arange(len(cities))).all()
    for tour, k in zip(tours, kept, strict=True):
        assert (tour[:k] == draft[:k]).all()
        if k == 0:
            assert tour[0] == 0
            assert tour[1] < tour[-1]
    lengths = lengths_of(cities, tours)
    slack = 1e-7 * lengths.max()
    assert (np.diff(lengths) >= -slack).all()
    assert (lengths <= lengths_of(cities, draft) + slack).all()


def fitted_pair(home: Path, n_cities: int) -> tuple[TSPOptions, Path]:
    """Fit a rejector, or skip the test; return the options and the folder of the pair."""
    pytest.importorskip("numba", reason="needs the extra tsp")
    torch.manual_seed(0)
    save_pointer(PointerNet(6), home / "pointer", {})
    sizes = {"train": 24, "validation": 12, "test": 1}
    options = TSPOptions(cities=n_cities, expert="search", predictor=str(home / "pointer"), **sizes)
    fit_model(ENTRY, options, experiment_settings(ENTRY, "quick"), home / "model", device="cpu")
    return options, home / "model"


def is_tour(tours: Tensor) -> Tensor:
    """Return which rows (B, N) visit every city once. bool (B,)"""
    return (tours.sort(1).values == torch.arange(tours.shape[1], device=tours.device)).all(1)
