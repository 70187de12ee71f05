"""Thresholds that rounding cannot reach."""

from __future__ import annotations

from torch import Tensor

NEAR = 0.15  # of all scores, on either side


def between(scores: Tensor, share: float) -> float:
    """Return the middle of the widest gap between scores whose ranks are near `share` of all."""
    ordered = scores.flatten().double().sort().values
    n = len(ordered)
    first, last = max(int((share - NEAR) * n), 0), min(int((share + NEAR) * n) + 2, n)
    some = ordered[first:last]
    at = int(some.diff().argmax())
    return float(some[at] + some[at + 1]) / 2
