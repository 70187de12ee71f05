"""What is run for each table and figure of the paper, at two sizes, and what the paper prints there.

`paper` is the paper's protocol on the paper's tasks; `quick` is the same studies in minutes on data that every machine
with a package index can get, with `pronounce` in the place of summarization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from seqdefer.errors import unknown
from seqdefer.evaluation.results import PaperFigure
from seqdefer.evaluation.settings import ExperimentSettings, experiment_settings
from seqdefer.interfaces import TaskEntry
from seqdefer.rejectors.token_training import Strategy

STUDIES = ("table1", "figure-curves", "table-handoffs", "figure-alpha", "table-ablation")
TITLES = {
    "table1": "All methods on all tasks: area under the deferral curve",
    "figure-curves": "Deferral curves",
    "table-handoffs": "How many hand-off points a one-time rejector may choose from",
    "figure-alpha": "What a deferred sequence is said to cost in training",
    "table-ablation": "Token-level rejectors: architecture and training strategy",
}
ARCHITECTURES = ("lstm", "mlp")
ABLATED: tuple[Strategy, ...] = ("free", "teacher", "scheduled")


@dataclass(frozen=True)
class TaskPlan:
    """How a task enters: a preset of its own, what is changed in it, and what is tried on it."""

    preset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the experiment
    hand_offs: tuple[int, ...] = ()  # sizes of J; without L + 1, which is what `table1` runs
    # What rejectors of the ablation see: the options that make it so, by name.
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    seeds: int
    tasks: Mapping[str, TaskPlan]
    times: tuple[float, ...]  # alpha_1, in multiples of what the expert gains on average
    text: str  # the task of the ablation

    def tasks_of(self, study: str) -> list[str]:
        if study == "table-ablation":
            return [self.text]
        if study == "table-handoffs":
            return [name for name, task in self.tasks.items() if task.hand_offs]
        return list(self.tasks)


PLANS: dict[str, Plan] = {
    "paper": Plan(
        seeds=5,
        tasks={
            # Hourly windows of eight years are the paper's 70,080.
            "weather": TaskPlan("paper", {"data": "jena", "stride": 6}),
            "tsp": TaskPlan("paper", hand_offs=(5, 10, 15, 20, 25, 30, 35, 40, 45)),
            "xsum": TaskPlan(
                "paper",
                hand_offs=(3, 4, 5, 7, 10, 13, 15, 17),
                inputs={"states": {"shown": "states", "token_loss": "paper"}, "facts": {}},
            ),
        },
        times=(0.0, 0.0625, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0),
        text="xsum",
    ),
    "quick": Plan(
        seeds=2,
        tasks={
            "weather": TaskPlan("quick"),
            "tsp": TaskPlan("quick", {"train": 600, "validation": 150, "test": 200}, hand_offs=(5, 20)),
            "pronounce": TaskPlan(
                "quick",
                {"train": 4000, "validation": 800, "predictor_epochs": 15},
                hand_offs=(3, 6),
                inputs={"own": {}},
            ),
        },
        times=(0.0, 1.0, 16.0),
        text="pronounce",
    ),
}


def get_plan(preset: str) -> Plan:
    if preset not in PLANS:
        raise unknown("preset", preset, PLANS)
    return PLANS[preset]


def settings_of(entry: TaskEntry, task: TaskPlan, seeds: int) -> ExperimentSettings:
    """What `seqdefer run` would do, with the seeds of the reproduction."""
    return replace(experiment_settings(entry, task.preset), seeds=seeds, **task.settings)


def ablated_settings(
    entry: TaskEntry, usual: ExperimentSettings, architecture: str, strategy: Strategy
) -> ExperimentSettings:
    """One cell of the ablation: the paper's hyperparameters for both architectures, so that only they differ."""
    papers = entry.hyperparameters.published_token or usual.token
    token = replace(papers, architecture=architecture, epochs=min(papers.epochs, usual.token.epochs))
    return replace(usual, token=token, strategy=strategy)


# -- what the paper prints -----------------------------------------------------------------------------------------

_HAND_OFFS: dict[str, dict[str, dict[int, tuple[float, float, float, float]]]] = {
    "tsp": {
        "OneTimeModel": {
            5: (287.37, 7.67, 6.13, 1.68), 10: (277.44, 10.59, 9.38, 2.54), 15: (277.62, 9.15, 9.32, 1.85),
            20: (273.34, 11.13, 10.74, 2.34), 25: (273.31, 12.20, 10.73, 3.11), 30: (271.10, 9.77, 11.45, 2.16),
            35: (273.30, 6.76, 10.72, 1.69), 40: (272.57, 10.08, 10.97, 2.53), 45: (270.92, 10.67, 11.52, 2.41),
            51: (272.64, 9.11, 10.95, 2.06),
        },
        "OneTimeScore": {
            5: (322.08, 18.24, -5.19, 4.99), 10: (318.00, 12.62, -3.86, 2.95), 15: (320.45, 6.89, -4.68, 1.32),
            20: (321.35, 19.06, -4.96, 5.43), 25: (318.49, 12.65, -4.03, 3.18), 30: (319.61, 10.82, -4.39, 1.99),
            35: (316.40, 15.66, -3.36, 4.55), 40: (318.99, 14.07, -4.18, 3.49), 45: (318.52, 14.10, -4.04, 3.71),
            51: (318.96, 14.78, -4.17, 3.66),
        },
        "OneTimeEntropy": {
            5: (316.76, 19.90, -3.43, 5.30), 10: (317.84, 22.77, -3.78, 6.42), 15: (317.87, 12.57, -3.83, 3.22),
            20: (320.54, 22.24, -4.70, 6.68), 25: (321.32, 13.95, -4.97, 4.10), 30: (321.67, 14.16, -5.05, 3.11),
            35: (320.51, 20.33, -4.70, 6.20), 40: (320.91, 15.41, -4.82, 4.16), 45: (322.02, 14.99, -5.19, 4.31),
            51: (322.91, 14.05, -5.50, 4.39),
        },
    },
    "xsum": {
        "OneTimeModel": {
            3: (1412.16, 26.70, 1.54, 0.88), 4: (1398.39, 25.51, 2.50, 0.80), 5: (1407.01, 19.33, 1.89, 0.43),
            7: (1406.88, 19.64, 1.90, 0.79), 10: (1407.96, 19.47, 1.83, 0.34), 13: (1408.87, 23.47, 1.76, 0.71),
            15: (1408.94, 16.75, 1.75, 0.68), 17: (1418.97, 16.00, 1.05, 0.59), 21: (1417.50, 26.37, 1.17, 0.68),
        },
        "OneTimeScore": {
            3: (1444.68, 16.16, -0.74, 0.77), 4: (1448.43, 23.88, -1.00, 0.91), 5: (1457.76, 23.95, -1.65, 1.11),
            7: (1448.54, 20.05, -1.01, 0.97), 10: (1452.68, 15.51, -1.31, 1.44), 13: (1445.25, 12.84, -0.80, 1.78),
            15: (1453.11, 6.66, -1.34, 1.46), 17: (1450.95, 11.65, -1.19, 1.63), 21: (1452.79, 15.86, -1.31, 1.30),
        },
        "OneTimeEntropy": {
            3: (1441.52, 18.29, -0.52, 0.61), 4: (1447.35, 24.59, -0.92, 1.02), 5: (1450.36, 22.32, -1.13, 1.04),
            7: (1439.58, 16.68, -0.39, 1.20), 10: (1457.43, 15.44, -1.63, 1.29), 13: (1450.64, 14.74, -1.17, 1.72),
            15: (1460.17, 14.20, -1.83, 1.43), 17: (1457.15, 10.29, -1.62, 1.52), 21: (1447.35, 12.72, -0.93, 1.20),
        },
    },
}  # fmt: skip

_ABLATION: dict[tuple[str, str], tuple[float, float, float, float]] = {
    ("mlp", "free"): (1375.48, 34.57, 4.07, 1.01),
    ("mlp", "teacher"): (1387.49, 25.96, 3.22, 1.25),
    ("mlp", "scheduled"): (1377.01, 31.92, 3.96, 1.20),
    ("lstm", "free"): (1323.92, 25.34, 7.66, 0.96),
    ("lstm", "teacher"): (1340.43, 20.24, 6.49, 1.24),
    ("lstm", "scheduled"): (1324.83, 27.04, 7.60, 0.98),
}
_ABLATION_BASELINES = {
    "TokenwiseScore": (1354.78, 31.87, 5.51, 0.94),
    "TokenwiseEntropy": (1360.41, 31.50, 5.12, 0.62),
}


def papers_hand_offs(task: str, method: str, size: int) -> PaperFigure | None:
    found = _HAND_OFFS.get(task, {}).get(method, {}).get(size)
    return None if found is None else PaperFigure(*found)


def papers_ablation(task: str, architecture: str, strategy: str) -> PaperFigure | None:
    found = _ABLATION.get((architecture, strategy)) if task == "xsum" else None
    return None if found is None else PaperFigure(*found)


def papers_ablation_baseline(task: str, method: str) -> PaperFigure | None:
    found = _ABLATION_BASELINES.get(method) if task == "xsum" else None
    return None if found is None else PaperFigure(*found)
