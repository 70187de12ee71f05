"""From cells to studies: the rows of each table or figure, and the contrasts behind the claims.

Studies choose the size of J and alpha_1 by validation data. Test data only measures the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqdefer.evaluation.curves import Run, curve_of, improvement, paired_bootstrap, random_curve
from seqdefer.evaluation.experiment import granularity_of, seed_result, to_compare
from seqdefer.evaluation.published import (
    PAPER,
    published_ablation,
    published_ablation_baseline,
    published_hand_offs,
)
from seqdefer.evaluation.results import PaperFigure, Results, Units, mean_and_std, summarise
from seqdefer.paper.lab import DEFAULT_INPUTS, DEFAULT_VARIANT, Lab, Variant
from seqdefer.paper.plan import ARCHITECTURES, STRATEGIES, TITLES, ReproductionPlan
from seqdefer.paper.records import Contrast, Line, Row, Study, StudyTask
from seqdefer.progress import Meter
from seqdefer.report.style import block_of
from seqdefer.report.svg import extent, mean_curves

ONE_TIME = ("OneTimeModel", "OneTimeCost", "OneTimeScore", "OneTimeEntropy")
ONE_TIME_LEARNED, ONE_TIME_CONFIDENCE = ONE_TIME[:2], ONE_TIME[2:]
TOKEN_CONFIDENCE = ("TokenwiseScore", "TokenwiseEntropy")
RESAMPLES = 1000


@dataclass(frozen=True)
class PlannedRow:
    """A row to measure: a method in a variant, what the study varies, and the paper's figure."""

    label: str
    variant: Variant
    method: str
    varied: Mapping[str, Any]
    paper: PaperFigure | None = None
    is_default: bool = False


@dataclass(frozen=True)
class MeasuredRows:
    """The rows of a study on one task, and the runs behind them, whose sweeps are named by the rows' labels."""

    rows: list[Row]
    runs: list[Run]


class Studies:
    """The studies of a plan. `labs(task, inputs)` returns the lab of a task and a set of inputs."""

    def __init__(
        self, plan: ReproductionPlan, preset: str, seeds: int, labs: Callable[[str, str], Lab], meter: Meter
    ) -> None:
        self.plan, self.preset, self.seeds, self.labs, self.meter = plan, preset, seeds, labs, meter

    def make(self, name: str, tasks: Sequence[str]) -> Study:
        """Make a study on some tasks, from stored cells where they exist."""
        makers: dict[str, Callable[[str], Study]] = {
            "table1": self.table1,
            "figure-curves": self.curves,
            "table-handoffs": self.hand_offs,
            "figure-alpha": self.alpha,
            "table-ablation": self.ablation,
        }
        return join_studies([makers[name](task) for task in tasks])

    def table1(self, task: str) -> Study:
        lab = self.labs(task, DEFAULT_INPUTS)
        _, measured = self._all_methods(lab)
        pairs = to_compare(measured.runs[0])
        whole = [name for name in lab.methods if granularity_of(name) == "whole"]
        pairs += [("WholeModelEmbed", name) for name in whole if name != "WholeModelEmbed"]
        pairs += [(name, other) for name in TOKEN_CONFIDENCE if name in lab.methods for other in whole]
        note = (
            "OneTimeModel may choose from all hand-offs here; the paper prints its best size of J in this table (45 "
            "for TSP, 4 for XSUM). Table-handoffs shows the size that validation data chooses."
        )
        notes = (note,) if lab.task.has_published_figures and task in PAPER else ()
        contrasts = self._contrasts(lab, measured.runs, pairs)
        return self._study("table1", lab, measured.rows, contrasts=contrasts, notes=notes)

    def curves(self, task: str) -> Study:
        lab = self.labs(task, DEFAULT_INPUTS)
        results, measured = self._all_methods(lab)
        return self._study("figure-curves", lab, measured.rows, lines=_lines(results))

    def _all_methods(self, lab: Lab) -> tuple[Results, MeasuredRows]:
        runs, seeds = [], []
        for seed in range(self.seeds):
            run = lab.run(seed, {name: (DEFAULT_VARIANT, name) for name in lab.methods})
            runs.append(run)
            seeds.append(seed_result(seed, lab.oracles(seed), run))
        task, summary = lab.task, summarise(seeds)
        # What `seqdefer run` would keep; the curves are read from it.
        units = Units(loss=task.loss_unit)
        results = Results(task.name, "", task.spec.length, tuple(seeds), summary, units=units)
        papers = PAPER.get(task.name, {}) if task.has_published_figures else {}
        rows = [
            Row(
                task.name,
                name,
                block_of(name, row.granularity),
                row.audc_mean,
                row.audc_std,
                row.improvement_mean,
                row.improvement_std,
                tuple(seed.methods[name].improvement for seed in seeds),
                is_default=True,
                paper=papers.get(name),
            )
            for name, row in summary.items()
        ]
        return results, MeasuredRows(rows, runs)

    def hand_offs(self, task: str) -> Study:
        lab = self.labs(task, DEFAULT_INPUTS)
        full = lab.task.spec.length + 1
        sizes = [size for size in self.plan.tasks[task].hand_offs if size < full]
        planned = [
            PlannedRow(
                label=size_label(method, size),
                variant=Variant(hand_offs=size) if size < full else DEFAULT_VARIANT,
                method=method,
                varied={"hand_offs": size},
                paper=published_hand_offs(task, method, size) if lab.task.has_published_figures else None,
                is_default=size == full,
            )
            for size in [*sizes, full]
            for method in ONE_TIME
            if method in lab.methods
        ]
        measured = _with_choices(self._measure(lab, planned))
        learned = [name for name in ONE_TIME_LEARNED if name in lab.methods]
        pairs = [(size_label(name, size), size_label(name, full)) for name in learned for size in sizes]
        confidence = [name for name in ONE_TIME_CONFIDENCE if name in lab.methods]
        pairs += [
            (size_label("OneTimeModel", size), size_label(other, size))
            for size in [*sizes, full]
            for other in confidence
        ]
        return self._study("table-handoffs", lab, measured.rows, contrasts=self._contrasts(lab, measured.runs, pairs))

    def alpha(self, task: str) -> Study:
        lab = self.labs(task, DEFAULT_INPUTS)
        rule_alpha = lab.alpha(DEFAULT_VARIANT)
        variants = [Variant(times=times) for times in self.plan.times]
        variants = [variant for variant in variants if lab.alpha(variant) != rule_alpha]  # the rule may be 0
        planned = [
            PlannedRow(
                label=_alpha_label(lab, variant),
                variant=variant,
                method="OneTimeModel",
                varied={
                    "times": lab.alpha(variant) / lab.unit,
                    "alpha": lab.alpha(variant),
                    "alpha_token": lab.alpha(variant) / lab.task.spec.length,
                },
                is_default=variant is DEFAULT_VARIANT,
            )
            for variant in sorted([*variants, DEFAULT_VARIANT], key=lab.alpha)
        ]
        measured = _with_choices(self._measure(lab, planned))
        rule = _alpha_label(lab, DEFAULT_VARIANT)
        pairs = [(rule, row.label) for row in planned if row.label != rule]
        gain = f"the expert's mean gain over the training examples, {lab.unit:.4g}"
        unit = gain if lab.facts.gain > 0 else "the unit of the loss, since the expert's mean gain is not above 0"
        note = f"{task}: the unit of alpha_1 is {unit}; the rule of thumb, the median gain, is {lab.facts.rule:.4g}."
        contrasts = self._contrasts(lab, measured.runs, pairs)
        return self._study("figure-alpha", lab, measured.rows, contrasts=contrasts, notes=(note,))

    def ablation(self, task: str) -> Study:
        rows: list[Row] = []
        contrasts: list[Contrast] = []
        for inputs in self.plan.tasks[task].inputs:
            lab = self.labs(task, inputs)
            planned = [
                PlannedRow(
                    label=ablated_label(inputs, architecture, strategy),
                    variant=Variant(architecture=architecture, strategy=strategy),
                    method="TokenwiseModel",
                    varied={"inputs": inputs, "architecture": architecture, "strategy": strategy},
                    paper=published_ablation(task, architecture, strategy) if lab.task.has_published_figures else None,
                )
                for architecture in ARCHITECTURES
                for strategy in STRATEGIES
            ]
            measured = self._measure(lab, planned)
            rows += measured.rows
            pairs = [(ablated_label(inputs, "lstm", one), ablated_label(inputs, "mlp", one)) for one in STRATEGIES]
            pairs += [
                (ablated_label(inputs, architecture, "free"), ablated_label(inputs, architecture, other))
                for architecture in ARCHITECTURES
                for other in ("teacher", "scheduled")
            ]
            contrasts += self._contrasts(lab, measured.runs, pairs)
        baselines = []
        for name in (name for name in TOKEN_CONFIDENCE if name in lab.methods):
            paper = published_ablation_baseline(task, name) if lab.task.has_published_figures else None
            baselines.append(PlannedRow(name, DEFAULT_VARIANT, name, {}, paper, is_default=True))
        rows += self._measure(lab, baselines).rows
        note = (
            "All cells of the ablation have the paper's hyperparameters for token-level rejectors; table 1 shows the "
            "default of `seqdefer run`."
        )
        return self._study("table-ablation", lab, rows, contrasts=contrasts, notes=(note,))

    def _measure(self, lab: Lab, planned: Sequence[PlannedRow]) -> MeasuredRows:
        wanted = {row.label: (row.variant, row.method) for row in planned}
        runs = [lab.run(seed, wanted) for seed in range(self.seeds)]
        return MeasuredRows([self._row(lab, row, runs) for row in planned], runs)

    def _row(self, lab: Lab, planned: PlannedRow, runs: Sequence[Run]) -> Row:
        curves = [curve_of(run.sweeps[planned.label], run.ends) for run in runs]
        improvements = tuple(
            improvement(curve, random_curve(run.ends)) for curve, run in zip(curves, runs, strict=True)
        )
        cells = [lab.cell(planned.variant, planned.method, seed) for seed in range(self.seeds)]
        validation = [cell.validation for cell in cells if cell.validation is not None]
        return Row(
            lab.task.name,
            planned.method,
            granularity_of(planned.method),
            *mean_and_std([curve.area for curve in curves]),
            *mean_and_std(improvements),
            improvements,
            varied=planned.varied,
            is_default=planned.is_default,
            validation=mean_and_std(validation)[0] if validation else None,
            paper=planned.paper,
        )

    def _contrasts(self, lab: Lab, runs: Sequence[Run], pairs: Sequence[tuple[str, str]]) -> list[Contrast]:
        contrasts = []
        with self.meter.stage(f"bootstrap ({lab.task.name})", len(pairs)) as advance:
            for first, second in pairs:
                found = paired_bootstrap(runs, first, second, n_resamples=RESAMPLES, over_runs=True)
                contrasts.append(Contrast(lab.task.name, first, second, found.difference, found.low, found.high))
                advance(1)
        return contrasts

    def _study(
        self,
        name: str,
        lab: Lab,
        rows: Sequence[Row],
        *,
        lines: Sequence[Line] = (),
        contrasts: Sequence[Contrast] = (),
        notes: tuple[str, ...] = (),
    ) -> Study:
        task = lab.task
        return Study(
            name=name,
            title=TITLES[name],
            preset=self.preset,
            seeds=self.seeds,
            instances={task.name: lab.settings.instances},
            tasks={task.name: StudyTask(task.spec.length, task.loss_unit)},
            rows=tuple(rows),
            lines=tuple(lines),
            contrasts=tuple(contrasts),
            notes=notes,
            made_of={task.name: lab.name},
        )


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


def _with_choices(measured: MeasuredRows) -> MeasuredRows:
    """Mark the variant of each method that is best on validation data, the first among equals."""
    candidates = [(row.validation, row) for row in measured.rows if row.validation is not None]
    best: dict[str, Row] = {}
    for _, row in sorted(candidates, key=lambda pair: pair[0], reverse=True):  # a stable sort
        best.setdefault(row.method, row)
    return replace(measured, rows=[replace(row, is_chosen=row is best.get(row.method)) for row in measured.rows])


def _lines(results: Results) -> list[Line]:
    end = extent(results)
    lines = []
    for curve in mean_curves(results).values():
        steps = len(curve.mean) - 1
        budgets = tuple(end * step / steps for step in range(steps + 1))
        lines.append(Line(results.task, curve.name, curve.block, budgets, curve.mean, curve.std))
    return lines


def size_label(method: str, size: int) -> str:
    return f"{method}, |J| = {size}"


def _alpha_label(lab: Lab, variant: Variant) -> str:
    rule = " (rule of thumb)" if variant == DEFAULT_VARIANT else ""
    return f"OneTimeModel, alpha = {lab.alpha(variant):.4g}{rule}"


def ablated_label(inputs: str, architecture: str, strategy: str) -> str:
    return f"{architecture.upper()}, {strategy}, {inputs}"
