"""Lower convex hulls of many small sets of points at once: what is worth choosing when each unit of x has a price.

Row i has the points (x[i, d], y[i, d]). At a price of s a unit of x, the least y + s x is at a vertex of the row's
lower hull; as s falls from infinity, the choice walks along the hull's edges from the smallest x on, one edge at each
slope -s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


def first_vertices(x: Floats, y: Floats) -> Integers:
    """Return the hull's leftmost vertex of each row: least x, then least y. An infinite y marks padding. (n,)"""
    first: Integers = np.lexsort((y, np.where(np.isfinite(y), x, np.inf)), axis=-1)[:, 0]
    return first


def hull_edges(x: Floats, y: Floats) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Yield the edges of all rows' hulls by gift wrapping, all rows in step: rows, start points, end points (E,).

    Each step yields at most one edge a row, from left to right. Of points on a line only the outermost are vertices:
    a row's slopes rise strictly, as far as numbers can tell."""
    x = np.where(np.isfinite(y), x, np.inf)
    rows, here = np.arange(len(x)), first_vertices(x, y)
    while len(rows):
        run = x[rows] - x[rows, here][:, None]
        is_ahead = np.isfinite(y[rows]) & (run > 0)
        rise = np.where(is_ahead, y[rows], 0.0) - y[rows, here][:, None]
        slopes = np.divide(rise, run, out=np.full_like(run, np.inf), where=is_ahead)
        following = np.where(slopes == slopes.min(1, keepdims=True), run, -1.0).argmax(1)
        moving = is_ahead.any(1)
        rows, here, following = rows[moving], here[moving], following[moving]
        if len(rows):
            yield rows, here, following
        here = following


def priced_steps(x: Floats, y: Floats) -> tuple[Floats, Integers, Integers, Integers]:
    """Return all edges with the price of a unit of x at which each is taken: prices, rows, start, end points. (E,)

    The edges of a row stand in their order, and its prices never rise, even by rounding along a line."""
    lowest = np.full(len(x), np.inf)
    none = np.empty(0, np.int64)
    steps = [(np.empty(0), none, none, none)]
    for rows, here, there in hull_edges(x, y):
        price = (y[rows, here] - y[rows, there]) / (x[rows, there] - x[rows, here])
        lowest[rows] = np.minimum(price, lowest[rows])
        steps.append((lowest[rows], rows, here, there))
    prices, rows, here, there = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    return prices, rows, here, there
