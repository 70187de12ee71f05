"""What a method does to test instances as its setting moves: the points of a deferral curve, before they are averaged.

n test instances, T settings, R weightings of the instances (a bootstrap resample is a weighting).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias, final

import numpy as np

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.hand_off_rules import ScoredHandOffs, Values, to_floats
from seqdefer.errors import DataError
from seqdefer.types import HandOffTable

Outcome: TypeAlias = tuple[Values, Values]  # tokens deferred (n,) and loss (n,) of one decision per instance


def require_same_shape(**arrays: Floats) -> None:
    """Raise where arrays that describe the same instances differ in shape."""
    if len({array.shape for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DataError(f"these arrays describe the same instances and need the same shape: {shapes}")


class Sweep(ABC):
    """What a method does to n test instances as its setting moves.

    Sums are taken before they are divided by the weights: counts of tokens then add up exactly, and settings that
    defer equally much get equal x, whatever the order of the instances. `settings` are those that a plan would be
    given, in the order of `curves`; None where they are not known.
    """

    settings: Floats | None  # (T,)

    @abstractmethod
    def curves(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return weighted mean deferred and loss at every setting, in any order. weights (R, n) -> x, y (R, T)"""

    def in_passes(self) -> Sweep | None:
        """Return the same settings with the expert's passes in the place of deferred tokens: see `budgets.passes`. None
        where they were not counted."""
        return self  # an expert that writes on its own takes a pass for each token

    @abstractmethod
    def in_seconds(self, *, a_pass: float, a_token: float) -> Sweep | None:
        """Return the same settings with the seconds that the expert adds in the place of deferred tokens: so many for
        a pass over a chunk, or for a token that it writes on its own. None where passes were not counted."""


@final
class GridSweep(Sweep):
    """Outcomes measured at each of T settings (token-level deferral): deferred, loss, perhaps passes; (T, n) each."""

    def __init__(
        self, deferred: Values, loss: Values, passes: Values | None = None, settings: Values | None = None
    ) -> None:
        self.deferred = to_floats(deferred)
        self.loss = to_floats(loss)
        self.passes = None if passes is None else to_floats(passes)
        self.settings = None if settings is None else to_floats(settings)
        require_same_shape(deferred=self.deferred, loss=self.loss)

    def in_passes(self) -> Sweep | None:
        return None if self.passes is None else GridSweep(self.passes, self.loss)

    def in_seconds(self, *, a_pass: float, a_token: float) -> Sweep | None:
        return None if self.passes is None else GridSweep(self.passes * a_pass, self.loss)

    def curves(self, weights: Floats) -> tuple[Floats, Floats]:
        total = weights.sum(1, keepdims=True)
        return weights @ self.deferred.T / total, weights @ self.loss.T / total


@final
class StepSweep(Sweep):
    """Outcomes that change step by step: as the setting falls, steps are taken in the order of falling scores (E,),
    equal scores together. Step e belongs to instance rows[e] and adds to what it defers and loses; `start` is the
    outcome before any step. T is the number of distinct scores, and one for no step. A row's own steps must have
    falling scores.
    """

    def __init__(self, scores: Values, rows: Values, change: Outcome, start: Outcome) -> None:
        self.scores, self.rows = to_floats(scores), to_floats(rows).astype(np.int64)
        self.change = (to_floats(change[0]), to_floats(change[1]))
        self.start = (to_floats(start[0]), to_floats(start[1]))
        require_same_shape(scores=self.scores, deferred=self.change[0], loss=self.change[1])
        require_same_shape(start_deferred=self.start[0], start_loss=self.start[1])
        if np.isnan(self.scores).any():
            raise DataError(f"{int(np.isnan(self.scores).sum())} scores are NaN and have no place in the order")
        self.settings = np.append(np.inf, -np.unique(-self.scores))

    def in_seconds(self, *, a_pass: float, a_token: float) -> Sweep:
        change, start = ((part[0] * a_token, part[1]) for part in (self.change, self.start))
        return StepSweep(self.scores, self.rows, change, start)

    def curves(self, weights: Floats) -> tuple[Floats, Floats]:
        order = np.argsort(-self.scores, kind="stable")
        falling = self.scores[order]
        last = np.append(falling[:-1] != falling[1:], True) if len(order) else np.empty(0, bool)  # of equal scores
        total = weights.sum(1, keepdims=True)

        def path(start: Floats, change: Floats) -> Floats:
            first = (weights @ start)[:, None]  # (R, 1)
            gained = np.cumsum(weights[:, self.rows[order]] * change[order], axis=1)[:, last]
            return np.asarray(np.hstack([first, first + gained]) / total)

        return path(self.start[0], self.change[0]), path(self.start[1], self.change[1])


def switch_sweep(scores: Values, keep: Outcome, defer: Outcome) -> StepSweep:
    """Sweep a threshold: instance i switches from `keep` to `defer` at scores[i]. (n,) each"""
    arrays = {"scores": to_floats(scores), "keep_deferred": to_floats(keep[0]), "keep_loss": to_floats(keep[1]),
              "defer_deferred": to_floats(defer[0]), "defer_loss": to_floats(defer[1])}  # fmt: skip
    require_same_shape(**arrays)
    change = (arrays["defer_deferred"] - arrays["keep_deferred"], arrays["defer_loss"] - arrays["keep_loss"])
    return StepSweep(scores, np.arange(len(arrays["scores"])), change, keep)


def hand_off_sweep(scored: ScoredHandOffs, table: HandOffTable) -> StepSweep:
    """Sweep whole or one-time deferral: the choices change along the path of the rule."""
    path, rows = scored.path(), np.arange(len(table))
    deferred, loss = to_floats(table.deferred)[:, scored.grid], to_floats(table.loss)[:, scored.grid]
    change = tuple(values[path.rows, path.after] - values[path.rows, path.before] for values in (deferred, loss))
    start = deferred[rows, path.first], loss[rows, path.first]
    return StepSweep(path.settings, path.rows, (change[0], change[1]), start)
