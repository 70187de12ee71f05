"""What was served tells what settings spend: a calibration from a log, which has numbers and no texts.

    spending = served_spending(rows, length=20)
    calibrate(spending, inputs=spending.inputs, rejector=...)

Each input was served at one setting. What others would have spent follows from its scores:

token level   tokens are deferred where their logged scores reach the setting. That is exact at the setting that it
              was served at. Elsewhere it is an estimate: another author would have changed the prefix, and so the
              scores after it.
one-time      the hand-off at every setting is known, as the draft was scored before anyone took over. What the expert
              would then have written is known where that was served, and where nothing is handed off. Elsewhere it is
              what the draft has left or, for a promise, as much as a sequence can have: never less than the truth.

So a promise can rest on the log of one-time deferral alone, without the inputs that the rejector was fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.spending import TokenSpending, n_set_aside
from seqdefer.budgets.token_sweeps import N_THRESHOLDS, TokenSweep
from seqdefer.errors import DataError, OptionError


@dataclass(frozen=True)
class ServedInput:
    """What is logged of an input that was written to its end."""

    time: str
    rejector: str  # fingerprint
    budget: float
    threshold: float  # the setting, as JSON can hold it
    written: int
    deferred: int
    scores: tuple[float, ...] = ()  # token level: of each token
    draft: int = 0  # one-time: tokens of the draft
    hand_offs: tuple[tuple[float, int], ...] = ()  # one-time: falling settings, and the tokens kept from each on
    is_learned: bool = False  # the rejector was fitted on it: no guarantee may rest on it

    @property
    def first_score(self) -> float:
        """The highest setting at which it is deferred; at token level, at which its first token is."""
        if self.scores:
            return self.scores[0]
        return self.hand_offs[0][0] if self.hand_offs else -np.inf


def served_spending(rows: Sequence[ServedInput], length: int, *, promises: bool = False) -> TokenSpending:
    """Return what settings spend on inputs that were served. With `promises`, inputs that the rejector was fitted on do
    not count, nor do some that choose the settings, and counts are never below the truth: see above."""
    is_token_level = bool(rows and rows[0].scores)
    for row in rows:
        if not _is_sound(row, length, is_token_level):
            raise DataError(
                f"the log has an input, served at {row.time!r:.40}, not one of this model: {row.deferred} "
                f"of {row.written} tokens by the expert, {len(row.scores)} scores, a draft of {row.draft}; remove its "
                "line, or calibrate with inputs: --data FILE"
            )
    if promises and is_token_level:
        raise OptionError(
            "a log does not tell what other settings of token-level deferral would have spent, because decisions "
            "change the text that follows; a guarantee needs inputs: --data FILE"
        )
    rows = _unlearned(rows) if promises else rows
    order = np.random.default_rng(0).permutation(len(rows))
    n_aside = n_set_aside(len(rows)) if promises else 0
    settings = _settings([rows[place] for place in (order[:n_aside] if promises else order)])
    counted = [rows[place] for place in order[n_aside:]]
    counts = [(_by_score if is_token_level else _by_hand_off)(row, settings, length, promises) for row in counted]
    deferred, written = (torch.tensor(np.array(part).T) for part in zip(*counts, strict=True))
    first_scores = torch.tensor([row.first_score for row in counted], dtype=torch.float64)
    sweep = TokenSweep(torch.from_numpy(settings), deferred, written, torch.zeros(deferred.shape), None, first_scores)
    return TokenSpending(sweep, length, has_fixed_settings=promises)


def _unlearned(rows: Sequence[ServedInput]) -> list[ServedInput]:
    """Return the inputs that the rejector was not fitted on. Raise where these are fewer than two."""
    fresh = [row for row in rows if not row.is_learned]
    if len(fresh) < 2:
        raise OptionError(
            f"{len(rows) - len(fresh)} of {len(rows)} inputs were used to fit this rejector; a guarantee needs inputs "
            "that it was not fitted on"
        )
    return fresh


def _is_sound(row: ServedInput, length: int, is_token_level: bool) -> bool:
    """Tell whether a server can have logged an input; someone else may have."""
    if not 0 <= row.deferred <= row.written <= length or row.written == 0:
        return False
    if is_token_level:
        return len(row.scores) == row.written
    return not row.scores and 0 < row.draft <= length and all(0 <= kept <= length for _, kept in row.hand_offs)


def _settings(rows: Sequence[ServedInput]) -> Floats:
    """Return settings half way between scores that were met, and those that were served, falling."""
    met = np.unique([score for row in rows for score in (row.scores or [setting for setting, _ in row.hand_offs])])
    some = met[np.unique(np.linspace(0, len(met) - 1, min(N_THRESHOLDS, len(met))).round().astype(np.int64))]
    served = [row.threshold for row in rows]
    between = (some[:-1] + some[1:]) / 2
    return np.unique(np.concatenate([[np.inf, -np.inf], between, served]))[::-1].copy()


def _by_score(row: ServedInput, settings: Floats, length: int, promises: bool) -> tuple[Floats, Floats]:
    """Return the tokens deferred and written at each setting. (T,) each"""
    deferred = (np.array(row.scores) >= settings[:, None]).sum(1)
    return deferred, np.full(len(settings), len(row.scores))


def _by_hand_off(row: ServedInput, settings: Floats, length: int, promises: bool) -> tuple[Floats, Floats]:
    falling = np.array([setting for setting, _ in row.hand_offs])
    choices = (falling >= settings[:, None]).sum(1)  # steps that are taken at each setting
    kept = np.minimum([row.draft, *(kept for _, kept in row.hand_offs)], row.draft)[choices]
    ahead = np.where(kept < row.draft, (length if promises else row.draft) - kept, 0)
    is_served = choices == (falling >= row.threshold).sum()
    deferred = np.where(is_served, row.deferred, ahead)
    return deferred, np.where(is_served, row.written, kept + deferred)
