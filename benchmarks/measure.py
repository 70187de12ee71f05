"""Compare and time several ways to the same result.

Results are compared first. Then the ways alternate (A/B/A/B), so that other load on the machine affects all of them,
and every round gives a ratio.
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
    """Two ways gave different results, so their times cannot be compared."""


@dataclass(frozen=True)
class Row:
    """One line of the table: median, minimum and maximum of the measurements, in `unit`."""

    benchmark: str
    what: str
    unit: str
    median: float
    low: float
    high: float
    same: str = ""  # how the results compare; empty if there is nothing to compare
    note: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)  # the terms of the ratios

    @classmethod
    def of(cls, benchmark: str, what: str, unit: str, values: ArrayLike, **texts: Any) -> Row:
        values = np.asarray(values, dtype=np.float64)
        return cls(benchmark, what, unit, float(np.median(values)), float(values.min()), float(values.max()), **texts)

    @classmethod
    def faster(cls, benchmark: str, what: str, ours: Seconds, theirs: Seconds, same: str, note: str = "") -> Row:
        """Return a row that says how many times faster our way is than `what`."""
        seconds = {"ours": ours.tolist(), "theirs": theirs.tolist()}
        return cls.of(benchmark, what, FASTER, theirs / ours, same=same, note=note, seconds=seconds)


def race(ways: Mapping[str, Callable[[], Any]], repeats: int, least: float, log: Callable[[str], None]) -> Any:
    """Return the seconds (repeats,) of each way, in alternating rounds. Run every way once before, as a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats):
        log(f"round {turn + 1} of {repeats}")
        for name, way in ways.items():
            seconds[name].append(seconds_of(way, least))
    return {name: np.array(values) for name, values in seconds.items()}


def seconds_of(way: Callable[[], Any], least: float = 0.0) -> float:
    """Return the mean seconds of a call, over as many calls as fit into `least` seconds: one call of 1 ms is noise."""
    calls, begun = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - begun < least:
        way()
        calls += 1
    return (time.perf_counter() - begun) / calls


def require_same(what: str, *pairs: tuple[ArrayLike, ArrayLike], tolerance: float = 0.0, rounding: float = 0.0) -> str:
    """Check that ours and theirs are equal; return a description. All arrays have one shape.

    An entry is equal if it is equal in every pair, to `tolerance` relative to max(1, its size). `rounding` is the share
    of entries that may differ: batches of different sizes round differently, and a score close to a threshold can flip
    a decision and everything after it.
    """
    gaps = [_gaps(np.asarray(ours), np.asarray(theirs), what) for ours, theirs in pairs]
    widest = np.maximum.reduce(gaps)
    n, different = widest.size, int((~(widest <= tolerance)).sum())  # NaN is different
    if different > rounding * n:
        raise ResultsDifferError(f"{what}: {different:,} of {n:,} differ between the two ways; please report this")
    if different:
        to = f" to {tolerance:g}" if tolerance else ""
        return f"{n - different:,} of {n:,} {what} equal{to}, the rest differ by rounding"
    return f"{n:,} {what} equal" + (f" to {widest.max():.1g} (allowed: {tolerance:g})" if widest.any() else "")


def _gaps(ours: NDArray[Any], theirs: NDArray[Any], what: str) -> NDArray[np.float64]:
    """Return the differences relative to max(1, the size of theirs)."""
    if ours.shape != theirs.shape:
        raise ResultsDifferError(
            f"{what}: the two ways give shapes {ours.shape} and {theirs.shape}; please report this"
        )
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return np.asarray(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1.0))


def peak_gigabytes() -> float:
    """Return the peak memory of this process."""
    import resource  # missing on some systems

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)  # bytes on macOS, kilobytes elsewhere
