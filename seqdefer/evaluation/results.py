"""The typed record of a run, and its round trip through `results.json`.

    results = load_results("runs/weather")
    results.summary["TokenwiseModel"].improvement_mean

Nothing is measured here: `curves.py` does that. `summarise` only averages what the seeds hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from seqdefer.errors import DataError, InputError, import_extra
from seqdefer.recipes import recipe_in_words
from seqdefer.storage.files import write_json
from seqdefer.storage.records import from_plain, name_file, read_plain, to_plain

FILE_NAME = "results.json"
FREE = "OptimalFree"  # the expert's loss at every budget
REFERENCE_PREFIXES = ("Random", "Optimal", "Myopic")  # how names of what is no method begin: coins and oracles

# `types.Granularity` and the references; spelled out, because importing `types` would import torch to draw a line.
Block = Literal["whole", "once", "token", "reference"]
Point = tuple[float, float]  # mean number of deferred tokens per sequence, mean loss
Cost = Literal["passes", "seconds"]  # what else curves are drawn against than deferred tokens


@dataclass(frozen=True)
class CostCurve:
    """The loss of a method against another cost, from the predictor alone to the expert alone, which takes a pass for
    each of its tokens. Seconds begin with those of the predictor; the area counts from there."""

    audc: float
    improvement: float
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class MethodResult:
    """One method on one seed. `improvement` is in % of the AUDC of Random. `against` are curves by other costs."""

    granularity: Block
    audc: float
    improvement: float
    curve: tuple[Point, ...]
    against: Mapping[str, CostCurve] = field(default_factory=dict)


@dataclass(frozen=True)
class SeedResult:
    seed: int
    methods: Mapping[str, MethodResult]


@dataclass(frozen=True)
class Summary:
    """One method over the seeds: mean and sample standard deviation."""

    granularity: Block
    audc_mean: float
    audc_std: float
    improvement_mean: float
    improvement_std: float


@dataclass(frozen=True)
class Comparison:
    """`method` minus `against` in points of % improvement, with its paired 95 % bootstrap interval."""

    method: str
    against: str
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class PaperFigure:
    """The paper's figures for a method; None where it prints nothing."""

    audc: float | None
    audc_std: float | None
    improvement: float
    improvement_std: float | None


@dataclass(frozen=True)
class TimedSetting:
    """A setting of a method at which the timed inputs were written: seconds per sequence, derived and measured."""

    share: float  # of the tokens that the expert alone writes
    loss: float  # of all test instances of the first seed
    derived: float
    measured: float


@dataclass(frozen=True)
class PairTiming:
    """The times of a pair on one machine: `inputs` sequences, `at_once` of them together. Seconds of curves are derived
    from these; `methods` has settings that were also measured."""

    inputs: int
    at_once: int
    predictor: float  # seconds per sequence, alone
    expert: float
    a_token: float  # seconds per token that the expert writes on its own
    a_pass: float  # seconds per chunk that the expert reads
    methods: Mapping[str, tuple[TimedSetting, ...]] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    made_by: str = ""


@dataclass(frozen=True)
class PromisedBudget:
    """A budget, the promise for it, and the spending: mean shares of the inputs."""

    budget: float
    bound: float  # what the expected share is below, with the confidence
    calibrated: float  # spent by the inputs of the calibration
    spent: float  # by the others
    error: float  # half of the 95 % interval of `spent`


@dataclass(frozen=True)
class PromiseCheck:
    """Budgets that some test inputs promised, and what `unseen` others spent."""

    method: str
    confidence: float
    inputs: int
    unseen: int
    budgets: tuple[PromisedBudget, ...]


@dataclass(frozen=True)
class Units:
    loss: str = "loss"
    deferred: str = "tokens per sequence"
    costs: Mapping[str, str] = field(default_factory=dict)  # by the names of `Cost`


@dataclass(frozen=True)
class ExpertCalls:
    made: int = 0
    saved: int = 0


@dataclass(frozen=True)
class Provenance:
    """The origin of the numbers: enough to run them again, and to compare data and models."""

    version: str = ""
    command: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    expert_calls: ExpertCalls = field(default_factory=ExpertCalls)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """Everything a run leaves in `results.json`; `length` is L, the longest sequence of the task."""

    task: str
    preset: str
    length: int
    seeds: tuple[SeedResult, ...]
    summary: Mapping[str, Summary]
    comparisons: tuple[Comparison, ...] = ()
    cost_comparisons: Mapping[str, tuple[Comparison, ...]] = field(default_factory=dict)  # by other costs
    paper: Mapping[str, PaperFigure] = field(default_factory=dict)
    units: Units = field(default_factory=Units)
    notes: tuple[str, ...] = ()
    provenance: Provenance = field(default_factory=Provenance)
    recipe: str = "ours"
    recipe_changes: tuple[str, ...] = ()  # options that differ from the recipe's
    timing: PairTiming | None = None  # where the pair can be timed
    promise: PromiseCheck | None = None  # of the method that a fit would take
    about: Mapping[str, str] = field(default_factory=dict)  # a sentence about each method

    def __repr__(self) -> str:
        """Return a line for notebooks: the curves of all seeds would fill many screens."""
        ranked = sorted(self.summary.items(), key=lambda row: row[1].audc_mean)
        best = next((row for row in ranked if not row[0].startswith(REFERENCE_PREFIXES)), None)
        found = "" if best is None else f", best: {best[0]}, {best[1].improvement_mean:.2f} % over Random"
        what = f"{self.task}, preset {self.preset}, {len(self.seeds)} seed" + "s" * (len(self.seeds) != 1)
        return f"Results({what}, {len(self.summary)} methods{found}; to_frame() lists all)"

    @property
    def recipe_in_words(self) -> str:
        return recipe_in_words(self.recipe, self.recipe_changes)

    @property
    def cost(self) -> str | None:
        """The cost of `by_cost`; None where curves are against deferred tokens."""
        return next((cost for cost, unit in self.units.costs.items() if unit == self.units.deferred), None)

    def headroom(self, name: str) -> tuple[float, float] | None:
        """Return `headroom_of` a method; None where a seed lacks it, or what a free expert would give."""
        pairs = [(seed.methods.get(name), seed.methods.get(FREE)) for seed in self.seeds]
        found = [(one.improvement, free.improvement) for one, free in pairs if one and free]
        return headroom_of(found) if len(found) == len(pairs) else None

    def by_cost(self, cost: Cost) -> Results | None:
        """Return the same results with curves, areas and intervals by another cost; None where none was measured."""
        seeds = []
        for seed in self.seeds:
            rows = {
                name: replace(row, **vars(row.against[cost]), against={})
                for name, row in seed.methods.items()
                if cost in row.against
            }
            seeds.append(SeedResult(seed.seed, rows))
        if cost not in self.units.costs or not any(set(seed.methods) - {"Random", FREE} for seed in seeds):
            return None
        units = replace(self.units, deferred=self.units.costs[cost])
        comparisons = self.cost_comparisons.get(cost, ())
        return replace(
            self, seeds=tuple(seeds), summary=summarise(seeds), comparisons=comparisons, units=units, paper={}
        )

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each seed and method: granularity, AUDC, % improvement over
        Random."""
        names = ("granularity", "audc", "improvement")
        rows = [
            {"seed": seed.seed, "method": name, **{key: getattr(row, key) for key in names}}
            for seed in self.seeds
            for name, row in seed.methods.items()
        ]
        return _pandas().DataFrame(rows, columns=["seed", "method", *names])

    def curves_to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each point of each curve: mean deferred tokens and mean loss."""
        rows = [
            {"seed": seed.seed, "method": name, "deferred": deferred, "loss": loss}
            for seed in self.seeds
            for name, row in seed.methods.items()
            for deferred, loss in row.curve
        ]
        return _pandas().DataFrame(rows, columns=["seed", "method", "deferred", "loss"])

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and finite numbers; a `DataError` names the first value that is none."""
        return to_plain(self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the results that `to_json` was given; a `DataError` names the first field that is missing or wrong."""
        decoded: Self = from_plain(cls, value)
        if decoded.length < 1:
            raise DataError(f"field 'length' is {decoded.length}; it must be at least 1")
        return decoded


def _pandas() -> Any:
    return import_extra("pandas", "frame", "a table of results")


def summarise(seeds: Sequence[SeedResult]) -> dict[str, Summary]:
    """Return mean and sample standard deviation (0 for one seed) of each method, over the seeds that ran it."""
    rows: dict[str, list[MethodResult]] = {}
    for seed in seeds:
        for name, result in seed.methods.items():
            rows.setdefault(name, []).append(result)
    return {name: _summarise_method(results) for name, results in rows.items()}


def _summarise_method(results: Sequence[MethodResult]) -> Summary:
    audc = mean_and_std([result.audc for result in results])
    return Summary(results[0].granularity, *audc, *mean_and_std([result.improvement for result in results]))


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def headroom_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return improvements as shares of what a free expert would give, mean and std over seeds, in per cent: it compares
    pairs of models. `pairs` has both figures seed by seed. None where there is nothing to gain."""
    if any(free <= 0 for _, free in pairs):
        return None
    return mean_and_std([100 * one / free for one, free in pairs])


def save_results(results: Results, directory: Path | str) -> Path:
    return write_json(Path(directory) / FILE_NAME, results.to_json())


def load_results(path: Path | str) -> Results:
    """Read a run's directory, or its `results.json` itself."""
    file = _find_file(Path(path))
    return name_file(file, Results.from_json, read_plain(file))


def _find_file(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"{path} does not exist; give the directory that 'seqdefer run TASK --out DIR' wrote")
    file = path / FILE_NAME if path.is_dir() else path
    if not file.exists():
        raise InputError(f"{path} holds no {FILE_NAME}; make it with: seqdefer run TASK --out {path}")
    return file
