"""One task of a reproduction: it is labelled once and measured cell by cell, and every cell is stored.

A cell is one method in one variant on one seed: its outcome on the test instances of that seed as its threshold moves,
and its improvement on validation data. The name of a cell is a fingerprint of everything that it depends on. Studies
therefore share cells, a run that was killed continues with the missing ones, and a stored cell needs no labels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.budgets.sweeps import GridSweep, StepSweep, Sweep
from seqdefer.environment import machine
from seqdefer.errors import CheckpointError
from seqdefer.evaluation.curves import Curve, Ends, Run, curve_of, improvement, random_curve
from seqdefer.evaluation.experiment import Experiment, sweep_methods
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.evaluation.splits import Splits
from seqdefer.hyperparameters import Strategy
from seqdefer.interfaces import NextTokenExpert, Task, TaskEntry
from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.label_store import LabelStore
from seqdefer.labels.labelled import LearningData, require_learning_data
from seqdefer.methods.registry import get_method, methods_for
from seqdefer.paper.plan import ablated_settings
from seqdefer.progress import Clock
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.rejectors.losses import hand_off_grid, rule_of_thumb
from seqdefer.storage.files import fingerprint, read_json, write_json
from seqdefer.storage.shards import Store

CELL_FORMAT = 5  # increase it when the content of a cell changes: older cells are then measured again
LABEL_STAGE = "label"
END_NAMES = {"predictor_loss", "expert_loss", "expert_deferred"}


@dataclass(frozen=True)
class Variant:
    """Changes to `seqdefer run`: the size of J, alpha_1, psi, or the token-level network and its training."""

    hand_offs: int | None = None
    times: float | None = None  # alpha_1 in multiples of the expert's mean gain
    psi: str | None = None
    architecture: str | None = None
    strategy: Strategy | None = None

    @property
    def name(self) -> str:
        """The name of its folder of rejectors."""
        changed = {key: value for key, value in asdict(self).items() if value is not None}
        return "-".join(f"{key}_{value}" for key, value in changed.items())


DEFAULT_VARIANT = Variant()
TRAINING_FACTS = ("epochs", "best_epoch", "by_teacher", "by_closed_trees")  # the last two in % of decisions


@dataclass(frozen=True)
class MeasuredCell:
    sweep: Sweep
    validation: float | None  # % improvement on validation data; None at token level, which would need rollouts
    training: Mapping[str, float]  # of fitted networks: TRAINING_FACTS


@dataclass(frozen=True)
class Facts:
    """Numbers from the labels that every cell needs."""

    rule: float  # alpha_1 by the rule of thumb
    gain: float  # mean gain of the expert alone over the predictor alone, on the training examples
    has_entropy: bool
    calls: Calls


class Lab:
    """The cells of one task by one recipe. The labs of both recipes may share a folder."""

    def __init__(
        self,
        entry: TaskEntry,
        task: Task,
        settings: ExperimentSettings,
        folder: Path,
        clock: Clock,
        labels: LabelStore | None = None,
    ) -> None:
        self.entry, self.task, self.settings, self.folder, self.clock = entry, task, settings, folder, clock
        self.seconds: dict[str, float] = {}  # by stage, of all requested cells, also of stored ones
        self._counted: set[str] = set()
        self._store = Store(folder / "cells")
        self.splits = Splits(
            task, folder, clock, seeds=settings.seeds, instances=settings.instances, trees=settings.tree_kind,
            rollouts=settings.rollouts,
            labels=labels,
        )  # fmt: skip
        self.splits.test_rows()  # raises for too few examples before anything is labelled
        if settings.hand_offs is not None:
            hand_off_grid(task.spec.length, settings.hand_offs)  # raises for too many

    def cell(self, variant: Variant, method: str, seed: int) -> MeasuredCell:
        """Return a cell; measure it where it is not stored."""
        _ = self.facts
        found = self._stored(self._key(variant, method, seed), lambda: self._measure(variant, method, seed), method)
        validation, training = float(found.pop("validation")), found.pop("training").tolist()
        facts = dict(zip(TRAINING_FACTS, training, strict=False))  # none of methods without a network
        return MeasuredCell(_unpack(found), None if np.isnan(validation) else validation, facts)

    def is_stored(self, variant: Variant, method: str, seed: int) -> bool:
        return self._store.path(fingerprint(self.name, self._key(variant, method, seed))).is_file()

    def _key(self, variant: Variant, method: str, seed: int) -> list[Any]:
        return [asdict(variant), method, seed, _key_of(self._settings(variant, method))]

    def run(self, seed: int, wanted: Mapping[str, tuple[Variant, str]]) -> Run:
        """Return the sweeps of several cells by label, over the same test instances."""
        sweeps = {label: self.cell(variant, method, seed).sweep for label, (variant, method) in wanted.items()}
        return Run(self.ends(seed), sweeps)

    def ends(self, seed: int) -> Ends:
        def make() -> dict[str, Tensor]:
            ends = Ends.of(self.splits.test.table.select(self.splits.rows(seed)))
            return {name: torch.from_numpy(getattr(ends, name)) for name in END_NAMES}

        return Ends(**self._stored(["ends", seed], make, LABEL_STAGE))

    def oracles(self, seed: int) -> dict[str, Curve]:
        """Return the best curve of each granularity. A token-level search also counts the outcomes of all methods."""
        names = ["OptimalFree", "OptimalWhole", "OptimalOneTime"] + ["OptimalToken", "MyopicToken"] * self.by_token
        run = self.run(seed, {method: (DEFAULT_VARIANT, method) for method in self.methods})

        def make() -> dict[str, Tensor]:
            experiment = Experiment(self.task, self.settings, self.folder, self.clock, splits=self.splits)
            curves = experiment.oracles(seed, run)
            return {name: torch.tensor(curve.points, dtype=torch.float64) for name, curve in curves.items()}

        key = ["oracles", seed, self.methods, _key_of(self.settings)]  # the outcomes of methods depend on settings
        found = self._stored(key, make, "oracles")
        return {name: Curve(found[name][:, 0].numpy(), found[name][:, 1].numpy()) for name in names}

    @cached_property
    def facts(self) -> Facts:
        def make() -> dict[str, Tensor]:
            splits = self.splits
            splits.make_by_engine("test", "train", "validation")
            entropy, train, _ = splits.test.draft.entropy, splits.train.table, splits.validation
            gain = float((train.loss[:, -1] - train.loss[:, 0]).double().mean())
            numbers = {"rule": rule_of_thumb(train), "gain": gain}
            tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
            calls = torch.tensor([splits.calls.made, splits.calls.saved])
            return {**tensors, "has_entropy": torch.tensor(entropy is not None), "calls": calls}

        found = self._stored(["facts"], make, LABEL_STAGE)
        calls = Calls(*found["calls"].tolist())
        return Facts(float(found["rule"]), float(found["gain"]), bool(found["has_entropy"]), calls)

    @property
    def by_token(self) -> bool:
        return isinstance(self.task.expert, NextTokenExpert)

    @property
    def methods(self) -> list[str]:
        """The methods of the recipe that apply to the task."""
        allowed = methods_for(self.task, has_entropy=self.facts.has_entropy)
        return [name for name in allowed if self.settings.wants(name)]

    def alpha(self, variant: Variant) -> float:
        """Return alpha_1 of a variant: its own, that of the recipe, or the rule of thumb.

        A multiple of the unit that is one of these but for rounding gives that one exactly."""
        own = self.facts.rule if self.settings.alpha is None else self.settings.alpha
        if variant.times is None:
            return own
        alpha = variant.times * self.unit
        return next((known for known in (own, self.facts.rule) if math.isclose(alpha, known)), alpha)

    def size(self, variant: Variant) -> int:
        """Return the size of J of a variant: its own, that of the recipe, or all positions."""
        return variant.hand_offs or self.settings.hand_offs or self.n_positions

    @property
    def n_positions(self) -> int:
        """L + 1, the size of J with all positions."""
        return self.task.spec.length + 1

    @property
    def unit(self) -> float:
        """The unit of alpha_1: the expert's mean gain. The rule of thumb is a median and may be 0."""
        return self.facts.gain if self.facts.gain > 0 else 1.0

    @property
    def machine(self) -> dict[str, str]:
        """The machine that measured last."""
        with suppress(CheckpointError):
            found: dict[str, str] = read_json(self._machine_file)
            return found
        return machine(self.task.predictor.device)

    @property
    def _machine_file(self) -> Path:
        return self.folder / f"machine-{self.settings.recipe}.json"

    @cached_property
    def name(self) -> str:
        """A fingerprint of what all cells of the task share: data, models, losses, sizes."""
        task = self.task
        parts = [task.split("train"), task.split("validation"), task.split("test")]
        data = [tensor for part in parts for tensor in (part.inputs, part.targets, part.ids)]
        losses = [task.loss_unit, task.token_rule, *(task.loss_key(part) for part in parts)]
        # The maximum length need not show in data or models.
        sizes = (task.spec.length, task.spec.end, self.settings.instances, self.settings.rollouts)
        return fingerprint(
            __version__, CELL_FORMAT, task.name, *data, *losses, task.predictor.fingerprint, self._expert, *sizes
        )

    @cached_property
    def tested_on(self) -> str:
        """A fingerprint of the test data and of who writes, equal for all recipes."""
        task, test = self.task, self.task.split("test")
        return fingerprint(test.targets, test.ids, task.predictor.writer, self._expert)

    @property
    def _expert(self) -> str:
        return self.task.expert.fingerprint or self.task.describe().get("expert", "")

    def _stored(self, key: Any, make: Callable[[], dict[str, Tensor]], stage: str) -> dict[str, Tensor]:
        """Load stored tensors, or make and store them; add the seconds that making them took to the stage."""

        def make_timed() -> dict[str, Tensor]:
            if stage != LABEL_STAGE:  # label first: the time of labelling is not that of this cell
                _ = (self.splits.test, self.splits.train, self.splits.validation)
            start = time.perf_counter()
            made = make()
            write_json(self._machine_file, machine(self.task.predictor.device))
            return {**made, "seconds": torch.tensor(time.perf_counter() - start, dtype=torch.float64)}

        name = fingerprint(self.name, key)
        found = self._store.load_or_make(name, make_timed)
        seconds = float(found.pop("seconds"))
        if name not in self._counted:
            self._counted.add(name)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        return found

    def _settings(self, variant: Variant, method: str) -> ExperimentSettings:
        size = self.size(variant)
        settings = replace(self.settings, methods=(method,), hand_offs=None if size == self.n_positions else size)
        if variant.psi is not None:
            settings = replace(settings, psi=variant.psi)
        if variant.architecture is not None and variant.strategy is not None:
            settings = ablated_settings(self.entry, settings, variant.architecture, variant.strategy)
        return settings

    def _measure(self, variant: Variant, method: str, seed: int) -> dict[str, Tensor]:
        settings = replace(self._settings(variant, method), alpha=self.alpha(variant))
        splits = self.splits
        experiment = Experiment(
            self.task, settings, self.folder, self.clock, splits=splits, variant=f"{settings.recipe}-{variant.name}"
        )
        rejectors = experiment.fit(splits.train, splits.validation, seed)
        swept = _pack(experiment.sweep(seed, rejectors).sweeps[method])
        validation = float("nan")
        if get_method(method).granularity != "token":
            validation = _validation_improvement(splits.validation, method, rejectors)
        numbers = {"validation": validation, "training": _training_facts(rejectors[method])}
        return {**swept, **{name: torch.tensor(one, dtype=torch.float64) for name, one in numbers.items()}}


def _validation_improvement(validation: LearningData, method: str, rejectors: Mapping[str, Any]) -> float:
    """Return the % improvement on validation data, by which studies choose variants."""
    require_learning_data(validation)
    run = sweep_methods(validation, torch.arange(len(validation.examples)), rejectors)
    return improvement(curve_of(run.sweeps[method], run.ends), random_curve(run.ends))


def _training_facts(rejector: Rejector) -> list[float]:
    """Return the figures named in TRAINING_FACTS; none of a method without a network."""
    history = rejector.notes.get("history") if rejector.module is not None else None
    if not history:
        return []
    overridden = history["overridden"]
    shares = [100 * overridden[name] for name in ("teacher", "closed") if name in overridden]  # at token level
    return [len(history["training"]), history["best"] + 1, *shares]


def _key_of(settings: ExperimentSettings) -> dict[str, Any]:
    """Return the settings that a cell depends on."""
    return {key: one for key, one in asdict(settings).items() if key not in ("seeds", "resamples", "methods")}


def _pack(sweep: Sweep) -> dict[str, Tensor]:
    arrays: dict[str, np.ndarray[Any, Any]]
    if isinstance(sweep, GridSweep):
        arrays = {"deferred": sweep.deferred, "loss": sweep.loss}
    else:
        assert isinstance(sweep, StepSweep)
        arrays = {"scores": sweep.scores, "rows": sweep.rows, "more_deferred": sweep.change[0],
                  "more_loss": sweep.change[1], "deferred": sweep.start[0], "loss": sweep.start[1]}  # fmt: skip
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _unpack(found: Mapping[str, Tensor]) -> Sweep:
    arrays = {name: tensor.numpy() for name, tensor in found.items()}
    if "scores" not in arrays:
        return GridSweep(arrays["deferred"], arrays["loss"])
    return StepSweep(
        arrays["scores"],
        arrays["rows"],
        (arrays["more_deferred"], arrays["more_loss"]),
        (arrays["deferred"], arrays["loss"]),
    )
