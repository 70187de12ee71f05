"""Budget rules that promise: what the expert writes stays within the budget on inputs like those of the calibration.

    nearest     the setting whose share is nearest to the budget; promises nothing
    expected    the share stays within the budget in expectation (conformal risk control)
    confident   the expected share stays within the budget, with a confidence (learn then test)

    rule = budget_rule("confident", confidence=0.9, share_of="tokens")
    setting = rule.choose(spending, budget=0.2)
    rule.promise(spending.inputs).in_words(0.2)

The share is that of all tokens, or the mean of the inputs' shares. A promise is about one budget, not about all at
once. It needs inputs that no fit and no choice has seen, and settings that do not depend on them. Thresholds of
token-level deferral are therefore chosen on inputs set aside (`DeferralRunner.spending`). Those of whole and one-time
deferral lie between the scores of the inputs: they are all that differ, and where losses rise that is as good.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast, get_args

import numpy as np

from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.guarantees import (
    Booleans,
    accepted_settings,
    betting_p_values,
    conformal_bounds,
    hoeffding_bentkus_p_values,
    least_inputs,
    monotone_envelope,
    token_losses,
)
from seqdefer.budgets.rules import NEAREST, BudgetRule
from seqdefer.budgets.spending import Spending
from seqdefer.errors import OptionError, require_known

Guarantee = Literal["nearest", "expected", "confident"]
ShareOf = Literal["tokens", "inputs"]
Bound = Literal["conformal", "betting", "hoeffding-bentkus"]
DEFAULT_CONFIDENCE = 0.9
SETTINGS_AT_ONCE = 64  # that are tested together
ROUNDING = 1e-12  # of sums that should equal a budget


@dataclass(frozen=True)
class Promise:
    """What a calibration promises, and from how many inputs."""

    rule: Literal["expected", "confident"]
    share_of: ShareOf
    inputs: int
    bound: Bound
    confidence: float | None = None  # None in expectation

    def least_inputs(self, budget: float) -> int:
        """Return how many inputs a budget in (0, 1) takes at least: so many if the expert wrote nothing."""
        return _least_inputs(self.bound, self.confidence, budget)

    def follows_from(self, other: Promise) -> bool:
        """Tell whether it is the same kind of promise, with no more confidence."""
        is_same = (self.rule, self.share_of) == (other.rule, other.share_of)
        return is_same and (self.confidence or 0.0) <= (other.confidence or 0.0)

    def in_words(self, budget: float) -> str:
        """Return what is promised at a budget, and on what condition."""
        what = "all tokens" if self.share_of == "tokens" else "an input's tokens, on average"
        how = "in expectation" if self.confidence is None else f"with confidence {self.confidence:g}"
        return (
            f"{how}, the expert writes at most {100 * budget:.4g} % of {what}, for inputs like the {self.inputs} of "
            "the calibration"
        )


class PromisingRule(BudgetRule):
    """The setting that spends the most among those that keep a promise; never to defer always does."""

    name: Literal["expected", "confident"]
    bound: Bound
    confidence: float | None = None

    def __init__(self, share_of: ShareOf = "tokens") -> None:
        require_known("kind of share", share_of, get_args(ShareOf))
        self.share_of = share_of

    @abstractmethod
    def passes(self, losses: Floats, budget: float) -> Booleans:
        """Tell which settings keep the promise, from losses (T, n) in [0, 1]. bool (T,)"""

    @abstractmethod
    def needs_monotone(self, spending: Spending) -> bool:
        """Tell whether the losses of an input must rise."""

    def promise(self, inputs: int) -> Promise:
        return Promise(self.name, self.share_of, inputs, self.bound, self.confidence)

    def place(self, spending: Spending, budget: float) -> int:
        if budget in (0.0, 1.0):
            return 0 if budget == 0 else len(spending.settings) - 1
        place = 0
        for losses in self._losses(spending, budget):
            passed = self.passes(losses, budget)
            place += accepted_settings(passed)
            if not passed.all():
                break
        return place

    def _losses(self, spending: Spending, budget: float) -> Iterator[Floats]:
        """Yield the losses of the settings after the first, some at a time, in an order of inputs that does not depend
        on them. Between two settings of a `HandOffSpending` no loss changes: to test these is to test all thresholds,
        and where losses rise the one at which the expectation crosses the budget is among them."""
        order = np.random.default_rng(0).permutation(spending.inputs)
        deferred, written = spending.counts
        highest = self._loss(deferred[:1], written[:1], budget, spending.length)
        for start in range(1, len(deferred), SETTINGS_AT_ONCE):
            part = slice(start, start + SETTINGS_AT_ONCE)
            losses = self._loss(deferred[part], written[part], budget, spending.length)
            if self.needs_monotone(spending):
                losses = monotone_envelope(np.concatenate([highest, losses]))[1:]
                highest = losses[-1:]
            yield losses[:, order]

    def _loss(self, deferred: Floats, written: Floats, budget: float, length: int) -> Floats:
        if self.share_of == "tokens":
            return token_losses(deferred, written, budget, length)
        return np.asarray(deferred / written)


class Expected(PromisingRule):
    """The share stays within the budget in expectation, over inputs of the calibration and the input to come."""

    name, bound = "expected", "conformal"

    def passes(self, losses: Floats, budget: float) -> Booleans:
        return np.asarray(conformal_bounds(losses) <= budget + ROUNDING)

    def needs_monotone(self, spending: Spending) -> bool:
        return True


class Confident(PromisingRule):
    """The expected share stays within the budget, except with probability 1 - confidence over the inputs that the
    calibration got. Betting is much the tighter test of losses between 0 and 1; the other needs means alone."""

    name = "confident"

    def __init__(
        self,
        confidence: float = DEFAULT_CONFIDENCE,
        share_of: ShareOf = "tokens",
        bound: Literal["betting", "hoeffding-bentkus"] = "betting",
    ) -> None:
        super().__init__(share_of)
        self.confidence, self.bound = check_confidence(confidence), bound

    def passes(self, losses: Floats, budget: float) -> Booleans:
        delta = 1 - check_confidence(self.confidence)
        if self.bound == "betting":
            return np.asarray(betting_p_values(losses, budget, delta) <= delta)
        return np.asarray(hoeffding_bentkus_p_values(losses.mean(1), losses.shape[1], budget) <= delta)

    def needs_monotone(self, spending: Spending) -> bool:
        return not spending.has_fixed_settings


def budget_rule(
    guarantee: str = "nearest", *, confidence: float | None = None, share_of: str | None = None
) -> BudgetRule:
    """Return the rule of a name. A confidence belongs to `confident` alone, a kind of share to both that promise."""
    require_known("guarantee", guarantee, get_args(Guarantee))
    if confidence is not None and guarantee != "confident":
        raise OptionError(f"confidence {confidence:g} belongs to the guarantee confident, not to {guarantee}")
    if share_of is not None and guarantee == "nearest":
        raise OptionError(f"the share of {share_of} belongs to a guarantee; choose expected or confident")
    if guarantee == "nearest":
        return NEAREST
    kind = cast(ShareOf, share_of or "tokens")  # the rules refuse others
    if guarantee == "expected":
        return Expected(kind)
    return Confident(DEFAULT_CONFIDENCE if confidence is None else confidence, kind)


def check_confidence(confidence: float | None) -> float:
    """Return the confidence, or raise if it is not between 0 and 1."""
    if confidence is None or not (math.isfinite(confidence) and 0.0 < confidence < 1.0):
        raise OptionError(f"confidence is {confidence}; it must be between 0 and 1, such as {DEFAULT_CONFIDENCE}")
    return confidence


@lru_cache
def _least_inputs(bound: Bound, confidence: float | None, budget: float) -> int:
    if confidence is None:
        return max(1, math.ceil(1 / budget - 1 - ROUNDING))
    rule = Confident(confidence, "inputs", "betting" if bound == "betting" else "hoeffding-bentkus")
    return least_inputs(lambda n: bool(rule.passes(np.zeros((1, n)), budget)[0]))
