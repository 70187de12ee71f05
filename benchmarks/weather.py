"""Benchmarks on the weather task: our way, the naive way, and other ways to the same results.

A benchmark is a function of a `Bench` that returns rows; `BENCHMARKS` lists them in the order of the table. The
predictor is trained for only `Sizes.predictor_epochs` epochs, which changes the forecasts but not their cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, Seconds, peak_gigabytes, race, require_same
from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.rules import threshold_for
from seqdefer.budgets.sweeps import StepSweep, hand_off_sweep
from seqdefer.budgets.token_sweeps import TokenSweep, sweep_thresholds
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.evaluation.oracle import all_outcomes
from seqdefer.hyperparameters import PUBLISHED_TOKEN, Settings
from seqdefer.interfaces import Policy, SplitName, Task
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import Silent
from seqdefer.rejectors.checkpoints import token_networks
from seqdefer.rejectors.confidence import ChowSum
from seqdefer.rejectors.losses import Phi, get_phi, token_surrogate
from seqdefer.rejectors.token import TokenNetwork
from seqdefer.rejectors.token_training import fit_token
from seqdefer.rejectors.training import History, fit
from seqdefer.storage.files import write_text
from seqdefer.tasks.weather.task import WeatherOptions, WeatherTask, prepare
from seqdefer.types import Examples, HandOffTable, Proposal, Rollout, Sequences

PAPER = PUBLISHED_TOKEN
SEED = 0
TOLERANCE = 1e-4  # of float32 losses in batches of different sizes
MAX_FLIPS = 1e-3  # share of decisions that such rounding may flip


@dataclass(frozen=True)
class Sizes:
    """Sizes of the benchmarks. n_* count windows unless the comment says otherwise."""

    weeks: int  # of the synthetic record for all benchmarks except paper_scale
    paper_weeks: int  # of the synthetic record for paper_scale
    predictor_epochs: int
    repeats: int
    least_seconds: float  # faster ways are called repeatedly for this time
    n_training: int
    training_epochs: int
    n_labels: int
    n_enumerate: int
    n_sweep: int
    n_thresholds: int
    n_curve: int
    n_engine: int
    n_paper: int
    paper_epochs: int
    n_tours: int = 100  # instances
    n_cold_tours: int = 4  # instances for the slow way
    n_tour_cities: int = 50
    n_labelled: int = 2048  # tours labelled by workers
    n_memory: int = 512  # tours; memory is also measured for 4 and 16 times as many
    ray: bool = True  # if it is installed


DEFAULT = Sizes(
    weeks=60, paper_weeks=208, predictor_epochs=4, repeats=3, least_seconds=0.2, n_training=2048, training_epochs=5,
    n_labels=4096, n_enumerate=512, n_sweep=500, n_thresholds=100, n_curve=2000, n_engine=1024,
    n_paper=PAPER.samples, paper_epochs=5,
)  # fmt: skip
QUICK = replace(
    DEFAULT, weeks=16, paper_weeks=16, predictor_epochs=8, least_seconds=0.1, n_training=512, training_epochs=3,
    n_labels=1024, n_enumerate=128, n_sweep=100, n_engine=128, n_paper=PAPER.samples // 20, paper_epochs=3,
    n_tours=20, n_cold_tours=1, n_labelled=256, n_memory=64, ray=False,  # starting Ray takes most of a minute
)  # fmt: skip


@dataclass
class Bench:
    """Data and models that benchmarks share, made on first use."""

    sizes: Sizes
    folder: Path
    data: str | None = None  # as for `seqdefer run weather --data`; None makes a synthetic record
    full: bool = False  # train paper_scale to the end
    log: Callable[[str], None] = lambda _: None

    @cached_property
    def task(self) -> WeatherTask:
        return self._prepare(self.sizes.weeks)

    @cached_property
    def paper_task(self) -> WeatherTask:
        return self._prepare(self.sizes.paper_weeks)

    def _prepare(self, weeks: int) -> WeatherTask:
        data = self.data or str(write_text(self.folder / f"synthetic-{weeks}-weeks.csv", synthetic_record(weeks)))
        options = WeatherOptions(data=data, epochs=self.sizes.predictor_epochs)
        self.log("training a predictor")
        return prepare(options, self.folder, torch.device("cpu"), Silent())

    @cached_property
    def rejector(self) -> TokenNetwork:
        """A trained rejector, so that it defers some tokens and keeps others."""
        self.log("training a rejector")
        n, settings = self.sizes.n_training, replace(PAPER, epochs=self.sizes.training_epochs)
        train, validation = self.some("train", n), self.some("validation", n // 4)
        trees = enumerate_trees(self.task, train), enumerate_trees(self.task, validation)
        return fit_token(*trees, settings, seed=SEED)[0]

    def some(self, name: SplitName, n: int) -> Examples:
        """Return `n` random windows of a split, or all if there are fewer."""
        return some_of(self.task.split(name), n)

    def race(self, **ways: Callable[[], Any]) -> Any:
        return race(ways, self.sizes.repeats, self.sizes.least_seconds, self.log)


Benchmarks = dict[str, tuple[Callable[..., list[Row]], str]]  # by name: the benchmark, and what our way is


def some_of(examples: Examples, n: int) -> Examples:
    """Return `n` random examples."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(SEED))
    return examples.select(order[:n])


def synthetic_record(weeks: int) -> str:
    """Return a CSV of temperatures every 10 minutes: a yearly and a daily cycle, and noise of varying volatility."""
    n = weeks * 7 * 24 * 6
    generator = np.random.default_rng(SEED)
    days = np.arange(n) / 144
    volatility = np.exp(_autoregression(generator.normal(0, 0.09, n), 0.995))
    noise = _autoregression(generator.normal(0, 0.15, n) * volatility, 0.99)
    celsius = 9 - 9 * np.cos(2 * np.pi * days / 365.2425) - 4 * np.cos(2 * np.pi * (days - 0.1)) + noise
    times = np.datetime64("2009-01-01T00:00") + 10 * np.arange(n).astype("timedelta64[m]")
    lines = [f"{moment},{value:.2f}" for moment, value in zip(times.astype(str), celsius, strict=True)]
    return "\n".join(["time,temperature", *lines]) + "\n"


def _autoregression(shocks: np.ndarray, memory: float) -> list[float]:
    values, value = [], 0.0
    for shock in shocks.tolist():
        value = memory * value + shock
        values.append(value)
    return values


# -- training ------------------------------------------------------------------------------------------------------


def training(bench: Bench) -> list[Row]:
    task, sizes = bench.task, bench.sizes
    settings = replace(PAPER, epochs=sizes.training_epochs)
    examples, judged = bench.some("train", sizes.n_training), bench.some("validation", sizes.n_training // 4)
    trees, judged_trees = enumerate_trees(task, examples), enumerate_trees(task, judged)
    bench.log("comparing")
    network, ours = fit_token(trees, judged_trees, settings, seed=SEED)
    theirs = fit_without_trees(task, examples, judged, settings, network)
    both = ours.training + ours.validation, theirs.training + theirs.validation
    same = require_same("losses of epochs", both, tolerance=1e-3)
    seconds = bench.race(
        trees=lambda: fit_token(trees, judged_trees, settings, seed=SEED),
        making=lambda: (enumerate_trees(task, examples), enumerate_trees(task, judged)),
        asking=lambda: fit_without_trees(task, examples, judged, settings, network),
    )
    size = f"{len(examples):,} windows, {settings.epochs} epochs"
    with_trees = seconds["trees"] + seconds["making"]
    return [
        Row.faster("training", f"asking both models at every step ({size})", seconds["trees"], seconds["asking"], same),
        Row.faster(
            "training", f"the same, with the time to make the trees (once, for these {settings.epochs} epochs)",
            with_trees, seconds["asking"], same, _break_even(seconds, settings.epochs),
        ),
    ]  # fmt: skip


def _break_even(seconds: Mapping[str, Seconds], epochs: int) -> str:
    """Return after how many epochs, over all rejectors and seeds, the trees have paid for themselves."""
    saved = float(np.median(seconds["asking"] - seconds["trees"])) / epochs
    if saved <= 0:
        return "the trees never pay for themselves"
    return f"the trees pay for themselves after {np.median(seconds['making']) / saved:.1f} epochs over all seeds"


def fit_without_trees(
    task: Task, examples: Examples, judged: Examples, settings: Settings, like: TokenNetwork
) -> History:
    """Run `fit_token` without trees: same network and standardisation as `like`, free strategy, same seed."""
    torch.manual_seed(SEED)
    network = token_networks()[settings.architecture](like.sizes, like.predictor)
    for name, statistic in like.named_buffers():
        network.get_buffer(name).copy_(statistic)
    phi = get_phi("logistic")
    return fit(
        network,
        len(examples),
        lambda rows: risk_without_trees(network, task, examples.select(rows), phi),
        lambda: risk_without_trees(network, task, judged, phi),
        settings,
        seed=SEED,
    )


def risk_without_trees(network: TokenNetwork, task: Any, examples: Examples, phi: Phi) -> Tensor:
    """Return the token risk of one rollout by the models themselves, for sequences of fixed length."""
    state, context = task.predictor.start(examples.inputs)
    expert_state, seen = task.expert.start(examples), network.start(context)
    everyone = torch.arange(len(examples))
    columns: list[list[Tensor]] = [[], [], []]  # scores, losses, costs
    for position in range(task.spec.length):
        proposal = task.predictor.propose(state)
        named, expert_state = task.expert.next(expert_state, everyone)
        score, seen = network.score(seen, position, proposal)
        before = Sequences(examples.targets[:, :0], torch.full_like(everyone, position))  # losses need only positions
        loss, cost = task.token_loss(examples, before, proposal.tokens), task.token_cost(examples, before, named)
        for column, value in zip(columns, (score, loss, cost), strict=True):
            column.append(value)
        if position + 1 < task.spec.length:
            tokens = torch.where(score.detach() >= 0, named, proposal.tokens)
            state, expert_state = task.predictor.append(state, tokens), task.expert.append(expert_state, tokens)
    scores, losses, costs = (torch.stack(column, 1) for column in columns)
    return token_surrogate(scores, losses, costs, torch.ones_like(scores, dtype=torch.bool), phi)


# -- labels --------------------------------------------------------------------------------------------------------


def labels(bench: Bench) -> list[Row]:
    task, examples = bench.task, bench.some("train", bench.sizes.n_labels)
    drafted = draft(task.predictor, examples, task.spec)
    bench.log("comparing")
    table, calls = hand_off_table(task, examples, drafted)
    plain, plain_calls = hand_off_table(task, examples, drafted, shortcut=False)
    same = _same_tables(table, plain)
    same_as_rollouts = _same_tables(table, table_by_rollouts(task, examples))
    seconds = bench.race(
        draft=lambda: draft(task.predictor, examples, task.spec),
        table=lambda: hand_off_table(task, examples, drafted),
        plain=lambda: hand_off_table(task, examples, drafted, shortcut=False),
        rollouts=lambda: table_by_rollouts(task, examples),
    )
    size, n_rollouts = f"{len(examples):,} windows", task.spec.length + 1
    note = f"expert calls: {calls.made:,} made, {calls.saved:,} saved; without short-cuts {plain_calls.made:,}"
    return [
        Row.faster("labels", f"asking for every hand-off ({size})", seconds["table"], seconds["plain"], same, note),
        Row.faster(
            "labels", f"{n_rollouts} rollouts, one per hand-off; ours includes the draft",
            seconds["draft"] + seconds["table"], seconds["rollouts"], same_as_rollouts,
        ),
    ]  # fmt: skip


def table_by_rollouts(task: Task, examples: Examples) -> HandOffTable:
    """Return the table from the engine alone, by a rollout for every hand-off."""
    kept = [torch.full((len(examples),), k) for k in range(task.spec.length + 1)]
    rolled = [roll_out(task.predictor, task.expert, examples, HandOff(k), task.spec) for k in kept]
    return HandOffTable(*(torch.stack(column, 1) for column in _outcomes(task, examples, rolled)))


def _outcomes(task: Task, examples: Examples, rolled: list[Rollout]) -> tuple[list[Tensor], list[Tensor]]:
    """Return loss and deferred tokens of each rollout."""
    losses = [task.sequence_loss(examples, rollout.sequences) for rollout in rolled]
    return losses, [rollout.deferred for rollout in rolled]


def _same_tables(ours: HandOffTable, theirs: HandOffTable) -> str:
    pairs = (ours.loss, theirs.loss), (ours.deferred, theirs.deferred)
    return require_same("hand-offs (loss and deferred)", *pairs, tolerance=TOLERANCE)


# -- decision trees ------------------------------------------------------------------------------------------------


def enumerate_(bench: Bench) -> list[Row]:
    task, examples = bench.task, bench.some("train", bench.sizes.n_enumerate)
    bench.log("comparing")
    trees, lazy = enumerate_trees(task, examples), grow_lazily(task, examples)
    outcomes, what = all_outcomes(trees), "outcomes of all decisions (loss and deferred)"
    same = require_same(what, *zip(outcomes, all_outcomes(lazy), strict=True), tolerance=TOLERANCE)
    rolled = outcomes_by_rollouts(task, examples)
    same_as_rollouts = require_same(what, *zip(outcomes, rolled, strict=True), tolerance=TOLERANCE)
    seconds = bench.race(
        levels=lambda: enumerate_trees(task, examples),
        lazy=lambda: grow_lazily(task, examples),
        outcomes=lambda: all_outcomes(trees),
        rollouts=lambda: outcomes_by_rollouts(task, examples),
    )
    size = f"{len(examples):,} windows, {trees.nodes.size:,} nodes"
    return [
        Row.faster(
            "enumerate", f"growing them lazily, level by level, by replaying prefixes ({size})",
            seconds["levels"], seconds["lazy"], same,
        ),
        Row.faster(
            "enumerate", f"{2**task.spec.length} rollouts, one for each way to decide; ours includes the look-up",
            seconds["levels"] + seconds["outcomes"], seconds["rollouts"], same_as_rollouts,
        ),
    ]  # fmt: skip


def grow_lazily(task: Task, examples: Examples) -> DecisionTrees:
    """Grow all nodes as rollouts do: each from the first token on."""
    trees = DecisionTrees(task, examples)
    nodes = trees.roots
    while len(nodes):
        found = [trees.children(nodes, torch.full_like(nodes, defer)) for defer in (0, 1)]
        nodes = torch.cat(found).unique()
        nodes = nodes[nodes != END]
    return trees


class FixedDecisions(Policy[Tensor]):
    """A policy that defers at given positions, whatever is proposed."""

    def __init__(self, decisions: list[bool]) -> None:
        self.decisions = decisions

    def start(self, context: Tensor) -> Tensor:
        return context[:, :0]

    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        defer = torch.full_like(proposal.tokens, self.decisions[position], dtype=torch.bool)
        return defer.float(), defer, state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


def outcomes_by_rollouts(task: Task, examples: Examples) -> tuple[Tensor, Tensor]:
    """Return `all_outcomes` from the engine alone, by a rollout for every way to decide (first position highest)."""
    length = task.spec.length
    ways = [[bool(way >> (length - 1 - position) & 1) for position in range(length)] for way in range(2**length)]
    rolled = [roll_out(task.predictor, task.expert, examples, FixedDecisions(way), task.spec) for way in ways]
    losses, deferred = _outcomes(task, examples, rolled)
    return torch.stack(losses, 1), torch.stack(deferred, 1)


# -- sweeps and curves ---------------------------------------------------------------------------------------------


def sweep(bench: Bench) -> list[Row]:
    task, rejector, examples = bench.task, bench.rejector, bench.some("test", bench.sizes.n_sweep)
    trees = enumerate_trees(task, examples)
    thresholds = _thresholds_between(sweep_thresholds(rejector, trees), bench.sizes.n_thresholds)
    bench.log("comparing")
    swept = sweep_thresholds(rejector, trees, thresholds=thresholds)
    losses, deferred = sweep_by_rollouts(task, rejector, examples, thresholds)
    pairs = (swept.loss, losses), (swept.deferred, deferred)
    same = require_same("outcomes (loss and deferred)", *pairs, tolerance=TOLERANCE, rounding=MAX_FLIPS)
    seconds = bench.race(
        sweep=lambda: sweep_thresholds(rejector, trees, thresholds=thresholds),
        making=lambda: enumerate_trees(task, examples),
        rollouts=lambda: sweep_by_rollouts(task, rejector, examples, thresholds),
        rollout=lambda: sweep_by_rollouts(task, rejector, examples, thresholds[len(thresholds) // 2, None]),
    )
    n, with_trees = len(thresholds), seconds["sweep"] + seconds["making"]
    times = {"ours": seconds["sweep"].tolist(), "theirs": seconds["rollout"].tolist()}
    return [
        Row.faster("sweep", f"{n} rollouts ({len(examples):,} windows)", seconds["sweep"], seconds["rollouts"], same),
        Row.faster("sweep", "the same, with the time to make the trees", with_trees, seconds["rollouts"], same),
        Row.of(
            "sweep", f"ONE rollout: what {n} thresholds cost", "times its cost", seconds["sweep"] / seconds["rollout"],
            same=same, seconds=times,
        ),
    ]  # fmt: skip


def _thresholds_between(swept: TokenSweep, n: int) -> Tensor:
    """Return `n` thresholds halfway between occurring scores: at a score itself, rounding would decide."""
    met = swept.thresholds[1:-1]
    halfway = (met[1:] + met[:-1]) / 2
    return halfway[torch.linspace(0, len(halfway) - 1, n).long()]


def sweep_by_rollouts(
    task: Task, rejector: TokenNetwork, examples: Examples, thresholds: Tensor
) -> tuple[Tensor, Tensor]:
    """Return loss and deferred tokens (T, n) by a rollout for every threshold."""
    policies = [Threshold(rejector, threshold) for threshold in thresholds.tolist()]
    rolled = [roll_out(task.predictor, task.expert, examples, policy, task.spec) for policy in policies]
    losses, deferred = _outcomes(task, examples, rolled)
    return torch.stack(losses), torch.stack(deferred)


def curve(bench: Bench) -> list[Row]:
    task, examples = bench.task, bench.some("test", bench.sizes.n_curve)
    drafted = draft(task.predictor, examples, task.spec)
    scored = ScoredHandOffs.of(ChowSum().score(drafted), task.spec.length)
    swept = hand_off_sweep(scored, hand_off_table(task, examples, drafted)[0])
    weights = np.ones((1, len(examples)))
    bench.log("comparing")
    ours = np.concatenate(swept.curves(weights))
    what, theirs = "coordinates of points", (curve_by_loop(swept), curve_by_broadcast(swept))
    same = [require_same(what, (ours, other), tolerance=1e-9) for other in theirs]
    seconds = bench.race(
        sort=lambda: swept.curves(weights),
        loop=lambda: curve_by_loop(swept),
        broadcast=lambda: curve_by_broadcast(swept),
    )
    size = f"{len(examples):,} windows, {ours.shape[1]:,} thresholds"
    return [
        Row.faster("curve", f"a loop over the thresholds ({size})", seconds["sort"], seconds["loop"], same[0]),
        Row.faster("curve", "all thresholds by all windows at once", seconds["sort"], seconds["broadcast"], same[1]),
    ]


def _falling_thresholds(swept: StepSweep) -> np.ndarray:
    return np.append(np.inf, np.unique(swept.scores)[::-1])


def curve_by_loop(swept: StepSweep) -> np.ndarray:
    """Return mean deferred and mean loss (2, T) by a pass over the test set for each threshold."""
    points = []
    for threshold in _falling_thresholds(swept):
        defer = swept.scores >= threshold
        points.append([(swept.start[i] + np.where(defer, swept.change[i], 0)).mean() for i in (0, 1)])
    return np.array(points).T


def curve_by_broadcast(swept: StepSweep) -> np.ndarray:
    """Return the same by one array of thresholds by instances."""
    defer = swept.scores >= _falling_thresholds(swept)[:, None]  # (T, n)
    return np.stack([(swept.start[i] + np.where(defer, swept.change[i], 0)).mean(1) for i in (0, 1)])


# -- engine --------------------------------------------------------------------------------------------------------


def engine(bench: Bench) -> list[Row]:
    task, examples = bench.task, bench.some("test", bench.sizes.n_engine)
    half = threshold_for(0.5, sweep_thresholds(bench.rejector, enumerate_trees(task, bench.some("validation", 100))))
    policy = Threshold(bench.rejector, half.threshold)

    def roll(rows: Tensor) -> Rollout:
        return roll_out(task.predictor, task.expert, examples.select(rows), policy, task.spec)

    everyone = torch.arange(len(examples))

    def one_by_one() -> list[Rollout]:
        return [roll(row) for row in everyone.split(1)]

    bench.log("comparing")
    batched, single = roll(everyone), one_by_one()
    tokens = torch.cat([rollout.sequences.tokens for rollout in single])
    authors = torch.cat([rollout.by_expert for rollout in single])
    pairs = (batched.sequences.tokens, tokens), (batched.by_expert, authors)
    same = require_same("tokens and their authors", *pairs, tolerance=TOLERANCE, rounding=MAX_FLIPS)
    seconds = bench.race(batched=lambda: roll(everyone), single=one_by_one)
    what, note = f"one row at a time ({len(examples):,} rows)", f"the expert writes {batched.share:.0%} of the tokens"
    return [Row.faster("engine", what, seconds["batched"], seconds["single"], same, note)]


# -- the paper's size ----------------------------------------------------------------------------------------------


def paper_scale(bench: Bench) -> list[Row]:
    task, sizes = bench.paper_task, bench.sizes
    train, validation = some_of(task.split("train"), sizes.n_paper), task.split("validation")
    settings = PAPER if bench.full else replace(PAPER, epochs=sizes.paper_epochs)
    size = f"{len(train):,} training and {len(validation):,} validation windows"
    bench.log(f"labelling {size}")
    marks = [time.perf_counter()]
    trees, judged = enumerate_trees(task, train), enumerate_trees(task, validation)
    marks.append(time.perf_counter())

    def after_epoch(_: int) -> None:
        marks.append(time.perf_counter())
        bench.log(f"epoch {len(marks) - 2} of at most {settings.epochs}: {marks[-1] - marks[-2]:.1f} s")

    fit_token(trees, judged, settings, seed=SEED, progress=after_epoch)
    # The time of the first epoch includes the creation of the network.
    labelling, *epochs = np.diff(marks)
    nodes = trees.nodes.size + judged.nodes.size
    return [
        Row.of("paper_scale", f"make the trees: {size}", "s", labelling, note=f"{nodes:,} nodes"),
        Row.of("paper_scale", f"one epoch, of {len(epochs)} measured (batches of {settings.batch_size})", "s", epochs),
        _total(labelling, np.array(epochs), bench.full, _paper_note(len(train))),
        Row.of("paper_scale", "peak memory of this process", "GB", peak_gigabytes()),
    ]


def _total(labelling: float, epochs: np.ndarray, full: bool, note: str) -> Row:
    if full:
        what = f"trees and training to the end, measured ({len(epochs)} epochs until early stopping)"
        return Row.of("paper_scale", what, "s", labelling + epochs.sum(), note=note)
    what = f"PROJECTION, not measured: trees and all {PAPER.epochs} epochs, without early stopping"
    projected = labelling + PAPER.epochs * np.quantile(epochs, [0, 0.5, 1])
    return Row.of("paper_scale", what, "s", projected, note=note)


def _paper_note(n: int) -> str:
    if n < PAPER.samples:
        return f"{n / PAPER.samples:.0%} of the paper's {PAPER.samples:,} windows: not comparable with the paper's time"
    return "the paper, on an Nvidia A40: about 5 hours of training"


BENCHMARKS: Benchmarks = {
    "training": (training, "token-level training over memoised trees"),
    "labels": (labels, "all hand-offs, with the short-cuts"),
    "enumerate": (enumerate_, "all trees, level by level from live states"),
    "sweep": (sweep, "all thresholds at once over the trees"),
    "curve": (curve, "a sort and a cumulative sum"),
    "engine": (engine, "interleaved rollouts, batched"),
    "paper_scale": (paper_scale, "trees and token-level training, with the settings of the paper (not a ratio)"),
}
