"""Whole deferral by confidence: Chow's rule on the sum, the mean or a quantile of the tokens' uncertainties."""

from __future__ import annotations

from seqdefer.methods.base import Method, rule_fit
from seqdefer.rejectors.confidence import ChowMean, ChowQuantile, ChowSum

QUANTILES = (0.0, 0.4, 0.8, 1.0)  # the paper's


def _quantile(level: float, order: int) -> Method:
    return Method(f"ChowQuantile{level}", "whole", rule_fit(lambda _: ChowQuantile(level)), order=order)


METHODS = (
    Method("ChowMean", "whole", rule_fit(lambda _: ChowMean()), order=0),
    Method("ChowSum", "whole", rule_fit(lambda _: ChowSum()), order=1),
    *(_quantile(level, order) for order, level in enumerate(QUANTILES, 2)),
)
