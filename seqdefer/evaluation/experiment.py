"""The main job, from a task to its results: label, fit every rejector, sweep every method, compare, write.

    task data -> predictor, expert -> labels -> rejectors -> sweeps -> curves -> results.json, report.html

Seeds differ in the test instances they draw (disjoint) and in the rejectors' initial weights and batches; the pair and
the labels are the same for all. Rejectors are kept in the output folder and say what made them, so that a run that was
stopped goes on where it was. Nothing is chosen on test data: it enters after the
fits, and its type (`splits.Held`) keeps it out of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.budgets.policies import sweep_thresholds
from seqdefer.environment import machine
from seqdefer.errors import CheckpointError, OptionError
from seqdefer.evaluation.curves import (
    Curve,
    Ends,
    GridSweep,
    Run,
    Sweep,
    curve_of,
    improvement,
    once_confidence_sweep,
    once_cost_sweep,
    once_sweep,
    optimal_curve,
    optimal_once,
    optimal_whole,
    paired_bootstrap,
    random_curve,
    whole_sweep,
)
from seqdefer.evaluation.examples import draw_examples
from seqdefer.evaluation.oracle import all_outcomes, beam_outcomes
from seqdefer.evaluation.published import PAPER
from seqdefer.evaluation.results import (
    Comparison,
    ExpertCalls,
    MethodResult,
    PaperFigure,
    Provenance,
    Results,
    SeedResult,
    Units,
    summarise,
)
from seqdefer.evaluation.settings import BY_DRAFT, GRANULARITY, METHODS, ExperimentSettings
from seqdefer.evaluation.splits import Held, Labelled, Splits, Studied, require_studied
from seqdefer.interfaces import NextTokenExpert, Task
from seqdefer.labels.label_store import LabelStore
from seqdefer.labels.manifest import describe_options
from seqdefer.progress import Clock
from seqdefer.rejectors.confidence import CHOW, Confidence, Measure, confidence_of
from seqdefer.rejectors.losses import hand_off_grid, rule_of_thumb
from seqdefer.rejectors.networks import DraftNetwork, TokenNetwork, load_rejector
from seqdefer.rejectors.training import History, default_price, fit_cost, fit_once, fit_token, fit_whole
from seqdefer.storage.files import fingerprint


@dataclass(frozen=True)
class _Recipe:
    """How a rejector is made: `words` and the data `seen` tell two recipes apart, `make(progress=...)` follows one."""

    name: str
    words: Any
    seen: str
    epochs: int
    make: Callable[..., tuple[DraftNetwork | TokenNetwork, History]]


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
        self.splits = splits or Splits(
            task,
            self.folder,
            self.clock,
            seeds=settings.seeds,
            instances=settings.instances,
            rollouts=settings.rollouts,
            by_token=settings.wants("TokenwiseModel"),
            kept=self.grid.tolist() if any(map(settings.wants, BY_DRAFT)) else (),
            labels=labels,
        )
        self.drawn = ""

    def run(self, *, preset: str = "custom", command: str = "") -> Results:
        """Labels, fits, sweeps and compares; returns the results (`run_task` also writes them). Keeps the rejectors."""
        self._require_by_token()
        self.splits.make_by_engine("test", "train", "validation")
        self._require_entropy(self.splits.test)  # test rows may be too few: then all that follows would be for nothing
        runs, seeds = [], []
        for seed in range(self.settings.seeds):
            rejectors = self.fit(self.splits.train, self.splits.validation, seed)
            run = self.sweep(seed, rejectors)
            runs.append(run)
            seeds.append(seed_result(seed, self.oracles(seed, run), run))
            if seed == 0 and type(self.task).draw is not Task.draw:
                with self.clock.stage("draw examples", 1) as advance:
                    self.drawn = draw_examples(self.splits, self.grid, rejectors)
                    advance(1)
        with self.clock.stage("bootstrap", len(to_compare(runs[0]))) as advance:
            comparisons = compare(runs, to_compare(runs[0]), self.settings.resamples, advance)
        return self._results(preset, command, seeds, comparisons, self._notes(self.splits.train))

    def _require_by_token(self) -> None:
        """Before all the labelling: methods by token need an expert that names next tokens."""
        if not isinstance(self.task.expert, NextTokenExpert):
            self._refuse([name for name in METHODS if GRANULARITY[name] != "token"])

    def _require_entropy(self, test: Held) -> None:
        if test.draft.entropy is None:
            self._refuse([name for name in METHODS if not name.endswith("Entropy")])

    def _refuse(self, available: list[str]) -> None:
        """Raises where a method was asked for that is not available."""
        for method in self.settings.methods or ():
            if method not in available:
                raise OptionError(
                    f"method {method!r} does not apply to task {self.task.name!r}; available: {', '.join(available)}"
                )

    def fit(self, train: Studied, validation: Studied, seed: int) -> dict[str, DraftNetwork | TokenNetwork]:
        """The trained rejectors of a seed, from the folder where they are already there."""
        require_studied(train, validation)
        return {
            recipe.name: self._follow(recipe, seed)
            for recipe in self._recipes(train, validation, seed)
            if self.settings.wants(recipe.name)
        }

    def _recipes(self, train: Studied, validation: Studied, seed: int) -> list[_Recipe]:
        settings, alpha, grid = self.settings, self.alpha(train), self.grid
        drafts = ((train.draft, train.table), (validation.draft, validation.table))
        predictor = self.task.predictor
        models = (predictor.fingerprint, __version__)
        ends, seen = (
            fingerprint(*train.seen_by_draft(places), *validation.seen_by_draft(places), *models)
            for places in (grid[[0, -1]], grid)
        )
        common: dict[str, Any] = {"fingerprint": predictor.fingerprint, "seed": seed, "device": predictor.device}
        once, cost, token = asdict(settings.once), asdict(settings.cost), asdict(settings.token)
        whole = partial(fit_whole, *drafts, settings.once, **common)
        by_hand_off = partial(fit_once, *drafts, grid, settings.once, alpha=alpha, psi=settings.psi, **common)
        by_cost = partial(fit_cost, *drafts, grid, settings.cost, **common)
        kept = grid.tolist()
        recipes = [
            _Recipe("WholeModelEmbed", once, ends, settings.once.epochs, whole),
            _Recipe("OneTimeModel", [once, kept, alpha, settings.psi], seen, settings.once.epochs, by_hand_off),
            _Recipe("OneTimeCost", [cost, kept], seen, settings.cost.epochs, by_cost),
        ]
        if train.trees is not None and validation.trees is not None:
            seen = fingerprint(*train.seen_by_token(), *validation.seen_by_token(), *models)
            choices: dict[str, Any] = {"phi": settings.phi, "strategy": settings.strategy, "price": self._price(train)}
            by_token = partial(fit_token, train.trees, validation.trees, settings.token, seed=seed, **choices)
            recipes.append(_Recipe("TokenwiseModel", [token, *choices.values()], seen, settings.token.epochs, by_token))
        return recipes

    def _follow(self, recipe: _Recipe, seed: int) -> DraftNetwork | TokenNetwork:
        made_by = fingerprint(recipe.name, recipe.words, seed, recipe.seen)
        folder = self.folder / "rejectors" / self.variant / f"{recipe.name}-seed{seed}"
        found = _load_if_same(folder, made_by, self.task)
        if found is not None:
            return found
        with self.clock.stage(f"fit {recipe.name} (seed {seed})", recipe.epochs) as advance:
            rejector, history = recipe.make(progress=advance)
        rejector.notes.update(
            method=recipe.name, made_by=made_by, task=self.task.name, history=_finite(asdict(history))
        )
        rejector.save_pretrained(folder)
        return rejector.to(self.task.predictor.device)

    def sweep(self, seed: int, rejectors: Mapping[str, Any]) -> Run:
        """Every wanted method over the test instances of a seed."""
        test, rows = self.splits.test, self.splits.rows(seed)
        with self.clock.stage(f"sweep thresholds (seed {seed})", 1) as advance:
            run = sweep_methods(test, rows, rejectors, self.settings, self.grid)
            advance(1)
        return run

    def oracles(self, seed: int, run: Run) -> dict[str, Curve]:
        """The best that each granularity can do on the test instances of a seed."""
        table = self.splits.test.table.select(self.splits.rows(seed))
        curves = {"OptimalWhole": optimal_whole(table), "OptimalOneTime": optimal_once(table)}
        outcomes = self.outcomes(seed, run)
        if outcomes is not None:
            curves["OptimalToken"] = optimal_curve(*outcomes, until=float(run.ends.expert_deferred.mean()))
        return curves

    def outcomes(self, seed: int, run: Run) -> tuple[Tensor, Tensor] | None:
        """What the token oracle chooses from, loss and deferred tokens (n, D) each; None where it has no trees.

        Of sequences too long for all outcomes: those that a beam finds, and all that any method is known to reach, so
        that none beats the oracle."""
        test, rows = self.splits.test, self.splits.rows(seed)
        if test.trees is None:
            return None
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

    def alpha(self, train: Studied) -> float:
        """alpha_1: what was asked for, or the rule of thumb; nothing where nobody asks."""
        if self.settings.alpha is not None:
            return self.settings.alpha
        return rule_of_thumb(train.table) if self.settings.wants("OneTimeModel") else 0.0

    def _price(self, train: Studied) -> float:
        if self.settings.price is not None:
            return self.settings.price
        return 0.0 if train.trees is None else default_price(train.trees)

    def _notes(self, train: Studied) -> tuple[str, ...]:
        settings, alpha, price = self.settings, self.alpha(train), self._price(train)
        by_token = (
            f"TokenwiseModel minimises the token surrogate with phi = {settings.phi}; its training rollouts follow the "
            f"strategy '{settings.strategy}'{f'; each expert token costs {price:.3g} besides' if price else ''}."
        )
        notes = {
            "TokenwiseModel": by_token if self.splits.grown else "",
            "OneTimeModel": f"OneTimeModel minimises the one-time surrogate with psi = {settings.psi} over "
            f"{len(self.grid)} hand-offs; alpha_1 = {alpha:.4g}"
            f"{' by the rule of thumb' if settings.alpha is None else ''}.",
            "OneTimeCost": "OneTimeCost (ours) estimates the loss of every hand-off; a price of a token decides.",
        }
        told = tuple(note for method, note in notes.items() if note and settings.wants(method))
        if self.splits.grown and self.splits.searches:
            told += (
                f"OptimalToken is the best found by a beam over the decisions of {self.task.spec.length} tokens, or by "
                "any method: a bound; the true optimum may be lower.",
            )
        if self._paper:
            told += ("The paper's figures are for its own pair and data; compare orders of methods, not digits.",)
        return told

    @property
    def _paper(self) -> Mapping[str, PaperFigure]:
        """What the paper has to compare with."""
        return PAPER.get(self.task.name, {}) if self.task.is_papers else {}

    def _results(
        self, preset: str, command: str, seeds: list[SeedResult], comparisons: list[Comparison], notes: tuple[str, ...]
    ) -> Results:
        settings = {**asdict(self.settings), "task": describe_options(self.task)}
        calls = self.splits.calls
        described = self.task.describe()
        models = {key: text for key, text in described.items() if key in ("predictor", "expert")}
        return Results(
            task=self.task.name,
            preset=preset,
            length=self.task.spec.length,
            seeds=tuple(seeds),
            summary=summarise(seeds),
            comparisons=tuple(comparisons),
            paper=self._paper,
            units=Units(loss=self.task.loss_unit),
            notes=notes,
            provenance=Provenance(
                version=__version__,
                command=command,
                data={key: text for key, text in described.items() if key not in models},
                models=models,
                seeds=tuple(range(self.settings.seeds)),
                machine=machine(self.task.predictor.device),
                seconds=self.clock.seconds,
                expert_calls=ExpertCalls(calls.made, calls.saved),
                settings=settings,
            ),
        )


def _finite(value: Any) -> Any:
    """JSON has no NaN: an epoch that diverged is null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _load_if_same(folder: Path, made_by: str, task: Task) -> DraftNetwork | TokenNetwork | None:
    """The rejector in `folder` if the very same recipe made it."""
    try:
        rejector = load_rejector(folder, task.predictor)
    except CheckpointError:
        return None
    return rejector if rejector.notes.get("made_by") == made_by else None


def sweep_methods(
    part: Labelled, rows: Tensor, rejectors: Mapping[str, Any], settings: ExperimentSettings, grid: Tensor
) -> Run:
    """Every wanted method over the instances `rows` of a split."""
    drafted, table, lengths = part.draft.select(rows), part.table.select(rows), part.draft.sequences.lengths[rows]
    measures: dict[str, Measure] = {"Score": "uncertainty"}
    if drafted.entropy is not None:
        measures["Entropy"] = "entropy"

    def by_token(rejector: Any) -> Sweep:
        assert part.trees is not None
        swept = sweep_thresholds(rejector, part.trees, rows)
        return GridSweep(swept.deferred.cpu(), swept.loss.cpu())

    make: dict[str, Callable[[], Sweep]] = {
        name: partial(lambda chow: whole_sweep(chow.score(drafted), table), chow) for name, chow in CHOW.items()
    }
    make["WholeModelEmbed"] = lambda: whole_sweep(rejectors["WholeModelEmbed"].score(drafted), table)
    make["OneTimeModel"] = lambda: once_sweep(rejectors["OneTimeModel"].score(drafted), grid, table)
    make["OneTimeCost"] = lambda: once_cost_sweep(rejectors["OneTimeCost"].score(drafted), lengths, grid, table)
    for suffix, measure in measures.items():
        values = confidence_of(drafted, measure)
        make[f"OneTime{suffix}"] = partial(once_confidence_sweep, values, lengths, grid, table)
    if part.trees is not None:
        make["TokenwiseModel"] = lambda: by_token(rejectors["TokenwiseModel"])
        for suffix, measure in measures.items():
            make[f"Tokenwise{suffix}"] = partial(by_token, Confidence(measure))
    return Run(Ends.of(table), {name: sweep() for name, sweep in make.items() if settings.wants(name)})


def seed_result(seed: int, oracles: Mapping[str, Curve], run: Run) -> SeedResult:
    """Areas of all curves of a seed: Random's, the oracles', the methods'."""
    random = random_curve(run.ends)
    curves = {"Random": random, **oracles, **{name: curve_of(sweep, run.ends) for name, sweep in run.sweeps.items()}}
    methods = {
        name: MethodResult(
            GRANULARITY[name], curve.area, improvement(curve, random), tuple((x, y) for x, y in curve.points)
        )
        for name, curve in curves.items()
    }
    return SeedResult(seed, methods)


def to_compare(run: Run) -> list[tuple[str, str]]:
    """Each learned partial method with every method of its own or a coarser granularity."""
    rank = {"whole": 0, "once": 1, "token": 2}
    return [
        (method, other)
        for method in ("OneTimeModel", "OneTimeCost", "TokenwiseModel")
        for other in run.sweeps
        if method in run.sweeps and method != other and rank[GRANULARITY[other]] <= rank[GRANULARITY[method]]
    ]


def compare(
    runs: Sequence[Run],
    pairs: Sequence[tuple[str, str]],
    resamples: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Comparison]:
    """The difference of each pair, with its paired interval."""
    comparisons = []
    for method, other in pairs:
        interval = paired_bootstrap(runs, method, other, n_resamples=resamples)
        comparisons.append(Comparison(method, other, interval.difference, interval.low, interval.high))
        progress(1)
    return comparisons
