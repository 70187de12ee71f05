"""The records of a study: rows, lines, contrasts and verdicts, and their round trip through JSON.

    study = load_study("runs/reproduce/published/table-handoffs.json")
    [row.improvement_mean for row in study.rows if row.task == "tsp" and row.method == "OneTimeModel"]

A study is made by one recipe; tables and figures show the studies of both beside each other. Studies do not depend on
machine or time: a run that was killed and resumed leaves the same bytes as one that was not. Machine and times are in
`Origins`, a separate file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from seqdefer.evaluation.results import Block, PaperFigure, Provenance
from seqdefer.storage.files import write_json
from seqdefer.storage.records import read_record, to_plain

Verdict = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True)
class Row:
    """One method in one variant on one task, over the seeds. Improvements are in % of the AUDC of Random."""

    task: str
    method: str
    granularity: Block
    audc_mean: float
    audc_std: float
    improvement_mean: float
    improvement_std: float
    improvements: tuple[float, ...]  # seed by seed
    varied: Mapping[str, Any] = field(default_factory=dict)  # what this study changes: {"hand_offs": 5}
    is_default: bool = False  # the default of `seqdefer run`
    validation: float | None = None  # mean % improvement on validation data
    is_chosen: bool = False  # best on validation data among the variants of its task and method
    paper: PaperFigure | None = None
    headroom: float | None = None  # improvement as a share of what a free expert would give, mean over the seeds, in %
    training: Mapping[str, float] = field(default_factory=dict)  # of networks: lab.TRAINING_FACTS, means over seeds


@dataclass(frozen=True)
class Line:
    """A deferral curve, averaged over the seeds at every percent of the budget."""

    task: str
    method: str
    granularity: Block  # "reference" for Random and the oracles
    deferred: tuple[float, ...]  # mean tokens per sequence
    mean: tuple[float, ...]
    std: tuple[float, ...]
    varied: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contrast:
    """The advantage of `first` over `second` in points of % improvement, with a paired 95 % bootstrap interval."""

    task: str
    first: str  # a label: "OneTimeModel", "OneTimeModel, |J| = 5"
    second: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class StudyTask:
    """The length of the sequences of a task, its units, and a fingerprint of its test data, equal for all recipes."""

    length: int
    loss_unit: str
    tested_on: str = ""
    deferred_unit: str = "tokens per sequence"


@dataclass(frozen=True)
class Study:
    """One table or figure of the paper, reproduced by a recipe."""

    name: str  # table-handoffs
    title: str
    recipe: str
    preset: str
    seeds: int
    instances: Mapping[str, int]  # test instances per seed, by task
    tasks: Mapping[str, StudyTask]
    rows: tuple[Row, ...]
    lines: tuple[Line, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    notes: tuple[str, ...] = ()
    made_of: Mapping[str, str] = field(default_factory=dict)  # by task, a fingerprint of data, models, losses and sizes


@dataclass(frozen=True)
class Judgement:
    """The verdict of our intervals on a claim of the paper, on one task."""

    claim: str  # a short name: "partial-beats-whole"
    statement: str
    task: str
    recipe: str
    verdict: Verdict
    contrasts: tuple[Contrast, ...]
    reason: str = ""  # the likely reason, unless the claim holds


@dataclass(frozen=True)
class Judgements:
    preset: str
    seeds: int
    judgements: tuple[Judgement, ...]


@dataclass(frozen=True)
class Origins:
    """The provenance of each task's figures by one recipe: data, models, machine, settings, seconds by stage."""

    command: str
    tasks: Mapping[str, Provenance]


def save(record: Study | Judgements | Origins, path: Path) -> Path:
    return write_json(path, to_plain(record))


def load_study(path: Path | str) -> Study:
    return read_record(Study, Path(path))


def load_judgements(path: Path | str) -> Judgements:
    return read_record(Judgements, Path(path))


def load_origins(path: Path | str) -> Origins:
    return read_record(Origins, Path(path))


def study_of_task(study: Study, task: str) -> Study:
    """Return the part of a study on one task. A note that begins with the name of a task belongs to that task."""
    others = tuple(f"{other}: " for other in study.tasks if other != task)
    return replace(
        study,
        instances={task: study.instances[task]},
        tasks={task: study.tasks[task]},
        rows=tuple(row for row in study.rows if row.task == task),
        lines=tuple(line for line in study.lines if line.task == task),
        contrasts=tuple(one for one in study.contrasts if one.task == task),
        notes=tuple(note for note in study.notes if not note.startswith(others)),
        made_of={name: made for name, made in study.made_of.items() if name == task},
    )


def join_studies(studies: Sequence[Study]) -> Study:
    """Join studies of different tasks."""
    return replace(
        studies[0],
        instances={name: number for study in studies for name, number in study.instances.items()},
        tasks={name: task for study in studies for name, task in study.tasks.items()},
        rows=tuple(row for study in studies for row in study.rows),
        lines=tuple(line for study in studies for line in study.lines),
        contrasts=tuple(one for study in studies for one in study.contrasts),
        notes=tuple(dict.fromkeys(note for study in studies for note in study.notes)),
        made_of={name: made for study in studies for name, made in study.made_of.items()},
    )
