"""Makes a path between two fixed ends shorter: 2-opt and Or-opt moves, the best one first, until none helps.

It gives the exact solvers an upper bound. All moves are judged at once as arrays, without a compiler. The expert that
searches well is `seqdefer.tasks.tsp.search`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAST_GAIN = 1e-9  # of the mean distance: less is rounding
LONGEST_SEGMENT = 3  # cities that an Or-opt move takes along


def improve(path: Ints, distances: Floats) -> Ints:
    """A path with the same ends and cities to which no move helps. A closed tour is a path back to where it began."""
    while len(path) > 3:
        between = distances[np.ix_(path, path)]
        gain, move = max(_best_reversal(between), *_best_shifts(between), key=lambda found: found[0])
        if gain <= LEAST_GAIN:
            break
        path = path[move]
    return path


Move = tuple[float, Ints]  # what it gains, and the path after it as positions in the path before


def _best_reversal(between: Floats) -> Move:
    """The edges after positions k and `last` go, the part between them turns round."""
    m, steps = len(between), np.diagonal(between, 1)
    gains = steps[:, None] + steps[None, :] - between[:-1, :-1] - between[1:, 1:]
    gains = np.triu(gains, 1)  # 0 elsewhere: that gains nothing
    k, last = divmod(int(gains.argmax()), m - 1)
    order = np.arange(m)
    order[k + 1 : last + 1] = order[k + 1 : last + 1][::-1]
    return float(gains[k, last]), order


def _best_shifts(between: Floats) -> list[Move]:
    return [
        _best_shift(between, size, turned)
        for size in range(1, min(LONGEST_SEGMENT, len(between) - 3) + 1)
        for turned in ((False, True) if size > 1 else (False,))
    ]


def _best_shift(between: Floats, size: int, turned: bool) -> Move:
    """The `size` cities from position i on go between positions k and k + 1."""
    m, steps = len(between), np.diagonal(between, 1)
    first = np.arange(1, m - size)  # (I,)
    last = first + size - 1
    freed = between[first - 1, first] + between[last, last + 1] - between[first - 1, last + 1]
    head, tail = (last, first) if turned else (first, last)
    gains = freed[:, None] + steps[None, :] - between[head, :-1] - between[tail, 1:]  # (I, m - 1)
    places = np.arange(m - 1)
    gains[(places >= first[:, None] - 1) & (places <= last[:, None])] = -np.inf
    row, k = divmod(int(gains.argmax()), m - 1)
    i = row + 1
    segment = np.arange(i, i + size)
    rest = np.delete(np.arange(m), segment)
    place = (k if k < i else k - size) + 1
    order = np.concatenate([rest[:place], segment[::-1] if turned else segment, rest[place:]])
    return float(gains[row, k]), order
