"""A pair whose budgets were measured: the part of a `DeferringModel` that calibrates and promises.

    model.calibrate(inputs, guarantee="expected")
    model.setting(0.2).threshold

It writes nothing itself (`model.writing_pair`), and knows no files (`model.deferring_model`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from seqdefer.budgets.calibration import Calibration, LossCurve, calibrate, loss_curve, remaining_tokens
from seqdefer.budgets.promises import PromisingRule, ShareOf, budget_rule, check_confidence
from seqdefer.budgets.quality import QualityPromise, check_within, promise_quality
from seqdefer.budgets.rules import NEAREST, BudgetRule, Setting
from seqdefer.budgets.served import ServedInput, served_spending
from seqdefer.budgets.spending import Spending, n_set_aside
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.interfaces import Served, Task, TokenRejector
from seqdefer.labels.labelled import CalibrationData, LabelledData
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.deferral import DeferralRunner, UnjudgedTask, deferral_of
from seqdefer.methods.plans import BATCH_SIZE
from seqdefer.methods.timing import TIMED_BUDGETS, Timing, time_budgets
from seqdefer.model.folders import LearnedFrom, Pairing
from seqdefer.model.learning import require_limit
from seqdefer.model.unfitted import UnfittedPair
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.progress_bars import say, show_progress
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.types import Examples

DEFAULT_BUDGET = 0.2


class BudgetWarning(UserWarning):
    """No setting of this rejector spends about the budget that was asked for."""


class CalibratedPair:
    """A pair, a rejector and what its budgets do, as far as that was measured."""

    def __init__(
        self,
        served: Served | None = None,
        rejector: Rejector | None = None,
        calibration: Calibration | None = None,
        pairing: Pairing | None = None,
        curve: LossCurve | None = None,
        timing: Timing | None = None,
        learned_from: LearnedFrom | None = None,
        quality: QualityPromise | None = None,
        *,
        unfitted: UnfittedPair | None = None,
    ) -> None:
        self.calibration, self.pairing, self.unfitted = calibration, pairing, unfitted
        self.curve, self.timing, self.learned_from, self.quality = curve, timing, learned_from, quality
        self._fitted: tuple[Served, Rejector, DeferralRunner] | None = None
        if served is not None and rejector is not None:
            self._join(served, rejector)

    def _join(self, served: Served, rejector: Rejector) -> None:
        _check(served, rejector)
        self._fitted = (served, rejector, deferral_of(rejector))

    def _require_fitted(self) -> tuple[Served, Rejector, DeferralRunner]:
        if self._fitted is None:
            raise OptionError("this model is not fitted yet; fit it: model.fit(data)")
        return self._fitted

    @property
    def served(self) -> Served:
        """The pair, and how it reads inputs."""
        return self._require_fitted()[0]

    @property
    def rejector(self) -> Rejector:
        return self._require_fitted()[1]

    @property
    def deferral(self) -> DeferralRunner:
        """How its kind of rejector decides."""
        return self._require_fitted()[2]

    @property
    def task(self) -> str:
        """The name of its task, "" where that is not known."""
        return "" if self.pairing is None else self.pairing.task

    @property
    def is_token_level(self) -> bool:
        return isinstance(self.rejector, TokenRejector)

    @property
    def method(self) -> str:
        """The name of the method that made its rejector, "" where that is not known."""
        return str(self.rejector.notes.get("method", ""))

    def _encode(self, inputs: Sequence[Any]) -> Examples:
        if isinstance(inputs, Mapping) or hasattr(inputs, "columns"):  # list() would give the columns' names
            what = type(inputs).__name__
            raise InputError(f"inputs are a {what}; give a list of inputs, such as one column: {what.lower()}[NAME]")
        listed = [] if isinstance(inputs, str) else list(inputs)
        if not listed:
            raise InputError(f"inputs are {inputs!r:.40}; give a list of one input or more")
        return self.served.codec.encode(listed)

    # -- measuring -------------------------------------------------------------------------------------------------

    def calibrate(
        self,
        inputs: Sequence[Any],
        *,
        guarantee: str = "nearest",
        confidence: float | None = None,
        share_of: ShareOf | None = None,
        progress: bool = True,
    ) -> Calibration:
        """Measure what each setting spends on inputs like these, and use it from now on; `save_calibration` stores it.

        `guarantee` is `nearest` (none), `expected` or `confident`, the last with a `confidence` (0.9): see
        `seqdefer.budgets.promises`. It needs inputs that the rejector was not fitted on."""
        rule, examples = budget_rule(guarantee, confidence=confidence, share_of=share_of), self._encode(inputs)
        with show_progress(quiet=not progress) as meter, meter.stage("calibrate budgets", len(examples)) as advance:
            found = self.calibrate_by(rule, examples, progress=advance)
        say(*calibration_remarks(found, len(examples)), quiet=not progress)
        return found

    def calibrate_by(self, rule: BudgetRule, examples: Examples, *, progress: Progress = NO_PROGRESS) -> Calibration:
        """Calibrate on encoded inputs; a rule that promises needs inputs that the rejector was not fitted on."""
        if isinstance(rule, PromisingRule):
            return self.promise(self.spending_on(self.calibration_data(examples), progress=progress), rule)
        return self.calibrate_on(examples, progress=progress)

    def calibration_data(self, examples: Examples) -> CalibrationData:
        """Return encoded inputs as those that a guarantee may rest on; refuse what the rejector was fitted on."""
        self._require_known_inputs()
        return CalibrationData.of(examples, self.known_inputs, self.served.codec)

    @property
    def known_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that the rejector was fitted on, none where it was put together by hand."""
        return () if self.learned_from is None else self.learned_from.inputs

    def _require_known_inputs(self) -> None:
        if self.learned_from is None and self.pairing is not None:
            raise OptionError(
                "this model was fitted before the inputs of a fit were recorded, so that it cannot be told whether a "
                "guarantee would rest on them; fit it again"
            )

    def spending_on(
        self, data: CalibrationData, *, judge: Task | None = None, progress: Progress = NO_PROGRESS
    ) -> Spending:
        """Tell what every setting does to inputs that a guarantee may rest on, with losses where their task judges."""
        require_inputs(data.examples)
        judge = judge or UnjudgedTask(self.served)
        return self.deferral.spending(judge, data.examples, progress=progress, set_aside=True)

    def promise(self, spending: Spending, rule: PromisingRule) -> Calibration:
        """Calibrate with a guarantee, from `spending_on`."""
        self.calibration = calibrate(spending, inputs=spending.inputs, rejector=self.rejector.fingerprint, rule=rule)
        return self.calibration

    def promise_quality(self, spending: Spending, judge: Task, *, within: float, confidence: float) -> QualityPromise:
        """Find the least share that loses at most `within` more than the expert, from `spending_on` with the judge."""
        limit, aside = require_limit(judge), n_set_aside(spending.inputs)
        found = promise_quality(
            spending, within=within, max_loss=limit, confidence=confidence, set_aside=aside
        )  # fmt: skip
        self.quality = replace(found, unit=judge.loss_unit, rejector=self.rejector.fingerprint)
        return self.quality

    def require_promise(self, rule: BudgetRule) -> None:
        """Raise where the calibration does not promise what a rule would."""
        if isinstance(rule, PromisingRule):
            found = None if self.calibration is None else self.calibration.promise
            if found is None or not rule.promise(found.inputs).follows_from(found):
                has = "no guarantee" if found is None else f"another guarantee: {found.in_words(DEFAULT_BUDGET)}"
                asked = f"--guarantee {rule.name} --share-of {rule.share_of}"
                asked += "" if rule.confidence is None else f" --confidence {rule.confidence:g}"
                raise OptionError(
                    f"the calibration of this model has {has}; make one: seqdefer calibrate DIR --data FILE {asked}"
                )

    def require_quality(self, within: float, confidence: float) -> QualityPromise:
        """Return the quality that is promised, or raise where it is less than this."""
        check_within(within)
        found = self.quality
        if found is None or found.within > within or found.confidence < check_confidence(confidence):
            has = "no promise of quality" if found is None else f"another promise: {found.in_words()}"
            raise OptionError(
                f"this model has {has}; make one: seqdefer fit TASK --within {within:g} --confidence {confidence:g}"
            )
        return found

    def calibrate_on(
        self,
        examples: Examples,
        *,
        judge: Task | None = None,
        labelled: LabelledData | None = None,
        trees: DecisionTrees | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> Calibration:
        """Calibrate on encoded inputs, which may be labelled already, or have trees. With their task as `judge`,
        measure what the budgets buy, too."""
        require_inputs(examples)
        spending = self.deferral.spending(
            judge or UnjudgedTask(self.served), examples, labelled=labelled, trees=trees, progress=progress
        )
        n, name = len(examples), self.rejector.fingerprint
        self.calibration = calibrate(spending, inputs=n, rejector=name)
        if judge is not None:
            self.curve = loss_curve(spending, unit=judge.loss_unit, inputs=n, rejector=name)
        return self.calibration

    def calibrate_from_log(self, rows: Sequence[ServedInput], rule: BudgetRule = NEAREST) -> Calibration:
        """Calibrate on what was served (`seqdefer.budgets.served` says what that can tell). No model runs."""
        length, name, promises = self.served.spec.length, self.rejector.fingerprint, isinstance(rule, PromisingRule)
        spending = served_spending(rows, length, promises=promises)
        if promises:
            self._require_known_inputs()
        found = calibrate(spending, inputs=spending.inputs, rejector=name, rule=rule)
        lengths = np.array([row.written for row in rows])  # a promise counts sequences as long as they could be
        self.calibration = replace(found, remaining=remaining_tokens(lengths, length))
        return self.calibration

    def time(self, examples: Examples, *, at_once: int = BATCH_SIZE, progress: Progress = NO_PROGRESS) -> None:
        """Measure what budgets take on this machine, on encoded inputs; `save_calibration` stores it. A remote expert
        is not called for this."""
        assert self.calibration is not None
        thresholds = {budget: self.calibration.for_budget(budget).threshold for budget in TIMED_BUDGETS}
        self.timing = time_budgets(
            self.served, self.deferral, thresholds, examples,
            rejector=self.rejector.fingerprint, at_once=at_once, progress=progress,
        )  # fmt: skip

    def setting(self, budget: float) -> Setting:
        """Return what decides at a budget and what that spends; warn where that is not about the budget."""
        self._require_fitted()
        if self.calibration is None:
            raise OptionError(
                "the budgets of this model were not measured; do that with inputs like yours: seqdefer calibrate DIR "
                "--data FILE, or give a threshold"
            )
        if (shortfall := self.calibration.shortfall(budget)) is not None:
            warnings.warn(shortfall, BudgetWarning, stacklevel=_callers_level())
        return self.calibration.for_budget(budget)


def calibration_remarks(found: Calibration, n_given: int) -> list[str]:
    """Return what to know about a calibration: how rough it is, and which of the inputs given do not count."""
    remarks = [] if (rough := found.roughness()) is None else [rough]
    if found.inputs < n_given:
        aside = n_given - found.inputs
        remarks.append(f"{aside} of {n_given} inputs, drawn at random, chose the thresholds and are not counted")
    return remarks


def require_inputs(examples: Examples) -> None:
    """Raise where there is too little to measure anything with."""
    if len(examples) < 2:
        raise OptionError(f"inputs to calibrate with: {len(examples)}; give at least 2, and better some hundred")


def _callers_level() -> int:
    """Return the `stacklevel` of a warning that names the line outside these modules which led to it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("seqdefer.model."):
        level, frame = level + 1, frame.f_back
    return level


def _check(served: Served, rejector: Rejector) -> None:
    if rejector.predictor not in ("", served.predictor.fingerprint):  # "": a rule that fits any
        raise CheckpointError(
            f"the rejector was fitted for predictor {rejector.predictor}, not for {served.predictor.fingerprint}; load "
            "that predictor, or fit a rejector for this one"
        )
    if rejector.length not in (None, served.spec.length):
        raise CheckpointError(
            f"the rejector was fitted for sequences of {rejector.length} tokens, not of {served.spec.length}; "
            "fit one for these"
        )
