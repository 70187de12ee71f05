"""Made-up results of a full run, and a parser that checks the page made from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

from seqdefer.evaluation.results import (
    Block,
    Comparison,
    CostCurve,
    ExpertCalls,
    MethodResult,
    PairTiming,
    PaperFigure,
    Provenance,
    Results,
    SeedResult,
    TimedSetting,
    Units,
    summarise,
)

LENGTH = 6
# How far the curve of each method sags below the straight line of Random; negative: worse than Random.
SAG: dict[str, tuple[Block, float]] = {
    "Random": ("reference", 0.0),
    "OptimalWhole": ("reference", 1.6),
    "OptimalOneTime": ("reference", 2.2),
    "OptimalToken": ("reference", 5.0),
    "ChowMean": ("whole", 0.36),
    "ChowSum": ("whole", 0.24),
    "ChowQuantile0.0": ("whole", 0.10),
    "ChowQuantile0.4": ("whole", 0.18),
    "ChowQuantile0.8": ("whole", 0.20),
    "ChowQuantile1.0": ("whole", 0.14),
    "WholeModelEmbed": ("whole", -0.12),
    "OneTimeModel": ("once", 0.45),
    "OneTimeScore": ("once", 0.22),
    "OneTimeEntropy": ("once", 0.12),
    "TokenwiseModel": ("token", 1.1),
    "TokenwiseScore": ("token", -0.30),
    "TokenwiseEntropy": ("token", 0.55),
}
HOSTILE = "<script>alert(1)</script>\"'&</script>\x00\ud800"


def fake_method(name: str, rng: random.Random, ends: tuple[float, float]) -> MethodResult:
    granularity, sag = SAG[name]
    sag += 0 if granularity == "reference" else rng.gauss(0, 0.08)
    inner = sorted(rng.uniform(0, LENGTH) for _ in range(98))
    points = []
    for x in [0.0, *inner, float(LENGTH)]:
        share = x / LENGTH
        bend = (1 - math.exp(-sag * 2 * share)) / (1 - math.exp(-sag * 2)) if sag else share
        wobble = 0 if granularity == "reference" else 0.015 * math.sin(9 * share + sag * 40) * share * (1 - share) * 4
        points.append((x, ends[0] + (ends[1] - ends[0]) * (bend + wobble)))
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
    straight = LENGTH * sum(ends) / 2
    return MethodResult(granularity, area, 100 * (1 - area / straight), tuple(points))


def fake_results(n_seeds: int = 5) -> Results:
    """Make the results of a full weather run: 17 methods of 100 points each."""
    rng = random.Random(0)
    seeds = []
    for seed in range(n_seeds):
        ends = (1.9 + rng.gauss(0, 0.12), 0.24 + rng.gauss(0, 0.01))
        seeds.append(SeedResult(seed, {name: fake_method(name, rng, ends) for name in SAG}))
    paper = {"ChowMean": (5.26, 9.92), "OneTimeModel": (7.23, 11.80), "TokenwiseModel": (25.78, 1.33)}
    paper |= {"TokenwiseScore": (-28.50, 6.20), "WholeModelEmbed": (-5.28, 15.09), "Random": (0.0, 0.0)}
    return Results(
        task="weather",
        preset="full",
        length=LENGTH,
        seeds=tuple(seeds),
        summary=summarise(seeds),
        comparisons=(
            Comparison("TokenwiseModel", "ChowMean", 27.4, 22.1, 32.9),
            Comparison("TokenwiseModel", "TokenwiseScore", 38.9, 30.2, 47.7),
            Comparison("OneTimeModel", "ChowMean", 5.3, -1.6, 11.9),
            Comparison("WholeModelEmbed", "ChowMean", -10.2, -16.0, -4.1),
        ),
        paper={name: PaperFigure(None, None, mean, std) for name, (mean, std) in paper.items()},
        units=Units("squared error of the sequence (°C²)", "tokens per sequence"),
        notes=(
            "The noise of the simulated human is not given in the paper; here its standard deviation is 0.2 °C.",
            "OptimalToken is exact: all 64 decisions of a sequence are enumerated.",
        ),
        provenance=Provenance(
            version="0.1.0",
            command="seqdefer run weather --preset full --seeds 5 --out runs/weather",
            data={"jena": "sha256:5d41402abc4b2a76, 420 551 rows, 2009-01-01 to 2016-12-31"},
            models={"predictor": "LSTM 64, 18 000 parameters, a94f5374fce5", "expert": "truth + N(0, 0.2²)"},
            seeds=tuple(range(n_seeds)),
            machine={
                "cpu": "AMD EPYC 7763, 8 cores",
                "gpu": "NVIDIA A100-SXM4-40GB",
                "torch": "2.13.0",
                "os": "Linux 6.8",
            },
            seconds={"data": 3.2, "predictor": 95.0, "labels": 12.6, "rejectors": 241.8, "curves": 5.4},
            expert_calls=ExpertCalls(made=420_480, saved=4_063_360),
            settings={"epochs": 20, "learning_rate": 0.001, "surrogate": "logistic", "hidden": [64, 64]},
        ),
    )


def timed(results: Results) -> Results:
    """The same results with seconds: ten at the predictor's end, and two for each token."""
    methods = {"TokenwiseModel": (TimedSetting(0.1, 1.0, 12.0, 13.0), TimedSetting(0.6, 0.5, 19.0, 30.0))}
    timing = PairTiming(64, 32, 10.0, 22.0, 2.0, 0.5, methods, {"device": "cpu (abacus)", "cores": "3"})
    return replace(against(results, "seconds", "seconds per sequence", in_time), timing=timing)


def in_time(row: MethodResult) -> CostCurve:
    return CostCurve(2 * row.audc, row.improvement, tuple((10 + 2 * x, y) for x, y in row.curve))


def against(results: Results, cost: str, unit: str, curve: Callable[[MethodResult], CostCurve]) -> Results:
    """The same results with curves by another cost, and a difference by it."""

    def with_curves(seed: SeedResult) -> SeedResult:
        methods = {name: replace(row, against={cost: curve(row)}) for name, row in seed.methods.items()}
        return replace(seed, methods=methods)

    return replace(
        results,
        seeds=tuple(map(with_curves, results.seeds)),
        units=replace(results.units, costs={cost: unit}),
        cost_comparisons={cost: (Comparison("A", "B", 3.21, 1.0, 5.0),)},
    )


class Walk(HTMLParser):
    """A parser that checks that tags are closed in order, and collects text, tags and scripts."""

    VOID = frozenset({"input", "meta", "link", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"duplicate attribute in <{tag}>"
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.text).append(data)
