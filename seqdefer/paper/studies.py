"""From cells to studies: which cells a table or figure takes, its rows, and the contrasts its claims rest on.

What a study chooses (the size of J, alpha_1), it chooses by validation data; the test data only says how that came out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seqdefer.evaluation.curves import Curve, Run, curve_of, improvement, paired_bootstrap, random_curve
from seqdefer.evaluation.experiment import seed_result, to_compare
from seqdefer.evaluation.published import PAPER
from seqdefer.evaluation.results import PaperFigure, Results, SeedResult, Units, mean_and_std, summarise
from seqdefer.evaluation.settings import GRANULARITY
from seqdefer.paper import records
from seqdefer.paper.lab import USUAL, Lab, Variant
from seqdefer.paper.plan import (
    ABLATED,
    ARCHITECTURES,
    TITLES,
    Plan,
    papers_ablation,
    papers_ablation_baseline,
    papers_hand_offs,
)
from seqdefer.paper.records import Contrast, Line, Row, Study
from seqdefer.progress import Meter
from seqdefer.report.style import block_of
from seqdefer.report.svg import extent, mean_curves

RESAMPLES = 1000
ONE_TIME = ("OneTimeModel", "OneTimeCost", "OneTimeScore", "OneTimeEntropy")


@dataclass(frozen=True)
class Entry:
    """A row to be: a method in a variant, what the study says of it, and the paper's figure."""

    label: str
    variant: Variant
    method: str
    varied: Mapping[str, Any]
    paper: PaperFigure | None = None
    is_default: bool = False


@dataclass(frozen=True)
class Part:
    """What a study has of one task: its rows, and the runs behind them by label, to compare."""

    rows: list[Row]
    runs: list[Run]
    labels: list[str]  # of the rows


class Studies:
    """The studies of some tasks. `labs` holds one lab a task, and one more for each set of inputs of the ablation."""

    def __init__(self, plan: Plan, preset: str, seeds: int, labs: Callable[[str, str], Lab], meter: Meter) -> None:
        self.plan, self.preset, self.seeds, self.labs, self.meter = plan, preset, seeds, labs, meter

    def make(self, name: str, tasks: Sequence[str]) -> Study:
        makers: dict[str, Callable[[str], Study]] = {
            "table1": self.table1,
            "figure-curves": self.curves,
            "table-handoffs": self.hand_offs,
            "figure-alpha": self.alpha,
            "table-ablation": self.ablation,
        }
        return joined([makers[name](task) for task in tasks])

    # -- table 1 and the curves ------------------------------------------------------------------------------------

    def table1(self, task: str) -> Study:
        lab = self.labs(task, "usual")
        _, part = self._all_methods(lab)
        pairs = to_compare(part.runs[0])
        whole = [name for name in part.labels if GRANULARITY[name] == "whole"]
        pairs += [("WholeModelEmbed", name) for name in whole if name != "WholeModelEmbed"]
        by_confidence = [name for name in ("TokenwiseScore", "TokenwiseEntropy") if name in part.labels]
        pairs += [(name, other) for name in by_confidence for other in whole]
        note = (
            "OneTimeModel may choose from all hand-offs here; the paper prints its best size of J in this table (45 "
            "for TSP, 4 for XSUM). What validation data chooses is in table-handoffs."
        )
        notes = (note,) if lab.task.is_papers and task in PAPER else ()
        return self._study("table1", lab, part.rows, contrasts=self._contrasts(lab, part.runs, pairs), notes=notes)

    def curves(self, task: str) -> Study:
        lab = self.labs(task, "usual")
        results, part = self._all_methods(lab)
        return self._study("figure-curves", lab, part.rows, lines=_lines(results))

    def _all_methods(self, lab: Lab) -> tuple[Results, Part]:
        runs, seeds = [], []
        for seed in range(self.seeds):
            run = self._run(lab, seed, [Entry(name, USUAL, name, {}) for name in lab.methods])
            runs.append(run)
            seeds.append(seed_result(seed, lab.oracles(seed), run))
        task, summary = lab.task, summarise(seeds)
        papers = PAPER.get(task.name, {}) if task.is_papers else {}
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
        results = _results(lab, seeds)
        return results, Part(rows, runs, list(lab.methods))

    # -- one-time deferral -----------------------------------------------------------------------------------------

    def hand_offs(self, task: str) -> Study:
        lab = self.labs(task, "usual")
        most = lab.task.spec.length + 1
        sizes = [size for size in self.plan.tasks[task].hand_offs if size < most]
        methods = [name for name in ONE_TIME if name in lab.methods]
        entries = [
            Entry(
                label=size_label(method, size),
                variant=Variant(hand_offs=size) if size < most else USUAL,
                method=method,
                varied={"hand_offs": size},
                paper=papers_hand_offs(task, method, size) if lab.task.is_papers else None,
                is_default=size == most,
            )
            for size in [*sizes, most]
            for method in methods
        ]
        part = _with_choices(self._measure(lab, entries))
        model = [name for name in ("OneTimeModel", "OneTimeCost") if name in methods]
        pairs = [(size_label(name, size), size_label(name, most)) for name in model for size in sizes]
        confidence = [name for name in ("OneTimeScore", "OneTimeEntropy") if name in methods]
        pairs += [
            (size_label("OneTimeModel", size), size_label(other, size))
            for size in [*sizes, most]
            for other in confidence
        ]
        return self._study("table-handoffs", lab, part.rows, contrasts=self._contrasts(lab, part.runs, pairs))

    def alpha(self, task: str) -> Study:
        lab = self.labs(task, "usual")
        tried = [Variant(times=times) for times in self.plan.times]
        variants = [variant for variant in tried if lab.alpha(variant) != lab.alpha(USUAL)]  # the rule may be 0
        entries = [
            Entry(
                label=_with_times(lab, variant),
                variant=variant,
                method="OneTimeModel",
                varied={
                    "times": lab.alpha(variant) / lab.unit,
                    "alpha": lab.alpha(variant),
                    "alpha_token": lab.alpha(variant) / lab.task.spec.length,
                },
                is_default=variant is USUAL,
            )
            for variant in sorted([*variants, USUAL], key=lab.alpha)
        ]
        part = _with_choices(self._measure(lab, entries))
        rule = _with_times(lab, USUAL)
        pairs = [(rule, entry.label) for entry in entries if entry.label != rule]
        gained = f"what the expert gains on average over the training examples, {lab.unit:.4g}"
        unit = gained if lab.facts.gain > 0 else "units of the loss, since the expert gains nothing on average"
        note = f"{task}: alpha_1 is counted in {unit}; the rule of thumb, the median gain, is {lab.facts.rule:.4g}."
        return self._study(
            "figure-alpha", lab, part.rows, contrasts=self._contrasts(lab, part.runs, pairs), notes=(note,)
        )

    # -- token level -----------------------------------------------------------------------------------------------

    def ablation(self, task: str) -> Study:
        rows: list[Row] = []
        contrasts: list[Contrast] = []
        for inputs in self.plan.tasks[task].inputs:
            lab = self.labs(task, inputs)
            entries = [
                Entry(
                    label=ablated_label(inputs, architecture, strategy),
                    variant=Variant(architecture=architecture, strategy=strategy),
                    method="TokenwiseModel",
                    varied={"inputs": inputs, "architecture": architecture, "strategy": strategy},
                    paper=papers_ablation(task, architecture, strategy) if lab.task.is_papers else None,
                )
                for architecture in ARCHITECTURES
                for strategy in ABLATED
            ]
            part = self._measure(lab, entries)
            rows += part.rows
            pairs = [(ablated_label(inputs, "lstm", one), ablated_label(inputs, "mlp", one)) for one in ABLATED]
            pairs += [
                (ablated_label(inputs, architecture, "free"), ablated_label(inputs, architecture, other))
                for architecture in ARCHITECTURES
                for other in ("teacher", "scheduled")
            ]
            contrasts += self._contrasts(lab, part.runs, pairs)
        names = [name for name in ("TokenwiseScore", "TokenwiseEntropy") if name in lab.methods]
        papers = {name: papers_ablation_baseline(task, name) if lab.task.is_papers else None for name in names}
        baselines = [Entry(name, USUAL, name, {}, papers[name], is_default=True) for name in names]
        rows += self._measure(lab, baselines).rows
        note = (
            "All cells of the ablation have the paper's hyperparameters for token-level rejectors; what `seqdefer run` "
            "fits by default is in table 1."
        )
        return self._study("table-ablation", lab, rows, contrasts=contrasts, notes=(note,))

    # -- what they share -------------------------------------------------------------------------------------------

    def _measure(self, lab: Lab, entries: Sequence[Entry]) -> Part:
        runs = [self._run(lab, seed, entries) for seed in range(self.seeds)]
        rows = []
        for entry in entries:
            curves = [(curve_of(run.sweeps[entry.label], run.ends), random_curve(run.ends)) for run in runs]
            rows.append(_row(lab, entry, curves, self._judged(lab, entry)))
        return Part(rows, runs, [entry.label for entry in entries])

    def _run(self, lab: Lab, seed: int, entries: Sequence[Entry]) -> Run:
        return lab.run(seed, {entry.label: (entry.variant, entry.method) for entry in entries})

    def _judged(self, lab: Lab, entry: Entry) -> float | None:
        """Mean % improvement on validation data."""
        judged = [lab.cell(entry.variant, entry.method, seed).validation for seed in range(self.seeds)]
        known = [value for value in judged if value is not None]
        return mean_and_std(known)[0] if known else None

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
            tasks={task.name: records.Task(task.spec.length, task.loss_unit)},
            rows=tuple(rows),
            lines=tuple(lines),
            contrasts=tuple(contrasts),
            notes=notes,
            made_of={task.name: lab.name},
        )


def only(study: Study, task: str) -> Study:
    """The part of a study that is about one task; its notes begin with the task's name, or are for all."""
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


def joined(studies: Sequence[Study]) -> Study:
    """One study of the tasks of several."""
    first = studies[0]
    return replace(
        first,
        instances={name: number for study in studies for name, number in study.instances.items()},
        tasks={name: task for study in studies for name, task in study.tasks.items()},
        rows=tuple(row for study in studies for row in study.rows),
        lines=tuple(line for study in studies for line in study.lines),
        contrasts=tuple(one for study in studies for one in study.contrasts),
        notes=tuple(dict.fromkeys(note for study in studies for note in study.notes)),
        made_of={name: made for study in studies for name, made in study.made_of.items()},
    )


def _row(lab: Lab, entry: Entry, curves: Sequence[tuple[Curve, Curve]], judged: float | None) -> Row:
    improvements = tuple(improvement(curve, random) for curve, random in curves)
    return Row(
        lab.task.name,
        entry.method,
        GRANULARITY[entry.method],
        *mean_and_std([curve.area for curve, _ in curves]),
        *mean_and_std(improvements),
        improvements,
        varied=entry.varied,
        is_default=entry.is_default,
        validation=judged,
        paper=entry.paper,
    )


def _with_choices(part: Part) -> Part:
    """Of each method's variants, the one that did best on validation data is marked, the first among equals."""
    judged = [(row.validation, row) for row in part.rows if row.validation is not None]
    best: dict[str, Row] = {}
    for _, row in sorted(judged, key=lambda pair: pair[0], reverse=True):  # equals stay in their order
        best.setdefault(row.method, row)
    return replace(part, rows=[replace(row, is_chosen=row is best.get(row.method)) for row in part.rows])


def _results(lab: Lab, seeds: Sequence[SeedResult]) -> Results:
    """As `seqdefer run` would keep them; `plots` reads curves from it."""
    task = lab.task
    return Results(task.name, "", task.spec.length, tuple(seeds), summarise(seeds), units=Units(loss=task.loss_unit))


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


def _with_times(lab: Lab, variant: Variant) -> str:
    rule = " (rule of thumb)" if variant == USUAL else ""
    return f"OneTimeModel, alpha = {lab.alpha(variant):.4g}{rule}"


def ablated_label(inputs: str, architecture: str, strategy: str) -> str:
    return f"{architecture.upper()}, {strategy}, {inputs}"
