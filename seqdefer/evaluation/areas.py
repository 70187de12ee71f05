"""Areas under the curves of all methods, and differences between them, from their sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seqdefer.budgets.sweeps import Sweep
from seqdefer.evaluation.curves import Curve, Run, curve_of, free_curve, improvement, paired_bootstrap, random_curve
from seqdefer.evaluation.results import FREE, Comparison, CostCurve, MethodResult, PairTiming, Point, SeedResult
from seqdefer.evaluation.seconds import in_seconds
from seqdefer.methods.registry import RANK, get_method
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.types import Granularity

REFERENCES: dict[str, tuple[Granularity, str]] = {  # the granularity, and a sentence about it
    "Random": ("whole", "Flips a coin for each sequence: the straight line between both models alone."),
    "RandomSpeculative": (
        "whole", "Flips a coin for each sequence: the predictor alone, or lossless speculative decoding."
    ),
    "OptimalFree": ("whole", "An expert that costs nothing: its loss at every budget. Nobody can reach it."),
    "OptimalWhole": ("whole", "Gives whole sequences to the expert in the best order, knowing every loss in advance."),
    "OptimalOneTime": ("once", "Hands over once at the best place, knowing every loss in advance."),
    "OptimalToken": ("token", "Asks for the best set of tokens, knowing every loss in advance."),
    "MyopicToken": ("token", "Asks for the token that gains most now, knowing its loss but not what follows."),
}  # fmt: skip


def granularity_of(name: str) -> Granularity:
    """Return the granularity of a method or a reference (Random, the oracles)."""
    return REFERENCES[name][0] if name in REFERENCES else get_method(name).granularity


def about_method(name: str) -> str:
    """Return a sentence about a method or a reference."""
    return REFERENCES[name][1] if name in REFERENCES else get_method(name).about


def seed_result(
    seed: int,
    oracles: Mapping[str, Curve],
    run: Run,
    coins: Mapping[str, Sweep] | None = None,
    timing: PairTiming | None = None,
) -> SeedResult:
    """Return the areas of all curves of a seed: Random's, the oracles', the methods'; by passes, and where the pair was
    timed by seconds."""
    run = Run(run.ends, {**(coins or {}), **run.sweeps})
    random = random_curve(run.ends)
    curves = {"Random": random, **oracles, **{name: curve_of(sweep, run.ends) for name, sweep in run.sweeps.items()}}
    costs = {"passes": _cost_curves(run.in_passes())}
    if timing is not None:
        costs["seconds"] = _cost_curves(in_seconds(run, timing), begin=timing.predictor)
    methods = {
        name: MethodResult(
            granularity_of(name),
            *_measured(curve, random),
            against={cost: found[name] for cost, found in costs.items() if name in found},
        )
        for name, curve in curves.items()
    }
    return SeedResult(seed, methods)


def _cost_curves(run: Run, begin: float = 0.0) -> dict[str, CostCurve]:
    """Return the curves of a run by another cost, of which the predictor alone takes `begin`."""
    random = random_curve(run.ends)
    curves = {"Random": random, FREE: free_curve(run.ends)}
    curves |= {name: curve_of(sweep, run.ends) for name, sweep in run.sweeps.items()}
    return {name: CostCurve(*_measured(curve, random, begin)) for name, curve in curves.items()}


def _measured(curve: Curve, random: Curve, begin: float = 0.0) -> tuple[float, float, tuple[Point, ...]]:
    """Return area, improvement and points of a curve, which are moved to begin at `begin`."""
    return curve.area, improvement(curve, random), tuple((begin + x, y) for x, y in curve.points)


def to_compare(run: Run) -> list[tuple[str, str]]:
    """Pair each learned partial method with every method of its own or a coarser granularity."""
    swept = {name: get_method(name) for name in run.sweeps}
    return [
        (name, other)
        for name, method in swept.items()
        for other in swept
        if method.is_learned
        and method.granularity != "whole"
        and name != other
        and RANK[swept[other].granularity] <= RANK[method.granularity]
    ]


def compare(
    runs: Sequence[Run],
    pairs: Sequence[tuple[str, str]],
    resamples: int,
    progress: Progress = NO_PROGRESS,
) -> list[Comparison]:
    """Return the difference of each pair, with its paired interval."""
    comparisons = []
    for method, other in pairs:
        interval = paired_bootstrap(runs, method, other, n_resamples=resamples)
        comparisons.append(Comparison(method, other, interval.difference, interval.low, interval.high))
        progress(1)
    return comparisons
