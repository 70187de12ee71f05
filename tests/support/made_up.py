"""Made-up records of studies, for the tests of tables, figures and claims."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from seqdefer.evaluation.areas import granularity_of
from seqdefer.evaluation.published import PAPER
from seqdefer.evaluation.results import PaperFigure, mean_and_std
from seqdefer.methods.registry import usual_methods
from seqdefer.paper.records import Contrast, Judgement, Judgements, Line, Row, Study, StudyTask
from seqdefer.report.style import block_of

SEEDS = 3
TASKS = {
    "tsp": StudyTask(50, "% longer than the expert's tour"),
    "xsum": StudyTask(20, "100 × (1 − ROUGE-1)"),
    "weather": StudyTask(6, "squared error of the sequence (°C²)"),
}
NAMES = ("Random", "OptimalToken", "OptimalOneTime", *usual_methods())
METHODS = {name: block_of(name, granularity_of(name)) for name in NAMES}


def make_row(task: str, method: str, around: float, chance: random.Random, **more: Any) -> Row:
    """Make a row whose improvements scatter around a value."""
    improvements = tuple(around + chance.gauss(0, 1 + abs(around) / 10) * (method != "Random") for _ in range(SEEDS))
    areas = [300 * (1 - one / 100) for one in improvements]
    return Row(task, method, METHODS[method], *mean_and_std(areas), *mean_and_std(improvements), improvements, **more)


def of_both(name: str, *given: Any) -> list[Study]:
    """Return the studies of one name as published and ours. The published one lacks what the paper lacks."""
    ours = STUDIES[name](*given)
    rows, lines = (tuple(one for one in of if one.method != "OneTimeCost") for of in (ours.rows, ours.lines))
    published = tuple(_shifted(row) for row in rows)
    return [replace(ours, recipe="published", rows=published, lines=lines), ours]


def _shifted(row: Row) -> Row:
    """Return another outcome for the other recipe."""
    improvements = tuple(one - 1.25 * (row.method != "Random") for one in row.improvements)
    return replace(row, improvement_mean=mean_and_std(improvements)[0], improvements=improvements)


def make_study(name: str, tasks: Sequence[str], rows: Sequence[Row], **more: Any) -> Study:
    counts = dict.fromkeys(tasks, 100)
    known = {task: TASKS.get(task, StudyTask(10, "loss")) for task in tasks}
    recipe = more.pop("recipe", "ours")
    return Study(name, f"Made up {name}", recipe, "paper", SEEDS, counts, known, tuple(rows), **more)


def table1(tasks: Sequence[str] = tuple(TASKS), name: str = "table1", **more: Any) -> Study:
    chance = random.Random(0)
    rows = []
    for task in tasks:
        papers = PAPER.get(task, {})
        for method in METHODS if task not in TASKS else [m for m in METHODS if m in papers or m == "OneTimeCost"]:
            paper = papers.get(method)
            around = 1.5 * paper.improvement + 1 if paper and method != "Random" else 0.0
            rows.append(make_row(task, method, around, chance, is_default=True, paper=paper))
    return make_study(name, tasks, rows, **more)


def curves(tasks: Sequence[str] = tuple(TASKS)) -> Study:
    study = table1(tasks)
    lines = [make_line(row, study.tasks[row.task].length) for row in study.rows]
    return table1(tasks, "figure-curves", lines=tuple(lines))


def make_line(row: Row, length: int) -> Line:
    """Make a curve that sags below the straight line in proportion to the improvement."""
    shares = [step / 100 for step in range(101)]
    sag = row.improvement_mean / 100 * 6
    mean = tuple(12 * (1 - share) * (1 - sag * share / 2) + 2 for share in shares)
    std = tuple(0.8 * share * (1 - share) + 0.4 * (1 - share) for share in shares)
    return Line(row.task, row.method, row.granularity, tuple(length * share for share in shares), mean, std)


def hand_offs(tasks: Sequence[str] = ("tsp", "xsum")) -> Study:
    chance = random.Random(1)
    rows = []
    for task in tasks:
        for size in (5, 10, 15, 20, 25, 30, 35, 40, 45, 51) if task == "tsp" else (3, 4, 5, 7, 10, 13, 15, 17, 21):
            for method, around in {
                "OneTimeModel": 9.0,
                "OneTimeCost": 11.0,
                "OneTimeScore": -4.0,
                "OneTimeEntropy": -5.0,
            }.items():
                rows.append(
                    make_row(
                        task,
                        method,
                        around - 10 / size,
                        chance,
                        varied={"hand_offs": size},
                        validation=around + size / 100,
                        is_default=size in (51, 21),
                        is_chosen=size == {"tsp": 45}.get(task, 10) and method in ("OneTimeModel", "OneTimeCost"),
                        paper=PaperFigure(None, None, around - 2, 1.5) if method != "OneTimeCost" else None,
                    )
                )
    return make_study("table-handoffs", tasks, rows)


def alpha(
    tasks: Sequence[str] = tuple(TASKS),
    *,
    sizes: Sequence[int] = (51,),
    times: Sequence[float] = (0.0, 0.0625, 0.25, 0.5, 0.83, 1.0, 2.0, 4.0, 16.0),
    is_rule: bool = True,
) -> Study:
    """Cross sizes of J with multiples of alpha_1; 0.83 is the recipe's own, the rule of thumb or another."""
    chance = random.Random(2)
    rows = [
        make_row(
            task,
            "OneTimeModel",
            10 - abs(one - 1) - size / 20,
            chance,
            varied={
                "hand_offs": size,
                "times": one,
                "alpha": 3.1 * one,
                "alpha_token": 0.062 * one,
                "is_rule": is_rule and one == 0.83,
                "is_own": one == 0.83,
            },
            validation=10 - abs(one - 2),
            is_default=(size, one) == (51, 0.83),
            is_chosen=(size, one) == (sizes[-1], 2),
        )
        for task in tasks
        for size in sizes
        for one in times
    ]
    return make_study("figure-alpha", tasks, rows)


def psi(tasks: Sequence[str] = tuple(TASKS)) -> Study:
    chance = random.Random(4)
    names = ("cross_entropy", "mean_absolute_error")
    rows = [
        make_row(task, "OneTimeModel", 5, chance, varied={"psi": name}, is_default=name == names[0])
        for task in tasks
        for name in names
    ]
    return make_study("table-psi", tasks, rows)


def ablation(tasks: Sequence[str] = ("xsum",)) -> Study:
    chance = random.Random(3)
    rows = []
    for task in tasks:
        for architecture in ("lstm", "mlp"):
            for strategy in ("free", "teacher", "scheduled"):
                varied = {"architecture": architecture, "strategy": strategy}
                paper = PaperFigure(1340.0, 20.0, 6.0 + len(strategy) / 10, 1.0)
                rows.append(make_row(task, "TokenwiseModel", 5, chance, varied=varied, paper=paper))
        for method in ("TokenwiseScore", "TokenwiseEntropy"):
            rows.append(make_row(task, method, 3, chance, is_default=True, paper=PaperFigure(None, None, 5.5, None)))
    return make_study("table-ablation", tasks, rows, notes=("The networks are the paper's.",))


STUDIES = {
    "table1": table1,
    "figure-curves": curves,
    "table-handoffs": hand_offs,
    "figure-alpha": alpha,
    "table-psi": psi,
    "table-ablation": ablation,
}


def judgements() -> Judgements:
    holds = Contrast("tsp", "OneTimeModel", "ChowMean", 5.336, 3.1, 7.25)
    fails = Contrast("xsum", "OneTimeModel", "ChowMean", -1.5, -3.0, -0.25)
    several = (fails, Contrast("xsum", "OneTimeModel, |J| = 5", "ChowSum", 0.5, -1.0, 2.0))
    statement = "Partial deferral beats whole deferral"
    rows = (
        Judgement("partial-beats-whole", statement, "tsp", "ours", "holds", (holds,)),
        Judgement(
            "partial-beats-whole", statement, "xsum", "ours", "does not hold", several, "The expert hardly helps"
        ),
        Judgement("fewer-points", "Fewer hand-off points do better", "tsp", "ours", "undecided", (), "Too few runs"),
    )
    return Judgements("paper", SEEDS, rows)
