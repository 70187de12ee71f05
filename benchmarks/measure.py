"""Timing two ways of doing the same thing: first that their results are the same, then how long each takes.

Ways take turns (A/B/A/B), so that whatever else the machine does hurts both alike, and a ratio is taken of each turn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seqdefer.errors import SeqdeferError

Seconds = NDArray[np.float64]  # (repeats,)
FASTER = "times as fast"


class ResultsDifferError(SeqdeferError):
    """Two ways that should give the same result do not: their times mean nothing."""


@dataclass(frozen=True)
class Row:
    """One line of the table: the median, least and largest of what was measured, in `unit`."""

    benchmark: str
    what: str
    unit: str
    median: float
    low: float
    high: float
    same: str = ""  # how results were compared, and with what outcome; empty where there is nothing to compare with
    note: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)  # what the ratios were made of

    @classmethod
    def of(cls, benchmark: str, what: str, unit: str, values: ArrayLike, **texts: Any) -> Row:
        values = np.asarray(values, dtype=np.float64)
        return cls(benchmark, what, unit, float(np.median(values)), float(values.min()), float(values.max()), **texts)

    @classmethod
    def faster(cls, benchmark: str, what: str, ours: Seconds, theirs: Seconds, same: str, note: str = "") -> Row:
        """How many times faster we are than `what`."""
        seconds = {"ours": ours.tolist(), "theirs": theirs.tolist()}
        return cls.of(benchmark, what, FASTER, theirs / ours, same=same, note=note, seconds=seconds)


def race(ways: Mapping[str, Callable[[], Any]], repeats: int, least: float, tell: Callable[[str], None]) -> Any:
    """Seconds of each way, (repeats,) by name, taking turns. Run every way once before: comparing results does."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats):
        tell(f"round {turn + 1} of {repeats}")
        for name, way in ways.items():
            seconds[name].append(seconds_of(way, least))
    return {name: np.array(values) for name, values in seconds.items()}


def seconds_of(way: Callable[[], Any], least: float = 0.0) -> float:
    """Mean seconds of a call, over as many calls as take `least` seconds together: one call of 1 ms is mostly noise."""
    calls, begun = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begun < least:
        way()
        calls += 1
    return (time.perf_counter() - begun) / calls


def require_same(what: str, *pairs: tuple[ArrayLike, ArrayLike], tolerance: float = 0.0, rounding: float = 0.0) -> str:
    """Checks that ours and theirs are the same, and says so. All arrays have one shape.

    An entry is the same if it is so in every pair, to `tolerance` of its size (of 1, for smaller ones). `rounding` is
    the share of entries that may differ: batches of different sizes round differently, and where a score comes within
    rounding of a threshold the decision, and all that follows it, falls the other way.
    """
    gaps = [_gaps(np.asarray(ours), np.asarray(theirs), what) for ours, theirs in pairs]
    widest = np.maximum.reduce(gaps)
    n, different = widest.size, int((~(widest <= tolerance)).sum())  # so that NaN is different
    if different > rounding * n:
        raise ResultsDifferError(f"{what}: {different:,} of {n:,} differ between the two ways; please report this")
    if different:
        to = f" to {tolerance:g}" if tolerance else ""
        return f"{n - different:,} of {n:,} {what} equal{to}, the rest turned by rounding"
    return f"{n:,} {what} equal" + (f" to {widest.max():.1g} (allowed: {tolerance:g})" if widest.any() else "")


def _gaps(ours: NDArray[Any], theirs: NDArray[Any], what: str) -> NDArray[np.float64]:
    """How far apart, as a share of the size of theirs (of 1, for smaller ones)."""
    if ours.shape != theirs.shape:
        raise ResultsDifferError(
            f"{what}: the two ways give shapes {ours.shape} and {theirs.shape}; please report this"
        )
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return np.asarray(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1.0))


def peak_gigabytes() -> float:
    """The most memory this process has held so far."""
    import resource  # not on every system, and only one row needs it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)  # bytes there, kilobytes elsewhere
