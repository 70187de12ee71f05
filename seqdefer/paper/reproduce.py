"""The job behind the command: prepares the tasks, makes the studies one by one, writes each when it is done."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
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
from seqdefer.paper.lab import Lab
from seqdefer.paper.plan import STUDIES, Plan, TaskPlan, get_plan, settings_of
from seqdefer.paper.records import Judgements, Origins, Study, load_origins, load_study, save
from seqdefer.paper.render.drawing import require_matplotlib
from seqdefer.paper.render.writing import write_judgements, write_study
from seqdefer.paper.studies import Studies, joined, only
from seqdefer.progress import Clock, Meter, Silent
from seqdefer.registry import load_task

Written = Callable[[Study | Judgements, list[Path]], None]


@dataclasses.dataclass(frozen=True)
class Choices:
    """What can be chosen about a reproduction."""

    preset: str = "paper"
    seeds: int | None = None  # None: what the preset says
    instances: int | None = None
    tasks: tuple[str, ...] | None = None  # None: all of a study
    options: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)  # of tasks, as texts
    device: str = "auto"
    figures: bool = True  # PDF and SVG
    labelling: ExecutorSettings = dataclasses.field(default_factory=ExecutorSettings)

    @property
    def plan(self) -> Plan:
        plan = get_plan(self.preset)
        if self.tasks == ():
            raise OptionError(f"--tasks names none; available: {', '.join(plan.tasks)}")
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
    written: Written = lambda *_: None,
) -> dict[str, Study]:
    """Makes the study `name`, or all, in `folder`; `written` is told of each as it is written."""
    names = _names(name)
    plan = choices.plan
    seeds = plan.seeds if choices.seeds is None else choices.seeds
    clock = Clock(meter or Silent())
    bench = _Bench(plan, seeds, folder, choices, clock)
    wanted = {one: [task for task in plan.tasks_of(one) if task in (choices.tasks or plan.tasks)] for one in names}
    if not any(wanted.values()):
        raise OptionError(
            f"{name} has no part on {', '.join(choices.tasks or ())}; its tasks: {', '.join(plan.tasks_of(name))}"
        )
    if choices.figures:  # what is missing is told before hours of work, not after
        require_matplotlib()
    bench.prepare(task for tasks in wanted.values() for task in tasks)
    studies = Studies(plan, choices.preset, seeds, bench.lab, clock)
    found = _found(folder, choices.preset, seeds, bench.names)
    made: dict[str, Study] = {}
    for one, tasks in wanted.items():
        if tasks:
            made[one] = _completed(studies.make(one, tasks), found.get(one), plan)
            bench.save_origins(command)
            written(made[one], write_study(made[one], folder, figures=choices.figures))
    judged = Judgements(choices.preset, seeds, tuple(judge({**found, **made})))
    if judged.judgements:
        written(judged, write_judgements(judged, folder))
    return made


def _found(folder: Path, preset: str, seeds: int, made_of: Mapping[str, str]) -> dict[str, Study]:
    """Studies that earlier commands left, and that were made of the same: their other tasks and verdicts stay."""
    found = {}
    for name in STUDIES:
        with suppress(DataError, InputError):
            study = load_study(folder / f"{name}.json")
            is_same = all(made_of.get(task, made) == made for task, made in study.made_of.items())
            if (study.name, study.preset, study.seeds) == (name, preset, seeds) and is_same:
                found[name] = study
    return found


def _completed(study: Study, found: Study | None, plan: Plan) -> Study:
    """With the tasks that an earlier command measured and this one did not."""
    parts = {task: only(study, task) for task in study.tasks}
    parts = {task: only(found, task) for task in found.tasks if task in plan.tasks} | parts if found else parts
    return joined([parts[task] for task in plan.tasks if task in parts])


def _names(name: str) -> Sequence[str]:
    if name == "all":
        return STUDIES
    if name not in STUDIES:
        raise unknown("study", name, (*STUDIES, "all"))
    return (name,)


class _Bench:
    """The labs, one a task and set of inputs, made when they are first needed."""

    def __init__(self, plan: Plan, seeds: int, folder: Path, choices: Choices, clock: Clock) -> None:
        self.plan, self.seeds, self.folder, self.choices, self.clock = plan, seeds, folder, choices, clock
        self.labs: dict[tuple[str, str], Lab] = {}

    def prepare(self, tasks: typing.Iterable[str]) -> None:
        """All of them at once, the one with models to download first: what is missing is told before hours of work."""
        wanted = list(dict.fromkeys(tasks))
        for task in wanted:  # a predictor may take long to train: not for an option of the next task to be refused
            self._options(task, {})
        for task in sorted(wanted, key=lambda task: task != self.plan.text):
            self.lab(task, "usual")

    @property
    def names(self) -> dict[str, str]:
        """What each task is made of."""
        return {task: lab.name for (task, inputs), lab in self.labs.items() if inputs == "usual"}

    def lab(self, task: str, inputs: str) -> Lab:
        planned = self.plan.tasks[task]
        changes = {} if inputs == "usual" else planned.inputs[inputs]
        inputs = inputs if changes else "usual"  # what changes nothing is the same lab
        if (task, inputs) not in self.labs:
            self.labs[task, inputs] = self._make(task, planned, inputs, changes)
        return self.labs[task, inputs]

    def _make(self, name: str, planned: TaskPlan, inputs: str, changes: Mapping[str, Any]) -> Lab:
        entry, options = load_task(name), self._options(name, changes)
        settings = settings_of(entry, planned, self.seeds)
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
        """Of the tasks that were measured; what earlier commands told of others stays."""
        path, tasks = self.folder / "origins.json", dict[str, Provenance]()
        with suppress(DataError, InputError):
            tasks.update(load_origins(path).tasks)
        for (name, inputs), lab in self.labs.items():
            if lab.seconds:
                tasks[name if inputs == "usual" else f"{name} ({inputs})"] = _provenance(lab, command)
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
    """A task's options with those that were given as texts, each read as the type of its field."""
    hints = typing.get_type_hints(type(defaults))
    read = {}
    for name, text in given.items():
        field = name.replace("-", "_")
        if field not in hints:
            raise unknown(f"option of {task}", name, sorted(hints))
        read[field] = _read(text, hints[field], f"{task}.{name}")
    return dataclasses.replace(defaults, **read)


def _read(text: str, hint: Any, where: str) -> Any:
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
