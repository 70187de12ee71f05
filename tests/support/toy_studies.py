"""Toy tasks and a tiny plan in place of the paper's, and helpers for the tests of its reproduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import completing
from torch import Tensor

from seqdefer.errors import look_up
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.interfaces import SplitName, Task, TaskEntry
from seqdefer.paper import labs, plan, studies
from seqdefer.paper.lab import Lab
from seqdefer.paper.labs import Choices
from seqdefer.paper.plan import ReproductionPlan, TaskPlan, settings_of
from seqdefer.paper.records import Row, Study
from seqdefer.progress import Clock
from seqdefer.recipes import Recipe, published
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import ToyPredictor, ToyState
from seqdefer.types import Examples, Proposal
from tests.evaluation.test_experiment import TINY as SMALL

SEEDS, RESAMPLES = 2, 30
TINY = Choices("tiny", figures=False)
DRAWN = [".pdf", ".svg"] if find_spec("matplotlib") else []
TIMED = {"origins.json"}  # holds seconds
Spy = Callable[..., list[tuple[Any, ...]]]


@dataclass(frozen=True)
class ToyOptions:
    n: int = 40
    length: int = 3
    seed: int = 0
    test_seed: int = 0  # not 0: other test data, all else unchanged
    slips: int = 5  # of 8 tokens, where the predictor may err
    blind: bool = False  # rejectors see no features
    by_token: bool = True  # False: the expert only completes
    expert: str = ""  # another name of the expert


class Toy(ToyTask):
    def __init__(self, name: str, options: ToyOptions) -> None:
        super().__init__(options.n, options.length, seed=options.seed)
        self.name, self.options = name, options
        if options.blind:
            self.predictor = Blind(self)
        self.predictor.fingerprint += f"-{options.slips}"
        if not options.by_token:
            self.expert = completing(Toy(name, replace(options, by_token=True)))  # type: ignore[assignment]
        if options.expert:
            self.expert.fingerprint = options.expert

    def split(self, name: SplitName) -> Examples:
        if name == "test" and self.options.test_seed:
            return ToyTask(self.n, self.spec.length, seed=self.options.test_seed).split(name)
        return super().split(name)

    def stray(self, state: ToyState, often: int, salt: int) -> Tensor:
        return super().stray(state, self.options.slips if salt == PREDICTORS_SALT else often, salt)


PREDICTORS_SALT = 5


class Blind(ToyPredictor):
    def __init__(self, task: ToyTask) -> None:
        super().__init__(task)
        self.fingerprint += "-blind"

    def propose(self, state: ToyState) -> Proposal:
        proposal = super().propose(state)
        return replace(proposal, features=torch.zeros_like(proposal.features))


# As published: rejectors without features, fewer hand-offs, a cost of their own.
RECIPES = {
    "ours": Recipe(token=SMALL.token, once=SMALL.once, cost=SMALL.cost),
    "published": published(SMALL.token, SMALL.once, options={"blind": True}, hand_offs=3, alpha=0.5),
}


def toy_entry(name: str, **options: Any) -> TaskEntry:
    def prepare(chosen: ToyOptions, *_: Any) -> Task:
        return Toy(name, chosen)

    return TaskEntry(name, f"the toy {name}", {"tiny": ToyOptions(**options)}, prepare, recipes=RECIPES)


# An expert that names tokens, for the ablation, and one that only completes.
ENTRIES = {"spell": toy_entry("spell"), "solve": toy_entry("solve", length=4, by_token=False)}
FEW = {"instances": 12, "resamples": RESAMPLES}
PLAN = ReproductionPlan(
    seeds=SEEDS,
    tasks={
        "spell": TaskPlan("tiny", {}, FEW, hand_offs=(2, 3)),
        "solve": TaskPlan("tiny", {}, FEW, hand_offs=(2, 3)),
    },
    times=(0.0, 1.0, 4.0),
    ablated_task="spell",
    crossed_recipes=("published", "ours"),
)


def settings_of_toy(name: str, recipe: str, **changes: Any) -> ExperimentSettings:
    return replace(settings_of(ENTRIES[name], PLAN.tasks[name], SEEDS, recipe), **changes)


def toy_of(name: str, recipe: str, **changes: Any) -> Toy:
    """Return the task as a recipe shows it."""
    return Toy(name, replace(ENTRIES[name].presets["tiny"], **{**RECIPES[recipe].options, **changes}))


def install(patch: pytest.MonkeyPatch) -> None:
    """Add the tiny plan, and replace all tasks by its toys."""
    patch.setitem(plan.PLANS, "tiny", PLAN)
    patch.setattr(labs, "load_task", lambda name: look_up("task", name, ENTRIES))
    patch.setattr(studies, "RESAMPLES", RESAMPLES)


def open_lab(folder: Path, task: Task | None = None, **settings: Any) -> Lab:
    chosen = settings_of_toy("spell", settings.pop("recipe", "ours"), **settings)
    return Lab(ENTRIES["spell"], task or Toy("spell", ToyOptions()), chosen, folder, Clock())


def cells_of(folder: Path) -> set[Path]:
    return set(folder.rglob("cells/*.safetensors"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_of(study: Study, task: str, method: str | None = None) -> list[Row]:
    return [row for row in study.rows if row.task == task and method in (None, row.method)]


@dataclass(frozen=True)
class Finished:
    folder: Path
    made: Mapping[str, Mapping[str, Study]]  # by name and recipe


def final_files(folder: Path) -> dict[str, bytes]:
    """Read the files for people; the folders of the tasks hold what they were made from."""
    folders = [folder, *(folder / recipe for recipe in RECIPES)]
    paths = [path for one in folders if one.is_dir() for path in one.iterdir()]
    kept = [path for path in paths if path.is_file() and path.name not in TIMED]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in kept}


def same_but_for_drawings(folder: Path, finished: Finished) -> bool:
    expected = final_files(finished.folder)
    return final_files(folder) == {name: data for name, data in expected.items() if Path(name).suffix not in DRAWN}
