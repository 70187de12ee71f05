"""What a study leaves behind: rows, lines, contrasts and verdicts, and their round trip through JSON.

    study = load_study("runs/reproduce/table-handoffs.json")
    [row.improvement_mean for row in study.rows if row.task == "tsp" and row.method == "OneTimeModel"]

Nothing is measured here, and nothing depends on the machine or the hour: two runs of a study, one of them killed and
taken up again, leave the same bytes. Where and how long it ran is in `Origins`, a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    is_default: bool = False  # what `seqdefer run` does without being told
    validation: float | None = None  # mean % improvement on validation data, where choices are made
    is_chosen: bool = False  # by validation data, among the variants of its task and method
    paper: PaperFigure | None = None


@dataclass(frozen=True)
class Line:
    """A deferral curve, averaged over the seeds on a common grid of budgets: one point a percent."""

    task: str
    method: str
    granularity: Block  # "reference" for Random and the oracles
    deferred: tuple[float, ...]  # mean tokens per sequence
    mean: tuple[float, ...]
    std: tuple[float, ...]
    varied: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contrast:
    """How much better `first` is than `second`, in points of % improvement, with a paired 95 % interval over runs and
    their test instances."""

    task: str
    first: str  # a label: "OneTimeModel", "OneTimeModel, |J| = 5"
    second: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Task:
    """What the figures of a task are measured in."""

    length: int
    loss_unit: str
    deferred_unit: str = "tokens per sequence"


@dataclass(frozen=True)
class Study:
    """One table or figure of the paper, beside ours."""

    name: str  # table-handoffs
    title: str
    preset: str
    seeds: int
    instances: Mapping[str, int]  # test instances a seed, by task
    tasks: Mapping[str, Task]
    rows: tuple[Row, ...]
    lines: tuple[Line, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    notes: tuple[str, ...] = ()
    made_of: Mapping[str, str] = field(default_factory=dict)  # by task, a name of data, pair, losses and sizes


@dataclass(frozen=True)
class Judgement:
    """A claim of the paper on one task, and what our intervals say of it."""

    claim: str  # a short name: "partial-beats-whole"
    statement: str
    task: str
    verdict: Verdict
    contrasts: tuple[Contrast, ...]
    reason: str = ""  # the likely one, where it does not hold or is undecided


@dataclass(frozen=True)
class Judgements:
    preset: str
    seeds: int
    judgements: tuple[Judgement, ...]


@dataclass(frozen=True)
class Origins:
    """Where the figures of each task were measured: data, models, machine, settings, seconds by stage."""

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
