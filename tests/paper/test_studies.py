"""Studies report what separate experiments measure, and make every choice without test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_studies import ENTRIES, PLAN, RESAMPLES, SEEDS, TINY, Finished, Toy, cells_of, contents, rows_of

from seqdefer.budgets.sweeps import Sweep
from seqdefer.engine.drafts import draft
from seqdefer.evaluation.curves import Ends, Run, paired_bootstrap
from seqdefer.evaluation.experiment import Experiment, granularity_of
from seqdefer.evaluation.results import Results
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.evaluation.splits import Splits
from seqdefer.interfaces import Task
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.paper import studies
from seqdefer.paper.lab import DEFAULT_VARIANT, Lab, Variant
from seqdefer.paper.plan import ablated_settings, settings_of
from seqdefer.paper.records import Contrast, Line, Row, Study
from seqdefer.paper.reproduce import reproduce
from seqdefer.progress import Clock
from seqdefer.rejectors.losses import rule_of_thumb
from seqdefer.testing.fakes import blank_prefixes
from tests.evaluation.test_experiment import FITTED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("installed")]

# -- against separate experiments ----------------------------------------------------------------------------------


def settings_of_toy(name: str, **changes: Any) -> ExperimentSettings:
    return replace(settings_of(ENTRIES[name], PLAN.tasks[name], SEEDS), **changes)


def toy(name: str, **changes: Any) -> Toy:
    return Toy(name, replace(ENTRIES[name].presets["tiny"], **changes))


def assert_same_figures(row: Row, results: Results) -> None:
    """The figures agree bit by bit: the same sums in the same order."""
    summary = results.summary[row.method]
    ours = (row.audc_mean, row.audc_std, row.improvement_mean, row.improvement_std)
    assert ours == (summary.audc_mean, summary.audc_std, summary.improvement_mean, summary.improvement_std)
    assert row.improvements == tuple(seed.methods[row.method].improvement for seed in results.seeds)


@pytest.fixture(scope="module", params=["spell", "solve"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of `seqdefer run`."""
    name: str = request.param
    return Experiment(toy(name), settings_of_toy(name), tmp_path_factory.mktemp("plain")).run()


def test_table_1_equals_a_run(plain: Results, finished: Finished) -> None:
    rows = rows_of(finished.made["table1"], plain.task)
    assert [row.method for row in rows] == list(plain.summary)
    assert {row.method for row in rows} >= {"Random", "OptimalWhole", "OptimalOneTime", *FITTED[:3]}
    for row in rows:
        assert_same_figures(row, plain)
        assert row.is_default
        assert not row.is_chosen
    assert rows == rows_of(finished.made["figure-curves"], plain.task)


def test_contrasts_of_table_1_equal_those_of_a_run(plain: Results, finished: Finished) -> None:
    contrasts = {(one.first, one.second): one for one in finished.made["table1"].contrasts if one.task == plain.task}
    for one in plain.comparisons:
        ours = contrasts.pop((one.method, one.against))
        assert ours.difference == one.difference
        assert ours.low <= ours.difference <= ours.high  # usually wider: runs are resampled too
    assert {first for first, _ in contrasts} <= {"WholeModelEmbed", "TokenwiseScore", "TokenwiseEntropy"}
    assert all(granularity_of(second) == "whole" for _, second in contrasts)


class SeparateRuns:
    """Variants of one task, each fitted and swept by a separate experiment."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.folder = task, folder
        self.splits = Splits(task, folder, seeds=SEEDS, instances=12)
        self.runs = [dict[str, Sweep]() for _ in range(SEEDS)]

    def measure(self, label: str, method: str, **changes: Any) -> Results:
        settings = settings_of_toy(self.task.name, methods=(method,), **changes)
        plain = Experiment(self.task, settings, self.folder, splits=self.splits, variant=label)
        results = plain.run()
        for seed, sweeps in enumerate(self.runs):
            rejectors = plain.fit(self.splits.train, self.splits.validation, seed)
            sweeps[label] = plain.sweep(seed, rejectors).sweeps[method]
        return results

    def contrast(self, first: str, second: str) -> Contrast:
        test, splits = self.splits.test.table, self.splits
        runs = [Run(Ends.of(test.select(splits.rows(seed))), sweeps) for seed, sweeps in enumerate(self.runs)]
        found = paired_bootstrap(runs, first, second, n_resamples=RESAMPLES, over_runs=True)
        return Contrast(self.task.name, first, second, found.difference, found.low, found.high)


def assert_same_contrasts(study: Study, apart: SeparateRuns) -> None:
    """All contrasts between the variants agree."""
    labels = set(apart.runs[0])
    contrasts = [one for one in study.contrasts if one.task == apart.task.name and {one.first, one.second} <= labels]
    assert {label for one in contrasts for label in (one.first, one.second)} == labels
    assert contrasts == [apart.contrast(one.first, one.second) for one in contrasts]


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_hand_offs_equal_separate_experiments(name: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["table-handoffs"], SeparateRuns(toy(name), tmp_path)
    rows = rows_of(study, name)
    for row in rows:
        size = row.varied["hand_offs"]
        assert_same_figures(row, apart.measure(f"{row.method}, |J| = {size}", row.method, hand_offs=size))
        assert row.is_default is (size == apart.task.spec.length + 1)
    methods = ("OneTimeModel", "OneTimeCost", "OneTimeScore", "OneTimeEntropy")
    sizes = (2, 3, apart.task.spec.length + 1)
    assert [(row.varied["hand_offs"], row.method) for row in rows] == list(product(sizes, methods))
    assert_same_contrasts(study, apart)


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_alphas_equal_separate_experiments(name: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["figure-alpha"], SeparateRuns(toy(name), tmp_path)
    for row in rows_of(study, name):
        label = f"OneTimeModel, alpha = {row.varied['alpha']:.4g}{' (rule of thumb)' if row.is_default else ''}"
        changes = {} if row.is_default else {"alpha": row.varied["alpha"]}  # the rule of thumb is the default
        assert_same_figures(row, apart.measure(label, "OneTimeModel", **changes))
    assert len(apart.runs[0]) == len(PLAN.times) + 1
    assert_same_contrasts(study, apart)


@pytest.mark.parametrize("inputs", ["blind", "own"])
def test_the_ablation_equals_separate_experiments(inputs: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["table-ablation"], SeparateRuns(toy("spell", blind=inputs == "blind"), tmp_path)
    for row in study.rows:
        if row.varied.get("inputs") == inputs:
            architecture, strategy = row.varied["architecture"], row.varied["strategy"]
            chosen = ablated_settings(ENTRIES["spell"], settings_of_toy("spell"), architecture, strategy)
            label = f"{architecture.upper()}, {strategy}, {inputs}"
            changes = {"token": chosen.token, "strategy": strategy}
            assert_same_figures(row, apart.measure(label, "TokenwiseModel", **changes))
    assert len(apart.runs[0]) == 6
    assert_same_contrasts(study, apart)


def test_the_ablation_has_the_baselines_of_table_1(finished: Finished) -> None:
    for name in ("TokenwiseScore", "TokenwiseEntropy"):
        (ours,), (default,) = (rows_of(finished.made[study], "spell", name) for study in ("table-ablation", "table1"))
        assert ours == default


# -- curves --------------------------------------------------------------------------------------------------------


def alone(task: Task) -> tuple[float, float]:
    """Return the mean losses of predictor and expert alone on the test instances of all seeds."""
    examples = task.split("test")
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[: SEEDS * 12]
    examples = examples.select(drawn)
    drafted = draft(task.predictor, examples, task.spec).sequences
    completed = task.expert.complete(examples, blank_prefixes(examples, task.spec), task.spec)
    losses = [task.sequence_loss(examples, written).double().view(SEEDS, 12) for written in (drafted, completed)]
    return float(losses[0].mean()), float(losses[1].mean())


def lines_of(study: Study, task: str) -> dict[str, Line]:
    return {line.method: line for line in study.lines if line.task == task}


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_curves_run_from_the_predictor_alone_to_the_expert_alone(name: str, finished: Finished) -> None:
    lines = lines_of(finished.made["figure-curves"], name)
    assert set(lines) == {row.method for row in rows_of(finished.made["table1"], name)}
    first, last = alone(toy(name))
    for method, line in lines.items():
        assert len(line.deferred) == len(line.mean) == len(line.std) == 101
        assert line.deferred == pytest.approx(np.linspace(0, line.deferred[-1], 101))
        if not method.startswith("Optimal"):  # oracles may start lower, and need not spend a budget
            assert (line.mean[0], line.mean[-1]) == pytest.approx((first, last))


# -- choices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table-handoffs", "figure-alpha"])
def test_validation_data_chooses_one_variant_of_each_method(name: str, finished: Finished) -> None:
    study = finished.made[name]
    for task in study.tasks:
        for method in {row.method for row in rows_of(study, task)}:
            rows = rows_of(study, task, method)
            judged = [row.validation for row in rows]
            assert None not in judged
            (chosen,) = (row for row in rows if row.is_chosen)
            assert chosen.validation == max(value for value in judged if value is not None)


def judged_row(value: float | None, size: int, method: str = "OneTimeModel") -> Row:
    return Row("toy", method, "once", 1.0, 0.0, 1.0, 0.0, (1.0,), {"hand_offs": size}, validation=value)


@pytest.mark.parametrize(
    ("judged", "chosen"),
    [([1.0, 3.0, 2.0], 1), ([2.0, 1.0, 2.0], 0), ([-1.0, -1.0], 0), ([None, -5.0, None], 1), ([None, None], None)],
)
def test_one_variant_is_chosen_among_equals(judged: Sequence[float | None], chosen: int | None) -> None:
    """All equals used to be marked; a claim then took the first, and a figure circled all."""
    rows = [judged_row(value, size) for size, value in enumerate(judged)]
    others = [judged_row(100.0, 9, "OneTimeCost")]  # another method, with a choice of its own
    found = studies._with_choices(studies.MeasuredRows([*rows, *others], []))
    assert [row.is_chosen for row in found.rows] == [place == chosen for place in range(len(rows))] + [True]


def training_table(task: Task) -> Any:
    examples = task.split("train")
    return hand_off_table(task, examples, draft(task.predictor, examples, task.spec))[0]


def assert_alphas_agree(study: Study, task: Task, times: Sequence[float]) -> None:
    table, rows = training_table(task), rows_of(study, task.name)
    gain = float((table.loss[:, -1] - table.loss[:, 0]).double().mean())
    unit = gain if gain > 0 else 1.0
    for row in rows:
        varied = row.varied
        assert varied["alpha"] == pytest.approx(varied["times"] * unit)
        assert varied["alpha_token"] == pytest.approx(varied["alpha"] / task.spec.length)
    (rule,) = (row for row in rows if row.is_default)
    assert rule.varied["alpha"] == rule_of_thumb(table)
    others = sorted(one for one in times if one * unit != rule.varied["alpha"])
    assert sorted(row.varied["times"] for row in rows if row is not rule) == pytest.approx(others)
    assert [row.varied["alpha"] for row in rows] == sorted(row.varied["alpha"] for row in rows)


@pytest.mark.parametrize("name", ["spell", "solve"])
def test_alphas_agree_with_the_rule_of_thumb(name: str, finished: Finished) -> None:
    assert_alphas_agree(finished.made["figure-alpha"], toy(name), PLAN.times)


@pytest.mark.parametrize(("slips", "gains"), [("2", True), ("0", False)])
def test_a_rule_of_thumb_of_zero(slips: str, gains: bool, tmp_path: Path) -> None:
    """With a good predictor the median gain is 0; where the mean is not above 0 either, the unit of alpha is 1."""
    choices = replace(TINY, tasks=("spell",), options={"spell": {"slips": slips}})
    study = reproduce("figure-alpha", tmp_path, choices)["figure-alpha"]
    assert_alphas_agree(study, toy("spell", slips=int(slips)), PLAN.times)
    (rule,) = (row for row in study.rows if row.is_default)
    assert (rule.varied["alpha"], rule.varied["times"]) == (0, 0)
    assert sum(row.varied["alpha"] == 0 for row in study.rows) == 1  # the plan has it too, but it appears once
    assert all(one.first != one.second for one in study.contrasts)
    assert sum(row.is_chosen for row in study.rows) == 1
    assert (max(row.varied["alpha"] for row in study.rows) == max(PLAN.times)) is not gains


def test_validation_figures_are_means_over_the_seeds(copied: Path, finished: Finished) -> None:
    """test_lab.py tests the figures of the cells."""
    reproduce("table-handoffs", copied, TINY)
    for name in PLAN.tasks:
        lab = Lab(ENTRIES[name], toy(name), settings_of_toy(name), copied / name, Clock())
        for row in rows_of(finished.made["table-handoffs"], name):
            variant = DEFAULT_VARIANT if row.is_default else Variant(hand_offs=row.varied["hand_offs"])
            judged = [lab.cell(variant, row.method, seed).validation for seed in range(SEEDS)]
            assert row.validation == pytest.approx(np.mean([value for value in judged if value is not None]))


def choices_of(study: Study) -> list[Any]:
    return [(row.task, row.method, dict(row.varied), row.validation, row.is_chosen) for row in study.rows]


def test_no_choice_depends_on_test_data(finished: Finished, tmp_path: Path) -> None:
    """Other test data changes the figures, but no rejector, validation figure, alpha or choice."""
    other = {name: {"test_seed": "9"} for name in PLAN.tasks}
    made = reproduce("all", tmp_path, replace(TINY, options=other))
    for name, study in made.items():
        expected = finished.made[name]
        assert choices_of(study) == choices_of(expected)
        assert study.notes == expected.notes
        assert [row.improvement_mean for row in study.rows] != [row.improvement_mean for row in expected.rows]
    for task in PLAN.tasks:
        ours, theirs = (contents(folder / task / "rejectors") for folder in (tmp_path, finished.folder))
        assert len(ours) > 20
        assert ours == theirs
        assert not {path.name for path in cells_of(tmp_path / task)} & {path.name for path in cells_of(finished.folder)}
