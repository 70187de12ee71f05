"""The first half of a fit: prepare the task, label training and validation data, and fit one rejector.

`DeferringModel.fit` and `seqdefer fit` both come here, through `DeferringModel.fit_task`; the second half measures
what the rejector's budgets spend and buy. Labels and rejectors are stored in a work folder: what was stopped resumes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from seqdefer.budgets.promises import DEFAULT_CONFIDENCE, PromisingRule, ShareOf, budget_rule, check_confidence
from seqdefer.budgets.quality import check_within
from seqdefer.budgets.rules import NEAREST, BudgetRule
from seqdefer.environment import choose_device
from seqdefer.errors import OptionError
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings, recipe_changes
from seqdefer.interfaces import Served, Task, TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.label_store import open_labels
from seqdefer.labels.labelled import LabelledData, all_names, are_among
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.registry import get_method, preferred_methods, require_applicable, require_fittable
from seqdefer.model.folders import LearnedFrom, Pairing, pairing_of, require_replaceable
from seqdefer.progress import Clock
from seqdefer.recipes import recipe_in_words
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.storage.files import fingerprint
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


def requested_promises(
    guarantee: str, *, confidence: float | None, share_of: ShareOf | None, within: float | None
) -> tuple[BudgetRule, QualityRequest | None]:
    """Return the rule that chooses settings, and the quality to promise, if any. The confidence may be that of a
    quality alone."""
    own = None if within is not None and guarantee != "confident" else confidence
    rule = budget_rule(guarantee, confidence=own, share_of=share_of)
    if within is None:
        return rule, None
    return rule, QualityRequest(within, **({} if confidence is None else {"confidence": confidence}))


@dataclass(frozen=True)
class Learned:
    """A fitted rejector, the pair and the task it belongs to, and the data that its budgets are measured on."""

    task: Task
    served: Served
    rejector: Rejector
    pairing: Pairing
    learned_from: LearnedFrom
    validation: Examples
    labelled: LabelledData | None  # where the method has labels of hand-offs
    trees: DecisionTrees | None  # where it has trees


def learn(
    entry: TaskEntry,
    options: Any,
    settings: ExperimentSettings,
    work: Path,
    *,
    method: str | None = None,
    device: str = "auto",
    labelling: ExecutorSettings | None = None,
    keeps_test: bool = False,
    rule: BudgetRule = NEAREST,
    quality: QualityRequest | None = None,
    kept: Path | None = None,
    clock: Clock,
) -> Learned:
    """Prepare a task and fit one rejector. `method` is by default the first of `preferred_methods`. All data is for
    learning; with `keeps_test`, the test split is kept apart, for guarantees. A model in the folder `kept` that was
    fitted another way is not replaced: that raises before anything is labelled."""
    require_served(entry)
    if method is not None:
        require_fittable(method)
    if isinstance(options, HasTestData) and not keeps_test:
        options = options.without_test()
    task = entry.prepare(options, work, choose_device(device), clock)
    served = served_of(task)
    if quality is not None:
        require_limit(task)
    method = method or preferred_methods(task)[0]
    require_applicable(task, [method])
    labels = open_labels(labelling or ExecutorSettings(), entry, options, task, work, device)
    settings = replace(settings, methods=(method,), seeds=1)
    promised = rule.promise(inputs=0) if isinstance(rule, PromisingRule) else None
    request = fingerprint(*map(repr, (entry.file or entry.name, options, settings, promised, quality)))
    if kept is not None:
        require_replaceable(kept, request)
    experiment = Experiment(task, settings, work, clock, labels=labels)
    splits = experiment.splits
    splits.make_by_engine("train", "validation")
    rejector = experiment.fit(splits.train, splits.validation, seed=0)[method]
    options = task.options if isinstance(task.options, type(options)) else options
    validation = splits.validation
    recipe = recipe_in_words(settings.recipe, recipe_changes(entry, options, settings))
    names = [found for part in (splits.train, validation) for found in all_names(part.examples, served.codec)]
    source = task.describe().get("data", "")
    data = f"{len(names):,} inputs for training and validation{f', of {source}' if source else ''}"
    # A method that learns nothing from hand-offs has none labelled: calibration then asks for its own.
    learns_from = get_method(method).learns_from
    return Learned(
        task,
        served,
        rejector,
        replace(pairing_of(entry.file or entry.name, options, served, recipe, data), request=request),
        LearnedFrom(tuple(chain(*names)), rejector.fingerprint),
        validation.examples,
        labelled=validation if learns_from in ("ends", "hand_offs") else None,
        trees=validation.trees_of(settings.tree_kind) if learns_from == "trees" else None,
    )


def unseen_inputs(task: Task, learned_from: Collection[str]) -> Examples:
    """Return some inputs of the test split, at random, without those that the training data repeats."""
    every = task.split("test")
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    is_known = are_among(learned_from, every, task.codec)
    fresh = [row for row in order.tolist() if not is_known[row]]
    return every.select(torch.tensor(fresh[:PROMISE_INPUTS], dtype=torch.long))


def require_served(entry: TaskEntry) -> None:
    """Raise where a task takes no inputs of users' own."""
    if entry.serve is None:
        raise OptionError(f"task {entry.name!r} takes no inputs of your own, so there is nothing to fit a rejector for")


def require_limit(judge: Task) -> float:
    """Return the largest loss of a task, or raise where it has none."""
    if judge.max_loss is None:
        raise OptionError(
            f"the loss of task {judge.name!r} ({judge.loss_unit}) has no upper limit, so nothing can be promised about "
            "its expectation; promise what is spent instead: --guarantee"
        )
    return judge.max_loss


def served_of(task: Task) -> Served:
    """Return the pair of a task, for users' own inputs."""
    if task.codec is None:
        raise OptionError(f"task {task.name!r} cannot read inputs of your own: it has no codec")
    return Served(task.predictor, task.expert, task.spec, task.codec)
