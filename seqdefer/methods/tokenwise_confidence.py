"""Token-level deferral by confidence: where the proposed token is uncertain."""

from __future__ import annotations

from seqdefer.methods.base import Method, rule_fit
from seqdefer.rejectors.confidence import Confidence

METHODS = (
    Method("TokenwiseScore", "token", rule_fit(lambda _: Confidence("uncertainty")), order=10),
    Method("TokenwiseEntropy", "token", rule_fit(lambda _: Confidence("entropy")), needs_entropy=True, order=11),
)
