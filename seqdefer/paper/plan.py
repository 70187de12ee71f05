"""The plan of a reproduction: which tasks and settings each table and figure of the paper runs, at two sizes.

`paper` is the paper's protocol on the paper's tasks. `quick` runs the same studies in minutes, on data from the package
index or made on the spot, with `pronounce` in the place of summarization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from seqdefer.errors import look_up
from seqdefer.evaluation.settings import ExperimentSettings, experiment_settings
from seqdefer.hyperparameters import Strategy
from seqdefer.interfaces import TaskEntry

TITLES = {
    "table1": "All methods on all tasks: area under the deferral curve",
    "figure-curves": "Deferral curves",
    "table-handoffs": "How many hand-off points a one-time rejector may choose from",
    "figure-alpha": "The cost of a deferred sequence in training",
    "table-psi": "The surrogate of one-time deferral: cross-entropy or mean absolute error",
    "table-ablation": "Token-level rejectors: architecture and training strategy",
}
STUDIES = tuple(TITLES)
PSIS = ("cross_entropy", "mean_absolute_error")
ARCHITECTURES = ("lstm", "mlp")
STRATEGIES: tuple[Strategy, ...] = ("free", "teacher", "scheduled")


@dataclass(frozen=True)
class TaskPlan:
    """The preset of a task, changes to it, and the variants to measure."""

    preset: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the experiment
    hand_offs: tuple[int, ...] = ()  # sizes of J below L + 1


@dataclass(frozen=True)
class ReproductionPlan:
    """The tasks of a reproduction and the values of alpha_1 that it measures."""

    seeds: int
    tasks: Mapping[str, TaskPlan]
    times: tuple[float, ...]  # alpha_1 in multiples of the expert's mean gain
    ablated_task: str
    crossed_recipes: tuple[str, ...] = ("published",)  # alpha_1 by |J|, as in the paper; attention would take hours

    def tasks_of(self, study: str) -> list[str]:
        if study == "table-ablation":
            return [self.ablated_task]
        if study == "table-handoffs":
            return [name for name, task in self.tasks.items() if task.hand_offs]
        return list(self.tasks)


PLANS: dict[str, ReproductionPlan] = {
    "paper": ReproductionPlan(
        seeds=5,
        tasks={
            # Hourly windows of eight years: 70,080 before they are split.
            "weather": TaskPlan("paper", {"data": "jena", "stride": 6}),
            "tsp": TaskPlan("paper", hand_offs=(5, 10, 15, 20, 25, 30, 35, 40, 45)),
            "xsum": TaskPlan("paper", hand_offs=(3, 4, 5, 7, 10, 13, 15, 17)),
        },
        times=(0.0, 0.0625, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0),
        ablated_task="xsum",
    ),
    "quick": ReproductionPlan(
        seeds=2,
        tasks={
            "weather": TaskPlan("quick", {"train_windows": 4000}),
            "tsp": TaskPlan("quick", {"train": 400, "validation": 150, "test": 200}, hand_offs=(5, 20)),
            "pronounce": TaskPlan(
                "quick",
                {"train": 3000, "validation": 600, "predictor_epochs": 15, "expert_epochs": 2},
                hand_offs=(3, 6),
            ),
        },
        times=(0.0, 1.0, 16.0),
        ablated_task="pronounce",
    ),
}


def get_plan(preset: str) -> ReproductionPlan:
    return look_up("preset", preset, PLANS)


def settings_of(entry: TaskEntry, task: TaskPlan, seeds: int, recipe: str) -> ExperimentSettings:
    """Return the settings of `seqdefer run --recipe`, with the seeds of the reproduction."""
    return replace(experiment_settings(entry, task.preset, recipe=recipe), seeds=seeds, **task.settings)


def ablated_settings(
    entry: TaskEntry, default: ExperimentSettings, architecture: str, strategy: Strategy
) -> ExperimentSettings:
    """Return the settings of a cell of the ablation: the paper's hyperparameters for all architectures."""
    papers = entry.recipes["published"].token
    epochs = min(papers.epochs, default.token.epochs)
    token = replace(papers, architecture=architecture, epochs=epochs, inputs=default.token.inputs)
    return replace(default, token=token, strategy=strategy)
