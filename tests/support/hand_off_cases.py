"""Random hand-off tables with scores, and slow versions of curves: one threshold and one instance at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.hand_off_rules import ScoredHandOffs, Values
from seqdefer.budgets.sweeps import GridSweep, StepSweep, Sweep, hand_off_sweep
from seqdefer.evaluation.curves import Curve, Ends
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.types import HandOffTable

Points = list[tuple[float, float]]


class HandOffCase:
    """A random test set from one seed. It has few distinct values, so that scores, losses and counts often tie."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.n = int(self.random.integers(1, 9))
        self.length = int(self.random.integers(1, 7))
        self.grid = hand_off_grid(self.length, int(self.random.integers(2, self.length + 2)))
        self.lengths = self.random.integers(1, self.length + 1, self.n)
        kept = np.minimum(np.arange(self.length + 1), self.lengths[:, None])  # a short draft repeats its last column
        loss = np.take_along_axis(self.integers(5, self.n, self.length + 1), kept, 1)
        written = np.maximum(self.lengths[:, None] - kept + self.random.integers(-2, 3, kept.shape), 1)
        deferred = np.where(kept == self.lengths[:, None], 0, written)
        self.table = HandOffTable(torch.tensor(loss), torch.tensor(deferred))
        self.ends = Ends.of(self.table)

    def integers(self, below: int, *shape: int) -> Floats:
        return self.random.integers(0, below, shape).astype(np.float64)

    def scored(self, scores: Values, rule: str) -> ScoredHandOffs:
        return ScoredHandOffs.of(scores, self.length, hand_offs=self.grid, rule=rule, lengths=self.lengths)

    def once_sweep(self, scores: Values, rule: str) -> StepSweep:
        return hand_off_sweep(self.scored(scores, rule), self.table)

    def sweep(self) -> Sweep:
        """Return one of the sweeps that a table allows."""
        once = self.integers(3, self.n, len(self.grid))
        choices = [
            self.once_sweep(self.costs(), "cost"),
            whole_sweep(self.integers(4, self.n), self.table),
            self.once_sweep(once, "odds"),
            self.once_sweep(once, "largest"),
            self.grid_sweep(),
        ]
        return choices[int(self.random.integers(len(choices)))]

    def costs(self) -> Floats:
        """Return minus the estimated losses, in quarters, so that equal quotients are equal to the bit. Hand-offs past
        the end of a draft, and some others, are impossible."""
        scores = -self.integers(9, self.n, len(self.grid)) / 4
        impossible = (self.grid.numpy() >= self.lengths[:, None]) | (self.random.random(scores.shape) < 0.15)
        impossible[:, -1] = False
        return np.where(impossible, -np.inf, scores)

    def grid_sweep(self) -> GridSweep:
        """Take any hand-off of any instance at some settings, in no order."""
        kept = self.random.integers(0, self.length + 1, (int(self.random.integers(1, 8)), self.n))
        rows = np.arange(self.n)
        return GridSweep(self.table.deferred.numpy()[rows, kept], self.table.loss.numpy()[rows, kept])

    def outcome(self, kept: int, row: int) -> tuple[float, float]:
        return float(self.table.deferred[row, kept]), float(self.table.loss[row, kept])

    def mean_outcome(self, kept: list[int]) -> tuple[float, float]:
        taken = [self.outcome(one, row) for row, one in enumerate(kept)]
        return sum(x for x, _ in taken) / self.n, sum(y for _, y in taken) / self.n


def whole_sweep(scores: Values, table: HandOffTable) -> StepSweep:
    return hand_off_sweep(ScoredHandOffs.of(scores, table.loss.shape[1] - 1), table)


def slow_curve(points: Points, ends: Ends) -> Points:
    """Sort by x, then by falling loss. The expert's end takes the place of all that lies beyond it."""
    last = (float(np.mean(ends.expert_deferred)), float(np.mean(ends.expert_loss)))
    inside = sorted((point for point in points if point[0] <= last[0]), key=lambda point: (point[0], -point[1]))
    return [(0.0, float(np.mean(ends.predictor_loss))), *inside, last]


def slow_area(points: Points) -> float:
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points))


def slow_switch(case: HandOffCase, values: list[float], best: list[int]) -> Points:
    """At every threshold, hand off each instance at its best place where its value reaches the threshold."""
    thresholds = [math.inf, *sorted(set(values), reverse=True)]
    return [
        case.mean_outcome([kept if value >= at else case.length for value, kept in zip(values, best, strict=True)])
        for at in thresholds
    ]


def assert_same_curve(curve: Curve, points: Points) -> None:
    """Compare areas, and points up to repeated ones."""
    got, expected = (np.round(some, 9).tolist() for some in (curve.points, points))
    assert [point for point, _ in itertools.groupby(got)] == [point for point, _ in itertools.groupby(expected)]
    assert curve.area == pytest.approx(slow_area(points))
