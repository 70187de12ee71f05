"""The main job, from a task to its results: label, fit every rejector, sweep every method, compare.

    task data -> predictor, expert -> labels -> rejectors -> sweeps -> curves -> results.json, report.html

Seeds differ in the test instances they draw (disjoint) and in the rejectors' initial weights and batches; the pair and
the labels are the same for all. Rejectors are stored in the output folder with what made them, so that a stopped run
resumes. Nothing is chosen on test data: it enters after the fits, and its type (`TestData`) keeps it out of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.budgets.passes import CHUNK
from seqdefer.budgets.sweeps import GridSweep, Sweep
from seqdefer.budgets.token_sweeps import sweep_hindsight, sweep_thresholds
from seqdefer.environment import machine
from seqdefer.errors import CheckpointError
from seqdefer.evaluation.areas import about_method, compare, seed_result, to_compare
from seqdefer.evaluation.curves import (
    Curve,
    Ends,
    Run,
    curve_of,
    free_curve,
    optimal_curve,
    optimal_once,
    optimal_whole,
)
from seqdefer.evaluation.examples import draw_examples
from seqdefer.evaluation.oracle import all_outcomes, beam_outcomes
from seqdefer.evaluation.promise import check_promise
from seqdefer.evaluation.published import PAPER
from seqdefer.evaluation.results import (
    Comparison,
    ExpertCalls,
    PairTiming,
    PaperFigure,
    PromiseCheck,
    Provenance,
    Results,
    SeedResult,
    Units,
    summarise,
)
from seqdefer.evaluation.seconds import TIMING_FILE, can_be_timed, has_slower_expert, in_seconds, time_methods
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.evaluation.splits import Splits
from seqdefer.interfaces import Task
from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.label_store import LabelStore
from seqdefer.labels.labelled import LabelledData, LearningData, require_learning_data
from seqdefer.labels.manifest import describe_options
from seqdefer.methods.base import FitContext, Method
from seqdefer.methods.deferral import deferral_of
from seqdefer.methods.registry import RANK, all_methods, methods_for, preferred_methods, require_applicable
from seqdefer.progress import NO_PROGRESS, Clock
from seqdefer.rejectors.checkpoints import Rejector, load_rejector
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rejectors.losses import hand_off_grid
from seqdefer.storage.files import fingerprint


class Experiment:
    """One task, all methods. `run` does it all; the steps are methods of their own.

    Experiments that differ in what they learn may share `splits`; each then needs a name, `variant`, for its rejectors.
    """

    def __init__(
        self,
        task: Task,
        settings: ExperimentSettings,
        folder: Path | str,
        clock: Clock | None = None,
        *,
        splits: Splits | None = None,
        variant: str = "",
        labels: LabelStore | None = None,
    ) -> None:
        self.task, self.settings, self.folder, self.variant = task, settings, Path(folder), variant
        self.clock, length = clock or Clock(), task.spec.length
        self.grid = hand_off_grid(length, length + 1 if settings.hand_offs is None else settings.hand_offs)
        wanted = [one for one in all_methods().values() if settings.wants(one.name)]
        learned_from = {one.learns_from for one in wanted}
        ends = self.grid[:1] if "ends" in learned_from else self.grid[:0]
        self.splits = splits or Splits(
            task,
            self.folder,
            self.clock,
            seeds=settings.seeds,
            instances=settings.instances,
            trees=settings.tree_kind,
            rollouts=settings.rollouts,
            by_token="trees" in learned_from,
            kept=(self.grid if "hand_offs" in learned_from else ends).tolist(),
            reads_first=any(one.reads_first for one in wanted),
            labels=labels,
        )
        self.drawn = ""

    def run(self, *, preset: str = "custom", command: str = "", timing: bool = False) -> Results:
        """Label, fit, sweep and compare; return the results (`run_task` also writes them). Rejectors are stored. With
        `timing`, pairs that run here are timed, for curves against seconds."""
        require_applicable(self.task, self.settings.methods or ())
        self.splits.make_by_engine("test", "train", "validation")
        _ = self.splits.test  # first, to fail early if it is too small
        runs, oracles, timed, promise = list[Run](), list[dict[str, Curve]](), None, None
        for seed in range(self.settings.seeds):
            rejectors = self.fit(self.splits.train, self.splits.validation, seed)
            run = self.sweep(seed, rejectors)
            runs.append(run)
            oracles.append(self.oracles(seed, run))
            promise = self.promise(rejectors) if seed == 0 else promise
            if seed == 0 and timing and can_be_timed(self.task):
                timed = self.time(rejectors, run)
            if seed == 0 and type(self.task).draw is not Task.draw:
                with self.clock.stage("draw examples", 1) as advance:
                    self.drawn = draw_examples(self.splits, rejectors)
                    advance(1)
        pairs, resamples = to_compare(runs[0]), self.settings.resamples
        with self.clock.stage("bootstrap", len(pairs)) as advance:
            comparisons = compare(runs, pairs, resamples, advance)
        by_cost = {}
        if self.splits.reads_first:  # elsewhere passes follow what is written
            by_cost["passes"] = tuple(compare([run.in_passes() for run in runs], pairs, resamples))
        if timed is not None and all(has_slower_expert(run, timed) for run in runs):
            by_second = [in_seconds(run, timed) for run in runs]
            drawn = [pair for pair in pairs if all(set(pair) <= set(run.sweeps) for run in by_second)]
            by_cost["seconds"] = tuple(compare(by_second, drawn, resamples))
        coins = [self.coin(seed) if by_cost else {} for seed in range(len(runs))]
        parts = zip(oracles, runs, coins, strict=True)
        seeds = [seed_result(seed, *part, timed if "seconds" in by_cost else None) for seed, part in enumerate(parts)]
        notes = self._notes(self.splits.train, self.splits.validation)
        results = self._results(preset, command, seeds, comparisons, notes)
        return replace(results, cost_comparisons=by_cost, timing=timed, promise=promise)

    def fit(self, train: LearningData, validation: LearningData, seed: int) -> dict[str, Rejector]:
        """Return the rejectors of a seed by method, from the folder where they are there already."""
        require_learning_data(train, validation)
        context = FitContext(self.task, self.settings, self.grid, train, validation, seed)
        allowed = methods_for(self.task, has_entropy=train.draft.entropy is not None)
        return {name: self._fitted(method, context) for name, method in allowed.items() if self.settings.wants(name)}

    def _fitted(self, method: Method, context: FitContext) -> Rejector:
        """Return the rejector of a fit. Its folder has a name for readers, so another fit replaces what it holds;
        networks of `storage/made_once.py` are named by what made them, and another config is an error."""
        fit, seed = method.fit(context), context.seed
        if not fit.epochs:
            return fit.run(NO_PROGRESS)[0]
        made_by = fingerprint(method.name, fit.choices, seed, fit.data)
        folder = self.folder / "rejectors" / self.variant / f"{method.name}-seed{seed}"
        found = _load_if_same(folder, made_by, self.task)
        if found is not None:
            return found
        with self.clock.stage(f"fit {method.name} (seed {seed})", fit.epochs) as advance:
            rejector, history = fit.run(advance)
        self.splits.store_grown()
        losses = {} if history is None else {"history": _finite(asdict(history))}
        rejector.notes.update(method=method.name, made_by=made_by, task=self.task.name, **losses)
        rejector.save_pretrained(folder)
        if rejector.module is not None:
            rejector.module.to(self.task.predictor.device)
        return rejector

    def sweep(self, seed: int, rejectors: Mapping[str, Rejector]) -> Run:
        """Sweep the fitted methods over the test instances of a seed."""
        test, rows = self.splits.test, self.splits.rows(seed)
        with self.clock.stage(f"sweep thresholds (seed {seed})", 1) as advance:
            run = sweep_methods(test, rows, rejectors)
            advance(1)
        return run

    def time(self, rejectors: Mapping[str, Rejector], run: Run) -> PairTiming:
        """Time the pair and the methods of the first seed; a run that resumes finds what was measured."""
        examples, file = self.splits.test.examples.select(self.splits.rows(0)), self.folder / TIMING_FILE
        with self.clock.stage("time methods", len(rejectors)) as advance:
            return time_methods(self.task, examples, rejectors, run, file, advance)

    def promise(self, rejectors: Mapping[str, Rejector]) -> PromiseCheck | None:
        """Let half of all test instances promise budgets of the method that a fit would take, and the others check.
        Those that choose its thresholds, if any do, belong to neither half."""
        name = next((name for name in preferred_methods(self.task) if name in rejectors), None)
        if name is None:
            return None
        test, deferral = self.splits.test, deferral_of(rejectors[name])
        return check_promise(name, deferral.spending(self.task, test.examples, labelled=test, set_aside=True))

    def coin(self, seed: int) -> dict[str, Sweep]:
        """Return RandomSpeculative: a coin for each sequence between the predictor alone and lossless speculative
        decoding, the expert's tokens in as few passes as drafts allow. Against written tokens it is Random."""
        test, rows = self.splits.test, self.splits.rows(seed)
        if test.trees is None:
            return {}
        swept = sweep_thresholds(Confidence(), test.trees, rows, torch.tensor([-math.inf, math.inf]))
        assert swept.passes is not None
        return {"RandomSpeculative": GridSweep(swept.deferred.cpu(), swept.loss.cpu(), swept.passes.cpu())}

    def oracles(self, seed: int, run: Run) -> dict[str, Curve]:
        """Return the best that each granularity can do on the test instances of a seed, what a free expert would give
        (OptimalFree), and token by token what hindsight about the next token gives (MyopicToken)."""
        test, rows = self.splits.test, self.splits.rows(seed)
        table = test.table.select(rows)
        curves = {
            "OptimalFree": free_curve(run.ends),
            "OptimalWhole": optimal_whole(table),
            "OptimalOneTime": optimal_once(table),
        }
        if test.trees is not None:
            swept = sweep_hindsight(test.trees, rows)
            myopic = GridSweep(swept.deferred, swept.loss)
            outcomes = self.outcomes(seed, Run(run.ends, {**run.sweeps, "MyopicToken": myopic}))
            curves["OptimalToken"] = optimal_curve(*outcomes, until=float(run.ends.expert_deferred.mean()))
            curves["MyopicToken"] = curve_of(myopic, run.ends)
        return curves

    def outcomes(self, seed: int, run: Run) -> tuple[Tensor, Tensor]:
        """Return what the token oracle chooses from, loss and deferred tokens (n, D) each.

        Sequences too long for all outcomes get those that a beam finds, and all that any method reaches, so that none
        beats the oracle."""
        test, rows = self.splits.test, self.splits.rows(seed)
        assert test.trees is not None
        if not self.splits.searches:
            loss, deferred = all_outcomes(test.trees, rows)
            return loss.cpu(), deferred.cpu()
        with self.clock.stage(f"search for the oracle (seed {seed})", len(rows)) as advance:
            loss, deferred = beam_outcomes(test.trees, rows, progress=advance)
        table = test.table.select(rows)
        swept = [sweep for sweep in run.sweeps.values() if isinstance(sweep, GridSweep)]
        losses = [loss.cpu(), table.loss, *(torch.from_numpy(sweep.loss.T) for sweep in swept)]
        counts = [deferred.cpu(), table.deferred, *(torch.from_numpy(sweep.deferred.T) for sweep in swept)]
        return torch.cat([part.double() for part in losses], 1), torch.cat([part.double() for part in counts], 1)

    def _notes(self, train: LearningData, validation: LearningData) -> tuple[str, ...]:
        """Return what the report prints about this run: the methods first, the finest of them leading."""
        context = FitContext(self.task, self.settings, self.grid, train, validation)
        fine_first = sorted(methods_for(self.task).values(), key=lambda one: -RANK[one.granularity])
        notes = tuple(note for one in fine_first if self.settings.wants(one.name) and (note := one.note(context)))
        if self.splits.grown and self.splits.searches:
            notes += (
                f"OptimalToken is the best found by a beam over the decisions of {self.task.spec.length} tokens, or by "
                "any method: a bound; the true optimum may be lower.",
            )
        if self._paper:
            notes += ("The paper's figures are for its own pair and data; compare orders of methods, not digits.",)
        return notes

    @property
    def _paper(self) -> Mapping[str, PaperFigure]:
        """The paper's figures for this task, if it prints any."""
        return PAPER.get(self.task.name, {}) if self.task.has_published_figures else {}

    def _results(
        self, preset: str, command: str, seeds: list[SeedResult], comparisons: list[Comparison], notes: tuple[str, ...]
    ) -> Results:
        return Results(
            task=self.task.name,
            preset=preset,
            recipe=self.settings.recipe,
            length=self.task.spec.length,
            seeds=tuple(seeds),
            summary=summarise(seeds),
            comparisons=tuple(comparisons),
            paper=self._paper,
            units=Units(
                loss=self.task.loss_unit,
                costs={
                    "passes": f"expert passes per sequence, in chunks of {CHUNK} tokens",
                    "seconds": "seconds per sequence",
                },
            ),
            notes=notes,
            about={name: about_method(name) for name in summarise(seeds)},
            provenance=provenance_of(
                self.task,
                self.settings,
                command,
                self.splits.calls,
                self.clock.seconds,
                machine(self.task.predictor.device),
            ),
        )


def provenance_of(
    task: Task,
    settings: ExperimentSettings,
    command: str,
    calls: Calls,
    seconds: Mapping[str, float],
    machine: Mapping[str, str],
) -> Provenance:
    """Return where the numbers of a task come from."""
    described = task.describe()
    models = {key: text for key, text in described.items() if key in ("predictor", "expert")}
    return Provenance(
        version=__version__,
        command=command,
        data={key: text for key, text in described.items() if key not in models},
        models=models,
        seeds=tuple(range(settings.seeds)),
        machine=machine,
        seconds=seconds,
        expert_calls=ExpertCalls(calls.made, calls.saved),
        settings={**asdict(settings), "task": describe_options(task)},
    )


def _finite(value: Any) -> Any:
    """Replace what JSON cannot hold: the loss of an epoch that diverged is null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _load_if_same(folder: Path, made_by: str, task: Task) -> Rejector | None:
    """Return the rejector in `folder` if the very same fit made it."""
    try:
        rejector = load_rejector(folder, task.predictor)
    except CheckpointError:
        return None
    return rejector if rejector.notes.get("made_by") == made_by else None


def sweep_methods(part: LabelledData, rows: Tensor, rejectors: Mapping[str, Rejector]) -> Run:
    """Sweep fitted methods over the instances `rows` of a split."""
    sweeps = {name: deferral_of(rejector).sweep(part, rows) for name, rejector in rejectors.items()}
    return Run(Ends.of(part.table.select(rows)), sweeps)
