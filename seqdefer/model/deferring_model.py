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

import dataclasses
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Self

from seqdefer.budgets.promises import PromisingRule, ShareOf
from seqdefer.budgets.rules import NEAREST, BudgetRule
from seqdefer.errors import OptionError
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.interfaces import Task, TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.methods.timing import TIMED_BUDGETS
from seqdefer.model import folders
from seqdefer.model.folders import PAIRING_FILE, RECORDS, REJECTOR_FOLDER, ROLES, WORK_FOLDER
from seqdefer.model.hub import local_folder, upload
from seqdefer.model.learning import QualityRequest, learn, requested_promises, unseen_inputs
from seqdefer.model.model_card import write_demo, write_model_card
from seqdefer.model.unfitted import UnfittedPair, bind
from seqdefer.model.writing_pair import WritingPair
from seqdefer.progress import Clock, Meter, Silent
from seqdefer.progress_bars import say, show_progress
from seqdefer.recipes import DEFAULT_PRESET
from seqdefer.rejectors.checkpoints import load_rejector
from seqdefer.report.notebook import model_html
from seqdefer.report.terminal import bought_table
from seqdefer.storage.files import writable_folder
from seqdefer.types import Examples


class DeferringModel(WritingPair):
    """A pair, a rejector and the budgets it was calibrated for. `from_pair` makes one that waits for `fit`."""

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
        replace: bool = False,
        progress: bool = True,
        **options: Any,
    ) -> Self:
        """Fit a rejector and measure its budgets, as `seqdefer fit text` does, with the same defaults.

        data       pairs (text, reference), dictionaries, a datasets.Dataset, a pandas DataFrame, a JSONL file, or the
                   name of a dataset; fields are `document_field` and `summary_field` ("document", "summary")
        metric     a name (rouge1), a function (prediction, reference, input) -> float, or a `Metric`
        folder     where to work and save, so that what was stopped resumes (a temporary one)
        method     the kind of rejector (TokenwiseModel, or OneTimeCost where the expert only completes)
        replace    fit in a `folder` that holds a model which was fitted another way, and lose that
        progress   show bars, and afterwards what budgets buy, on stderr
        guarantee  with `confidence`, `share_of` and `within`: see `seqdefer fit text --help`
        options    more options of the task, such as `train_documents`, or of learning, such as `architecture`"""
        if self.unfitted is None:
            raise OptionError("this model was not made by from_pair; make one to fit: DeferringModel.from_pair(...)")
        given = {**options, "train": data, "metric": metric}
        entry, chosen, settings = self.unfitted.chosen(given, preset=preset, recipe=recipe)
        rule, quality = requested_promises(guarantee, confidence=confidence, share_of=share_of, within=within)
        home = _temporary_folder(self) if folder is None else Path(folder)
        with writable_folder(home, "folder="), show_progress(quiet=not progress) as meter:
            self.fit_task(
                entry, chosen, settings, home, method=method, device=self.unfitted.device, rule=rule, quality=quality,
                replace=replace, meter=meter,
            )  # fmt: skip
        assert self.calibration is not None
        worth = None if self.curve is None else self.curve.worth()
        remarks = (
            worth,
            self.quality and self.quality.in_words(),
            self.calibration.roughness(),
            self.fitted_in_words(),
        )
        say(bought_table(self.calibration, self.timing, self.curve), *remarks, quiet=not progress)
        return self

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
        replace: bool = False,
    ) -> Self:
        """Fit, calibrate and save a task's own pair. Nothing is reported on, so all data is for learning; except for
        guarantees, which rest on the test split: of what is spent, or of quality."""
        promises, clock = isinstance(rule, PromisingRule) or quality is not None, Clock(meter or Silent())
        learned = learn(
            entry, options, settings, folder / WORK_FOLDER, method=method, device=device, labelling=labelling,
            keeps_test=promises, rule=rule, quality=quality, kept=None if replace else folder, clock=clock,
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

    def fitted_in_words(self) -> str:
        """Return by which recipe and on what data this model was fitted."""
        assert self.pairing is not None
        return f"fitted by the recipe {self.pairing.recipe}, on {self.pairing.data}"

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
        pairing = folders.read_pairing(folder)
        is_downloaded = folder != Path(source).expanduser()
        if is_downloaded:
            folders.require_own_endpoint(pairing, expert)
        entry = folders.task_of(pairing, folder, is_downloaded=is_downloaded)
        entry, changes = bind(entry, {"predictor": predictor, "expert": expert, "tokenizer": tokenizer})
        known = {field.name for field in dataclasses.fields(next(iter(entry.presets.values())))}
        for name in changes.keys() - known:
            raise OptionError(f"task {entry.name!r} has no option {name}: its pair belongs to it; leave {name} out")
        named = {name: folders.absolute(value) for name, value in changes.items()}
        pairing = dataclasses.replace(pairing, options={**folders.unbundled(pairing.options, folder), **named})
        served = folders.load_served(entry, pairing, folder, device, meter or Silent())
        rejector = load_rejector(folder / REJECTOR_FOLDER, served.predictor)
        names = [name for name in RECORDS if budgets or name != "calibration"]
        records = {name: folders.read_record_of(rejector, folder, name) for name in names}
        return cls(served, rejector, pairing=pairing, **records)

    def save_pretrained(self, folder: Path | str, *, bundle: bool = False) -> Path:
        """Write the folder, deferral.json last: where it exists, the rest is complete. It names the pair, or holds it
        with `bundle`, and has a model card and a demo (README.md, app.py)."""
        folder, _ = Path(folder), self._require_fitted()
        if self.pairing is None:
            raise OptionError("this model was put together by hand and cannot name its pair; give it a Pairing")
        for path in (folder / PAIRING_FILE, *(folders.record_path(folder, name) for name in RECORDS)):
            path.unlink(missing_ok=True)  # or new weights could stand beside old records
        self.rejector.save_pretrained(folder / REJECTOR_FOLDER)
        folders.write_records(folder, {name: getattr(self, name) for name in RECORDS})
        pairing = folders.bundle_pair(folder, self.pairing, self.served) if bundle else self.pairing
        write_model_card(folder, pairing, self.calibration, self.curve, self.method)
        write_demo(folder)
        folders.write_pairing(folder, pairing)
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
        A pair in folders of this machine needs `bundle`; otherwise users of the model must say where theirs is."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, bundle=bundle)
            folders.hide_paths(Path(folder))
            return upload(Path(folder), repository, private=private, token=token, message=message)

    def save_calibration(self, folder: Path | str) -> None:
        """Write the budgets and what they take, into a folder that has the rest; its card shows them."""
        folder = Path(folder)
        folders.write_records(folder, {"calibration": self.calibration, "timing": self.timing})
        if self.pairing is not None and (folder / PAIRING_FILE).is_file():
            write_model_card(folder, self.pairing, self.calibration, self.curve, self.method)


def _name_of(model: Any) -> str:
    return str(getattr(model, "name", "") or type(model).__name__)


def _temporary_folder(owner: object) -> Path:
    """Return a folder that is removed with its owner."""
    folder = Path(tempfile.mkdtemp(prefix="seqdefer-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder
