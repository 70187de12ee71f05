"""The main job, from a task to its results: label, fit every rejector, sweep every method, compare, write.

    task data -> predictor, expert -> labels -> rejectors -> sweeps -> curves -> results.json, report.html

Seeds differ in the test instances they draw (disjoint) and in the rejectors' initial weights and batches; the pair and
the labels are the same for all. Rejectors are kept in the output folder and say what made them, so that a run that was
stopped goes on where it was. Nothing is chosen on test data: it enters in `_sweeps` alone, after the fits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.baselines import CHOW, Confidence, Measure, confidence_of
from seqdefer.curves import (
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
from seqdefer.engine import HandOff, draft, roll_out
from seqdefer.environment import Clock, choose_device, machine
from seqdefer.errors import CheckpointError, DataError, OptionError, unknown
from seqdefer.exploration import explore_trees
from seqdefer.interfaces import Meter, NextTokenExpert, Policy, Silent, SplitName, Task, TaskEntry
from seqdefer.labels import Calls, hand_off_table
from seqdefer.losses import get_phi, get_psi, hand_off_grid, rule_of_thumb
from seqdefer.oracle import all_outcomes, beam_outcomes
from seqdefer.paper import PAPER
from seqdefer.policies import (
    Threshold,
    TokenSweep,
    choose_by_cost,
    choose_hand_off,
    cost_price_for,
    once_threshold_for,
    sweep_thresholds,
    threshold_for,
)
from seqdefer.rejectors import DRAFT_NETWORKS, TOKEN_NETWORKS, DraftNetwork, TokenNetwork, load_rejector
from seqdefer.report import PICTURES, panels_of, write_report
from seqdefer.results import (
    Comparison,
    ExpertCalls,
    MethodResult,
    PaperFigure,
    Provenance,
    Results,
    SeedResult,
    Units,
    save_results,
    summarise,
)
from seqdefer.store import fingerprint, write_text
from seqdefer.training import (
    BY_FACTS,
    BY_TOKEN,
    PERCEPTRON,
    PRESETS,
    STRATEGIES,
    TRANSFORMER,
    History,
    Settings,
    Strategy,
    default_price,
    fit_cost,
    fit_once,
    fit_token,
    fit_whole,
)
from seqdefer.trees import MAX_ENUMERATED_LENGTH, DecisionTrees, enumerate_trees
from seqdefer.types import Draft, Examples, Granularity, HandOffTable

GRANULARITY: dict[str, Granularity] = {
    "Random": "whole", "OptimalWhole": "whole", **dict.fromkeys(CHOW, "whole"), "WholeModelEmbed": "whole",
    "OptimalOneTime": "once", "OneTimeModel": "once", "OneTimeCost": "once",
    "OneTimeScore": "once", "OneTimeEntropy": "once",
    "OptimalToken": "token", "TokenwiseModel": "token", "TokenwiseScore": "token", "TokenwiseEntropy": "token",
}  # fmt: skip


SHOWN_EXAMPLES, SHOWN_JUDGES, SHOWN_BUDGETS = 3, {"enumerated": 200, "searched": 40}, (0.1, 0.25, 0.5, 0.75)
METHODS = [name for name in GRANULARITY if name != "Random" and not name.startswith("Optimal")]


@dataclass(frozen=True)
class ExperimentSettings:
    """What can be chosen about an experiment, whatever the task."""

    seeds: int = 5
    instances: int = 100  # test instances a seed
    token: Settings = PRESETS["mwp-token"]
    once: Settings = PRESETS["mwp-once"]
    cost: Settings = PERCEPTRON
    phi: str = "logistic"
    psi: str = "cross_entropy"
    strategy: Strategy = "explore"
    hand_offs: int | None = None  # size of J; None allows them all
    alpha: float | None = None  # alpha_1; None is the rule of thumb
    rollouts: int = 8  # of each example that token-level rejectors learn from, where sequences are long
    price: float | None = None  # added to the cost of each expert token; None: a little where some cost nothing
    methods: tuple[str, ...] | None = None  # None runs them all; Random and the oracles are always there
    resamples: int = 1000

    def wants(self, method: str) -> bool:
        return self.methods is None or method in self.methods

    def __post_init__(self) -> None:
        for name, least in {"seeds": 1, "instances": 1, "resamples": 1, "rollouts": 2}.items():
            if getattr(self, name) < least:
                raise OptionError(f"--{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("alpha", "price"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise OptionError(f"--{name} is {value}; it must be a cost, 0 or more")
        get_phi(self.phi)
        get_psi(self.psi)
        if self.token.architecture not in TOKEN_NETWORKS:
            raise unknown("token-level architecture", self.token.architecture, TOKEN_NETWORKS)
        if self.strategy not in STRATEGIES:
            raise unknown("training strategy", self.strategy, STRATEGIES)
        for method in self.methods or ():
            if method not in METHODS:
                raise unknown("method", method, METHODS)


# What rejectors start from: token level, one-time and whole, estimates of losses. By the columns of the paper's table,
# and ours.
STARTING_POINTS: dict[str, tuple[Settings, Settings, Settings]] = {
    "mwp": (PRESETS["mwp-token"], PRESETS["mwp-once"], PERCEPTRON),
    "xsum": (BY_FACTS, TRANSFORMER, TRANSFORMER),
    "tsp": (PRESETS["mwp-token"], TRANSFORMER, TRANSFORMER),
    "pronounce": (BY_TOKEN, PRESETS["mwp-once"], PERCEPTRON),
}


def experiment_settings(
    entry: TaskEntry, preset: str, draft_architecture: str | None = None, architecture: str | None = None
) -> ExperimentSettings:
    """The hyperparameters of a task; `quick` stops after fewer epochs and seeds, and takes smaller transformers.

    `draft_architecture` changes what scores whole drafts: the paper's perceptron, or attention over the steps.
    `architecture` changes what scores tokens; where ours is another than the paper's, the paper's comes with the
    paper's hyperparameters."""
    if entry.hyperparameters not in STARTING_POINTS:
        raise unknown(f"hyperparameters of task {entry.name!r}", entry.hyperparameters, STARTING_POINTS)
    token, once, cost = STARTING_POINTS[entry.hyperparameters]
    if draft_architecture not in (None, *DRAFT_NETWORKS):
        raise unknown("architecture by draft", draft_architecture, DRAFT_NETWORKS)
    if draft_architecture == "draft_mlp":
        once, cost = PRESETS.get(f"{entry.hyperparameters}-once", PRESETS["mwp-once"]), PERCEPTRON
    elif draft_architecture is not None:
        once = cost = TRANSFORMER
    if architecture not in (None, *TOKEN_NETWORKS):
        raise unknown("token-level architecture", architecture, TOKEN_NETWORKS)
    if architecture is not None:
        papers = PRESETS.get(f"{entry.hyperparameters}-token", token)
        token = replace(papers if architecture == papers.architecture else token, architecture=architecture)
    settings = ExperimentSettings(token=token, once=once, cost=cost)
    if preset != "quick":
        return settings
    token = replace(token, epochs=20, learning_rate=2e-3)
    return replace(
        settings, seeds=3, instances=entry.quick_instances, token=token, once=_quick(once), cost=_quick(cost)
    )


def _quick(settings: Settings) -> Settings:
    if settings.architecture == "draft_transformer":
        return replace(settings, layers=2, units=32, epochs=25, learning_rate=2e-3, patience=5)
    return replace(settings, epochs=30)


def find_tasks() -> dict[str, Any]:
    """Entry points of all installed tasks by name; nothing is imported yet."""
    return {point.name: point for point in entry_points(group="seqdefer.tasks")}


def load_task(name: str) -> TaskEntry:
    points = find_tasks()
    if name not in points:
        raise unknown("task", name, points)
    entry: TaskEntry = points[name].load()
    return entry


@dataclass(frozen=True)
class Labelled:
    """A split with everything that both writers would do to it."""

    examples: Examples
    draft: Draft
    table: HandOffTable
    trees: DecisionTrees | None  # None where the expert only completes

    def seen(self) -> list[Tensor]:
        """What rejectors are fitted on, as far as it takes to tell two splits or two ways to count losses apart."""
        by_token = [] if self.trees is None else self.trees.losses(self.trees.typical_nodes())
        return [self.examples.inputs, self.table.loss, *by_token]


@dataclass(frozen=True)
class _Recipe:
    """How a rejector is made: `words` tell two recipes apart, `make(progress=...)` follows one."""

    name: str
    words: Any
    epochs: int
    make: Callable[..., tuple[DraftNetwork | TokenNetwork, History]]


class Experiment:
    """One task, all methods. `run` does it all; the steps are methods of their own."""

    def __init__(
        self, task: Task, settings: ExperimentSettings, folder: Path | str, clock: Clock | None = None
    ) -> None:
        self.task, self.settings, self.folder = task, settings, Path(folder)
        self.clock = clock or Clock()
        self.table_calls = Calls()
        self.drawn = ""
        self.trees: list[DecisionTrees] = []  # they go on counting expert calls as they grow
        length = task.spec.length
        self.grid = hand_off_grid(length, length + 1 if settings.hand_offs is None else settings.hand_offs)

    def run(self, *, preset: str = "custom", command: str = "") -> Results:
        """Labels, fits, sweeps and compares; returns the results (`run_task` also writes them). Keeps the rejectors."""
        test_rows = self._test_rows()  # may be too many: then all that follows would be for nothing
        self._require_by_token()
        test = self.label("test", test_rows)
        self._require_entropy(test)
        train, validation = self.label("train"), self.label("validation")
        runs, seeds = [], []
        for seed in range(self.settings.seeds):
            rejectors = self.fit(train, validation, seed)
            rows = torch.arange(self.settings.instances) + seed * self.settings.instances
            with self.clock.stage(f"sweep thresholds (seed {seed})", 1) as advance:
                sweeps = _sweeps(test, rows, rejectors, self.settings, self.grid)
                advance(1)
            runs.append(sweeps)
            seeds.append(_seed_result(seed, test.table.select(rows), sweeps, self.outcomes(test, rows, sweeps, seed)))
            if seed == 0 and type(self.task).draw is not Task.draw:
                with self.clock.stage("draw examples", 1) as advance:
                    self.drawn = self.draw_examples(validation, test, rejectors)
                    advance(1)
        comparisons = self.compare(runs)
        return self._results(preset, command, seeds, comparisons, self._notes(train))

    def _require_by_token(self) -> None:
        """Before all the labelling: methods by token need an expert that names next tokens."""
        if not isinstance(self.task.expert, NextTokenExpert):
            self._refuse([name for name in METHODS if GRANULARITY[name] != "token"])

    def _require_entropy(self, test: Labelled) -> None:
        if test.draft.entropy is None:
            self._refuse([name for name in METHODS if not name.endswith("Entropy")])

    def _refuse(self, available: list[str]) -> None:
        """Raises where a method was asked for that is not available."""
        for method in self.settings.methods or ():
            if method not in available:
                raise OptionError(
                    f"method {method!r} does not apply to task {self.task.name!r}; available: {', '.join(available)}"
                )

    def _test_rows(self) -> Tensor:
        """The test instances of all seeds, disjoint, in the order of the seeds."""
        available, wanted = len(self.task.split("test")), self.settings.seeds * self.settings.instances
        if available < wanted:
            raise DataError(
                f"the test split has {available} examples, {self.settings.seeds} seeds x {self.settings.instances} "
                "instances need more; lower --seeds or --instances, or give more test data (tsp: --test; text: more "
                "documents, --test-documents)"
            )
        return torch.randperm(available, generator=torch.Generator().manual_seed(0))[:wanted]

    def label(self, name: SplitName, rows: Tensor | None = None) -> Labelled:
        """Draft, hand-off table and decision trees of a split (or some rows of it)."""
        examples = self.task.split(name)
        examples = examples if rows is None else examples.select(rows)
        with self.clock.stage(f"draft ({name})", len(examples)) as advance:
            drafted = draft(self.task.predictor, examples, self.task.spec, progress=advance)
        with self.clock.stage(f"label hand-offs ({name})", len(examples)) as advance:
            table, calls = hand_off_table(self.task, examples, drafted, folder=self.folder / "labels", progress=advance)
        self.table_calls = self.table_calls + calls
        is_needed = name == "test" or self.settings.wants("TokenwiseModel")  # the oracle and the sweeps need test trees
        if not (isinstance(self.task.expert, NextTokenExpert) and is_needed):
            return Labelled(examples, drafted, table, None)
        with self.clock.stage(f"label decisions ({name})", len(examples)) as advance:
            if not self._searches:
                trees = enumerate_trees(self.task, examples, progress=advance)
            elif name == "test":  # sweeps and the oracle go wherever they like
                trees = DecisionTrees(self.task, examples, progress=advance)
            else:
                labels, rollouts = self.folder / "labels", self.settings.rollouts
                trees = explore_trees(self.task, examples, rollouts, folder=labels, progress=advance)
        self.trees.append(trees)
        return Labelled(examples, drafted, table, trees)

    def fit(self, train: Labelled, validation: Labelled, seed: int) -> dict[str, DraftNetwork | TokenNetwork]:
        """The trained rejectors of a seed, from the folder where they are already there."""
        data = fingerprint(*train.seen(), *validation.seen(), self.task.predictor.fingerprint, __version__)
        rejectors = {}
        for recipe in self._recipes(train, validation, seed):
            if self.settings.wants(recipe.name):
                rejectors[recipe.name] = self._follow(recipe, fingerprint(recipe.name, recipe.words, seed, data), seed)
        return rejectors

    def _recipes(self, train: Labelled, validation: Labelled, seed: int) -> list[_Recipe]:
        settings, alpha, grid = self.settings, self._alpha(train), self.grid
        drafts = ((train.draft, train.table), (validation.draft, validation.table))
        predictor = self.task.predictor
        common: dict[str, Any] = {"fingerprint": predictor.fingerprint, "seed": seed, "device": predictor.device}
        once, cost, token = asdict(settings.once), asdict(settings.cost), asdict(settings.token)
        whole = partial(fit_whole, *drafts, settings.once, **common)
        by_hand_off = partial(fit_once, *drafts, grid, settings.once, alpha=alpha, psi=settings.psi, **common)
        by_cost = partial(fit_cost, *drafts, grid, settings.cost, **common)
        recipes = [
            _Recipe("WholeModelEmbed", once, settings.once.epochs, whole),
            _Recipe("OneTimeModel", [once, grid.tolist(), alpha, settings.psi], settings.once.epochs, by_hand_off),
            _Recipe("OneTimeCost", [cost, grid.tolist()], settings.cost.epochs, by_cost),
        ]
        if train.trees is not None and validation.trees is not None:
            choices: dict[str, Any] = {"phi": settings.phi, "strategy": settings.strategy, "price": self._price(train)}
            by_token = partial(fit_token, train.trees, validation.trees, settings.token, seed=seed, **choices)
            recipes.append(_Recipe("TokenwiseModel", [token, *choices.values()], settings.token.epochs, by_token))
        return recipes

    def _follow(self, recipe: _Recipe, made_by: str, seed: int) -> DraftNetwork | TokenNetwork:
        folder = self.folder / "rejectors" / f"{recipe.name}-seed{seed}"
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

    def outcomes(self, test: Labelled, rows: Tensor, run: Run, seed: int) -> tuple[Tensor, Tensor] | None:
        """What the token oracle chooses from, loss and deferred tokens (n, D) each; None where it has no trees.

        Of sequences too long for all outcomes: those that a beam finds, and all that any method is known to reach, so
        that none beats the oracle."""
        if test.trees is None:
            return None
        if not self._searches:
            loss, deferred = all_outcomes(test.trees, rows)
            return loss.cpu(), deferred.cpu()
        with self.clock.stage(f"search for the oracle (seed {seed})", len(rows)) as advance:
            loss, deferred = beam_outcomes(test.trees, rows, progress=advance)
        table = test.table.select(rows)
        swept = [sweep for sweep in run.sweeps.values() if isinstance(sweep, GridSweep)]
        losses = [loss.cpu(), table.loss, *(torch.from_numpy(sweep.loss.T) for sweep in swept)]
        counts = [deferred.cpu(), table.deferred, *(torch.from_numpy(sweep.deferred.T) for sweep in swept)]
        return torch.cat([part.double() for part in losses], 1), torch.cat([part.double() for part in counts], 1)

    @property
    def _searches(self) -> bool:
        """Sequences are too long to try all decisions."""
        return self.task.spec.length > MAX_ENUMERATED_LENGTH

    def _alpha(self, train: Labelled) -> float:
        return rule_of_thumb(train.table) if self.settings.alpha is None else self.settings.alpha

    def _price(self, train: Labelled) -> float:
        if self.settings.price is not None:
            return self.settings.price
        return 0.0 if train.trees is None else default_price(train.trees)

    def compare(self, runs: list[Run]) -> list[Comparison]:
        """Each learned partial method against every method of its own or a coarser granularity."""
        rank = {"whole": 0, "once": 1, "token": 2}
        pairs = [
            (method, other)
            for method in ("OneTimeModel", "OneTimeCost", "TokenwiseModel")
            for other in runs[0].sweeps
            if method in runs[0].sweeps and method != other and rank[GRANULARITY[other]] <= rank[GRANULARITY[method]]
        ]
        comparisons = []
        with self.clock.stage("bootstrap", len(pairs)) as advance:
            for method, other in pairs:
                interval = paired_bootstrap(runs, method, other, n_resamples=self.settings.resamples)
                comparisons.append(Comparison(method, other, interval.difference, interval.low, interval.high))
                advance(1)
        return comparisons

    def draw_examples(self, validation: Labelled, test: Labelled, rejectors: Mapping[str, Any]) -> str:
        """What the task draws of a few test examples at rising budgets, by the finest learned policy there is.

        Budgets are met on validation data, as users meet them; the examples are the first, whatever they show."""
        rows = torch.arange(min(SHOWN_EXAMPLES, len(test.draft)))
        examples, task = test.examples.select(rows), self.task
        policies = self._policies_to_draw(validation, test.draft.select(rows), rejectors)
        rollouts = {
            budget: roll_out(task.predictor, task.expert, examples, policy, task.spec)
            for budget, policy in policies.items()
        }
        return task.draw(examples, rollouts) if rollouts else ""

    def _policies_to_draw(
        self, validation: Labelled, drafted: Draft, rejectors: Mapping[str, Any]
    ) -> Mapping[float, Policy[Any]]:
        """A policy for each of the shown budgets."""
        if "TokenwiseModel" in rejectors and validation.trees is not None:
            rejector, swept = rejectors["TokenwiseModel"], self._sweep_judges(rejectors["TokenwiseModel"], validation)
            return {budget: Threshold(rejector, threshold_for(budget, swept).threshold) for budget in SHOWN_BUDGETS}
        name = next((name for name in ("OneTimeCost", "OneTimeModel") if name in rejectors), None)
        if name is None:
            return {}
        scores, judged = rejectors[name].score(drafted), rejectors[name].score(validation.draft)
        chosen = {}
        for budget in SHOWN_BUDGETS:
            if name == "OneTimeCost":
                price = cost_price_for(budget, judged, self.grid, validation.draft.sequences.lengths, validation.table)
                kept = choose_by_cost(scores, self.grid, drafted.sequences.lengths, price.threshold)
            else:
                odds = once_threshold_for(budget, judged, self.grid, validation.table)
                kept = choose_hand_off(scores, self.grid, odds.threshold)
            chosen[budget] = HandOff(kept)
        return chosen

    def _sweep_judges(self, rejector: TokenNetwork, validation: Labelled) -> TokenSweep:
        """Some validation examples, to find the threshold of a budget with. Closed trees cannot tell."""
        assert validation.trees is not None
        some = torch.arange(min(len(validation.examples), SHOWN_JUDGES["searched" if self._searches else "enumerated"]))
        if self._searches:
            return sweep_thresholds(rejector, DecisionTrees(self.task, validation.examples.select(some)))
        return sweep_thresholds(rejector, validation.trees, some)

    def _notes(self, train: Labelled) -> tuple[str, ...]:
        settings, alpha, price = self.settings, self._alpha(train), self._price(train)
        by_token = (
            f"TokenwiseModel minimises the token surrogate with phi = {settings.phi}; its training rollouts follow the "
            f"strategy '{settings.strategy}'{f'; each expert token costs {price:.3g} besides' if price else ''}."
        )
        notes = {
            "TokenwiseModel": by_token if self.trees else "",
            "OneTimeModel": f"OneTimeModel minimises the one-time surrogate with psi = {settings.psi} over "
            f"{len(self.grid)} hand-offs; alpha_1 = {alpha:.4g}"
            f"{' by the rule of thumb' if settings.alpha is None else ''}.",
            "OneTimeCost": "OneTimeCost (ours) estimates the loss of every hand-off; a price of a token decides.",
        }
        told = tuple(note for method, note in notes.items() if note and settings.wants(method))
        if self.trees and self._searches:
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
        settings = {**asdict(self.settings), "task": _described(getattr(self.task, "options", None))}
        calls = sum((trees.calls for trees in self.trees), start=self.table_calls)
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


def _described(options: Any) -> dict[str, Any]:
    """A task's options for the provenance, if it keeps them as `options`, a dataclass."""
    if not is_dataclass(options) or isinstance(options, type):
        return {}
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return plain


def _load_if_same(folder: Path, made_by: str, task: Task) -> DraftNetwork | TokenNetwork | None:
    """The rejector in `folder` if the very same recipe made it."""
    try:
        rejector = load_rejector(folder, task.predictor)
    except CheckpointError:
        return None
    return rejector if rejector.notes.get("made_by") == made_by else None


def _sweeps(
    test: Labelled, rows: Tensor, rejectors: Mapping[str, Any], settings: ExperimentSettings, grid: Tensor
) -> Run:
    """Every wanted method over the test instances `rows`."""
    drafted, table, lengths = test.draft.select(rows), test.table.select(rows), test.draft.sequences.lengths[rows]
    measures: dict[str, Measure] = {"Score": "uncertainty"}
    if drafted.entropy is not None:
        measures["Entropy"] = "entropy"

    def by_token(rejector: Any) -> Sweep:
        assert test.trees is not None
        swept = sweep_thresholds(rejector, test.trees, rows)
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
    if test.trees is not None:
        make["TokenwiseModel"] = lambda: by_token(rejectors["TokenwiseModel"])
        for suffix, measure in measures.items():
            make[f"Tokenwise{suffix}"] = partial(by_token, Confidence(measure))
    return Run(Ends.of(table), {name: sweep() for name, sweep in make.items() if settings.wants(name)})


def _seed_result(seed: int, table: HandOffTable, run: Run, outcomes: tuple[Tensor, Tensor] | None) -> SeedResult:
    random = random_curve(run.ends)
    curves: dict[str, Curve] = {
        "Random": random,
        "OptimalWhole": optimal_whole(table),
        "OptimalOneTime": optimal_once(table),
    }
    if outcomes is not None:
        curves["OptimalToken"] = optimal_curve(*outcomes, until=float(run.ends.expert_deferred.mean()))
    curves |= {name: curve_of(sweep, run.ends) for name, sweep in run.sweeps.items()}
    methods = {
        name: MethodResult(
            GRANULARITY[name], curve.area, improvement(curve, random), tuple((x, y) for x, y in curve.points)
        )
        for name, curve in curves.items()
    }
    return SeedResult(seed, methods)


def run_task(
    entry: TaskEntry,
    options: Any,
    settings: ExperimentSettings,
    folder: Path,
    *,
    preset: str = "custom",
    command: str = "",
    device: str = "auto",
    meter: Meter | None = None,
) -> Results:
    """`seqdefer run`: prepares the task, runs the experiment, writes results.json and report.html into `folder`."""
    clock = Clock(meter or Silent())
    task = entry.prepare(options, folder, choose_device(device), clock)
    experiment = Experiment(task, settings, folder, clock)
    results = experiment.run(preset=preset, command=command)
    save_results(results, folder)
    (folder / PICTURES).unlink(missing_ok=True)  # of an earlier run, which drew what this one may not
    if experiment.drawn:
        write_text(folder / PICTURES, experiment.drawn)
    write_report(results, folder / "report.html", panels=panels_of(folder))
    return results
