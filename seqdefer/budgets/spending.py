"""What each setting spends on some inputs; a budget rule chooses among them.

Settings fall from infinity (never defer) to minus infinity (defer all that can be): the last spends the most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from seqdefer.budgets.convex_hull import Floats, Integers
from seqdefer.budgets.hand_off_rules import ScoredHandOffs, to_floats
from seqdefer.budgets.token_sweeps import TokenSweep
from seqdefer.errors import DataError, OptionError
from seqdefer.types import HandOffTable

MAX_SET_ASIDE = 32


@dataclass(frozen=True)
class Outcomes:
    """What P settings do to n inputs."""

    deferred: Floats  # (P, n) tokens by the expert
    written: Floats  # (P, n) tokens in all
    loss: Floats  # (P, n); nan where hand-offs were not labelled, 0 where there are no references


def n_set_aside(n: int) -> int:
    """Return how many of n inputs choose the settings of a guarantee and are not counted: at most a fifth."""
    return min(MAX_SET_ASIDE, max(1, n // 5))


def n_to_give(counted: int) -> int:
    """Return how many inputs it takes at least to count so many beside those set aside."""
    n = counted + 1
    while n - n_set_aside(n) < counted:
        n += 1
    return n


class Spending(ABC):
    """T settings, falling, and what they spend on n inputs."""

    settings: Floats  # (T,) falling
    length: int  # the most tokens that a sequence can have
    inputs: int  # n, those that are counted
    has_fixed_settings: bool = False  # the settings were chosen without the inputs that are counted
    # (n,) the highest setting at which each input is deferred; at token level, at which its first token is
    first_scores: Floats | None  # None where that is not known

    @property
    @abstractmethod
    def counts(self) -> tuple[Floats, Floats]:
        """The tokens deferred and written by each input at every setting. (T, n) each"""

    @property
    @abstractmethod
    def shares(self) -> Floats:
        """The share of all tokens that each setting spends. (T,)"""

    @property
    @abstractmethod
    def expert_loss(self) -> Floats:
        """The loss of each input if the expert writes all of it. (n,)"""

    @abstractmethod
    def at(self, places: Sequence[int]) -> Outcomes:
        """Return the outcomes of each input at some of the settings."""

    @abstractmethod
    def at_setting(self, setting: float) -> Outcomes:
        """Return the outcomes (1, n) at any setting that is known: of whole and one-time deferral, any at all."""

    @abstractmethod
    def select(self, rows: Integers) -> Spending:
        """Return the spending of some of the inputs, repeats allowed."""


class TokenSpending(Spending):
    """Token-level deferral, from rollouts at every threshold."""

    def __init__(self, sweep: TokenSweep, length: int, *, has_fixed_settings: bool = False) -> None:
        self.sweep, self.length, self.has_fixed_settings = sweep, length, has_fixed_settings
        falling = sweep.thresholds.argsort(descending=True)
        deferred, written, loss = (to_floats(part[falling]) for part in (sweep.deferred, sweep.lengths, sweep.loss))
        self.settings, self.inputs = to_floats(sweep.thresholds[falling]), deferred.shape[1]
        self._outcomes = Outcomes(deferred, written, loss)
        self.first_scores = None if sweep.first_scores is None else to_floats(sweep.first_scores)

    @property
    def counts(self) -> tuple[Floats, Floats]:
        return self._outcomes.deferred, self._outcomes.written

    @property
    def shares(self) -> Floats:
        return np.asarray(self._outcomes.deferred.sum(1) / self._outcomes.written.sum(1))

    @property
    def expert_loss(self) -> Floats:
        return np.asarray(self._outcomes.loss[-1])

    def at(self, places: Sequence[int]) -> Outcomes:
        rows, found = list(places), self._outcomes
        return Outcomes(found.deferred[rows], found.written[rows], found.loss[rows])

    def at_setting(self, setting: float) -> Outcomes:
        found = np.flatnonzero(self.settings == setting)
        if not len(found):
            raise OptionError(f"threshold {setting} was not rolled out; take one of the {len(self.settings)} that were")
        return self.at([int(found[0])])

    def select(self, rows: Integers) -> TokenSpending:
        sweep, places = self.sweep, torch.from_numpy(rows)
        deferred, lengths, loss = (column[:, places] for column in (sweep.deferred, sweep.lengths, sweep.loss))
        first_scores = None if sweep.first_scores is None else sweep.first_scores[places]
        selected = TokenSweep(sweep.thresholds, deferred, lengths, loss, first_scores=first_scores)
        return TokenSpending(selected, self.length, has_fixed_settings=self.has_fixed_settings)


class HandOffSpending(Spending):
    """Whole and one-time deferral, along the path of the rule: no rollouts are needed.

    A setting stands half way between two at which a choice changes, so that nothing depends on rounding."""

    def __init__(self, scored: ScoredHandOffs, table: HandOffTable) -> None:
        self.scored, self.table = scored, table
        self._deferred, self._loss = (to_floats(part)[:, scored.grid] for part in (table.deferred, table.loss))
        if (self._deferred < 0).any():
            raise DataError("some hand-offs of the grid were not labelled; label them, or choose from those that were")
        self._written = np.minimum(scored.grid, scored.lengths[:, None]) + self._deferred
        self.length, self.inputs, self._path = int(scored.grid[-1]), len(scored), scored.path()
        self.first_scores = np.full(self.inputs, -np.inf)
        np.maximum.at(self.first_scores, self._path.rows, self._path.settings)
        self._changing = -np.unique(-self._path.settings)  # (T - 1,) the settings at which some choice changes, falling
        between = np.concatenate([[np.inf], (self._changing[:-1] + self._changing[1:]) / 2, [-np.inf]])
        self.settings = between if len(self._changing) else between[:1]

    @property
    def expert_loss(self) -> Floats:
        if self.scored.grid[0] != 0:
            raise OptionError(
                f"the first hand-off is after {self.scored.grid[0]} tokens; the expert alone needs one at 0"
            )
        return np.asarray(self._loss[:, 0])

    @cached_property
    def shares(self) -> Floats:
        deferred, written = (self._totals(counts) for counts in (self._deferred, self._written))
        return np.asarray(deferred / written)

    def _totals(self, counts: Floats) -> Floats:
        """Return the sum over all inputs at every setting. (T,)"""
        changes = np.zeros(len(self.settings))
        changes[0] = counts[np.arange(len(counts)), self._path.first].sum()
        np.add.at(changes, self._places, self._change(counts))
        return changes.cumsum()

    @cached_property
    def counts(self) -> tuple[Floats, Floats]:
        return self._each(self._deferred), self._each(self._written)

    def _each(self, counts: Floats) -> Floats:
        """Return the count of each input at every setting. (T, n)"""
        changes = np.zeros((len(self.settings), len(counts)))
        changes[0] = counts[np.arange(len(counts)), self._path.first]
        np.add.at(changes, (self._places, self._path.rows), self._change(counts))
        return changes.cumsum(0)

    @cached_property
    def _places(self) -> Integers:
        """The first setting after each step. (E,)"""
        return np.searchsorted(-self._changing, -self._path.settings) + 1

    def _change(self, counts: Floats) -> Floats:
        path = self._path
        return counts[path.rows, path.after] - counts[path.rows, path.before]

    def at(self, places: Sequence[int]) -> Outcomes:
        return self._outcomes([self.settings[place] for place in places])

    def at_setting(self, setting: float) -> Outcomes:
        return self._outcomes([setting])

    def _outcomes(self, settings: Sequence[float]) -> Outcomes:
        rows = np.arange(len(self.scored))
        chosen: list[Integers] = [self.scored.columns(setting) for setting in settings]
        parts = (self._deferred, self._written, self._loss)
        return Outcomes(*(np.stack([part[rows, columns] for columns in chosen]) for part in parts))

    def select(self, rows: Integers) -> HandOffSpending:
        return HandOffSpending(self.scored.select(rows), self.table.select(torch.from_numpy(rows)))
