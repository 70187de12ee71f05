"""One hand-off by confidence: before the least certain token of the draft."""

from __future__ import annotations

from seqdefer.methods.base import Method, rule_fit
from seqdefer.rejectors.confidence import DraftConfidence

_by_score = rule_fit(lambda context: DraftConfidence(context.grid.tolist(), "uncertainty"))
_by_entropy = rule_fit(lambda context: DraftConfidence(context.grid.tolist(), "entropy"))

METHODS = (
    Method("OneTimeScore", "once", _by_score, order=10),
    Method("OneTimeEntropy", "once", _by_entropy, needs_entropy=True, order=11),
)
