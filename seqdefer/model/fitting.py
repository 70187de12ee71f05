"""`seqdefer fit`: from a pair and data to a folder that `DeferringModel.from_pretrained` opens.

Labels the training and validation data, fits one rejector, and calibrates its budgets on the validation inputs. Labels
and the fitted rejector are stored in `FOLDER/work`: what was stopped resumes, and the folder is complete when
deferral.json is there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from seqdefer.budgets.promises import DEFAULT_CONFIDENCE, PromisingRule, check_confidence
from seqdefer.budgets.quality import check_within
from seqdefer.budgets.rules import NEAREST, BudgetRule
from seqdefer.environment import choose_device
from seqdefer.errors import OptionError
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings, recipe_changes
from seqdefer.interfaces import Served, Task, TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.label_store import open_labels
from seqdefer.labels.labelled import input_names
from seqdefer.methods.registry import get_method, preferred_methods, require_applicable, require_fittable
from seqdefer.methods.timing import TIMED_BUDGETS
from seqdefer.model.deferring_model import DeferringModel, require_limit
from seqdefer.model.folders import WORK_FOLDER, LearnedFrom, pairing_of
from seqdefer.progress import Clock, Meter, Silent
from seqdefer.recipes import recipe_in_words
from seqdefer.types import Examples

PROMISE_INPUTS = 500  # of the test split that a guarantee rests on, at most


@runtime_checkable
class HasTestData(Protocol):
    """Options of a task that keeps data to report on."""

    def without_test(self) -> Any:
        """Return the same options, all data for learning."""


@dataclass(frozen=True)
class QualityRequest:
    """A quality to promise: an expected loss of at most `within` above the expert's, with a confidence."""

    within: float
    confidence: float = DEFAULT_CONFIDENCE

    def __post_init__(self) -> None:
        check_within(self.within)
        check_confidence(self.confidence)


def fit_model(
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
) -> DeferringModel:
    """Fit, calibrate and save. `method` is by default the first of `preferred_methods`. Nothing is reported on, so all
    data is for learning; except for guarantees, which rest on the test split: of what is spent, or of quality."""
    require_served(entry)
    if method is not None:
        require_fittable(method)
    promises = isinstance(rule, PromisingRule) or quality is not None
    if isinstance(options, HasTestData) and not promises:
        options = options.without_test()
    clock, work = Clock(meter or Silent()), folder / WORK_FOLDER
    task = entry.prepare(options, work, choose_device(device), clock)
    if quality is not None:
        require_limit(task)
    method = method or preferred_methods(task)[0]
    require_applicable(task, [method])
    labels = open_labels(labelling or ExecutorSettings(), entry, options, task, work, device)
    settings = replace(settings, methods=(method,), seeds=1)
    experiment = Experiment(task, settings, work, clock, labels=labels)
    splits = experiment.splits
    splits.make_by_engine("train", "validation")
    rejector = experiment.fit(splits.train, splits.validation, seed=0)[method]
    served = served_of(task)
    recipe = recipe_in_words(settings.recipe, recipe_changes(entry, options, settings))
    model = DeferringModel(served, rejector, pairing=pairing_of(entry.file or entry.name, options, served, recipe))
    validation = splits.validation
    # A method that learns nothing from hand-offs has none labelled: calibration then asks for its own.
    learns_from = get_method(method).learns_from
    labelled = validation if learns_from in ("ends", "hand_offs") else None
    trees = validation.trees_of(settings.tree_kind) if learns_from == "trees" else None
    with clock.stage("calibrate budgets", len(validation.examples)) as advance:
        model.calibrate_on(validation.examples, judge=task, labelled=labelled, trees=trees, progress=advance)
    names = [name for part in (splits.train, validation) for name in input_names(part.examples)]
    model.learned_from = LearnedFrom(tuple(names), rejector.fingerprint)
    if promises:
        model.save_pretrained(folder)  # a promise that cannot be made raises, and must not lose the fit
        data = model.calibration_data(unseen_inputs(task, names))
        with clock.stage("promise", len(data.examples)) as advance:
            spending = model.spending_on(data, judge=task, progress=advance)
        if isinstance(rule, PromisingRule):
            model.promise(spending, rule)
        if quality is not None:
            model.promise_quality(spending, task, within=quality.within, confidence=quality.confidence)
    with clock.stage("time budgets", len(TIMED_BUDGETS)) as advance:
        model.time(validation.examples, progress=advance)
    model.save_pretrained(folder)
    return model


def unseen_inputs(task: Task, learned_from: Collection[str]) -> Examples:
    """Return some inputs of the test split, at random, without those that the training data repeats."""
    every = task.split("test")
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    known, names = frozenset(learned_from), input_names(every)
    fresh = [row for row in order.tolist() if names[row] not in known]
    return every.select(torch.tensor(fresh[:PROMISE_INPUTS], dtype=torch.long))


def require_served(entry: TaskEntry) -> None:
    """Raise where a task takes no inputs of users' own."""
    if entry.serve is None:
        raise OptionError(f"task {entry.name!r} takes no inputs of your own, so there is nothing to fit a rejector for")


def served_of(task: Task) -> Served:
    """Return the pair of a task, for users' own inputs."""
    if task.codec is None:
        raise OptionError(f"task {task.name!r} cannot read inputs of your own: it has no codec")
    return Served(task.predictor, task.expert, task.spec, task.codec)
