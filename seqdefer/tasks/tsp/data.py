"""Instances of the traveling salesman problem, generated from a seed or read from TSPLIB and CSV files.

    splits = make_splits(options)           # --data, --cities, --train, --validation, --test and --seed
    splits.parts["test"]                    # float32 (n, N, 2)
    gaussian_instances(10_000, 50, seed=0)  # to train a predictor on; no split contains any of them

Random numbers are the raw 64-bit words of numpy's Philox, a counter-based generator whose words do not change between
versions; normals and draws are computed here. An instance depends only on its seed, stream and index, so 2,400
instances are the first 2,400 of 24,000. The streams of a seed (predictor, train, validation, test) are independent.

Distances are Euclidean and real; TSPLIB rounds them to integers, so its lengths differ slightly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqdefer.errors import DataError, OptionError
from seqdefer.interfaces import SplitName
from seqdefer.tasks.common.proportions import divide_by_remainder
from seqdefer.tasks.tsp.options import TSPOptions
from seqdefer.tasks.tsp.reading import MIN_CITIES, CityData, count_cities, read_cities

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]
Stream = Literal["predictor", "train", "validation", "test"]

_STREAMS: Mapping[Stream | Literal["deal"], int] = {"predictor": 0, "train": 1, "validation": 2, "test": 3, "deal": 4}


@dataclass(frozen=True)
class InstanceSplits:
    """Three parts that share no instance."""

    parts: Mapping[SplitName, Tensor]  # float32 (n, N, 2)
    source: str  # a description for provenance


@dataclass(frozen=True)
class Pool:
    """A map with more cities than an instance."""

    cities: Tensor  # float64 (M, 2), all distinct
    duplicates: int  # cities dropped because another has the same coordinates
    name: str


# --- generated from a seed -------------------------------------------------------------------------------------------


def gaussian_instances(n: int, n_cities: int, seed: int, stream: Stream = "predictor") -> Tensor:
    """Return `n` instances of cities from a standard normal. float32 (n, N, 2)"""
    _check_sizes(n, n_cities)
    uniform = _uniforms(_words(n, 2 * n_cities, seed, stream)).reshape(n, n_cities, 2)
    radius, angle = np.sqrt(-2.0 * np.log1p(-uniform[..., 0])), 2.0 * math.pi * uniform[..., 1]  # Box-Muller
    cities = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return torch.from_numpy(cities.astype(np.float32))


def instances_from_pool(cities: Tensor, n: int, n_cities: int, seed: int, stream: Stream = "predictor") -> Tensor:
    """Return `n` instances, each of `N` distinct cities of a map (M, 2) in random order, normalised. float32 (n, N, 2)

    All sets of N cities are equally likely."""
    _check_sizes(n, n_cities)
    if len(cities) < n_cities:
        raise OptionError(f"cannot draw {n_cities} distinct cities from {len(cities)}; draw at most {len(cities)}")
    words = _words(n, 2 * n_cities, seed, stream)
    rows = _draw_subsets(_uniforms(words[:, :n_cities]), len(cities))  # (n, N)
    order = np.argsort(words[:, n_cities:], axis=1, kind="stable")
    instances = normalise(cities[torch.from_numpy(np.take_along_axis(rows, order, axis=1))])
    if (found := _find_duplicate(instances)) is not None:
        near = [tuple(cities[rows[found[0], order[found[0], city]]].tolist()) for city in found[1:]]
        raise DataError(f"two cities are too close to distinguish: {near[0]} and {near[1]}; remove one of them")
    return instances


def normalise(instances: Tensor) -> Tensor:
    """Center instances and scale them to unit variance, by one factor for both coordinates, which preserves ratios of
    tour lengths. (..., N, 2) -> float32 (..., N, 2)"""
    centred = instances.double() - instances.double().mean(-2, keepdim=True)
    centred = centred / _or_one(centred.abs().amax((-2, -1), keepdim=True))  # squares neither overflow nor underflow
    return (centred / _or_one(centred.square().mean((-2, -1), keepdim=True).sqrt())).float()


def _or_one(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _words(n_rows: int, n_words: int, seed: int, stream: Stream | Literal["deal"]) -> NDArray[np.uint64]:
    """Return random 64-bit words; a row depends on the seed, the stream and its index. (n_rows, n_words)"""
    if seed < 0:
        raise OptionError(f"the seed is {seed}; it must be at least 0")
    start = np.random.SeedSequence(entropy=seed, spawn_key=(_STREAMS[stream],))
    return np.asarray(np.random.Philox(start).random_raw(n_rows * n_words)).reshape(n_rows, n_words)


def _uniforms(words: NDArray[np.uint64]) -> Reals:
    """Return multiples of 2^-53 in [0, 1)."""
    return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _draw_subsets(uniform: Reals, n_pool: int) -> Integers:
    """Draw a uniform subset of range(n_pool) for each row, by Floyd's algorithm. (n, N)"""
    n, n_cities = uniform.shape
    chosen = np.empty((n, n_cities), dtype=np.int64)
    for place in range(n_cities):
        last = n_pool - n_cities + place
        drawn = np.minimum((uniform[:, place] * (last + 1)).astype(np.int64), last)
        is_taken = (chosen[:, :place] == drawn[:, None]).any(axis=1)
        chosen[:, place] = np.where(is_taken, last, drawn)
    return chosen


def _check_sizes(n: int, n_cities: int) -> None:
    if n < 1:
        raise OptionError(f"n is {n}; it must be at least 1")
    if n_cities < MIN_CITIES:
        raise OptionError(f"n_cities is {n_cities}; it must be at least {MIN_CITIES}")


# --- splits ----------------------------------------------------------------------------------------------------------


def make_splits(options: TSPOptions) -> InstanceSplits:
    """Return the instances that the options describe.

    no data           Gaussian instances, each part from its own stream; a larger part begins with the smaller one
    one large map     a file with one instance of more than `cities` cities: random subsets, from streams as above
    many instances    split at random by the seed: see `split_instances`

    Instances from files are normalised, because predictors are trained on zero mean and unit variance.
    """
    counts: dict[SplitName, int] = {"train": options.train, "validation": options.validation, "test": options.test}
    for name, least in {"cities": MIN_CITIES, "train": 1, "validation": 1, "test": 1, "seed": 0}.items():
        if getattr(options, name) < least:
            raise OptionError(f"--{name} is {getattr(options, name)}; it must be at least {least}")
    if options.data is None:
        parts = {name: gaussian_instances(n, options.cities, options.seed, name) for name, n in counts.items()}
        return InstanceSplits(parts, f"Gaussian instances of {options.cities} cities, seed {options.seed}")
    source = read_cities(options.data)
    if len(source.instances) == 1:
        return _splits_of_pool(_pool_of(source), options, counts)
    return _splits_of_instances(source, options, counts)


def _splits_of_pool(pool: Pool, options: TSPOptions, counts: Mapping[SplitName, int]) -> InstanceSplits:
    n_pool, n = len(pool.cities), sum(counts.values())
    if n_pool <= options.cities:
        raise DataError(
            f"{pool.name} has one instance of {n_pool} distinct cities, and --cities is {options.cities}; give a larger"
            " map to draw instances from, a folder or CSV file with many instances, or a smaller --cities"
        )
    # n^2 / (2 x number of subsets) bounds the probability that two instances are equal.
    log_subsets = math.lgamma(n_pool + 1) - math.lgamma(options.cities + 1) - math.lgamma(n_pool - options.cities + 1)
    if 2 * math.log(n) - math.log(2) - log_subsets > math.log(1e-3):
        raise DataError(
            f"{pool.name} has {n_pool} distinct cities, too few to draw {n} distinct instances of {options.cities};"
            " give a larger map, or change --cities"
        )
    parts = {
        name: instances_from_pool(pool.cities, n, options.cities, options.seed, name) for name, n in counts.items()
    }
    dropped = f", {pool.duplicates} duplicates dropped" if pool.duplicates else ""
    words = f"{options.cities} cities of the {n_pool} in {pool.name}{dropped}, drawn at random, seed {options.seed}"
    return InstanceSplits(parts, words)


def _splits_of_instances(source: CityData, options: TSPOptions, counts: Mapping[SplitName, int]) -> InstanceSplits:
    instances = stack_instances(source)
    n, n_cities, asked = len(instances), instances.shape[1], sum(counts.values())
    if n_cities != options.cities:
        raise DataError(
            f"the instances in {source.name} have {n_cities} cities, and --cities is {options.cities}; give"
            f" --cities {n_cities}"
        )
    instances = normalise(instances)
    _check_distinct(instances, source)
    parts = split_instances(instances, counts, options.seed, source.name)
    fewer = f" ({asked} were asked for)" if n < asked else ""
    words = f"{n} instances of {n_cities} cities in {source.name}{fewer}, split by seed {options.seed}"
    return InstanceSplits(parts, words)


def split_instances(
    instances: Tensor, counts: Mapping[SplitName, int], seed: int, name: str = "the data"
) -> dict[SplitName, Tensor]:
    """Split instances at random into parts of the sizes `counts`, or in these proportions if there are fewer.

    The test part does not change with the number of training instances."""
    if len(instances) < len(counts):
        raise DataError(
            f"{name} has {len(instances)} instances; at least {len(counts)} are needed, one for each of"
            f" {', '.join(counts)}"
        )
    order = torch.from_numpy(np.argsort(_words(1, len(instances), seed, "deal")[0], kind="stable"))
    sizes = dict(counts) if sum(counts.values()) <= len(instances) else divide_by_remainder(len(instances), counts)
    parts, start = {}, 0
    for part in reversed(sizes):  # test first
        parts[part] = instances[order[start : start + sizes[part]]]
        start += sizes[part]
    return {part: parts[part] for part in counts}


# --- reading ---------------------------------------------------------------------------------------------------------


def stack_instances(source: CityData) -> Tensor:
    """Return instances with their original coordinates; refuse different sizes and equal cities. float64 (n, N, 2)"""
    first = source.instances[0]
    for other in source.instances:
        if len(other.cities) != len(first.cities):
            raise DataError(
                f"instances differ in size: {first.label} has {count_cities(len(first.cities))}, {other.label} has"
                f" {count_cities(len(other.cities))}; give instances of one size"
            )
    instances = torch.from_numpy(np.stack([instance.cities for instance in source.instances]))
    if (found := _find_duplicate(normalise(instances))) is not None:
        instance, (one, two) = source.instances[found[0]], sorted(found[1:])
        what = "are both at" if (instance.cities[one] == instance.cities[two]).all() else "are too close at"
        raise DataError(
            f"{instance.label}: the cities on lines {instance.lines[one]} and {instance.lines[two]} {what}"
            f" {tuple(instance.cities[one].tolist())}; remove one of them"
        )
    return instances


def _check_distinct(instances: Tensor, source: CityData) -> None:
    """Refuse equal instances, in any order of their cities: they would leak from one part into another."""
    seen: dict[bytes, str] = {}
    for cities, instance in zip(np.sort(_points(instances), axis=1), source.instances, strict=True):
        other = seen.setdefault(cities.tobytes(), instance.label)
        if other is not instance.label:
            raise DataError(f"{other} and {instance.label} are the same instance; remove one of them")


def _points(instances: Tensor) -> NDArray[np.complex128]:
    """Return cities as x + iy, which numpy sorts by x, then by y. (n, N, 2) -> (n, N)"""
    points = instances.double().numpy() + 0.0  # no -0.0
    return np.asarray(points[..., 0] + 1j * points[..., 1])


def _find_duplicate(instances: Tensor) -> tuple[int, int, int] | None:
    """Return the first instance with two equal cities, and the two cities. (n, N, 2)"""
    points = _points(instances)
    order = np.argsort(points, axis=1, kind="stable")
    ordered = np.take_along_axis(points, order, axis=1)
    equal = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    if len(equal) == 0:
        return None
    instance, place = equal[0]
    return int(instance), int(order[instance, place]), int(order[instance, place + 1])


def _pool_of(source: CityData) -> Pool:
    cities = torch.from_numpy(source.instances[0].cities)
    # Closer cities would be equal in the float32 of an instance. Adding 0.0 turns -0.0 into 0.0.
    _, first = np.unique(np.round(normalise(cities).double().numpy(), 6) + 0.0, axis=0, return_index=True)
    kept = torch.from_numpy(np.sort(first))
    return Pool(cities[kept], len(cities) - len(kept), source.name)
