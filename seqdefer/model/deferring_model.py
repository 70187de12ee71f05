"""A pair at work: fit a rejector for it, give inputs and a budget, get sequences and who wrote each token.

    model = DeferringModel.from_pair("google/flan-t5-small", "google/flan-t5-base", prefix="summarize: ")
    model.fit("news.jsonl", metric="rougeL")
    written = model.generate(["A long article ..."], budget=0.2)
    print(written.outputs[0], written.sources[0], written.expert_tokens[0])
    model.save_pretrained("models/news")
    model = DeferringModel.from_pretrained("models/news")

`seqdefer.model.folders` says what the folder holds. The pair is named there, or bundled; another is refused.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from seqdefer.budgets.calibration import BUDGETS, Calibration, LossCurve, calibrate, loss_curve
from seqdefer.budgets.capped import Schedule
from seqdefer.budgets.caps import Allowance, Cap, allowances
from seqdefer.budgets.prices import Bill, Prices
from seqdefer.budgets.promises import PromisingRule, ShareOf, budget_rule, check_confidence
from seqdefer.budgets.quality import QualityPromise, check_within, promise_quality
from seqdefer.budgets.rules import NEAREST, BudgetRule, Setting, realised_shares
from seqdefer.budgets.served import ServedInput, served_spending
from seqdefer.budgets.spending import Spending
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.interfaces import Served, Task, TaskEntry, TokenRejector
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.labelled import CalibrationData, LabelledData
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.deferral import DeferralRunner, UnjudgedTask, deferral_of, n_set_aside
from seqdefer.methods.plans import BATCH_SIZE, Plan, PlanResult
from seqdefer.methods.timing import TIMED_BUDGETS, Timing, time_budgets
from seqdefer.model.folders import (
    CALIBRATION_FILE,
    CURVE_FILE,
    INPUTS_FILE,
    PAIRING_FILE,
    QUALITY_FILE,
    REJECTOR_FOLDER,
    ROLES,
    TIMING_FILE,
    WORK_FOLDER,
    LearnedFrom,
    Pairing,
    absolute,
    bundle_pair,
    hide_paths,
    load_served,
    read_calibration,
    read_curve,
    read_learned_from,
    read_pairing,
    read_quality,
    read_timing,
    require_own_endpoint,
    task_of,
    unbundled,
    update_digests,
    write_pairing,
)
from seqdefer.model.generation import Decisions, Generation, StreamedToken, input_tokens
from seqdefer.model.hub import local_folder, upload
from seqdefer.model.learning import QualityRequest, learn, requested_promises, require_limit, unseen_inputs
from seqdefer.model.model_card import write_card
from seqdefer.model.unfitted import UnfittedPair, bind
from seqdefer.progress import NO_PROGRESS, Clock, Meter, Progress, Silent
from seqdefer.progress_bars import show_progress
from seqdefer.recipes import DEFAULT_PRESET
from seqdefer.rejectors.checkpoints import Rejector, load_rejector
from seqdefer.report.notebook import model_html
from seqdefer.storage.files import write_json
from seqdefer.storage.records import to_plain
from seqdefer.types import Examples, Rollout, Sequences

DEFAULT_BUDGET = 0.2
CHECKED_BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)


class BudgetWarning(UserWarning):
    """No setting of this rejector spends about the budget that was asked for."""


class DeferringModel:
    """A pair, a rejector and the budgets it was calibrated for. `from_pair` makes one that waits for `fit`."""

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
        self.prices: Prices | None = None
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

    def __repr__(self) -> str:
        if self._fitted is None:
            predictor, expert = ("?", "?") if self.unfitted is None else self.unfitted.names
            return f"DeferringModel({predictor} -> {expert}, not fitted: call fit(data))"
        predictor, expert = (_name_of(getattr(self.served, role)) for role in ROLES)
        budgets = "no budgets" if self.calibration is None else f"budgets from {self.calibration.inputs} inputs"
        return f"DeferringModel({predictor} -> {expert}, {self.method or 'a rejector'}, {budgets})"

    def _repr_html_(self) -> str:
        return str(model_html(repr(self), self.curve))

    # -- fitting ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_pair(
        cls, predictor: Any, expert: Any, tokenizer: Any = None, *, device: str = "auto", **options: Any
    ) -> Self:
        """Return a model of your own pair, to be fitted. Models are names on the Hugging Face Hub, folders, or loaded
        models with their tokenizer, which are frozen in place; an expert may also be an endpoint, https://HOST/v1.
        `options` are those of `seqdefer fit text`, with _ instead of -: prefix, suffix, length, expert_model, ..."""
        return cls(unfitted=UnfittedPair.of(predictor, expert, tokenizer, options, device))

    def fit(
        self,
        data: Any,
        *,
        metric: Any = None,
        folder: Path | str | None = None,
        method: str | None = None,
        guarantee: str = "nearest",
        confidence: float | None = None,
        share_of: ShareOf | None = None,
        within: float | None = None,
        preset: str = DEFAULT_PRESET,
        recipe: str = "ours",
        progress: bool = True,
        **options: Any,
    ) -> Self:
        """Fit a rejector and measure its budgets, as `seqdefer fit text` does, with the same defaults.

        data       pairs (text, reference), dictionaries, a datasets.Dataset, a pandas DataFrame, a JSONL file, or the
                   name of a dataset; fields are `document_field` and `summary_field` ("document", "summary")
        metric     a name (rouge1), a function (prediction, reference, input) -> float, or a `Metric`
        folder     where to work and save, so that what was stopped resumes (a temporary one)
        method     the kind of rejector (TokenwiseModel, or OneTimeCost where the expert only completes)
        guarantee  with `confidence`, `share_of` and `within`: see `seqdefer fit text --help`
        options    more options of the task, such as `train_documents`, or of learning, such as `architecture`"""
        if self.unfitted is None:
            raise OptionError("this model was not made by from_pair; make one to fit: DeferringModel.from_pair(...)")
        given = {**options, "train": data, "metric": metric}
        entry, chosen, settings = self.unfitted.chosen(given, preset=preset, recipe=recipe)
        rule, quality = requested_promises(guarantee, confidence=confidence, share_of=share_of, within=within)
        home = _temporary_folder(self) if folder is None else Path(folder)
        with show_progress(quiet=not progress) as meter:
            return self.fit_task(
                entry, chosen, settings, home, method=method, device=self.unfitted.device, rule=rule, quality=quality,
                meter=meter,
            )  # fmt: skip

    def fit_task(
        self,
        entry: TaskEntry,
        options: Any,
        settings: ExperimentSettings,
        folder: Path,
        *,
        method: str | None = None,
        device: str = "auto",
        meter: Meter | None = None,
        labelling: ExecutorSettings | None = None,
        rule: BudgetRule = NEAREST,
        quality: QualityRequest | None = None,
    ) -> Self:
        """Fit, calibrate and save a task's own pair. Nothing is reported on, so all data is for learning; except for
        guarantees, which rest on the test split: of what is spent, or of quality."""
        promises, clock = isinstance(rule, PromisingRule) or quality is not None, Clock(meter or Silent())
        learned = learn(
            entry, options, settings, folder / WORK_FOLDER, method=method, device=device, labelling=labelling,
            keeps_test=promises, quality=quality, clock=clock,
        )  # fmt: skip
        self._join(learned.served, learned.rejector)
        self.pairing, self.learned_from, self.quality, self.timing = learned.pairing, learned.learned_from, None, None
        with clock.stage("calibrate budgets", len(learned.validation)) as advance:
            known: dict[str, Any] = {"labelled": learned.labelled, "trees": learned.trees}
            self.calibrate_on(learned.validation, judge=learned.task, **known, progress=advance)
        if promises:
            self.save_pretrained(folder)  # a promise that cannot be made raises, and must not lose the fit
            self._promise_on(
                unseen_inputs(learned.task, learned.learned_from.inputs), learned.task, rule, quality, clock
            )
        with clock.stage("time budgets", len(TIMED_BUDGETS)) as advance:
            self.time(learned.validation, progress=advance)
        self.save_pretrained(folder)
        return self

    def _promise_on(
        self, inputs: Examples, judge: Task, rule: BudgetRule, quality: QualityRequest | None, clock: Clock
    ) -> None:
        data = self.calibration_data(inputs)
        with clock.stage("promise", len(data.examples)) as advance:
            spending = self.spending_on(data, judge=judge, progress=advance)
        if isinstance(rule, PromisingRule):
            self.promise(spending, rule)
        if quality is not None:
            self.promise_quality(spending, judge, within=quality.within, confidence=quality.confidence)

    # -- files -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        source: Path | str,
        *,
        predictor: Any = None,
        expert: Any = None,
        tokenizer: Any = None,
        revision: str | None = None,
        token: str | None = None,
        device: str = "auto",
        meter: Meter | None = None,
        budgets: bool = True,
    ) -> Self:
        """Load a folder, or a repository OWNER/NAME of the Hugging Face Hub at a `revision`, and the pair it names.

        `predictor` and `expert`, names or loaded models with their `tokenizer`, say where the pair is now; another pair
        is refused. An endpoint that a repository names as its expert must be named here, too: it will read your inputs.
        `budgets=False` leaves the calibration unread, because it is about to be measured again."""
        folder = local_folder(source, revision=revision, token=token)
        pairing = read_pairing(folder)
        is_downloaded = folder != Path(source).expanduser()
        if is_downloaded:
            require_own_endpoint(pairing, expert)
        entry = task_of(pairing, folder, is_downloaded=is_downloaded)
        entry, changes = bind(entry, {"predictor": predictor, "expert": expert, "tokenizer": tokenizer})
        named = {name: absolute(value) for name, value in changes.items()}
        pairing = replace(pairing, options={**unbundled(pairing.options, folder), **named})
        served = load_served(entry, pairing, folder, device, meter or Silent())
        rejector = load_rejector(folder / REJECTOR_FOLDER, served.predictor)
        calibration = read_calibration(folder, rejector) if budgets else None
        curve, timing = read_curve(folder, rejector), read_timing(folder, rejector)
        learned_from, quality = read_learned_from(folder, rejector), read_quality(folder, rejector)
        return cls(served, rejector, calibration, pairing, curve, timing, learned_from, quality)

    def save_pretrained(self, folder: Path | str, *, bundle: bool = False) -> Path:
        """Write the folder, deferral.json last: where it exists, the rest is complete. It names the pair, or holds it
        with `bundle`, and has a model card and a demo (README.md, app.py)."""
        folder = Path(folder)
        if self.pairing is None:
            raise OptionError("this model was put together by hand and cannot name its pair; give it a Pairing")
        # Or new weights could stand beside old records.
        records = {CURVE_FILE: self.curve, INPUTS_FILE: self.learned_from, QUALITY_FILE: self.quality}
        for name in (PAIRING_FILE, CALIBRATION_FILE, TIMING_FILE, *records):
            (folder / name).unlink(missing_ok=True)
        self.rejector.save_pretrained(folder / REJECTOR_FOLDER)
        self.save_calibration(folder)
        for name, record in records.items():
            if record is not None:
                write_json(folder / name, to_plain(record))
        pairing = bundle_pair(folder, self.pairing, self.served) if bundle else self.pairing
        write_card(folder, pairing, self.calibration, self.curve, self.method)
        write_pairing(folder, pairing)
        return folder

    def push_to_hub(
        self,
        repository: str,
        *,
        bundle: bool = False,
        private: bool | None = None,
        token: str | None = None,
        message: str = "Upload a deferring model",
    ) -> str:
        """Upload the model to the repository OWNER/NAME of the Hugging Face Hub; return the address of the commit.
        A pair in folders of this machine needs `bundle`, or whoever loads the model must say where theirs is."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, bundle=bundle)
            hide_paths(Path(folder))
            return upload(Path(folder), repository, private=private, token=token, message=message)

    def save_calibration(self, folder: Path | str) -> None:
        """Write the budgets and what they take, into a folder that has the rest."""
        if self.calibration is not None:
            write_json(Path(folder) / CALIBRATION_FILE, to_plain(self.calibration))
        if self.timing is not None:
            write_json(Path(folder) / TIMING_FILE, to_plain(self.timing))
        update_digests(Path(folder))

    # -- budgets ---------------------------------------------------------------------------------------------------

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
            if isinstance(rule, PromisingRule):
                return self.promise(self.spending_on(self.calibration_data(examples), progress=advance), rule)
            return self.calibrate_on(examples, progress=advance)

    def calibration_data(self, examples: Examples) -> CalibrationData:
        """Return encoded inputs as those that a guarantee may rest on; refuse what the rejector was fitted on."""
        if self.learned_from is None and self.pairing is not None:
            raise OptionError(
                "this model was fitted before the inputs of a fit were recorded, so that it cannot be told whether a "
                "guarantee would rest on them; fit it again"
            )
        return CalibrationData.of(examples, () if self.learned_from is None else self.learned_from.inputs)

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
        spending = served_spending(rows, self.served.spec.length, promises=isinstance(rule, PromisingRule))
        self.calibration = calibrate(spending, inputs=spending.inputs, rejector=self.rejector.fingerprint, rule=rule)
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

    def check(
        self, inputs: Sequence[Any], budgets: Sequence[float] = CHECKED_BUDGETS, *, progress: Progress = NO_PROGRESS
    ) -> tuple[Setting, ...]:
        """Return what budgets spend on other inputs than those of the calibration: settings, with the shares seen
        here."""
        settings, deferred, written = [self.setting(budget) for budget in budgets], [], []
        for setting in settings:
            rollout = self.generate(inputs, threshold=setting.threshold).rollout
            deferred.append(rollout.deferred.numpy())
            written.append(rollout.sequences.lengths.numpy())
            progress(1)
        shares = realised_shares(np.stack(deferred).astype(float), np.stack(written).astype(float))
        seen = zip(budgets, settings, *shares, strict=True)
        return tuple(Setting(budget, one.threshold, *map(float, found)) for budget, one, *found in seen)

    # -- caps and money --------------------------------------------------------------------------------------------

    def use_prices(self, prices: Prices) -> None:
        """Count money by these prices from now on. Hours are counted by measured times where the prices name none."""
        length = None if self.calibration is None else self.calibration.mean_length
        if self.timing is None or length is None:
            self.prices = prices.with_times(None, None)
        else:
            self.prices = prices.with_times(self.timing.predictor / length, self.timing.expert / length)

    def expected_money(self, tokens: int, share: float) -> float:
        """Return about what a sequence costs whose input has so many tokens, if the expert writes a share of it."""
        if self.prices is None:
            raise OptionError("a budget in money needs prices; give --prices FILE")
        length = None if self.calibration is None else self.calibration.mean_length
        if length is None:
            raise OptionError(
                "a budget in money needs the usual length of sequences, which this model's calibration does not have; "
                "make it again: seqdefer calibrate DIR --data FILE"
            )
        return self.prices.expected(tokens, length, share, by_token=self.is_token_level)

    def budget_for_money(self, money: float, tokens: Sequence[int]) -> float:
        """Return the largest budget whose setting is expected to cost at most `money` a sequence, for inputs of so
        many tokens."""
        if not (math.isfinite(money) and money >= 0):
            raise OptionError(f"budget in money is {money}; give an amount from 0 on")
        mean = round(sum(tokens) / len(tokens))
        alone = self.expected_money(mean, 0.0)
        if alone > money:
            assert self.prices is not None
            raise OptionError(
                f"a budget of {money:g} {self.prices.currency} is too small: the predictor alone costs about "
                f"{alone:.3g} a sequence"
            )
        assert self.calibration is not None
        costs = [self.expected_money(mean, one.share) for one in self.calibration.settings]
        return max(budget for budget, cost in zip(BUDGETS, costs, strict=True) if budget == 0 or cost <= money)

    def _allowances(
        self, cap: Cap | Sequence[Cap], inputs: Sequence[Any], examples: Examples
    ) -> list[Allowance] | None:
        caps = [cap] if isinstance(cap, Cap) else list(cap)
        if self.is_token_level and self.calibration is None and any(one.policy == "rising" for one in caps):
            raise OptionError(
                "a rising cap needs budgets that were measured; do that: seqdefer calibrate DIR --data FILE, or choose "
                "the policy cut-off (--cap-policy)"
            )
        has_money = any(one.money is not None for one in caps)
        tokens = input_tokens(self.served.codec, inputs, examples) if has_money else [0] * len(inputs)
        return allowances(caps, tokens, self.prices)

    def _bills(self, rollout: Rollout, inputs: Sequence[Any], examples: Examples) -> list[Bill]:
        assert self.prices is not None
        tokens = input_tokens(self.served.codec, inputs, examples)
        rows = zip(tokens, rollout.authors.tolist(), rollout.sequences.lengths.tolist(), strict=True)
        return [self.prices.bill(n, authors[:length], by_token=self.is_token_level) for n, authors, length in rows]

    # -- writing ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Sequence[Any],
        budget: float = DEFAULT_BUDGET,
        *,
        threshold: float | None = None,
        budget_money: float | None = None,
        cap: Cap | Sequence[Cap] = (),
        batch_size: int = BATCH_SIZE,
    ) -> Generation:
        """Write sequences for all inputs, the expert about `budget` of their tokens; or by a threshold you name; or for
        about `budget_money` a sequence, with prices. A `cap` is never exceeded: see `seqdefer.budgets.caps`."""
        examples = self._encode(inputs)
        if budget_money is not None:
            budget = self.budget_for_money(budget_money, input_tokens(self.served.codec, inputs, examples))
        allowed = self._allowances(cap, inputs, examples)
        result = self._run(examples, self._threshold(budget, threshold), batch_size, allowed=allowed)
        rollout, capped = result.rollout, None if allowed is None else result.capped.tolist()
        bills = None if self.prices is None else self._bills(rollout, inputs, examples)
        return Generation(
            self._outputs(rollout.sequences), rollout, self.served.authors, self.served.codec, capped, bills
        )

    def decide(
        self,
        inputs: Sequence[Any],
        budget: float = DEFAULT_BUDGET,
        *,
        threshold: float | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Decisions:
        """Return where the rejector would defer, without running the expert."""
        examples = self._encode(inputs)
        result = self._run(examples, self._threshold(budget, threshold), batch_size, may_defer=False)
        alone = result.rollout
        return Decisions(self._outputs(alone.sequences), alone.sequences, alone.scores, result.wanted)

    def stream(
        self,
        one: Any,
        budget: float = DEFAULT_BUDGET,
        *,
        threshold: float | None = None,
        budget_money: float | None = None,
        cap: Cap | Sequence[Cap] = (),
    ) -> Iterator[StreamedToken]:
        """Yield the tokens of one sequence as they are written. Their texts together are the output."""
        examples = self._encode([one])
        if budget_money is not None:
            budget = self.budget_for_money(budget_money, input_tokens(self.served.codec, [one], examples))
        allowed = self._allowances(cap, [one], examples)
        return self._stream(examples, self._threshold(budget, threshold), allowed)

    def _stream(
        self, examples: Examples, threshold: float, allowed: Sequence[Allowance] | None
    ) -> Iterator[StreamedToken]:
        served, plan, n_shown, shown = self.served, self.plan(), 0, ""
        (row,) = plan.admit(examples, torch.tensor([threshold], dtype=torch.float64), None, allowed)
        while plan.rows:
            plan.turn()
            if row.written.error is not None:
                raise row.written.error
            tokens = row.written.tokens
            for position in range(n_shown, len(tokens)):
                is_last = row.is_over and position + 1 == len(tokens)
                added = served.codec.added(tokens[: position + 1], shown, is_last=is_last)
                shown += added
                author = served.authors[row.written.authors[position]]
                score = row.written.scores[position]
                yield StreamedToken(position, tokens[position], added, author, score, row.is_capped(position))
            n_shown = len(tokens)

    def plan(self, **options: Any) -> Plan:
        """Return a plan of this pair, without rows; options as in `seqdefer.methods.plans`."""
        return self.deferral.plan(self.served, schedule=self._schedule, **options)

    def _run(self, examples: Examples, threshold: float, batch_size: int, **options: Any) -> PlanResult:
        if batch_size < 1:
            raise OptionError(f"batch size {batch_size}; it must be at least 1")
        settings = torch.full((len(examples),), threshold, dtype=torch.float64)
        how = {"at_once": batch_size, "schedule": self._schedule, **options}
        return self.deferral.write(self.served, examples, settings, **how)

    @property
    def _schedule(self) -> Schedule | None:
        return None if self.calibration is None else self.calibration.schedule(self.served.spec.length)

    def _threshold(self, budget: float, threshold: float | None) -> float:
        if threshold is None:
            return self.setting(budget).threshold
        if math.isnan(threshold):
            raise OptionError("threshold is nan; it is a score, or inf to never defer")
        return threshold

    def _encode(self, inputs: Sequence[Any]) -> Examples:
        if isinstance(inputs, Mapping) or hasattr(inputs, "columns"):  # list() would give the columns' names
            what = type(inputs).__name__
            raise InputError(f"inputs are a {what}; give a list of inputs, such as one column: {what.lower()}[NAME]")
        listed = [] if isinstance(inputs, str) else list(inputs)
        if not listed:
            raise InputError(f"inputs are {inputs!r:.40}; give a list of one input or more")
        return self.served.codec.encode(listed)

    def _outputs(self, sequences: Sequences) -> list[Any]:
        rows = zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)
        return [self.served.codec.decode(tokens[:length]) for tokens, length in rows]


def require_inputs(examples: Examples) -> None:
    """Raise where there is too little to measure anything with."""
    if len(examples) < 2:
        raise OptionError(f"inputs to calibrate with: {len(examples)}; give at least 2, and better some hundred")


def _callers_level() -> int:
    """Return the `stacklevel` of a warning that names the line outside this module which led to it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back
    return level


def _name_of(model: Any) -> str:
    return str(getattr(model, "name", "") or type(model).__name__)


def _temporary_folder(owner: object) -> Path:
    """Return a folder that is removed with its owner."""
    folder = Path(tempfile.mkdtemp(prefix="seqdefer-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


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
