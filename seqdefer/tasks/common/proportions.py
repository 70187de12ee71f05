"""Whole numbers in given proportions, for data that is too small for the split that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=str)


def divide_by_remainder(n: int, weights: Mapping[Name, int]) -> dict[Name, int]:
    """Divide `n` in the proportions of `weights`, at least one each where `n` allows it.

    What rounding leaves over goes to the names that are furthest below their share.

        divide_by_remainder(10, {"train": 70, "validation": 10, "test": 20})  # 7, 1, 2
    """
    total = sum(weights.values())
    sizes = {name: max(1, n * weight // total) for name, weight in weights.items()}
    while sum(sizes.values()) != n:
        lacking = {name: n * weight - total * sizes[name] for name, weight in weights.items()}
        if sum(sizes.values()) < n:
            sizes[max(lacking, key=lambda name: lacking[name])] += 1
        else:
            sizes[max(sizes, key=lambda name: sizes[name])] -= 1
    return sizes
