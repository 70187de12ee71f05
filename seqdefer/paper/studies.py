"""From cells to studies: the rows of each table or figure, and the contrasts behind the claims.

Studies choose the size of J and alpha_1 by validation data. Test data only measures the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from seqdefer.evaluation.areas import granularity_of, seed_result, to_compare
from seqdefer.evaluation.curves import Run, curve_of, free_curve, improvement, paired_bootstrap, random_curve
from seqdefer.evaluation.published import (
    PAPER,
    published_ablation,
    published_ablation_baseline,
    published_hand_offs,
)
from seqdefer.evaluation.results import PaperFigure, Results, Units, headroom_of, mean_and_std, summarise
from seqdefer.hyperparameters import Strategy
from seqdefer.paper.cells import WantedCell
from seqdefer.paper.lab import DEFAULT_VARIANT, Lab, Variant
from seqdefer.paper.plan import ARCHITECTURES, PSIS, STRATEGIES, TITLES, ReproductionPlan, ablated_settings
from seqdefer.paper.records import Contrast, Line, Row, Study, StudyTask
from seqdefer.progress import Meter
from seqdefer.recipes import IN_WORDS
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
                for row, seed in product(self._planned(name, lab), range(self.seeds)):
                    if not lab.is_stored(row.variant, row.method, seed):
                        cells.append(WantedCell(lab.task.name, self.recipe, row.variant, row.method, seed))
        return cells

    def _planned(self, name: str, lab: Lab) -> list[PlannedRow]:
        planners: dict[str, Callable[[Lab], list[PlannedRow]]] = {
            "table-handoffs": self._planned_sizes,
            "figure-alpha": self._planned_alphas,
            "table-psi": self._planned_psis,
            "table-ablation": self._planned_networks,
        }
        every_method = [PlannedRow(method, DEFAULT_VARIANT, method, {}) for method in lab.methods]
        return planners[name](lab) if name in planners else every_method

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
        full, sizes = lab.n_positions, self._sizes(lab)
        learned = [name for name in ONE_TIME_LEARNED if name in lab.methods]
        pairs = [(size_label(name, size), size_label(name, full)) for name in learned for size in sizes if size < full]
        confidence = [name for name in ONE_TIME_CONFIDENCE if name in lab.methods]
        pairs += [(size_label("OneTimeModel", size), size_label(other, size)) for size in sizes for other in confidence]
        return self._measured_study("table-handoffs", lab, pairs)

    def _planned_sizes(self, lab: Lab) -> list[PlannedRow]:
        chosen = lab.size(DEFAULT_VARIANT)
        return [
            PlannedRow(
                label=size_label(method, size),
                variant=_sized(lab, size),
                method=method,
                varied={"hand_offs": size},
                paper=published_hand_offs(lab.task.name, method, size) if lab.task.has_published_figures else None,
                is_default=size == chosen,
            )
            for size in self._sizes(lab)
            for method in ONE_TIME
            if method in lab.methods
        ]

    def _sizes(self, lab: Lab) -> list[int]:
        """Return the sizes of J to measure: those of the plan, that of the recipe, and all positions."""
        planned = [size for size in self.plan.tasks[lab.task.name].hand_offs if size < lab.n_positions]
        return sorted({*planned, lab.size(DEFAULT_VARIANT), lab.n_positions})

    def alpha(self, lab: Lab) -> Study:
        planned = self._planned_alphas(lab)
        (usual,) = (row for row in planned if row.is_default)
        rivals = [row for row in planned if row.varied["hand_offs"] == usual.varied["hand_offs"] and row is not usual]
        gain = f"the expert's mean gain over the training examples, {lab.unit:.4g}"
        unit = gain if lab.facts.gain > 0 else "the unit of the loss, since the expert's mean gain is not above 0"
        note = (
            f"{lab.task.name}: the unit of alpha_1 is {unit}; the rule of thumb, the median gain, is "
            f"{lab.facts.rule:.4g}; the recipe's alpha_1 is {lab.alpha(DEFAULT_VARIANT):.4g}."
        )
        return self._measured_study("figure-alpha", lab, [(usual.label, row.label) for row in rivals], note)

    def _planned_alphas(self, lab: Lab) -> list[PlannedRow]:
        """Cross alpha_1 with the size of J where the plan says so; elsewhere only alpha_1 varies."""
        default = lab.alpha(DEFAULT_VARIANT)
        is_crossed = self.recipe in self.plan.crossed_recipes and self.plan.tasks[lab.task.name].hand_offs
        sizes = self._sizes(lab) if is_crossed else [lab.size(DEFAULT_VARIANT)]
        times = (*self.plan.times, lab.facts.rule / lab.unit)  # the rule may be one of the plan's, or the recipe's
        alphas = {lab.alpha(Variant(times=one)): one for one in reversed(times)}
        alphas.pop(default, None)
        return [
            PlannedRow(
                label=_alpha_label(lab, variant),
                variant=variant,
                method="OneTimeModel",
                varied={
                    "hand_offs": size,
                    "times": lab.alpha(variant) / lab.unit,
                    "alpha": lab.alpha(variant),
                    "alpha_token": lab.alpha(variant) / lab.task.spec.length,
                    "is_rule": lab.alpha(variant) == lab.facts.rule,
                    "is_own": variant.times not in self.plan.times,  # the recipe's, or the rule of thumb
                },
                is_default=variant == DEFAULT_VARIANT,
            )
            for size in sizes
            for variant in sorted(
                [_sized(lab, size), *(replace(_sized(lab, size), times=one) for one in alphas.values())], key=lab.alpha
            )
        ]

    def psi(self, lab: Lab) -> Study:
        first, second = self._planned_psis(lab)
        return self._measured_study("table-psi", lab, [(first.label, second.label)])

    def _planned_psis(self, lab: Lab) -> list[PlannedRow]:
        return [
            PlannedRow(
                label=f"OneTimeModel, {psi}",
                variant=DEFAULT_VARIANT if psi == lab.settings.psi else Variant(psi=psi),
                method="OneTimeModel",
                varied={"psi": psi},
                is_default=psi == lab.settings.psi,
            )
            for psi in PSIS
        ]

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

    def _planned_networks(self, lab: Lab) -> list[PlannedRow]:
        has_papers, task = lab.task.has_published_figures, lab.task.name
        networks = [
            PlannedRow(
                label=ablated_label(architecture, strategy),
                variant=_ablated(lab, architecture, strategy),
                method="TokenwiseModel",
                varied={"architecture": architecture, "strategy": strategy},
                paper=published_ablation(task, architecture, strategy) if has_papers else None,
            )
            for architecture in ARCHITECTURES
            for strategy in STRATEGIES
        ]
        baselines = [
            PlannedRow(
                name,
                DEFAULT_VARIANT,
                name,
                {},
                published_ablation_baseline(task, name) if has_papers else None,
                is_default=True,
            )
            for name in TOKEN_CONFIDENCE
            if name in lab.methods
        ]
        return networks + baselines

    def _measured_study(self, name: str, lab: Lab, pairs: Sequence[tuple[str, str]], *notes: str) -> Study:
        """Measure the planned rows of a study, and compare pairs of their labels."""
        planned = self._planned(name, lab)
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


def size_label(method: str, size: int) -> str:
    return f"{method}, |J| = {size}"


def _sized(lab: Lab, size: int) -> Variant:
    """Return the variant with |J| = size: the default one where the recipe has that size."""
    return DEFAULT_VARIANT if size == lab.size(DEFAULT_VARIANT) else Variant(hand_offs=size)


def _ablated(lab: Lab, architecture: str, strategy: Strategy) -> Variant:
    """Return the variant of a cell of the ablation: the default one where the recipe trains that network so."""
    settings = lab.settings
    is_recipe = ablated_settings(lab.entry, settings, architecture, strategy) == settings
    return DEFAULT_VARIANT if is_recipe else Variant(architecture=architecture, strategy=strategy)


def _alpha_label(lab: Lab, variant: Variant) -> str:
    rule = " (rule of thumb)" if lab.alpha(variant) == lab.facts.rule else ""
    return f"{size_label('OneTimeModel', lab.size(variant))}, alpha = {lab.alpha(variant):.4g}{rule}"


def ablated_label(architecture: str, strategy: str) -> str:
    return f"{architecture.upper()}, {strategy}"


def _mean_of(found: tuple[float, float] | None) -> float | None:
    return None if found is None else found[0]
