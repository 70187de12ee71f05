"""Token-level deferral by confidence: where the proposed token is uncertain."""

from __future__ import annotations

from seqdefer.methods.base import Method, rule_fit
from seqdefer.rejectors.confidence import Confidence

ABOUT = "Asks the expert for single tokens whose {} is high; nothing is trained."

METHODS = (
    Method(
        "TokenwiseScore", "token", rule_fit(lambda _: Confidence("uncertainty")), order=10,
        about=ABOUT.format("uncertainty"),
    ),
    Method(
        "TokenwiseEntropy", "token", rule_fit(lambda _: Confidence("entropy")), needs_entropy=True, order=11,
        about=ABOUT.format("entropy"),
    ),
)  # fmt: skip
