"""Local search on a path between two fixed ends: 2-opt and Or-opt moves, best first, until none helps.

It gives the exact solvers an upper bound. All moves are evaluated at once as arrays, without a compiler. The stronger
search of the expert is in `seqdefer.tasks.tsp.search`.
"""

from __future__ import annotations

import numpy as np

from seqdefer.tasks.tsp.completions import Floats, Ints

MIN_GAIN = 1e-9  # in mean distances; less is rounding
MAX_SEGMENT = 3  # cities in an Or-opt move


def improve(path: Ints, distances: Floats) -> Ints:
    """Return a path with the same ends and cities that no move improves. A closed tour is a path to its own start."""
    while len(path) > 3:
        between = distances[np.ix_(path, path)]
        gain, move = max(_best_reversal(between), *_best_shifts(between), key=lambda found: found[0])
        if gain <= MIN_GAIN:
            break
        path = path[move]
    return path


Move = tuple[float, Ints]  # its gain, and the new path as positions in the old one


def _best_reversal(between: Floats) -> Move:
    """Remove the edges after positions k and `last`, and reverse the part between them."""
    m, steps = len(between), np.diagonal(between, 1)
    gains = steps[:, None] + steps[None, :] - between[:-1, :-1] - between[1:, 1:]
    gains = np.triu(gains, 1)  # 0 elsewhere: that gains nothing
    k, last = divmod(int(gains.argmax()), m - 1)
    order = np.arange(m)
    order[k + 1 : last + 1] = order[k + 1 : last + 1][::-1]
    return float(gains[k, last]), order


def _best_shifts(between: Floats) -> list[Move]:
    return [
        _best_shift(between, size, reverse)
        for size in range(1, min(MAX_SEGMENT, len(between) - 3) + 1)
        for reverse in ((False, True) if size > 1 else (False,))
    ]


def _best_shift(between: Floats, size: int, reverse: bool) -> Move:
    """Move the `size` cities from position i to between positions k and k + 1."""
    m, steps = len(between), np.diagonal(between, 1)
    first = np.arange(1, m - size)  # (I,)
    last = first + size - 1
    freed = between[first - 1, first] + between[last, last + 1] - between[first - 1, last + 1]
    head, tail = (last, first) if reverse else (first, last)
    gains = freed[:, None] + steps[None, :] - between[head, :-1] - between[tail, 1:]  # (I, m - 1)
    places = np.arange(m - 1)
    gains[(places >= first[:, None] - 1) & (places <= last[:, None])] = -np.inf
    row, k = divmod(int(gains.argmax()), m - 1)
    i = row + 1
    segment = np.arange(i, i + size)
    rest = np.delete(np.arange(m), segment)
    place = (k if k < i else k - size) + 1
    order = np.concatenate([rest[:place], segment[::-1] if reverse else segment, rest[place:]])
    return float(gains[row, k]), order
