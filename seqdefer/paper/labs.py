"""The labs of a reproduction by task and recipe, and the options that make them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from seqdefer.environment import choose_device
from seqdefer.errors import DataError, InputError, OptionError, require_known, unknown
from seqdefer.evaluation.experiment import provenance_of
from seqdefer.evaluation.results import Provenance
from seqdefer.evaluation.settings import get_recipe, require_choices
from seqdefer.interfaces import TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.label_store import open_labels
from seqdefer.paper.lab import Lab
from seqdefer.paper.plan import ReproductionPlan, TaskPlan, get_plan, settings_of
from seqdefer.paper.records import Origins, Study, load_origins, save
from seqdefer.progress import Clock
from seqdefer.recipes import IN_WORDS
from seqdefer.registry import FILE_SUFFIX, load_task

BOTH = tuple(IN_WORDS)  # recipes, in the order of the tables


@dataclasses.dataclass(frozen=True)
class Choices:
    """The options of a reproduction."""

    preset: str = "paper"
    seeds: int | None = None  # None: those of the preset
    instances: int | None = None
    tasks: tuple[str, ...] | None = None  # names, or files of tasks; None: all tasks of a study
    recipes: tuple[str, ...] = BOTH
    options: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)  # by task, as text
    device: str = "auto"
    figures: bool = True  # PDF and SVG
    jobs: int = 1  # processes that fit and measure
    labelling: ExecutorSettings = dataclasses.field(default_factory=ExecutorSettings)

    @property
    def plan(self) -> ReproductionPlan:
        plan = get_plan(self.preset)
        for option, given, known in (("tasks", self.tasks, plan.tasks), ("recipe", self.recipes, BOTH)):
            if given == ():
                raise OptionError(f"--{option} is empty; available: {', '.join(known)}")
        others = [name for name in self.named_tasks if name not in plan.tasks]  # of the library, or of the user
        for name in others:
            require_known(f"preset of the task {name}", self.preset, load_task(self.named_tasks[name]).presets)
        tasks = {**plan.tasks, **{name: TaskPlan(self.preset) for name in others}}
        for name in self.options:
            require_known("task of --set", name, tasks)
        for name in self.recipes:
            require_known("recipe", name, BOTH)
        if self.jobs < 1:
            raise OptionError(f"--jobs is {self.jobs}; it must be at least 1")
        return dataclasses.replace(plan, tasks=tasks)

    @property
    def named_tasks(self) -> dict[str, str]:
        """The tasks that are asked for by their own names: a file has another."""
        return {load_task(one).name if one.endswith(FILE_SUFFIX) else one: one for one in self.tasks or ()}

    @property
    def n_seeds(self) -> int:
        return self.plan.seeds if self.seeds is None else self.seeds


class Labs:
    """The labs by task and recipe, made at first use."""

    def __init__(self, folder: Path, choices: Choices, clock: Clock) -> None:
        self.plan, self.folder, self.choices, self.clock = choices.plan, folder, choices, clock
        self.labs: dict[tuple[str, str], Lab] = {}

    def prepare(self, tasks: typing.Iterable[str]) -> None:
        """Prepare all tasks, that of the ablation first: its models may be missing, and that should show early."""
        wanted = [(task, recipe) for task in dict.fromkeys(tasks) for recipe in self.choices.recipes]
        for task, recipe in wanted:  # reject bad options of any task before a predictor is trained
            self._options(task, recipe)
        for task, recipe in sorted(wanted, key=lambda one: one[0] != self.plan.ablated_task):
            self.get(task, recipe)

    def by(self, recipe: str) -> Callable[[str], Lab]:
        return lambda task: self.get(task, recipe)

    def get(self, task: str, recipe: str) -> Lab:
        if (task, recipe) not in self.labs:
            self.labs[task, recipe] = self._make(task, recipe)
        return self.labs[task, recipe]

    def made(self, study: Study) -> bool:
        """Tell whether a study is of these labs; one by a recipe that is not open must have the same test instances."""
        for (name, recipe), lab in self.labs.items():
            if name in study.tasks:
                is_same = lab.name == study.made_of[name] if recipe == study.recipe else True
                tested = (study.tasks[name].tested_on, study.instances[name])
                if not is_same or tested != (lab.tested_on, lab.settings.instances):
                    return False
        return True

    def _make(self, name: str, recipe: str) -> Lab:
        entry, options = self._entry(name), self._options(name, recipe)
        settings = settings_of(entry, self.plan.tasks[name], self.choices.n_seeds, recipe)
        if self.choices.instances is not None:
            settings = dataclasses.replace(settings, instances=self.choices.instances)
        folder = self.folder / name
        task = entry.prepare(options, folder, choose_device(self.choices.device), self.clock)
        labels = open_labels(self.choices.labelling, entry, options, task, folder, self.choices.device)
        return Lab(entry, task, settings, folder, self.clock, labels)

    def _entry(self, name: str) -> TaskEntry:
        return load_task(self.choices.named_tasks.get(name, name))

    def _options(self, name: str, recipe: str) -> Any:
        entry, planned = self._entry(name), self.plan.tasks[name]
        changes = {**get_recipe(entry, recipe).options, **planned.options}
        defaults = dataclasses.replace(entry.presets[planned.preset], **changes)
        return with_options(defaults, self.choices.options.get(name, {}), name)

    def save_origins(self, command: str) -> None:
        """Write origins.json of each recipe for the measured tasks; keep those of earlier commands."""
        for recipe in self.choices.recipes:
            path, tasks = self.folder / recipe / "origins.json", dict[str, Provenance]()
            with suppress(DataError, InputError):
                tasks.update(load_origins(path).tasks)
            measured = {name: lab for (name, its_recipe), lab in self.labs.items() if its_recipe == recipe}
            tasks.update({name: _provenance(lab, command) for name, lab in measured.items() if lab.seconds})
            save(Origins(command, tasks), path)


def _provenance(lab: Lab, command: str) -> Provenance:
    seconds = {key: round(value, 1) for key, value in lab.seconds.items()}
    return provenance_of(lab.task, lab.settings, command, lab.facts.calls, seconds, lab.machine)


def with_options(defaults: Any, given: Mapping[str, str], task: str) -> Any:
    """Return `defaults` with options given as text, each parsed as the type of its field."""
    hints = typing.get_type_hints(type(defaults))
    parsed = {}
    for name, text in given.items():
        field = name.replace("-", "_")
        if field not in hints:
            raise unknown(f"option of {task}", name, sorted(hints))
        parsed[field] = _parse(text, hints[field], f"{task}.{name}")
    require_choices(defaults, parsed)
    return dataclasses.replace(defaults, **parsed)


def _parse(text: str, hint: Any, where: str) -> Any:
    kinds = [kind for kind in (typing.get_args(hint) or [hint]) if kind is not type(None)]
    if hint is bool:
        if text not in ("yes", "no"):
            raise OptionError(f"--set {where}={text}: it must be yes or no")
        return text == "yes"
    if typing.get_origin(hint) is typing.Literal:
        return text
    try:
        return kinds[0](text)
    except ValueError as error:
        raise OptionError(f"--set {where}={text}: it must be of type {kinds[0].__name__}") from error
