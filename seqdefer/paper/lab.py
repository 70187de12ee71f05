"""One task of a reproduction: labelled once, then measured cell by cell, and every cell kept.

A cell is one method in one variant on one seed: what it does to that seed's test instances as its threshold moves, and
how well it did on validation data. Cells are named by all that they depend on, so that studies share them, a run that
was killed makes only those that are missing, and nothing is labelled or loaded for a cell that is there.
"""

from __future__ import annotations

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
from seqdefer.environment import machine
from seqdefer.errors import CheckpointError
from seqdefer.evaluation.curves import (
    Curve,
    Ends,
    GridSweep,
    Run,
    StepSweep,
    Sweep,
    curve_of,
    improvement,
    random_curve,
)
from seqdefer.evaluation.experiment import Experiment, sweep_methods
from seqdefer.evaluation.settings import GRANULARITY, METHODS, ExperimentSettings
from seqdefer.evaluation.splits import Splits, Studied, require_studied
from seqdefer.interfaces import NextTokenExpert, Task, TaskEntry
from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.label_store import LabelStore
from seqdefer.paper.plan import ablated_settings
from seqdefer.progress import Clock
from seqdefer.rejectors.losses import rule_of_thumb
from seqdefer.rejectors.training import Strategy
from seqdefer.storage.files import fingerprint, read_json, write_json
from seqdefer.storage.shards import Store
from seqdefer.types import HandOffTable

CELLS = 3  # one more whenever the code changes what a cell holds: cells of before are then made again
LABELS = "label"  # the stage
FITTED = ("WholeModelEmbed", "OneTimeModel", "OneTimeCost", "TokenwiseModel")
ENDS = {"predictor_loss", "expert_loss", "expert_deferred"}


@dataclass(frozen=True)
class Variant:
    """What is changed against `seqdefer run`: the size of J, alpha_1, or the token-level network and its training."""

    hand_offs: int | None = None
    times: float | None = None  # alpha_1 in multiples of what the expert gains on average
    architecture: str | None = None
    strategy: Strategy | None = None

    @property
    def name(self) -> str:
        """Of its folder of rejectors."""
        changed = {key: value for key, value in asdict(self).items() if value is not None}
        return "-".join(f"{key}_{value}" for key, value in changed.items())


USUAL = Variant()


@dataclass(frozen=True)
class Cell:
    sweep: Sweep
    validation: float | None  # % improvement on validation data; None by token, where it would take rollouts


@dataclass(frozen=True)
class Facts:
    """What the labels tell that is needed before any cell."""

    rule: float  # alpha_1 by the rule of thumb
    gain: float  # how much the expert alone improves on the predictor alone, on average over the training examples
    has_entropy: bool
    calls: Calls


class Lab:
    """`inputs` names what rejectors see where labs of one task differ in that alone: they may share a folder."""

    def __init__(
        self,
        entry: TaskEntry,
        task: Task,
        settings: ExperimentSettings,
        folder: Path,
        clock: Clock,
        inputs: str = "usual",
        labels: LabelStore | None = None,
    ) -> None:
        self.entry, self.task, self.settings, self.folder, self.clock = entry, task, settings, folder, clock
        self.inputs = inputs
        self.seconds: dict[str, float] = {}  # by what was done, over all cells that were asked for, whenever made
        self._counted: set[str] = set()
        self.splits = Splits(
            task, folder, clock, seeds=settings.seeds, instances=settings.instances, rollouts=settings.rollouts,
            labels=labels,
        )  # fmt: skip
        self.splits.test_rows()  # too few of them is told before anything is labelled

    # -- what is measured ------------------------------------------------------------------------------------------

    def cell(self, variant: Variant, method: str, seed: int) -> Cell:
        """Made where it is not there yet."""
        _ = self.facts
        words = [asdict(variant), method, seed, _words(self._settings(variant, method))]
        found = self._kept(words, lambda: self._measure(variant, method, seed), method)
        judged = float(found.pop("validation"))
        return Cell(_unpack(found), None if np.isnan(judged) else judged)

    def run(self, seed: int, wanted: Mapping[str, tuple[Variant, str]]) -> Run:
        """The sweeps of several cells under labels, over the same test instances."""
        sweeps = {label: self.cell(variant, method, seed).sweep for label, (variant, method) in wanted.items()}
        return Run(self.ends(seed), sweeps)

    def ends(self, seed: int) -> Ends:
        def make() -> dict[str, Tensor]:
            ends = Ends.of(self._table(seed))
            return {name: torch.from_numpy(getattr(ends, name)) for name in ENDS}

        return Ends(**self._kept(["ends", seed], make, LABELS))

    def oracles(self, seed: int) -> dict[str, Curve]:
        """The best that each granularity can do; where the token level is searched, all methods' outcomes count."""
        names = ["OptimalWhole", "OptimalOneTime", *(["OptimalToken"] if self.by_token else [])]
        run = self.run(seed, {method: (USUAL, method) for method in self.methods})

        def make() -> dict[str, Tensor]:
            experiment = Experiment(self.task, self.settings, self.folder, self.clock, splits=self.splits)
            curves = experiment.oracles(seed, run)
            return {name: torch.tensor(curve.points, dtype=torch.float64) for name, curve in curves.items()}

        words = ["oracles", seed, self.methods, _words(self.settings)]  # what methods reach hangs on their settings
        found = self._kept(words, make, "oracles")
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

        found = self._kept(["facts"], make, LABELS)
        calls = Calls(*found["calls"].tolist())
        return Facts(float(found["rule"]), float(found["gain"]), bool(found["has_entropy"]), calls)

    @property
    def by_token(self) -> bool:
        return isinstance(self.task.expert, NextTokenExpert)

    @property
    def methods(self) -> list[str]:
        """Those that apply to the task."""
        return [
            name
            for name in METHODS
            if (self.by_token or GRANULARITY[name] != "token")
            and (self.facts.has_entropy or not name.endswith("Entropy"))
        ]

    def alpha(self, variant: Variant) -> float:
        """alpha_1 of a variant."""
        return self.facts.rule if variant.times is None else variant.times * self.unit

    @property
    def unit(self) -> float:
        """What alpha_1 is counted in: the expert's mean gain; the rule of thumb, a median, may be 0."""
        return self.facts.gain if self.facts.gain > 0 else 1.0

    @property
    def machine(self) -> dict[str, str]:
        """Where the cells were made last."""
        with suppress(CheckpointError):
            found = read_json(self.folder / "machine.json")
            if isinstance(found, dict):
                return {str(key): str(text) for key, text in found.items()}
        return machine(self.task.predictor.device)

    # -- how -------------------------------------------------------------------------------------------------------

    @cached_property
    def name(self) -> str:
        """Of everything that is the same for all cells of the task: the data, the pair, the losses."""
        task = self.task
        parts = [task.split("train"), task.split("validation"), task.split("test")]
        data = [tensor for part in parts for tensor in (part.inputs, part.targets, part.ids)]
        losses = [task.loss_unit, task.token_rule, *(task.loss_key(part) for part in parts)]
        expert = task.expert.fingerprint or task.describe().get("expert", "")
        # Neither data nor models need show how long sequences may get.
        sizes = (task.spec.length, task.spec.end, self.settings.instances, self.settings.rollouts)
        return fingerprint(__version__, CELLS, task.name, *data, *losses, task.predictor.fingerprint, expert, *sizes)

    def _kept(self, words: Any, make: Callable[[], dict[str, Tensor]], stage: str) -> dict[str, Tensor]:
        """Found or made, and how long that took."""

        def noted() -> dict[str, Tensor]:
            if stage != LABELS:  # their time is not this cell's
                _ = (self.splits.test, self.splits.train, self.splits.validation)
            begun = time.perf_counter()
            made = make()
            write_json(self.folder / "machine.json", machine(self.task.predictor.device))
            return {**made, "seconds": torch.tensor(time.perf_counter() - begun, dtype=torch.float64)}

        name = fingerprint(self.name, words)
        found = Store(self.folder / "cells").kept(name, noted)
        seconds = float(found.pop("seconds"))
        if name not in self._counted:
            self._counted.add(name)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        return found

    def _settings(self, variant: Variant, method: str) -> ExperimentSettings:
        settings = replace(self.settings, methods=(method,), hand_offs=variant.hand_offs)
        if variant.architecture is not None and variant.strategy is not None:
            settings = ablated_settings(self.entry, settings, variant.architecture, variant.strategy)
        return settings

    def _measure(self, variant: Variant, method: str, seed: int) -> dict[str, Tensor]:
        settings = replace(self._settings(variant, method), alpha=self.alpha(variant))
        splits = self.splits
        experiment = Experiment(
            self.task, settings, self.folder, self.clock, splits=splits, variant=f"{self.inputs}-{variant.name}"
        )
        rejectors = experiment.fit(splits.train, splits.validation, seed) if method in FITTED else {}
        swept = _pack(experiment.sweep(seed, rejectors).sweeps[method])
        judged = float("nan")
        if GRANULARITY[method] != "token":
            judged = _judged(splits.validation, method, rejectors, settings, experiment.grid)
        return {**swept, "validation": torch.tensor(judged, dtype=torch.float64)}

    def _table(self, seed: int) -> HandOffTable:
        return self.splits.test.table.select(self.splits.rows(seed))


def _judged(
    validation: Studied, method: str, rejectors: Mapping[str, Any], settings: ExperimentSettings, grid: Tensor
) -> float:
    """% improvement on validation data: what variants are chosen by."""
    require_studied(validation)
    run = sweep_methods(validation, torch.arange(len(validation.examples)), rejectors, settings, grid)
    return improvement(curve_of(run.sweeps[method], run.ends), random_curve(run.ends))


def _words(settings: ExperimentSettings) -> dict[str, Any]:
    """What of the settings a cell depends on, whatever the number of seeds and resamples."""
    words = asdict(settings)
    for name in ("seeds", "resamples", "methods", "alpha"):
        del words[name]
    return words


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
