"""What budgets cost in time: seconds and questions per sequence, measured on this machine in batches as served.

Inputs like those to come are written at each budget, by the predictor alone and by the expert alone. Where a budget
takes longer than the expert alone, deferral saves tokens and no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from seqdefer.environment import machine
from seqdefer.methods.deferral import DeferralRunner
from seqdefer.methods.plans import Pair, PlanResult
from seqdefer.progress import Progress
from seqdefer.types import Examples, Sequences

TIMED_BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
MAX_SECONDS = 4.0  # that the expert alone may take: fewer inputs are timed where it is slow
GROWTH = 4
Result = TypeVar("Result")


@dataclass(frozen=True)
class BudgetTime:
    """What one budget takes. `asked` counts how often a sequence asks the expert, about one or more tokens each."""

    budget: float
    share: float  # of the tokens, on the inputs that were timed
    asked: float  # per sequence
    seconds: float  # per sequence


@dataclass(frozen=True)
class Timing:
    """Seconds per sequence, at budgets and of each model alone."""

    rejector: str  # fingerprint
    machine: Mapping[str, str]
    inputs: int
    at_once: int  # sequences written together
    predictor: float  # seconds per sequence, alone
    expert: float
    budgets: tuple[BudgetTime, ...]

    @property
    def price(self) -> float:
        """What a token of the expert costs in tokens of the predictor, by the time they take."""
        return self.expert / self.predictor if self.predictor else 1.0


def time_budgets(
    pair: Pair,
    deferral: DeferralRunner,
    thresholds: Mapping[float, float],
    examples: Examples,
    *,
    rejector: str,
    at_once: int,
    progress: Progress = lambda _: None,
) -> Timing | None:
    """Time `thresholds` by budget, and both models alone; None where the expert runs elsewhere and calls may cost."""
    if pair.expert.waits:
        return None
    examples = as_many_as_fit(pair, examples, at_once)
    n, at_once = len(examples), min(at_once, len(examples))

    def write(threshold: float) -> PlanResult:
        settings = torch.full((n,), threshold, dtype=torch.float64)
        return deferral.write(pair, examples, settings, at_once=at_once)

    write(float("inf"))  # memory is allocated, and what is compiled on first use
    predictor, _ = timed(partial(write, float("inf")))
    expert, _ = timed(partial(write_alone, pair, examples, at_once))
    found = []
    for budget, threshold in thresholds.items():
        write(threshold)  # how far to run ahead is learned on the way
        seconds, result = timed(partial(write, threshold))
        found.append(BudgetTime(budget, result.rollout.share, result.work.chunks / n, seconds / n))
        progress(1)
    where = machine(pair.predictor.device)
    return Timing(rejector, where, n, at_once, predictor / n, expert / n, tuple(found))


def write_alone(pair: Pair, examples: Examples, at_once: int) -> Sequences:
    """Let the expert write all sequences, in batches."""
    parts = []
    for rows in torch.arange(len(examples)).split(at_once):
        some = examples.select(rows.to(examples.ids.device)).to(pair.predictor.device)
        is_real = pair.spec.end is None and some.targets.is_floating_point()
        blank = torch.zeros(len(rows), pair.spec.length, dtype=torch.float32 if is_real else torch.long)
        prefixes = Sequences(blank, torch.zeros(len(rows), dtype=torch.long)).to(pair.predictor.device)
        parts.append(pair.expert.complete(some, prefixes, pair.spec))
    return Sequences.join(parts)


def as_many_as_fit(pair: Pair, examples: Examples, at_once: int, max_seconds: float = MAX_SECONDS) -> Examples:
    """Return two batches, or about as many inputs as the expert writes in `max_seconds`."""
    n, most = 1, min(len(examples), 2 * at_once)
    while True:
        some = examples.select(torch.arange(n))
        seconds, _ = timed(partial(write_alone, pair, some, at_once))
        if n == most or GROWTH * seconds > max_seconds:
            return some
        n = min(GROWTH * n, most)


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds that a call takes, and its result."""
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result
