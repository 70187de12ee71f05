"""The record of a method, and what a fit may look at.

A file of a method defines `METHODS`, a tuple of records:

    METHODS = (Method("TokenwiseScore", "token", rule_fit(lambda context: Confidence("uncertainty"))),)

Hyperparameters that belong to one method alone are a constant of its file: a `Settings` record that `fit` trains with
and names in `Fit.choices`. `LearningSettings` has those that tasks and the command line choose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from seqdefer import __version__
from seqdefer.hyperparameters import Settings
from seqdefer.interfaces import Task
from seqdefer.labels.labelled import LearningData
from seqdefer.progress import Progress
from seqdefer.recipes import LearningSettings
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.rejectors.confidence import DraftRule, TokenRule
from seqdefer.rejectors.losses import rule_of_thumb
from seqdefer.rejectors.token_training import default_price
from seqdefer.rejectors.training import History
from seqdefer.storage.files import fingerprint
from seqdefer.types import Granularity


@dataclass(frozen=True)
class FitContext:
    """What a fit may look at. `grid` are the hand-offs that one-time rejectors choose from."""

    task: Task
    settings: LearningSettings
    grid: Tensor  # int64 (J,)
    train: LearningData
    validation: LearningData
    seed: int = 0

    @cached_property
    def alpha(self) -> float:
        """alpha_1: as set, or the rule of thumb."""
        return rule_of_thumb(self.train.table) if self.settings.alpha is None else self.settings.alpha

    @cached_property
    def price(self) -> float:
        """The price of an expert token in training: as set, or the default."""
        if self.settings.price is not None:
            return self.settings.price
        trees = self.train.trees_of(self.settings.tree_kind)
        return 0.0 if trees is None else default_price(trees)

    def draft_data(self, grid: Tensor) -> str:
        """Name the labels of these hand-offs, the predictor and the version."""
        return self._name(*self.train.seen_by_draft(grid), *self.validation.seen_by_draft(grid))

    def token_data(self) -> str:
        """Name the token-level labels, the predictor and the version."""
        kind = self.settings.tree_kind
        return self._name(*self.train.seen_by_token(kind), *self.validation.seen_by_token(kind))

    def _name(self, *seen: Tensor) -> str:
        return fingerprint(*seen, self.task.predictor.fingerprint, __version__)


@dataclass(frozen=True)
class Fit:
    """One fit to be run. `choices` and `data` name everything that its outcome depends on besides the seed; a fit of
    no epochs takes no time and its outcome is not stored."""

    run: Callable[[Progress], tuple[Rejector, History | None]]
    epochs: int = 0
    choices: Any = None
    data: str = ""


@dataclass(frozen=True)
class Method:
    """A rejector or rule with its granularity: one row of the paper's table.

    `learns_from` says what is labelled for it: `ends` are the sequences of both writers alone, `hand_offs` those of the
    grid, `trees` mixed decisions."""

    name: str
    granularity: Granularity
    fit: Callable[[FitContext], Fit]
    learns_from: Literal["ends", "hand_offs", "trees"] | None = None  # None: nothing is trained
    needs_entropy: bool = False
    note: Callable[[FitContext], str] = field(default=lambda _: "")  # what the report prints about this run
    order: int = 100  # in tables, among the methods of its granularity
    is_ours: bool = False  # not in the paper, and so not in its recipe
    source: str = ""  # whose rule it is, where it is neither the paper's nor ours
    about: str = ""  # a sentence for people who meet the name in a table
    reads_first: bool = False  # the expert reads a position before it decides; such methods cannot be fitted to serve

    @property
    def is_learned(self) -> bool:
        return self.learns_from is not None and not self.source

    @property
    def runs_when_named(self) -> bool:
        """Whether a run has it only where it is named: other people's rules, and what needs labels of another kind."""
        return bool(self.source) or self.reads_first


def draft_fit(
    context: FitContext, train: Callable[..., tuple[Rejector, History]], settings: Settings, grid: Tensor, choices: Any
) -> Fit:
    """Return the fit of a network that scores drafts by the labels of `grid`. `train` is one of
    `seqdefer.rejectors.draft_training`, with what it needs besides data, settings, predictor and seed."""
    data, predictor = [(part.draft, part.table) for part in (context.train, context.validation)], context.task.predictor
    how = {"fingerprint": predictor.fingerprint, "seed": context.seed, "device": predictor.device}
    return Fit(
        lambda progress: train(*data, settings=settings, **how, progress=progress),
        epochs=settings.epochs,
        choices=choices,
        data=context.draft_data(grid),
    )


def rule_fit(make: Callable[[FitContext], TokenRule | DraftRule]) -> Callable[[FitContext], Fit]:
    """Return the fit of a rule: there is nothing to train."""

    def fit(context: FitContext) -> Fit:
        rule = make(context)
        rule.predictor = context.task.predictor.fingerprint
        return Fit(lambda _: (rule, None))

    return fit
