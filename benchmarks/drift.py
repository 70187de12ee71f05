"""After how many inputs an alarm sounds when the season changes, and how often it does when nothing changes.

    python -m benchmarks.drift --data jena_2020.csv.gz --folder runs/drift --out docs/results/drift.json
    python tools/generate.py    # the page docs/drift.md

A rejector is fitted for the weather task by the quick preset. The test windows of a season, which no fit has seen, are
a population: calibrations and quiet streams are both drawn from it, with replacement, so that only chance differs.
Shifted streams turn to the other season half-way. Every input asks for one of BUDGETS, at random.

The other parts keep the windows in their order of time, where neighbours resemble each other, and calibrate again from
the log of what was served after the shift.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.populations import Subject, fit_subject
from seqdefer import __version__
from seqdefer.budgets.calibration import calibrate
from seqdefer.budgets.drift import DELTA, ScoreTest, SpendingTest, round_score, share_ceilings
from seqdefer.budgets.guarantees import token_losses
from seqdefer.budgets.promises import Confident
from seqdefer.budgets.rules import NEAREST
from seqdefer.budgets.served import ServedInput, served_spending
from seqdefer.budgets.spending import TokenSpending
from seqdefer.errors import SeqdeferError
from seqdefer.interfaces import Task, TokenRejector
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.deferral import deferral_of, sweep_tokens
from seqdefer.progress import Clock
from seqdefer.progress_bars import show_progress
from seqdefer.storage.files import fingerprint, write_json
from seqdefer.types import Examples

BUDGETS = (0.1, 0.2, 0.5)
CALIBRATED = 300  # inputs
QUIET, SHIFT, AFTER = 1000, 500, 1500  # inputs of a quiet stream; before and after a shift
STEP = 25
STREAMS = 1000
EXCESS, EXCESS_LIMIT, EXCESS_STREAMS = (1.25, 1.5, 2.0), 0.2, 200  # spending above a limit, by coins
IN_ORDER = 50  # calibrations whose streams keep the order of time
LOGGED = 300  # inputs of a log that calibrates again
ASIDE = 32  # inputs that choose the thresholds
SEASONS = {"summer": (6, 7, 8), "winter": (12, 1, 2)}
CONFIDENCE = 0.9
TESTS = ("spent, promised", "spent, measured", "scores")  # promised with a confidence, or measured with ceilings
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Season:
    """The windows of a season, in the order of time, and what every threshold does to them."""

    examples: Examples
    spending: TokenSpending


@dataclass(frozen=True)
class DriftRow:
    """What a test did with all streams that were calibrated in one season and served in another."""

    calibrated: str
    served: str
    test: str
    false_alarms: float  # share of quiet streams with an alarm although the hypothesis holds
    broken: float  # share of quiet streams whose calibration was unlucky, so that it does not hold
    true_alarms: float  # share of quiet streams with an alarm about that
    found: float  # share of shifted streams with an alarm after the shift
    median: float | None  # inputs from the shift to the alarm, of those found
    late: float | None  # 90 % of them are earlier
    quiet_by: tuple[float, ...]  # share of quiet streams with an alarm, whatever its reason, after every STEP inputs
    shifted_by: tuple[float, ...]  # the same of shifted streams


class Stream:
    """The tests of one calibration, side by side."""

    def __init__(self, sample: TokenSpending, seed: int) -> None:
        self.sample = sample
        confident = Confident(CONFIDENCE)
        self.promised = [confident.place(sample, budget) for budget in BUDGETS]
        self.measured = [NEAREST.place(sample, budget) for budget in BUDGETS]
        self.ceilings = share_ceilings(sample, self.measured)
        scores = sample.first_scores
        assert scores is not None
        self.score_test = ScoreTest([round_score(score) for score in scores], seed)
        self.spending_tests = (SpendingTest(), SpendingTest())

    def serve(self, season: TokenSpending, rows: Integers, budgets: Integers) -> None:
        """Serve inputs of a season, each at one of BUDGETS."""
        deferred, written = season.counts
        scores = season.first_scores
        assert scores is not None
        for row, which in zip(rows, budgets, strict=True):
            place, budget = self.promised[which], BUDGETS[which]
            spent = token_losses(deferred[place, row], written[place, row], budget, season.length)
            self.spending_tests[0].observe(float(spent), budget)
            place = self.measured[which]
            self.spending_tests[1].observe(deferred[place, row] / written[place, row], self.ceilings[which])
            self.score_test.observe(float(scores[row]))

    def holds(self, home: TokenSpending) -> list[bool]:
        """Tell for each of TESTS whether its hypothesis holds on the population that the calibration is from."""
        deferred, written = home.counts
        promised = [
            token_losses(deferred[place], written[place], budget, home.length).mean() <= budget
            for place, budget in zip(self.promised, BUDGETS, strict=True)
        ]
        measured = [
            (deferred[place] / written[place]).mean() <= ceiling
            for place, ceiling in zip(self.measured, self.ceilings, strict=True)
        ]
        return [all(promised), all(measured), True]

    def alarms(self) -> list[int]:
        """Return after how many inputs each of TESTS sounded; 0 for never."""
        return [test.evidence.alarm_at or 0 for test in (*self.spending_tests, self.score_test)]


def seasons_of(task: Task, rejector: TokenRejector[Any]) -> dict[str, Season]:
    """Sweep the test windows of each season at the same thresholds, which some summer windows choose."""
    every = task.split("test")
    months = every.ids.numpy().astype("datetime64[m]").astype("datetime64[M]").astype(np.int64) % 12 + 1
    rows = {name: np.flatnonzero(np.isin(months, which)) for name, which in SEASONS.items()}
    aside = np.random.default_rng(0).choice(rows["summer"], ASIDE, replace=False)
    rows["summer"] = np.setdiff1d(rows["summer"], aside)
    chosen = deferral_of(rejector).spending(task, every.select(torch.from_numpy(aside)))
    assert isinstance(chosen, TokenSpending)
    found = {}
    for name, some in rows.items():
        examples = every.select(torch.from_numpy(some))
        swept = sweep_tokens(rejector, DecisionTrees(task, examples), thresholds=chosen.sweep.thresholds)
        found[name] = Season(examples, TokenSpending(swept, task.spec.length, has_fixed_settings=True))
    return found


def study(seasons: Mapping[str, Season], calibrated: str, served: str, streams: int) -> Iterator[DriftRow]:
    """Yield the rows of one direction."""
    home, other = seasons[calibrated].spending, seasons[served].spending
    quiet, holds, shifted = [], [], []
    for seed in range(streams):
        rng = np.random.default_rng(seed)
        sample = home.select(rng.integers(0, home.inputs, CALIBRATED))
        stream = Stream(sample, seed)
        stream.serve(home, rng.integers(0, home.inputs, QUIET), rng.integers(0, len(BUDGETS), QUIET))
        quiet.append(stream.alarms())
        holds.append(stream.holds(home))
        stream = Stream(sample, seed)
        stream.serve(home, rng.integers(0, home.inputs, SHIFT), rng.integers(0, len(BUDGETS), SHIFT))
        stream.serve(other, rng.integers(0, other.inputs, AFTER), rng.integers(0, len(BUDGETS), AFTER))
        shifted.append(stream.alarms())
    for place, test in enumerate(TESTS):
        sounded, is_right = np.array(quiet)[:, place] > 0, ~np.array(holds)[:, place]
        delays = np.array(shifted)[:, place] - SHIFT
        delays = delays[delays > 0]
        has_delays = len(delays) > 0
        yield DriftRow(
            calibrated, served, test,
            false_alarms=float((sounded & ~is_right).mean()),
            broken=float(is_right.mean()),
            true_alarms=float((sounded & is_right).mean()),
            found=len(delays) / streams,
            median=float(np.median(delays)) if has_delays else None,
            late=float(np.quantile(delays, 0.9)) if has_delays else None,
            quiet_by=_alarmed_by(np.array(quiet)[:, place], QUIET),
            shifted_by=_alarmed_by(np.array(shifted)[:, place], SHIFT + AFTER),
        )  # fmt: skip


def _alarmed_by(alarms: Integers, length: int) -> tuple[float, ...]:
    return tuple(float(((alarms > 0) & (alarms <= n)).mean()) for n in range(0, length + 1, STEP))


def exceed(streams: int) -> list[dict[str, float | None]]:
    """Tell how long it takes to find that inputs, deferred whole or not at all, spend more than their limit."""
    found = []
    for factor in EXCESS:
        delays = []
        for seed in range(streams):
            rng, test = np.random.default_rng(seed), SpendingTest()
            chances = EXCESS_LIMIT * np.where(np.arange(SHIFT + AFTER) < SHIFT, 1.0, factor)
            for share in rng.random(len(chances)) < chances:
                test.observe(float(share), EXCESS_LIMIT)
            delays.append((test.evidence.alarm_at or 0) - SHIFT)
        late = [delay for delay in delays if delay > 0]
        median = float(np.median(late)) if late else None
        found.append(
            {"limit": EXCESS_LIMIT, "spent": EXCESS_LIMIT * factor, "found": len(late) / streams, "median": median}
        )
    return found


def in_order(seasons: Mapping[str, Season], streams: int) -> list[dict[str, Any]]:
    """Serve all windows of a season in the order of time, after calibrations drawn from summer."""
    home, found = seasons["summer"].spending, []
    for name, season in seasons.items():
        alarms = []
        for seed in range(streams):
            rng = np.random.default_rng(seed)
            stream = Stream(home.select(rng.integers(0, home.inputs, CALIBRATED)), seed)
            n = season.spending.inputs
            stream.serve(season.spending, np.arange(n), rng.integers(0, len(BUDGETS), n))
            alarms.append(stream.alarms())
        for place, test in enumerate(TESTS):
            after = np.array(alarms)[:, place]
            sounded = after[after > 0]
            median = float(np.median(sounded)) if len(sounded) else None
            found.append({"served": name, "test": test, "alarms": float((after > 0).mean()), "median": median})
    return found


def recalibrate(task: Task, rejector: TokenRejector[Any], seasons: Mapping[str, Season]) -> list[dict[str, float]]:
    """Serve winter windows at the settings of a summer calibration, calibrate again from their log, and tell what each
    budget then spends on other winter windows, before and after."""
    deferral, winter = deferral_of(rejector), seasons["winter"].examples
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(winter)))
    served, others = winter.select(order[:LOGGED]), winter.select(order[LOGGED:])
    home = seasons["summer"].spending
    before = [NEAREST.choose(home, budget) for budget in BUDGETS]
    budgets = np.random.default_rng(2).integers(0, len(BUDGETS), len(served))
    settings = torch.tensor([before[which].threshold for which in budgets], dtype=torch.float64)
    rollout = deferral.write(task, served, settings, at_once=64).rollout
    lengths, deferred = rollout.sequences.lengths.tolist(), rollout.deferred.tolist()
    rows = [
        ServedInput("", "", BUDGETS[which], setting, n, by_expert, tuple(scores[:n]))
        for which, setting, n, by_expert, scores in zip(
            budgets, settings.tolist(), lengths, deferred, rollout.scores.tolist(), strict=True
        )
    ]
    again = calibrate(served_spending(rows, task.spec.length), inputs=len(rows), rejector="")

    def spent(threshold: float) -> float:
        some = deferral.write(task, others, torch.full((len(others),), threshold, dtype=torch.float64), at_once=64)
        return float(some.rollout.deferred.sum() / some.rollout.sequences.lengths.sum())

    after = [again.for_budget(budget) for budget in BUDGETS]
    return [
        {"budget": budget, "summer": one.share, "winter": spent(one.threshold), "recalibrated": spent(new.threshold)}
        for budget, one, new in zip(BUDGETS, before, after, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    subject = Subject("weather", "TokenwiseModel", 0, {"data": str(chosen.data)})
    try:
        with show_progress(quiet=False) as meter:
            folder = chosen.folder / f"weather-fit-{fingerprint(asdict(subject), __version__)}"
            task, rejector = fit_subject(subject, folder, Clock(meter))
    except SeqdeferError as error:
        print(f"drift: {error}", file=sys.stderr)
        return 2
    assert isinstance(rejector, TokenRejector)
    seasons = seasons_of(task, rejector)
    print(", ".join(f"{name}: {len(one.examples)} windows" for name, one in seasons.items()), file=sys.stderr)
    write_json(chosen.out, _record(task, rejector, seasons, chosen.streams))
    print(f"written: {chosen.out}", file=sys.stderr)
    return 0


def _record(task: Task, rejector: TokenRejector[Any], seasons: Mapping[str, Season], streams: int) -> dict[str, Any]:
    directions = (("summer", "winter"), ("winter", "summer"))
    rows = [asdict(row) for pair in directions for row in study(seasons, *pair, streams)]
    return {
        "version": __version__,
        "streams": streams,
        "calibrated": CALIBRATED,
        "quiet": QUIET,
        "shift": SHIFT,
        "after": AFTER,
        "delta": DELTA,
        "confidence": CONFIDENCE,
        "budgets": BUDGETS,
        "seasons": {name: len(one.examples) for name, one in seasons.items()},
        "rows": rows,
        "step": STEP,
        "logged": LOGGED,
        "exceed": exceed(min(EXCESS_STREAMS, streams)),
        "in_order": in_order(seasons, min(IN_ORDER, streams)),
        "recalibrated": recalibrate(task, rejector, seasons),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    words = "weather record with all seasons, as for seqdefer run weather"
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help=words)
    parser.add_argument("--folder", type=Path, default=Path("runs/drift"), metavar="DIR", help="labels and fits")
    parser.add_argument("--out", type=Path, default=Path("drift.json"), metavar="FILE", help="results")
    parser.add_argument("--streams", type=int, default=STREAMS, metavar="N", help=f"of each kind ({STREAMS})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
