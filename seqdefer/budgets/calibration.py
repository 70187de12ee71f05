"""Budgets that mean something: which threshold spends which share of the tokens, measured by rolling out.

After a deferral the prefix changes, and with it all scores that follow: the scores of a draft do not tell what a
threshold will spend. So inputs like those to come are written at every threshold (all of them share the prefixes that
they have in common, see `seqdefer.labels.trees`), and what the expert then wrote is counted. No references are needed.
Where there are some, the same rollouts tell what each budget buys: a curve of losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqdefer.budgets.policies import N_THRESHOLDS, choose_kept, cost_price_for, deferral_odds, sweep_thresholds
from seqdefer.engine.interleaved import draft
from seqdefer.errors import OptionError
from seqdefer.interfaces import Expert, Predictor, Served, SplitName, Task
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import Progress
from seqdefer.rejectors.networks import DraftNetwork, TokenNetwork
from seqdefer.types import Draft, Examples, HandOffTable, Sequences

BUDGETS = tuple(step / 100 for step in range(101))  # that a calibration has a setting for
CLOSE = 0.02  # of a budget: further away, it is not met
RESAMPLES = 1000
BEYOND = 1e90  # no score comes near, and a file can hold it
AT_ONCE = 32  # inputs whose trees are grown together; progress is told after each


@dataclass(frozen=True)
class Setting:
    """What to decide by for a budget, and what that was seen to spend: the share of all tokens that the expert wrote,
    with the interval that holds 95 % of its resamples."""

    budget: float
    threshold: float  # on scores; of OneTimeCost, the price of a token
    share: float
    low: float
    high: float

    def is_near(self, budget: float) -> bool:
        """Whether it meets a budget."""
        return abs(self.share - budget) <= CLOSE


@dataclass(frozen=True)
class Calibration:
    """A setting for each of BUDGETS, rising; the first never defers, the last as much as this rejector can."""

    settings: tuple[Setting, ...]
    inputs: int  # that it was measured on
    rejector: str  # fingerprint of the weights it belongs to

    def for_budget(self, budget: float) -> Setting:
        """The setting whose realised share comes nearest to a budget."""
        if not (math.isfinite(budget) and 0.0 <= budget <= 1.0):
            raise OptionError(f"budget is {budget}; it is the share of tokens the expert writes, from 0 to 1")
        if budget in (0.0, 1.0):  # on other inputs, too, all or nothing shall be just that
            return self.settings[0 if budget == 0 else -1]
        return min(self.settings, key=lambda one: abs(one.share - budget))


@dataclass(frozen=True)
class Point:
    share: float
    loss: float  # mean of the inputs


@dataclass(frozen=True)
class LossCurve:
    """What the settings of a calibration buy, on inputs whose answers were known: a point for each of them that differs
    from the one before, from the predictor alone to as much of the expert as this rejector can ask for."""

    unit: str  # of the loss
    inputs: int
    rejector: str  # as in Calibration
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Measured:
    calibration: Calibration
    curve: LossCurve | None  # where there was somebody to judge


@dataclass(frozen=True)
class _Spending:
    """What each of T thresholds, falling from never to always, does to n inputs."""

    thresholds: list[float]
    deferred: NDArray[Any]  # (T, n) tokens by the expert
    written: NDArray[Any]  # (T, n) tokens in all
    loss: NDArray[Any] | None = None  # (T, n); means nothing where nobody judged


@torch.no_grad()
def measure(
    served: Served,
    rejector: TokenNetwork | DraftNetwork,
    examples: Examples,
    *,
    rejector_name: str = "",
    judge: Task | None = None,
    table: HandOffTable | None = None,
    progress: Progress = lambda _: None,
) -> Measured:
    """Of `examples` the inputs alone are looked at, unless a `judge` knows their answers: the task that they belong to.
    One-time deferral can do with the `table` of their hand-offs, where that is known already (the judge's, where there
    is one): then the expert is not asked."""
    if len(examples) < 2:
        raise OptionError(f"inputs to calibrate with: {len(examples)}; give at least 2, and better some hundred")
    task = judge or _Unjudged(served)
    if isinstance(rejector, TokenNetwork):
        spending = _by_token(task, rejector, examples, progress)
    else:
        drafted = draft(task.predictor, examples, task.spec)
        if table is None:
            kept = rejector.sizes.hand_offs
            table, _ = hand_off_table(task, examples, drafted, kept=kept, progress=progress)
        spending = _by_draft(rejector, drafted, table)
    shares, low, high = realised(spending.deferred, spending.written)
    nearest = [0, *(int(np.abs(shares - budget).argmin()) for budget in BUDGETS[1:-1]), len(shares) - 1]
    settings = tuple(
        Setting(budget, _writable(spending.thresholds[place]), *map(float, (shares[place], low[place], high[place])))
        for budget, place in zip(BUDGETS, nearest, strict=True)
    )
    calibration = Calibration(settings, len(examples), rejector_name)
    if judge is None:
        return Measured(calibration, None)
    return Measured(calibration, LossCurve(judge.loss_unit, len(examples), rejector_name, _points(spending, nearest)))


def _points(spending: _Spending, places: list[int]) -> tuple[Point, ...]:
    assert spending.loss is not None
    shares = spending.deferred.sum(1) / spending.written.sum(1)  # (T,)
    losses = spending.loss.astype(np.float64).mean(1)  # (T,)
    return tuple(Point(float(shares[place]), float(losses[place])) for place in dict.fromkeys(places))


def _writable(threshold: float) -> float:
    return max(-BEYOND, min(BEYOND, threshold))


def _by_token(task: Task, rejector: TokenNetwork, examples: Examples, progress: Progress) -> _Spending:
    # Files are often sorted: inputs from all over one tell at which scores thresholds are worth while.
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
    first, *others = (examples.select(rows) for rows in order.split(AT_ONCE))
    trees = DecisionTrees(task, first)
    thresholds = torch.tensor(_falling(sweep_thresholds(rejector, trees).thresholds), device=trees.device)
    swept = []
    for part in (first, *others):
        trees = trees if part is first else DecisionTrees(task, part)
        swept.append(sweep_thresholds(rejector, trees, thresholds=thresholds))
        progress(len(part))
    parts = ([getattr(one, name).cpu() for one in swept] for name in ("deferred", "lengths", "loss"))
    return _Spending(thresholds.tolist(), *(torch.cat(part, 1).numpy() for part in parts))


def _by_draft(rejector: DraftNetwork, drafted: Draft, table: HandOffTable) -> _Spending:
    thresholds = _prices(rejector, drafted, table) if rejector.sizes.rule == "cost" else _odds(rejector, drafted)
    scores, deferred, written, losses = rejector.score(drafted), [], [], []
    for threshold in thresholds:
        kept = choose_kept(rejector, scores, drafted, threshold)
        deferred.append(table.deferred.gather(1, kept[:, None]).squeeze(1))
        written.append(torch.minimum(kept, drafted.sequences.lengths) + deferred[-1])
        losses.append(table.loss.gather(1, kept[:, None]).squeeze(1))
    return _Spending(thresholds, *(torch.stack(part).numpy() for part in (deferred, written, losses)))


def _prices(rejector: DraftNetwork, drafted: Draft, table: HandOffTable) -> list[float]:
    scores, grid, lengths = rejector.score(drafted), torch.tensor(rejector.sizes.hand_offs), drafted.sequences.lengths
    found = {cost_price_for(budget, scores, grid, lengths, table).threshold for budget in BUDGETS}
    return sorted({math.inf, *found, -math.inf}, reverse=True)


def _odds(rejector: DraftNetwork, drafted: Draft) -> list[float]:
    odds = deferral_odds(rejector.score(drafted)).unique()
    places = torch.linspace(0, len(odds) - 1, min(N_THRESHOLDS, len(odds)))
    return _falling(odds[places.round().long()])


def _falling(scores: Tensor) -> list[float]:
    """Thresholds between rising scores, and both ends. Where one stood at a score, rounding could decide: a batch of
    another size moves the last digit."""
    finite = scores[scores.isfinite()]
    return [math.inf, *((finite[:-1] + finite[1:]) / 2).unique().flip(0).tolist(), -math.inf]


def realised(deferred: NDArray[Any], written: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Shares (T,) of all tokens, and their intervals: inputs are drawn again and again. deferred, written: (T, n)"""
    n = deferred.shape[1]
    shares = deferred.sum(1) / written.sum(1)
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)  # (R, n)
    low, high = np.percentile((draws @ deferred.T) / (draws @ written.T), [2.5, 97.5], axis=0)
    return shares, np.minimum(low, shares), np.maximum(high, shares)  # of very few inputs it could lie outside


class _Unjudged(Task):
    """A pair with inputs that nobody knows the answers to: all losses are 0."""

    name, loss_unit = "unjudged", ""
    predictor: Predictor[Any]
    expert: Expert

    def __init__(self, served: Served) -> None:
        self.predictor, self.expert, self.spec = served.predictor, served.expert, served.spec

    def split(self, name: SplitName) -> Examples:
        raise NotImplementedError("it has no data of its own")

    def sequence_loss(self, examples: Examples, sequences: Sequences) -> Tensor:
        return torch.zeros(len(sequences), device=sequences.tokens.device)

    def token_loss(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
        return torch.zeros(len(tokens), device=tokens.device)
