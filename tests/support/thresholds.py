"""Thresholds that rounding cannot reach, and what the interleaved loop writes at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import roll_out
from seqdefer.rejectors.confidence import Confidence
from seqdefer.types import Examples, Rollout, SequenceSpec

NEAR = 0.15  # of all scores, on either side


def between(scores: Tensor, share: float) -> float:
    """Return the middle of the widest gap between scores whose ranks are near `share` of all."""
    ordered = scores.flatten().double().sort().values
    n = len(ordered)
    first, last = max(int((share - NEAR) * n), 0), min(int((share + NEAR) * n) + 2, n)
    some = ordered[first:last]
    at = int(some.diff().argmax())
    return float(some[at] + some[at + 1]) / 2


def interleaved(
    predictor: Any, expert: Any, examples: Examples, spec: SequenceSpec, shares: Sequence[float] = (0.43, 0.81)
) -> dict[float, Rollout]:
    """Return what the interleaved loop writes by confidence: all deferred, as scores divide, nothing deferred."""
    write = lambda threshold: roll_out(predictor, expert, examples, Threshold(Confidence(), threshold), spec)  # noqa: E731
    scores = write(9e9).scores
    return {one: write(one) for one in (-9e9, *(between(scores, share) for share in shares), 9e9)}
