"""How often each budget rule exceeds its budget, and what its promise costs, on real labels drawn again and again.

    python -m benchmarks.coverage --folder runs/coverage --out docs/results/coverage.json \\
        --pair runs/pair/predictor runs/pair/expert --documents rejector.jsonl.gz test.jsonl.gz
    python tools/generate.py    # the page docs/guarantees.md

A population is the test split of a task (`benchmarks.populations`), with what every threshold of a fitted rejector does
to each input. Draws of n of them, with replacement, calibrate; the share at the chosen threshold over the population is
then exactly the expectation that rules make promises about. `exceeds_rest` counts instead by the inputs that were not
drawn, whose share has a chance error of its own, where there are at least n of them.

`--pair` names two models that share a vocabulary, `--documents` XSum to fit with and to report on; without them xsum is
left out. Fits, labels, populations and rows are kept in the folder. The labels take about an hour.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.populations import SUBJECTS, Population, Subject, measure
from seqdefer import __version__
from seqdefer.budgets.promises import Confident, Expected, ShareOf
from seqdefer.budgets.rules import NEAREST, BudgetRule
from seqdefer.budgets.spending import Spending
from seqdefer.errors import SeqdeferError, unknown
from seqdefer.progress_bars import show_progress
from seqdefer.storage.files import read_json, write_json

BUDGETS = (0.1, 0.2, 0.5)
SIZES = (100, 300, 1000)
CONFIDENCE = 0.9
DRAWS = 200
RuleName = Literal["nearest", "expected", "confident", "hoeffding-bentkus"]
SHARES: tuple[ShareOf, ...] = ("tokens", "inputs")
Cell = tuple[ShareOf, RuleName, float]  # kind of share, rule, budget
ROUNDING = 1e-9


@dataclass(frozen=True)
class CoverageRow:
    """What a rule did with a budget in all draws of n inputs."""

    subject: str
    share_of: ShareOf
    n: int
    budget: float
    rule: RuleName
    exceeds: float  # share of the draws whose threshold spends more than the budget on the population
    exceeds_rest: float | None  # the same on the inputs that were not drawn
    mean: float  # of what the thresholds spend
    error: float  # standard error of this mean
    unspent: float  # points of the budget, on average


def rules_for(share_of: ShareOf) -> dict[RuleName, BudgetRule]:
    """Return the rules to compare. `nearest` is about the share of all tokens, whatever the others promise."""
    return {
        "nearest": NEAREST,
        "expected": Expected(share_of),
        "confident": Confident(CONFIDENCE, share_of),
        "hoeffding-bentkus": Confident(CONFIDENCE, share_of, "hoeffding-bentkus"),
    }


def share_at(spending: Spending, setting: float, share_of: ShareOf, rows: Any = slice(None)) -> float:
    """Return what a setting spends on some inputs."""
    seen = spending.at_setting(setting)
    deferred, written = seen.deferred[0][rows], seen.written[0][rows]
    return float(deferred.sum() / written.sum() if share_of == "tokens" else (deferred / written).mean())


def study(
    name: str,
    spending: Spending,
    *,
    draws: int = DRAWS,
    sizes: Sequence[int] = SIZES,
    budgets: Sequence[float] = BUDGETS,
    shares: Sequence[ShareOf] = SHARES,
) -> Iterator[CoverageRow]:
    """Yield the rows of one population."""
    cells = [(share_of, rule, budget) for share_of in shares for rule in rules_for(share_of) for budget in budgets]
    for n in sizes:
        spent: dict[Cell, list[tuple[float, float]]] = {cell: [] for cell in cells}
        for draw in range(draws):
            rows = np.random.default_rng([n, draw]).integers(0, spending.inputs, n)
            sample, rest = spending.select(rows), np.setdiff1d(np.arange(spending.inputs), rows)
            for cell, found in spent.items():
                found.append(_spent(spending, sample, cell, rest))
        for (share_of, rule, budget), found in spent.items():
            yield _row(name, share_of, n, budget, rule, np.array(found))


def _spent(spending: Spending, sample: Spending, cell: Cell, rest: NDArray[np.int64]) -> tuple[float, float]:
    """Return what the setting that a sample chooses spends on all inputs, and on the rest if it is as large."""
    share_of, rule, budget = cell
    setting = float(sample.settings[rules_for(share_of)[rule].place(sample, budget)])
    others = share_at(spending, setting, share_of, rest) if len(rest) >= sample.inputs else math.nan
    return share_at(spending, setting, share_of), others


def _row(
    name: str, share_of: ShareOf, n: int, budget: float, rule: RuleName, found: NDArray[np.float64]
) -> CoverageRow:
    spent, others = found.T
    has_rest = bool(np.isfinite(others).all())
    return CoverageRow(
        name, share_of, n, budget, rule,
        exceeds=float((spent > budget + ROUNDING).mean()),
        exceeds_rest=float((others > budget + ROUNDING).mean()) if has_rest else None,
        mean=float(spent.mean()),
        error=float(spent.std() / math.sqrt(len(spent))),
        unspent=float(100 * (budget - spent.mean())),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        populations = dict(_populations(chosen))
    except SeqdeferError as error:
        print(f"coverage: {error}", file=sys.stderr)
        return 2
    rows = []
    for name, population in populations.items():
        print(f"{name}: {population.spending.inputs} inputs", file=sys.stderr)
        rows += _stored_study(name, population, chosen.folder, chosen.draws)
    write_json(chosen.out, _record(populations, rows, chosen.draws))
    print(f"written: {chosen.out}", file=sys.stderr)
    return 0


def _stored_study(name: str, population: Population, folder: Path, draws: int) -> list[CoverageRow]:
    """Return the rows of a population, or those that an earlier call stored."""
    file = folder / f"{name}-{population.made_by}-{draws}.json"
    if not file.exists():
        write_json(file, [asdict(row) for row in study(name, population.spending, draws=draws)])
    return [CoverageRow(**row) for row in read_json(file)]


def _populations(chosen: argparse.Namespace) -> Iterator[tuple[str, Population]]:
    subjects: dict[str, Subject] = dict(SUBJECTS)
    if chosen.pair is None or chosen.documents is None:
        del subjects["xsum"]
    else:
        names = ("predictor", "expert", "train", "test")
        files = dict(zip(names, (*chosen.pair, *chosen.documents), strict=True))
        subjects["xsum"] = subjects["xsum"].with_options(**files)
    for name in chosen.only or subjects:
        if name not in subjects:
            raise unknown("subject", name, subjects)
        with show_progress(quiet=False) as meter:
            yield name, measure(subjects[name], chosen.folder, meter=meter)


def _record(populations: Mapping[str, Population], rows: Sequence[CoverageRow], draws: int) -> dict[str, Any]:
    subjects = {
        name: {
            "task": one.subject.task,
            "method": one.subject.method,
            "inputs": one.spending.inputs,
            "settings": len(one.spending.settings),
        }
        for name, one in populations.items()
    }
    return {
        "version": __version__,
        "draws": draws,
        "confidence": CONFIDENCE,
        "subjects": subjects,
        "rows": [asdict(row) for row in rows],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, default=Path("runs/coverage"), metavar="DIR", help="labels and fits")
    parser.add_argument("--out", type=Path, default=Path("coverage.json"), metavar="FILE", help="results")
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help=f"of each size ({DRAWS})")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this subject; may be repeated")
    parser.add_argument("--pair", nargs=2, metavar=("PREDICTOR", "EXPERT"), help="models for xsum")
    parser.add_argument("--documents", nargs=2, metavar=("TRAIN", "TEST"), help="JSON lines for xsum")
    return parser


if __name__ == "__main__":
    sys.exit(main())
