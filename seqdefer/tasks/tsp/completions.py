"""The interface of the solvers of tours: they complete prefixes of a draft, one instance at a time.

    solved = LocalSearch().hand_offs(cities, draft, kept)    # (N, 2), (N,), (J,)
    solved.tours                                             # (J, N)

`seqdefer.tasks.tsp.experts` checks inputs, and solves the rows of a batch in parallel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Stop = NDArray[np.bool_]  # (1,): True ends the work soon; an array, because compiled code reads it too


@dataclass(frozen=True)
class HandOffs:
    """The completions of several prefixes of one draft."""

    tours: Ints  # (J, N)
    runs: int  # prefixes solved; the others follow from the one before
    unproven: int = 0  # prefixes whose tour may not be shortest, because of the time limit


class TourSolver(ABC):
    """A solver that completes tours. Thread-safe."""

    fingerprint: str  # names all that its tours depend on
    batch_size: int  # instances between two writes

    @abstractmethod
    def hand_offs(self, cities: Floats, draft: Ints, kept: Ints, *, stop: Stop | None = None) -> HandOffs:
        """Complete the first `kept` (J,), rising, cities of a draft (N,). cities: (N, 2)

        With nothing kept, the tour goes from city 0 towards its smaller neighbour. Setting `stop` ends the search soon,
        with the best tours so far."""

    def fill(self, cities: Floats, prefix: Ints) -> Ints:
        """Return a draft that begins with the prefix: then the other cities, in rising order. (N,)"""
        return np.concatenate([prefix, np.setdiff1d(np.arange(len(cities)), prefix)])

    def prepare(self) -> None:  # noqa: B027, most load nothing
        """Load what the threads share. It runs in the thread that receives interrupts."""
