"""How the scores of a draft become one hand-off, at a setting: the decision rules of whole and one-time deferral.

    odds      defer where the log odds of deferring at all reach the threshold, at the best-scored hand-off (the paper)
    largest   defer where the largest score reaches it, there (confidence rules, and whole deferral)
    cost      take the hand-off of the least estimated loss + price x tokens deferred (ours)

Scores (n, J) belong to the hand-offs `grid` (J,): tokens kept, rising, no deferral last. Each rule answers two
questions: which hand-off at a setting (`choose`), and how the choices change as the setting falls (`path`). The
second is what curves and budgets are made of; both agree at every setting. numpy in float64 throughout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from seqdefer.budgets.convex_hull import Floats, Integers, first_vertices, priced_steps
from seqdefer.errors import DataError, OptionError, look_up

Values: TypeAlias = ArrayLike | Tensor


def to_floats(values: Values) -> Floats:
    """Return tensors, arrays or lists as float64."""
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)


@dataclass(frozen=True)
class HandOffPath:
    """How the choices of n drafts change as the setting falls from infinity. Choices are columns of the grid."""

    first: Integers  # (n,) at infinity
    settings: Floats  # (E,) at which each step is taken
    rows: Integers  # (E,) whose step it is; the settings of a row's own steps fall
    before: Integers  # (E,)
    after: Integers  # (E,)


class HandOffRule(ABC):
    """A decision rule. Arguments: scores (n, J), grid (J,), lengths (n,) of the drafts."""

    @abstractmethod
    def choose(self, scores: Floats, grid: Integers, lengths: Integers, settings: Floats) -> Integers:
        """Return the column of the grid that each draft takes at its own setting. settings (n,) -> (n,)"""

    @abstractmethod
    def path(self, scores: Floats, grid: Integers, lengths: Integers) -> HandOffPath:
        """Return how the choices change as one setting for all falls."""


class _Switch(HandOffRule):
    """One switch per draft: from no deferral to its best hand-off, where its value reaches the threshold."""

    @abstractmethod
    def values(self, scores: Floats) -> tuple[Floats, Integers]:
        """Return the value of deferring and the column of the best hand-off, the smallest among equals. (n,) each"""

    def choose(self, scores: Floats, grid: Integers, lengths: Integers, settings: Floats) -> Integers:
        values, best = self.values(scores)
        return np.where(values >= settings, best, len(grid) - 1)

    def path(self, scores: Floats, grid: Integers, lengths: Integers) -> HandOffPath:
        values, best = self.values(scores)
        kept_all = np.full(len(scores), len(grid) - 1)
        return HandOffPath(kept_all, values, np.arange(len(scores)), kept_all, best)


class Odds(_Switch):
    """The paper's rule. It keeps the draft while the no-deferral score exceeds a threshold. A score means something
    only beside the others (the losses see differences), so it is normalised and turned round: log odds of deferring.
    Their order is that of falling log_softmax, without its ties where softmax saturates."""

    def values(self, scores: Floats) -> tuple[Floats, Integers]:
        odds = scores[:, :-1] - scores[:, -1:]  # (n, J - 1)
        return np.logaddexp.reduce(odds, axis=1), odds.argmax(1)


class Largest(_Switch):
    """Defers by the largest score of a hand-off; that of no deferral is not looked at."""

    def values(self, scores: Floats) -> tuple[Floats, Integers]:
        return scores[:, :-1].max(1), scores[:, :-1].argmax(1)


class Cost(HandOffRule):
    """Scores are minus the loss expected of each hand-off, -inf for a hand-off past the draft's end. What a hand-off
    will defer is taken to be what the draft has left. As the price falls, the choice walks along the lower hull of a
    draft's estimates."""

    def choose(self, scores: Floats, grid: Integers, lengths: Integers, settings: Floats) -> Integers:
        ahead = self._ahead(grid, lengths)
        with np.errstate(invalid="ignore"):  # at an infinite price: infinity x 0 is free, infinity - infinity is masked
            spent = np.where(ahead > 0, settings[:, None] * ahead, 0.0)
            chosen: Integers = np.where(scores == -np.inf, np.inf, spent - scores).argmin(1)
        return chosen

    def path(self, scores: Floats, grid: Integers, lengths: Integers) -> HandOffPath:
        ahead = self._ahead(grid, lengths)
        return HandOffPath(first_vertices(ahead, -scores), *priced_steps(ahead, -scores))

    @staticmethod
    def _ahead(grid: Integers, lengths: Integers) -> Floats:
        return np.asarray(np.maximum(lengths[:, None] - grid, 0), dtype=np.float64)  # (n, J)


HAND_OFF_RULES: dict[str, HandOffRule] = {"cost": Cost(), "largest": Largest(), "odds": Odds()}


@dataclass(frozen=True)
class ScoredHandOffs:
    """The scores of n drafts with the rule that decides by them."""

    rule: HandOffRule
    scores: Floats  # (n, J)
    grid: Integers  # (J,)
    lengths: Integers  # (n,)

    @classmethod
    def of(
        cls, scores: Values, length: int, *, hand_offs: Sequence[int] | Values = (), rule: str = "largest",
        lengths: Values | None = None,
    ) -> ScoredHandOffs:  # fmt: skip
        """Check and join what a rejector says about drafts of sequences of up to `length` tokens.

        Without `hand_offs`, scores (n,) are of whole deferral. `lengths` (n,) are the drafts'; `length` by default."""
        values, grid = to_floats(scores), to_floats(hand_offs).astype(np.int64)
        if values.ndim == 1:  # whole deferral is a hand-off before the first token
            values, grid = np.stack([values, np.zeros_like(values)], 1), np.array([0, length])
        if len(grid) < 2 or grid[0] < 0 or grid[-1] != length or (np.diff(grid) <= 0).any():
            raise OptionError(
                f"the grid of hand-offs must rise from 0 or more to {length} (no deferral): {grid.tolist()}"
            )
        if np.isnan(values).any():
            raise DataError(f"{int(np.isnan(values).sum())} scores are NaN and have no place in the order")
        own = np.full(len(values), length) if lengths is None else to_floats(lengths).astype(np.int64)
        return cls(look_up("decision rule", rule, HAND_OFF_RULES), values, grid, own)

    def __len__(self) -> int:
        return len(self.scores)

    def select(self, rows: Integers) -> ScoredHandOffs:
        return ScoredHandOffs(self.rule, self.scores[rows], self.grid, self.lengths[rows])

    def columns(self, settings: Values) -> Integers:
        """Return the chosen columns of the grid, at one setting or at one for each draft. (n,)"""
        each = np.broadcast_to(to_floats(settings), len(self))
        return self.rule.choose(self.scores, self.grid, self.lengths, each)

    def kept(self, settings: Values) -> Integers:
        """Return the tokens that each draft keeps. (n,)"""
        return self.grid[self.columns(settings)]

    def kept_within(self, settings: Values, allowed: NDArray[np.bool_]) -> Integers:
        """Return the tokens that each draft keeps if only some of its hand-offs are allowed. bool (n, J) -> (n,)"""
        scores = np.where(allowed | (np.arange(len(self.grid)) == len(self.grid) - 1), self.scores, -np.inf)
        kept = ScoredHandOffs(self.rule, scores, self.grid, self.lengths).kept(settings)
        return np.where(allowed[:, :-1].any(1), kept, self.grid[-1])

    def path(self) -> HandOffPath:
        """Return how the choices change as the setting falls."""
        return self.rule.path(self.scores, self.grid, self.lengths)

    def steps(self) -> list[list[tuple[float, int]]]:
        """Return for each draft the falling settings at which its hand-off changes, and the tokens kept from there."""
        path, found = self.path(), [list[tuple[float, int]]() for _ in range(len(self))]
        for row, setting, after in zip(path.rows.tolist(), path.settings.tolist(), path.after, strict=True):
            found[row].append((setting, int(self.grid[after])))
        return found

    def by_position(self) -> Floats:
        """Return the scores compared with that of no deferral, where the hand-offs would be; 0 elsewhere. (n, L)"""
        *kept, length = self.grid.tolist()
        placed = np.zeros((len(self), length))
        compared = self.scores[:, :-1] - self.scores[:, -1:]
        placed[:, kept] = np.where(np.isfinite(compared), compared, 0.0)  # a hand-off past a draft's end is none
        return placed
