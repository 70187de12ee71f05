"""Quality that is promised: the setting that spends the least and loses at most `within` more than the expert alone.

    found = promise_quality(spending, within=1.0, max_loss=100.0, confidence=0.9)
    found.threshold, found.share

Learn then test, as in `budgets.promises`, in the other direction: settings are tested from "always" upwards until the
first that fails, so that all between are known to be good. Losses lie between 0 and `max_loss`, so that differences to
the expert's lie between -max_loss and max_loss; (difference + max_loss) / (2 max_loss) is a loss in [0, 1] for a
betting test. Stakes may be higher than where losses are near 0: up to what one loss can ruin, 1 / (1 - limit).

Losses need not rise as settings do, so the settings must not depend on the inputs that are tested: where the spending
does not have such settings, some inputs choose them and are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.guarantees import Booleans, accepted_settings, betting_p_values, least_inputs
from seqdefer.budgets.promises import check_confidence
from seqdefer.budgets.rules import Setting, to_finite
from seqdefer.budgets.spending import Spending
from seqdefer.errors import OptionError

MAX_SETTINGS = 200  # that are tested where the inputs set aside give more


@dataclass(frozen=True)
class QualityPromise:
    """A setting, what it spent and lost on average on the inputs that were counted, and what follows for others."""

    threshold: float
    share: float  # of all tokens
    loss: float
    expert_loss: float  # of the expert alone
    inputs: int
    within: float
    confidence: float
    unit: str = ""  # of the loss
    rejector: str = ""  # as in Calibration

    @property
    def setting(self) -> Setting:
        """The setting, at the budget that it was seen to spend."""
        return Setting(self.share, self.threshold, self.share, self.share, self.share)

    def in_words(self) -> str:
        """Return what is promised, and on what condition."""
        return (
            f"with confidence {self.confidence:g}, the expected loss ({self.unit}) at --threshold {self.threshold:.9g} "
            f"is at most {self.within:g} above the expert's, for inputs like the {self.inputs} tested; the expert "
            f"wrote {self.share:.1%} of their tokens"
        )


def promise_quality(
    spending: Spending, *, within: float, max_loss: float, confidence: float, set_aside: int = 0
) -> QualityPromise:
    """Return the setting that spends the least. Raise where only the expert alone can be promised; the message says how
    many inputs it would take. The first `set_aside` inputs choose the settings, where these are not fixed already."""
    delta = 1 - check_confidence(confidence)
    check_within(within)
    if spending.has_fixed_settings:
        settings, counted = spending.settings, spending
    else:
        rows = np.random.default_rng(0).permutation(spending.inputs)
        settings = _thinned(spending.select(rows[:set_aside]).settings)
        counted = spending.select(rows[set_aside:])
    seen = [counted.at_setting(float(one)) for one in settings]
    losses, expert = np.concatenate([one.loss for one in seen]), counted.expert_loss
    order = np.random.default_rng(0).permutation(counted.inputs)
    passes = _passes((losses - expert)[::-1, order], within, max_loss, delta)  # from always upwards
    n_passed = accepted_settings(passes)
    place = len(settings) - n_passed
    if n_passed == 0 or (seen[place].deferred == seen[place].written).all():
        failed = losses[max(place - 1, 0)] - expert
        raise OptionError(_too_few(failed, within, max_loss, delta))
    found = seen[place]
    share = float(found.deferred.sum() / found.written.sum())
    return QualityPromise(
        to_finite(float(settings[place])),
        share,
        loss=float(found.loss.mean()),
        expert_loss=float(expert.mean()),
        inputs=counted.inputs,
        within=within,
        confidence=confidence,
    )


def check_within(within: float) -> None:
    """Raise where it is not a loss above 0."""
    if not (math.isfinite(within) and within > 0):
        raise OptionError(f"within is {within}; it is how much may be lost beside the expert alone, a number above 0")


def _passes(differences: Floats, within: float, max_loss: float, delta: float) -> Booleans:
    """Tell where the expected difference to the expert's loss is below `within`. (T, n) -> (T,)"""
    if np.abs(differences).max(initial=0.0) > max_loss * (1 + 1e-6):
        raise OptionError(f"a loss lies outside 0 to {max_loss:g}, which the task says is its range")
    limit = (within + max_loss) / (2 * max_loss)
    if limit >= 1:
        return np.ones(len(differences), dtype=np.bool_)
    losses = ((differences + max_loss) / (2 * max_loss)).clip(0, 1)
    return np.asarray(betting_p_values(losses, limit, delta, most=1 / (1 - limit)) <= delta)


def _too_few(differences: Floats, within: float, max_loss: float, delta: float) -> str:
    """Say how many inputs would be needed, by the mean and variance of the differences at the setting that failed."""
    n, mean = len(differences), float(differences.mean())
    what = f"from {n} inputs, no setting but the expert alone can be promised to lose at most {within:g} more than it"
    if mean >= within:
        return f"{what}: the first that was tested lost {mean:.3g} more; allow more, or fit a better rejector"
    least = least_inputs(lambda size: bool(_passes(np.zeros((1, size)), within, max_loss, delta)[0]))
    needed = 2 * float(differences.var()) * math.log(1 / delta) / (within - mean) ** 2
    return f"{what}; about {max(least, math.ceil(needed), n + 1)} inputs would be needed"


def _thinned(settings: Floats) -> Floats:
    """Return at most MAX_SETTINGS of them, both ends among them."""
    places = np.linspace(0, len(settings) - 1, min(MAX_SETTINGS, len(settings))).round().astype(np.int64)
    return settings[places]
