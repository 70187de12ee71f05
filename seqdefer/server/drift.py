"""Watches what is served: tests of drift, what each budget spent, and the log that can calibrate again.

The hypotheses are those of `budgets.drift`. Every input counts for the test of scores. Only those that were written to
their end, without a stop text, a cap or a limit below the model's length and with an expert that answered, count for
the test of what is spent. The tests begin anew with each start of a server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from seqdefer.budgets.calibration import Calibration
from seqdefer.budgets.drift import Evidence, ScoreTest, SpendingTest
from seqdefer.budgets.rules import Setting, to_finite
from seqdefer.budgets.served import ServedInput
from seqdefer.labels.labelled import are_among
from seqdefer.methods.plans import ScoredDraft
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.served_log import ServedLog
from seqdefer.server.metrics import Metrics
from seqdefer.server.tickets import Token, WriteRequest
from seqdefer.types import Examples

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


@dataclass(frozen=True)
class ServedSequence:
    """What was written for one input, perhaps not to its end."""

    setting: Setting
    tokens: Sequence[Token]
    draft: ScoredDraft | None  # None at token level
    is_learned: bool  # the rejector was fitted on the input

    @property
    def deferred(self) -> int:
        return sum(token.author == "expert" for token in self.tokens)


class TrafficMonitor:
    """The tests of one server. Used by the event loop only."""

    def __init__(self, model: DeferringModel, metrics: Metrics, served_log: ServedLog | None = None) -> None:
        assert model.calibration is not None
        self.calibration: Calibration = model.calibration
        self.length, self.rejector = model.served.spec.length, model.rejector.fingerprint
        self.served_log, self.shares = served_log, dict[float, ServedShare]()
        self._learned_from, self._codec = frozenset(model.known_inputs), model.served.codec
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

    def are_learned(self, examples: Examples) -> list[bool]:
        """Tell which inputs the rejector was fitted on, where that is logged."""
        if self.served_log is None:
            return [False] * len(examples)
        return are_among(self._learned_from, examples, self._codec)

    def note(self, request: WriteRequest, one: ServedSequence) -> None:
        """Count an input, as far as it was written."""
        if not one.tokens:
            return
        before = self.warning
        if self.tests:
            self._scores.observe(one.tokens[0].score if one.draft is None else one.draft.first_setting)
        last = one.tokens[-1]
        if request.is_unlimited(self.length) and last.finish is not None and last.degraded is None:
            self._note_whole(one)
        if self.warning != before:
            log.warning("%s", self.warning)

    def _note_whole(self, one: ServedSequence) -> None:
        setting, written, deferred = one.setting, len(one.tokens), one.deferred
        limit = self.calibration.limit(setting)
        if self.tests and limit is not None:
            self._spending.observe(self.calibration.spent(setting, deferred, written, self.length), limit)
        share = self.shares.setdefault(setting.budget, ServedShare())
        share.inputs += 1
        share.deferred += deferred
        share.written += written
        if self.served_log is not None:
            self.served_log.write(self._row(one))

    def _row(self, one: ServedSequence) -> ServedInput:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        setting, draft = one.setting, one.draft
        head = ServedInput(
            now, self.rejector, setting.budget, setting.threshold, len(one.tokens), one.deferred,
            is_learned=one.is_learned,
        )  # fmt: skip
        if draft is None:
            return replace(head, scores=tuple(_rounded(token.score) for token in one.tokens))
        hand_offs = tuple((_rounded(at), kept) for at, kept in draft.hand_offs)
        return replace(head, draft=draft.length, hand_offs=hand_offs)


def _rounded(score: float) -> float:
    return to_finite(float(f"{score:.6g}"))
