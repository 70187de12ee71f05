"""What every setting does to inputs that no fit has seen: studies of budgets draw from them.

    population = measure(SUBJECTS["pronounce"], Path("runs/coverage"))
    population.spending.inputs

A subject is a task with one method. Its rejector is fitted once by the quick preset, on training and validation data;
the population is its test split. Fits and populations are stored in the folder, named by what made them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.budgets.hand_off_rules import HAND_OFF_RULES, ScoredHandOffs
from seqdefer.budgets.spending import HandOffSpending, Spending, TokenSpending
from seqdefer.budgets.token_sweeps import TokenSweep
from seqdefer.environment import choose_device
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.interfaces import Task
from seqdefer.methods.deferral import deferral_of
from seqdefer.progress import Clock, Meter
from seqdefer.registry import load_task
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.storage.files import fingerprint, read_tensors, write_tensors
from seqdefer.types import HandOffTable


@dataclass(frozen=True)
class Subject:
    """A task, a method, and what differs from the quick preset. `inputs` is the size of the population, at most."""

    task: str
    method: str
    inputs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    learning: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> Subject:
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Population:
    """What every setting does to the inputs of a subject."""

    subject: Subject
    spending: Spending
    unit: str  # of the loss
    made_by: str  # fingerprint


SUBJECTS = {
    "weather": Subject("weather", "TokenwiseModel", 4000),
    "pronounce": Subject("pronounce", "TokenwiseModel", 4000),
    "tsp": Subject(
        "tsp", "OneTimeModel", 2000, {"train": 400, "validation": 100, "test": 2000}, {"hand_offs": 11}
    ),
    "xsum": Subject("xsum", "TokenwiseModel", 600, {"test_documents": 600}),
}  # fmt: skip


def measure(subject: Subject, folder: Path, *, meter: Meter, device: str = "cpu") -> Population:
    """Fit the rejector of a subject and sweep it over the test split, or read what an earlier call stored."""
    made_by = fingerprint(asdict(subject), __version__)
    file = folder / f"{subject.task}-{made_by}.safetensors"
    if not file.exists():
        task, spending = _sweep(subject, folder, Clock(meter), device)
        write_tensors(file, _columns(spending), {"unit": task.loss_unit})
    return Population(subject, _spending(read_tensors(file)), _unit(file), made_by)


def fit_subject(subject: Subject, folder: Path, clock: Clock, device: str = "cpu") -> tuple[Task, Rejector]:
    """Return the task of a subject, and its rejector: fitted, or as an earlier call stored it."""
    fit = fingerprint(asdict(replace(subject, inputs=0)), __version__)
    folder, entry = folder / f"{subject.task}-fit-{fit}", load_task(subject.task)
    options = replace(entry.presets["quick"], **subject.options)
    task = entry.prepare(options, folder, choose_device(device), clock)
    settings = replace(
        experiment_settings(entry, "quick"), methods=(subject.method,), seeds=1, instances=1, **subject.learning
    )
    experiment = Experiment(task, settings, folder, clock)
    splits = experiment.splits
    return task, experiment.fit(splits.train, splits.validation, seed=0)[subject.method]


def _sweep(subject: Subject, folder: Path, clock: Clock, device: str) -> tuple[Task, Spending]:
    task, rejector = fit_subject(subject, folder, clock, device)
    every = task.split("test")
    rows = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[: subject.inputs]
    with clock.stage("sweep the population", len(rows)) as advance:
        return task, deferral_of(rejector).spending(task, every.select(rows), progress=advance, set_aside=True)


def _columns(spending: Spending) -> dict[str, Tensor]:
    """Return a spending as tensors; `_spending` reads them."""
    if isinstance(spending, TokenSpending):
        swept = spending.sweep
        columns = {"thresholds": swept.thresholds, "deferred": swept.deferred, "lengths": swept.lengths}
        return {**columns, "loss": swept.loss, "length": torch.tensor([spending.length])}
    assert isinstance(spending, HandOffSpending)
    scored, table = spending.scored, spending.table
    rule = next(name for name, one in HAND_OFF_RULES.items() if one is scored.rule)
    arrays = {"scores": scored.scores, "grid": scored.grid, "lengths": scored.lengths}
    columns = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    return {**columns, "loss": table.loss, "deferred": table.deferred, f"rule.{rule}": torch.zeros(1)}


def _spending(columns: Mapping[str, Tensor]) -> Spending:
    if "thresholds" in columns:
        swept = TokenSweep(*(columns[name] for name in ("thresholds", "deferred", "lengths", "loss")))
        return TokenSpending(swept, int(columns["length"]), has_fixed_settings=True)
    rule = next(name.removeprefix("rule.") for name in columns if name.startswith("rule."))
    length = int(columns["grid"][-1])
    scored = ScoredHandOffs.of(
        columns["scores"], length, hand_offs=columns["grid"], rule=rule, lengths=columns["lengths"]
    )  # fmt: skip
    return HandOffSpending(scored, HandOffTable(columns["loss"], columns["deferred"]))


def _unit(file: Path) -> str:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        return str(opened.metadata()["unit"])
