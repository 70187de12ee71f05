"""The rows and tasks of studies that tables and figures show, and the names that both print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seqdefer.evaluation.results import Block
from seqdefer.paper.records import Line, Row, Study
from seqdefer.report.style import group_by_block

STRATEGY_NAMES = {"free": "no teacher forcing", "teacher": "teacher forcing", "scheduled": "scheduled sampling"}
PSI_NAMES = {"cross_entropy": "cross-entropy", "mean_absolute_error": "mean absolute error"}
MULTIPLE = "times the mean gain"  # the unit of alpha_1: the mean gain of the expert


def measured_tasks(studies: Iterable[Study]) -> list[str]:
    """Return the tasks of any of the studies."""
    known = {record.task for study in studies for record in study.lines or study.rows}
    return [task for task in dict.fromkeys(task for study in studies for task in study.tasks) if task in known]


def measured_parts(studies: Sequence[Study]) -> list[tuple[Study, str]]:
    """Return the studies and tasks that were measured, recipe by recipe."""
    return [(study, task) for study in studies for task in measured_tasks([study])]


def rows_of_task(study: Study, task: str) -> list[Row]:
    return [row for row in study.rows if row.task == task]


def methods_by_block(records: Iterable[Row | Line]) -> dict[Block, list[str]]:
    return group_by_block((record.method, record.granularity) for record in records)


def all_rows(studies: Sequence[Study], task: str) -> list[Row]:
    """Return the rows of all studies, ours first: it has all the methods, in order."""
    return [row for study in reversed(studies) for row in rows_of_task(study, task)]


def network_of(row: Row) -> tuple[str, str]:
    """Return the architecture and the training strategy of a row of the ablation, in words."""
    strategy = str(row.varied["strategy"])
    return str(row.varied["architecture"]).upper(), STRATEGY_NAMES.get(strategy, strategy)
