"""`seqdefer fit`: from a pair and data to a folder that `DeferringModel.from_pretrained` opens.

Labels the training and validation data, fits one rejector, and calibrates its budgets on the validation inputs. Labels
and what is fitted are kept in `FOLDER/work`: what was stopped goes on, and the folder is whole when deferral.json is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from seqdefer.environment import choose_device
from seqdefer.errors import OptionError, unknown
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.interfaces import NextTokenExpert, Served, Task, TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.label_store import open_labels
from seqdefer.model.deferring_model import WORK, DeferringModel, pairing_of
from seqdefer.progress import Clock, Meter, Silent

METHODS = ("TokenwiseModel", "OneTimeModel", "OneTimeCost")


@runtime_checkable
class HasTestData(Protocol):
    """Options of a task that keeps data to report on."""

    def without_test(self) -> Any:
        """The same options, all data for learning."""


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
) -> DeferringModel:
    """Fits, calibrates and saves; `method` is token-level unless the expert only completes. Nothing is reported on, so
    all data is learned from."""
    require_served(entry)
    if method not in (None, *METHODS):
        raise unknown("method to fit", method, METHODS)
    options = options.without_test() if isinstance(options, HasTestData) else options
    clock, work = Clock(meter or Silent()), folder / WORK
    task = entry.prepare(options, work, choose_device(device), clock)
    method = _method_for(task, method)
    labels = open_labels(labelling or ExecutorSettings(), entry, options, task, work, device)
    experiment = Experiment(task, replace(settings, methods=(method,), seeds=1), work, clock, labels=labels)
    splits = experiment.splits
    splits.make_by_engine("train", "validation")
    rejector = experiment.fit(splits.train, splits.validation, seed=0)[method]
    served = served_of(task)
    model = DeferringModel(served, rejector, pairing=pairing_of(entry.name, options, served))
    validation = splits.validation
    with clock.stage("calibrate budgets", len(validation.examples)) as advance:
        model.calibrate_on(validation.examples, judge=task, table=validation.table, progress=advance)
    model.save_pretrained(folder)
    return model


def require_served(entry: TaskEntry) -> None:
    if entry.serve is None:
        raise OptionError(f"task {entry.name!r} takes no inputs of your own, so there is nothing to fit a rejector for")


def served_of(task: Task) -> Served:
    """The pair of a task, for inputs of users' own."""
    if task.codec is None:
        raise OptionError(f"task {task.name!r} cannot read inputs of your own: it has no codec")
    return Served(task.predictor, task.expert, task.spec, task.codec)


def _method_for(task: Task, method: str | None) -> str:
    by_token = isinstance(task.expert, NextTokenExpert)
    if method == "TokenwiseModel" and not by_token:
        raise OptionError(
            f"the expert of task {task.name!r} completes sequences and names no next token; available: "
            + ", ".join(METHODS[1:])
        )
    return method or ("TokenwiseModel" if by_token else "OneTimeCost")
