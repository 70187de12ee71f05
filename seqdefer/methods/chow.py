"""Whole deferral by confidence: Chow's rule on the sum, the mean or a quantile of the tokens' uncertainties."""

from __future__ import annotations

from collections.abc import Callable

from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.rejectors.confidence import ChowMean, ChowQuantile, ChowSum, DraftRule, TokenRule

QUANTILES = (0.0, 0.4, 0.8, 1.0)  # the paper's


def rule_fit(make: Callable[[FitContext], TokenRule | DraftRule]) -> Callable[[FitContext], Fit]:
    """Return the fit of a rule: there is nothing to train."""

    def fit(context: FitContext) -> Fit:
        rule = make(context)
        rule.predictor = context.task.predictor.fingerprint
        return Fit(lambda _: (rule, None))

    return fit


def _quantile(level: float, order: int) -> Method:
    return Method(f"ChowQuantile{level}", "whole", rule_fit(lambda _: ChowQuantile(level)), order=order)


METHODS = (
    Method("ChowMean", "whole", rule_fit(lambda _: ChowMean()), order=0),
    Method("ChowSum", "whole", rule_fit(lambda _: ChowSum()), order=1),
    *(_quantile(level, order) for order, level in enumerate(QUANTILES, 2)),
)
