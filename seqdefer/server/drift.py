"""Watches what is served: tests of drift, what each budget spent, and the log that can calibrate again.

The hypotheses are those of `budgets.drift`. Every input counts for the test of scores. Only those that were written to
their end, without a stop text, a cap or a limit below the model's length and with an expert that answered, count for
the test of what is spent. The tests begin anew with each start of a server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from seqdefer.budgets.calibration import Calibration
from seqdefer.budgets.drift import Evidence, ScoreTest, SpendingTest
from seqdefer.budgets.rules import Setting, to_finite
from seqdefer.budgets.served import ServedInput
from seqdefer.methods.plans import ScoredDraft
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.served_log import ServedLog
from seqdefer.server.metrics import Metrics
from seqdefer.server.tickets import Token, WriteRequest

WORDS = {
    "spent": "more is spent than the calibration allows",
    "scores": "the rejector's scores are not those of the calibration",
}

log = logging.getLogger("seqdefer.server")


@dataclass
class ServedShare:
    """What inputs spent that were served at one budget."""

    inputs: int = 0
    deferred: int = 0
    written: int = 0


class TrafficMonitor:
    """The tests of one server. Used by the event loop only."""

    def __init__(self, model: DeferringModel, metrics: Metrics, served_log: ServedLog | None = None) -> None:
        assert model.calibration is not None
        self.calibration: Calibration = model.calibration
        self.length, self.rejector = model.served.spec.length, model.rejector.fingerprint
        self.served_log, self.shares = served_log, dict[float, ServedShare]()
        self.tests = dict[str, Evidence]()
        reference = self.calibration.reference
        if reference is not None:
            self._spending, self._scores = SpendingTest(), ScoreTest(reference.scores)
            self.tests = {"spent": self._spending.evidence, "scores": self._scores.evidence}
        for name, evidence in self.tests.items():
            metrics.gauge("seqdefer_drift_evidence", partial(getattr, evidence, "value"), {"test": name})
            metrics.gauge("seqdefer_drift_alarm", partial(getattr, evidence, "has_alarm"), {"test": name})

    @property
    def warning(self) -> str | None:
        """What answers say after an alarm."""
        found = [f"{WORDS[name]} (since input {one.alarm_at})" for name, one in self.tests.items() if one.has_alarm]
        if not found:
            return None
        return f"what is served is no longer like the calibration: {' and '.join(found)}; calibrate again"

    def note(
        self, request: WriteRequest, setting: Setting, tokens: Sequence[Token], draft: ScoredDraft | None = None
    ) -> None:
        """Count an input, as far as it was written."""
        if not tokens:
            return
        before = self.warning
        if self.tests:
            self._scores.observe(tokens[0].score if draft is None else draft.first_setting)
        if self._is_whole(request, tokens):
            self._note_whole(setting, tokens, draft)
        if self.warning != before:
            log.warning("%s", self.warning)

    def _is_whole(self, request: WriteRequest, tokens: Sequence[Token]) -> bool:
        return request.is_unlimited(self.length) and tokens[-1].finish is not None and tokens[-1].degraded is None

    def _note_whole(self, setting: Setting, tokens: Sequence[Token], draft: ScoredDraft | None) -> None:
        written, deferred = len(tokens), sum(token.author == "expert" for token in tokens)
        limit = self.calibration.limit(setting)
        if self.tests and limit is not None:
            self._spending.observe(self.calibration.spent(setting, deferred, written, self.length), limit)
        share = self.shares.setdefault(setting.budget, ServedShare())
        share.inputs += 1
        share.deferred += deferred
        share.written += written
        if self.served_log is not None:
            self.served_log.write(self._row(setting, written, deferred, tokens, draft))

    def _row(
        self, setting: Setting, written: int, deferred: int, tokens: Sequence[Token], draft: ScoredDraft | None
    ) -> ServedInput:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        head = (now, self.rejector, setting.budget, setting.threshold, written, deferred)
        if draft is None:
            return ServedInput(*head, scores=tuple(to_finite(float(f"{token.score:.6g}")) for token in tokens))
        hand_offs = tuple((to_finite(float(f"{at:.6g}")), kept) for at, kept in draft.hand_offs)
        return ServedInput(*head, draft=draft.length, hand_offs=hand_offs)
