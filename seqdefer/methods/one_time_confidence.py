"""One hand-off by confidence: before the least certain token of the draft."""

from __future__ import annotations

from seqdefer.methods.base import Method, rule_fit
from seqdefer.rejectors.confidence import DraftConfidence

_by_score = rule_fit(lambda context: DraftConfidence(context.grid.tolist(), "uncertainty"))
_by_entropy = rule_fit(lambda context: DraftConfidence(context.grid.tolist(), "entropy"))

ABOUT = "Hands over once, before the token of the predictor's draft with the largest {}."

METHODS = (
    Method("OneTimeScore", "once", _by_score, order=10, about=ABOUT.format("uncertainty")),
    Method("OneTimeEntropy", "once", _by_entropy, needs_entropy=True, order=11, about=ABOUT.format("entropy")),
)
