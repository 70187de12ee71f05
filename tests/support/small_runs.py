"""Runs from end to end that take seconds: on the toy task, and on a made-up weather record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.results import Results
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.hyperparameters import Settings
from seqdefer.interfaces import Task
from seqdefer.methods import one_time_cost, one_time_model, tokenwise_model, whole_model
from seqdefer.report.run import run_task
from seqdefer.tasks.weather.task import ENTRY, WeatherOptions

TINY_MLP = Settings(
    learning_rate=1e-2, patience=5, architecture="draft_mlp", layers=1, units=4, dropout=0.1, epochs=3,
    weight_decay=0.0, samples=0, batch_size=64,
)  # fmt: skip
TINY = ExperimentSettings(
    seeds=2,
    instances=15,
    token=replace(TINY_MLP, architecture="lstm", epochs=2),
    once=TINY_MLP,
    cost=TINY_MLP,
    resamples=30,
)
FITTED = ("WholeModelEmbed", "OneTimeModel", "OneTimeCost", "TokenwiseModel")
FITS = {"fit_whole": whole_model, "fit_once": one_time_model, "fit_cost": one_time_cost, "fit_token": tokenwise_model}
OPTIMAL = {"whole": "OptimalWhole", "once": "OptimalOneTime", "token": "OptimalToken"}


def run_weather(record: Path, folder: Path, meter: Any = None) -> Results:
    options = WeatherOptions(data=str(record), stride=12, train_windows=60, hidden=4, epochs=2, passes=3)
    return run_task(ENTRY, options, TINY, folder, preset="custom", device="cpu", meter=meter)


def run_toy(task: Task, folder: Path, **settings: Any) -> Results:
    return Experiment(task, replace(TINY, **settings), folder).run()


def found_in(folder: Path) -> dict[str, Any]:
    """Return the results without what differs between runs: seconds, and the name of the folder."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    del found["provenance"]["seconds"], found["provenance"]["command"]
    return found
