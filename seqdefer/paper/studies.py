"""From cells to studies: the rows of each table or figure, and the contrasts behind the claims.

Studies choose the size of J and alpha_1 by validation data. Test data only measures the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from seqdefer.evaluation.areas import granularity_of, seed_result, to_compare
from seqdefer.evaluation.curves import Run, curve_of, free_curve, improvement, paired_bootstrap, random_curve
from seqdefer.evaluation.published import PAPER
from seqdefer.evaluation.results import Results, Units, headroom_of, mean_and_std, summarise
from seqdefer.paper.cells import WantedCell
from seqdefer.paper.lab import DEFAULT_VARIANT, Lab
from seqdefer.paper.plan import ARCHITECTURES, STRATEGIES, TITLES, ReproductionPlan
from seqdefer.paper.planned_rows import (
    ONE_TIME_CONFIDENCE,
    ONE_TIME_LEARNED,
    TOKEN_CONFIDENCE,
    PlannedRow,
    ablated_label,
    measured_sizes,
    plan_rows,
    size_label,
)
from seqdefer.paper.records import Contrast, Line, Row, Study, StudyTask, join_studies
from seqdefer.progress import Meter
from seqdefer.recipes import IN_WORDS
from seqdefer.report.drawn_curves import extent, mean_curves
from seqdefer.report.style import block_of

RESAMPLES = 1000


class Studies:
    """The studies of a plan by one recipe. `labs(task)` returns the lab of a task."""

    def __init__(
        self, plan: ReproductionPlan, preset: str, recipe: str, seeds: int, labs: Callable[[str], Lab], meter: Meter
    ) -> None:
        self.plan, self.preset, self.recipe = plan, preset, recipe
        self.seeds, self.labs, self.meter = seeds, labs, meter

    def make(self, name: str, tasks: Sequence[str]) -> Study:
        """Make a study on some tasks, from stored cells where they exist."""
        makers: dict[str, Callable[[Lab], Study]] = {
            "table1": self.table1,
            "figure-curves": self.curves,
            "table-handoffs": self.hand_offs,
            "figure-alpha": self.alpha,
            "table-psi": self.psi,
            "table-ablation": self.ablation,
        }
        return join_studies([makers[name](self.labs(task)) for task in tasks])

    def cells(self, wanted: Mapping[str, Sequence[str]]) -> list[WantedCell]:
        """Return the cells that studies need and that are not stored; `wanted` has the tasks by study."""
        cells = []
        for name, tasks in wanted.items():
            for lab in map(self.labs, tasks):
                for row, seed in product(plan_rows(name, lab, self.plan, self.recipe), range(self.seeds)):
                    if not lab.is_stored(row.variant, row.method, seed):
                        cells.append(WantedCell(lab.task.name, self.recipe, row.variant, row.method, seed))
        return cells

    def table1(self, lab: Lab) -> Study:
        _, rows, runs = self._all_methods(lab)
        pairs = to_compare(runs[0])
        whole = [name for name in lab.methods if granularity_of(name) == "whole"]
        pairs += [("WholeModelEmbed", name) for name in whole if name != "WholeModelEmbed"]
        pairs += [(name, other) for name in TOKEN_CONFIDENCE if name in lab.methods for other in whole]
        note = (
            f"{lab.task.name}: one-time methods choose from {lab.size(DEFAULT_VARIANT)} of {lab.n_positions} "
            f"positions; alpha_1 is {lab.alpha(DEFAULT_VARIANT):.4g}."
        )
        return self._study("table1", lab, rows, contrasts=self._contrasts(lab, runs, pairs), notes=(note,))

    def curves(self, lab: Lab) -> Study:
        results, rows, _ = self._all_methods(lab)
        return self._study("figure-curves", lab, rows, lines=_lines(results))

    def _all_methods(self, lab: Lab) -> tuple[Results, list[Row], list[Run]]:
        """Return what `seqdefer run` would keep, the rows of all methods, and the runs behind them."""
        runs, seeds = [], []
        for seed in range(self.seeds):
            run = lab.run(seed, {name: (DEFAULT_VARIANT, name) for name in lab.methods})
            runs.append(run)
            seeds.append(seed_result(seed, lab.oracles(seed), run))
        task, summary = lab.task, summarise(seeds)
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
                headroom=_mean_of(results.headroom(name)),
            )
            for name, row in summary.items()
        ]
        return results, rows, runs

    def hand_offs(self, lab: Lab) -> Study:
        full, sizes = lab.n_positions, measured_sizes(lab, self.plan)
        learned = [name for name in ONE_TIME_LEARNED if name in lab.methods]
        pairs = [(size_label(name, size), size_label(name, full)) for name in learned for size in sizes if size < full]
        confidence = [name for name in ONE_TIME_CONFIDENCE if name in lab.methods]
        pairs += [(size_label("OneTimeModel", size), size_label(other, size)) for size in sizes for other in confidence]
        return self._measured_study("table-handoffs", lab, pairs)

    def alpha(self, lab: Lab) -> Study:
        planned = plan_rows("figure-alpha", lab, self.plan, self.recipe)
        (usual,) = (row for row in planned if row.is_default)
        rivals = [row for row in planned if row.varied["hand_offs"] == usual.varied["hand_offs"] and row is not usual]
        gain = f"the expert's mean gain over the training examples, {lab.unit:.4g}"
        unit = gain if lab.facts.gain > 0 else "the unit of the loss, since the expert's mean gain is not above 0"
        note = (
            f"{lab.task.name}: the unit of alpha_1 is {unit}; the rule of thumb, the median gain, is "
            f"{lab.facts.rule:.4g}; the recipe's alpha_1 is {lab.alpha(DEFAULT_VARIANT):.4g}."
        )
        return self._measured_study("figure-alpha", lab, [(usual.label, row.label) for row in rivals], note)

    def psi(self, lab: Lab) -> Study:
        first, second = plan_rows("table-psi", lab, self.plan, self.recipe)
        return self._measured_study("table-psi", lab, [(first.label, second.label)])

    def ablation(self, lab: Lab) -> Study:
        pairs = [(ablated_label("lstm", one), ablated_label("mlp", one)) for one in STRATEGIES]
        pairs += [
            (ablated_label(architecture, "free"), ablated_label(architecture, other))
            for architecture in ARCHITECTURES
            for other in ("teacher", "scheduled")
        ]
        note = (
            "All cells of the ablation have the paper's hyperparameters for token-level rejectors, on what rejectors "
            "see by the recipe."
        )
        return self._measured_study("table-ablation", lab, pairs, note)

    def _measured_study(self, name: str, lab: Lab, pairs: Sequence[tuple[str, str]], *notes: str) -> Study:
        """Measure the planned rows of a study, and compare pairs of their labels."""
        planned = plan_rows(name, lab, self.plan, self.recipe)
        wanted = {row.label: (row.variant, row.method) for row in planned}
        runs = [lab.run(seed, wanted) for seed in range(self.seeds)]
        rows = _with_choices([self._row(lab, row, runs) for row in planned])
        return self._study(name, lab, rows, contrasts=self._contrasts(lab, runs, pairs), notes=notes)

    def _row(self, lab: Lab, planned: PlannedRow, runs: Sequence[Run]) -> Row:
        curves = [curve_of(run.sweeps[planned.label], run.ends) for run in runs]
        improvements = tuple(
            improvement(curve, random_curve(run.ends)) for curve, run in zip(curves, runs, strict=True)
        )
        cells = [lab.cell(planned.variant, planned.method, seed) for seed in range(self.seeds)]
        validation = [cell.validation for cell in cells if cell.validation is not None]
        free = [improvement(free_curve(run.ends), random_curve(run.ends)) for run in runs]
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
            headroom=_mean_of(headroom_of(list(zip(improvements, free, strict=True)))),
            training={name: mean_and_std([cell.training[name] for cell in cells])[0] for name in cells[0].training},
        )

    def _contrasts(self, lab: Lab, runs: Sequence[Run], pairs: Sequence[tuple[str, str]]) -> list[Contrast]:
        contrasts = []
        with self.meter.stage(f"bootstrap ({lab.task.name}, {IN_WORDS[self.recipe]})", len(pairs)) as advance:
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
            recipe=self.recipe,
            preset=self.preset,
            seeds=self.seeds,
            instances={task.name: lab.settings.instances},
            tasks={task.name: StudyTask(task.spec.length, task.loss_unit, tested_on=lab.tested_on)},
            rows=tuple(rows),
            lines=tuple(lines),
            contrasts=tuple(contrasts),
            notes=notes,
            made_of={task.name: lab.name},
        )


def _with_choices(rows: Sequence[Row]) -> list[Row]:
    """Mark the variant of each method that is best on validation data, the first among equals."""
    candidates = [(row.validation, row) for row in rows if row.validation is not None]
    best: dict[str, Row] = {}
    for _, row in sorted(candidates, key=lambda pair: pair[0], reverse=True):  # a stable sort
        best.setdefault(row.method, row)
    return [replace(row, is_chosen=row is best.get(row.method)) for row in rows]


def _lines(results: Results) -> list[Line]:
    end = extent(results)
    lines = []
    for curve in mean_curves(results).values():
        steps = len(curve.mean) - 1
        budgets = tuple(end * step / steps for step in range(steps + 1))
        lines.append(Line(results.task, curve.name, curve.block, budgets, curve.mean, curve.std))
    return lines


def _mean_of(found: tuple[float, float] | None) -> float | None:
    return None if found is None else found[0]
