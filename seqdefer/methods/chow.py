"""Whole deferral by confidence: Chow's rule on the sum, the mean or a quantile of the tokens' uncertainties."""

from __future__ import annotations

from seqdefer.methods.base import Method, rule_fit
from seqdefer.rejectors.confidence import ChowMean, ChowQuantile, ChowSum

QUANTILES = (0.0, 0.4, 0.8, 1.0)  # the paper's


ABOUT = "Gives the whole sequence to the expert where the {} of the predictor's uncertainties is high."


def _quantile(level: float, order: int) -> Method:
    about = ABOUT.format(f"{level} quantile")
    return Method(f"ChowQuantile{level}", "whole", rule_fit(lambda _: ChowQuantile(level)), order=order, about=about)


METHODS = (
    Method("ChowMean", "whole", rule_fit(lambda _: ChowMean()), order=0, about=ABOUT.format("mean")),
    Method("ChowSum", "whole", rule_fit(lambda _: ChowSum()), order=1, about=ABOUT.format("sum")),
    *(_quantile(level, order) for order, level in enumerate(QUANTILES, 2)),
)
