"""The job of `seqdefer reproduce`: prepare the tasks, make the studies, write each one when it is done."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from seqdefer import __version__
from seqdefer.environment import choose_device
from seqdefer.errors import DataError, InputError, OptionError, unknown
from seqdefer.evaluation.results import ExpertCalls, Provenance
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.label_store import open_labels
from seqdefer.labels.manifest import describe_options
from seqdefer.paper.claims import judge
from seqdefer.paper.lab import DEFAULT_INPUTS, Lab
from seqdefer.paper.plan import STUDIES, ReproductionPlan, get_plan, settings_of
from seqdefer.paper.records import Judgements, Origins, Study, load_origins, load_study, save
from seqdefer.paper.render.figures import require_matplotlib
from seqdefer.paper.render.files import write_judgements, write_study
from seqdefer.paper.studies import Studies, join_studies, study_of_task
from seqdefer.progress import Clock, Meter, Silent
from seqdefer.registry import load_task

OnWritten = Callable[[Study | Judgements, list[Path]], None]


@dataclasses.dataclass(frozen=True)
class Choices:
    """The options of a reproduction."""

    preset: str = "paper"
    seeds: int | None = None  # None: those of the preset
    instances: int | None = None
    tasks: tuple[str, ...] | None = None  # None: all tasks of a study
    options: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)  # by task, as text
    device: str = "auto"
    figures: bool = True  # PDF and SVG
    labelling: ExecutorSettings = dataclasses.field(default_factory=ExecutorSettings)

    @property
    def plan(self) -> ReproductionPlan:
        plan = get_plan(self.preset)
        if self.tasks == ():
            raise OptionError(f"--tasks is empty; available: {', '.join(plan.tasks)}")
        for name in (*(self.tasks or ()), *self.options):
            if name not in plan.tasks:
                raise unknown(f"task of the preset {self.preset}", name, plan.tasks)
        return plan


def reproduce(
    name: str,
    folder: Path,
    choices: Choices,
    *,
    command: str = "",
    meter: Meter | None = None,
    written: OnWritten = lambda *_: None,
) -> dict[str, Study]:
    """Make the study `name`, or all, in `folder`. Call `written` with each record and its files."""
    if name not in (*STUDIES, "all"):
        raise unknown("study", name, (*STUDIES, "all"))
    plan = choices.plan
    seeds = plan.seeds if choices.seeds is None else choices.seeds
    clock = Clock(meter or Silent())
    labs = _Labs(plan, seeds, folder, choices, clock)
    names = STUDIES if name == "all" else (name,)
    wanted = {one: [task for task in plan.tasks_of(one) if task in (choices.tasks or plan.tasks)] for one in names}
    if not any(wanted.values()):
        known = ", ".join(plan.tasks_of(name))
        raise OptionError(f"{name} does not use the task {', '.join(choices.tasks or ())}; its tasks: {known}")
    if choices.figures:  # fail before hours of work, not after
        require_matplotlib()
    labs.prepare(task for tasks in wanted.values() for task in tasks)
    studies = Studies(plan, choices.preset, seeds, labs.get, clock)
    found = _load_studies(folder, choices.preset, seeds, labs.fingerprints)
    made: dict[str, Study] = {}
    for one, tasks in wanted.items():
        if tasks:
            made[one] = _with_earlier_tasks(studies.make(one, tasks), found.get(one), plan)
            labs.save_origins(command)
            written(made[one], write_study(made[one], folder, figures=choices.figures))
    judgements = Judgements(choices.preset, seeds, tuple(judge({**found, **made})))
    if judgements.judgements:
        written(judgements, write_judgements(judgements, folder))
    return made


def _load_studies(folder: Path, preset: str, seeds: int, made_of: Mapping[str, str]) -> dict[str, Study]:
    """Load the studies of earlier commands that were made of the same data, models and settings."""
    found = {}
    for name in STUDIES:
        with suppress(DataError, InputError):
            study = load_study(folder / f"{name}.json")
            is_same = all(made_of.get(task, made) == made for task, made in study.made_of.items())
            if (study.name, study.preset, study.seeds) == (name, preset, seeds) and is_same:
                found[name] = study
    return found


def _with_earlier_tasks(study: Study, found: Study | None, plan: ReproductionPlan) -> Study:
    """Add the tasks that only an earlier command measured."""
    studies = {task: one for one in (found, study) if one for task in one.tasks}
    return join_studies([study_of_task(studies[task], task) for task in plan.tasks if task in studies])


class _Labs:
    """The labs by task and set of inputs, made at first use."""

    def __init__(self, plan: ReproductionPlan, seeds: int, folder: Path, choices: Choices, clock: Clock) -> None:
        self.plan, self.seeds, self.folder, self.choices, self.clock = plan, seeds, folder, choices, clock
        self.labs: dict[tuple[str, str], Lab] = {}

    def prepare(self, tasks: typing.Iterable[str]) -> None:
        """Prepare all tasks, that of the ablation first: its models may be missing, and that should show early."""
        wanted = list(dict.fromkeys(tasks))
        for task in wanted:  # reject bad options of any task before a predictor is trained
            self._options(task, {})
        for task in sorted(wanted, key=lambda task: task != self.plan.ablated_task):
            self.get(task, DEFAULT_INPUTS)

    @property
    def fingerprints(self) -> dict[str, str]:
        return {task: lab.name for (task, inputs), lab in self.labs.items() if inputs == DEFAULT_INPUTS}

    def get(self, task: str, inputs: str) -> Lab:
        changes = {} if inputs == DEFAULT_INPUTS else self.plan.tasks[task].inputs[inputs]
        inputs = inputs if changes else DEFAULT_INPUTS
        if (task, inputs) not in self.labs:
            self.labs[task, inputs] = self._make(task, inputs, changes)
        return self.labs[task, inputs]

    def _make(self, name: str, inputs: str, changes: Mapping[str, Any]) -> Lab:
        entry, options = load_task(name), self._options(name, changes)
        settings = settings_of(entry, self.plan.tasks[name], self.seeds)
        if self.choices.instances is not None:
            settings = dataclasses.replace(settings, instances=self.choices.instances)
        folder = self.folder / name
        task = entry.prepare(options, folder, choose_device(self.choices.device), self.clock)
        labels = open_labels(self.choices.labelling, entry, options, task, folder, self.choices.device)
        return Lab(entry, task, settings, folder, self.clock, inputs, labels)

    def _options(self, name: str, changes: Mapping[str, Any]) -> Any:
        planned = self.plan.tasks[name]
        defaults = dataclasses.replace(load_task(name).presets[planned.preset], **planned.options)
        given = with_options(defaults, self.choices.options.get(name, {}), name)
        return dataclasses.replace(given, **changes)

    def save_origins(self, command: str) -> None:
        """Write origins.json for the measured tasks; keep those of earlier commands."""
        path, tasks = self.folder / "origins.json", dict[str, Provenance]()
        with suppress(DataError, InputError):
            tasks.update(load_origins(path).tasks)
        for (name, inputs), lab in self.labs.items():
            if lab.seconds:
                tasks[name if inputs == DEFAULT_INPUTS else f"{name} ({inputs})"] = _provenance(lab, command)
        save(Origins(command, tasks), path)


def _provenance(lab: Lab, command: str) -> Provenance:
    described = lab.task.describe()
    models = {key: text for key, text in described.items() if key in ("predictor", "expert")}
    return Provenance(
        version=__version__,
        command=command,
        data={key: text for key, text in described.items() if key not in models},
        models=models,
        seeds=tuple(range(lab.settings.seeds)),
        machine=lab.machine,
        seconds={key: round(value, 1) for key, value in lab.seconds.items()},
        expert_calls=ExpertCalls(lab.facts.calls.made, lab.facts.calls.saved),
        settings={**dataclasses.asdict(lab.settings), "task": describe_options(lab.task)},
    )


def with_options(defaults: Any, given: Mapping[str, str], task: str) -> Any:
    """Return `defaults` with options given as text, each parsed as the type of its field."""
    hints = typing.get_type_hints(type(defaults))
    parsed = {}
    for name, text in given.items():
        field = name.replace("-", "_")
        if field not in hints:
            raise unknown(f"option of {task}", name, sorted(hints))
        parsed[field] = _parse(text, hints[field], f"{task}.{name}")
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
