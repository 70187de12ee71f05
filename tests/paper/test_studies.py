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
from toy_studies import (
    ENTRIES,
    PLAN,
    RECIPES,
    RESAMPLES,
    SEEDS,
    TINY,
    Finished,
    cells_of,
    contents,
    open_lab,
    rows_of,
    settings_of_toy,
    toy_of,
)

from seqdefer.budgets.sweeps import Sweep
from seqdefer.engine.drafts import draft
from seqdefer.evaluation.areas import granularity_of
from seqdefer.evaluation.curves import Ends, Run, paired_bootstrap
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.results import Results
from seqdefer.evaluation.splits import Splits
from seqdefer.interfaces import Task
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.paper import studies
from seqdefer.paper.lab import DEFAULT_VARIANT, Lab, Variant
from seqdefer.paper.plan import PSIS, ablated_settings
from seqdefer.paper.records import Contrast, Line, Row, Study
from seqdefer.paper.reproduce import reproduce
from seqdefer.progress import Clock
from seqdefer.rejectors.losses import rule_of_thumb
from seqdefer.testing.fakes import blank_prefixes
from tests.evaluation.test_experiment import FITTED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("installed")]

each_task = pytest.mark.parametrize("name", ["spell", "solve"])
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
both_once = pytest.mark.parametrize(("name", "recipe"), [("spell", "published"), ("solve", "ours")])
USUAL_SIZE = {("spell", "ours"): 4, ("solve", "ours"): 5, ("spell", "published"): 3, ("solve", "published"): 3}

# -- against separate experiments ----------------------------------------------------------------------------------


def assert_same_figures(row: Row, results: Results) -> None:
    """The figures agree bit by bit: the same sums in the same order."""
    summary = results.summary[row.method]
    ours = (row.audc_mean, row.audc_std, row.improvement_mean, row.improvement_std)
    assert ours == (summary.audc_mean, summary.audc_std, summary.improvement_mean, summary.improvement_std)
    assert row.improvements == tuple(seed.methods[row.method].improvement for seed in results.seeds)


NamedResults = tuple[str, Results]


@pytest.fixture(scope="module", params=product(["spell", "solve"], RECIPES), ids="-".join)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NamedResults:
    """A recipe, and the results of `seqdefer run --recipe`."""
    name, recipe = request.param
    folder = tmp_path_factory.mktemp("plain")
    return recipe, Experiment(toy_of(name, recipe), settings_of_toy(name, recipe), folder).run()


def test_table_1_equals_a_run(plain: NamedResults, finished: Finished) -> None:
    recipe, results = plain
    rows = rows_of(finished.made["table1"][recipe], results.task)
    assert [row.method for row in rows] == list(results.summary)
    assert {row.method for row in rows} >= {"Random", "OptimalWhole", "OptimalOneTime", *FITTED[:2]}
    assert ("OneTimeCost" in {row.method for row in rows}) is (recipe == "ours")
    for row in rows:
        assert_same_figures(row, results)
        assert row.is_default
        assert not row.is_chosen
    assert rows == rows_of(finished.made["figure-curves"][recipe], results.task)


def test_contrasts_of_table_1_equal_those_of_a_run(plain: NamedResults, finished: Finished) -> None:
    recipe, results = plain
    study = finished.made["table1"][recipe]
    contrasts = {(one.first, one.second): one for one in study.contrasts if one.task == results.task}
    for one in results.comparisons:
        ours = contrasts.pop((one.method, one.against))
        assert ours.difference == one.difference
        assert ours.low <= ours.difference <= ours.high  # usually wider: runs are resampled too
    assert {first for first, _ in contrasts} <= {"WholeModelEmbed", "TokenwiseScore", "TokenwiseEntropy"}
    assert all(granularity_of(second) == "whole" for _, second in contrasts)


class SeparateRuns:
    """Variants of one task by one recipe, each fitted and swept by a separate experiment."""

    def __init__(self, name: str, recipe: str, folder: Path) -> None:
        self.task, self.recipe, self.folder = toy_of(name, recipe), recipe, folder
        task = self.task
        self.splits = Splits(task, folder, seeds=SEEDS, instances=12)
        self.runs = [dict[str, Sweep]() for _ in range(SEEDS)]

    def measure(self, label: str, method: str, **changes: Any) -> Results:
        settings = settings_of_toy(self.task.name, self.recipe, methods=(method,), **changes)
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


@both_once
def test_hand_offs_equal_separate_experiments(name: str, recipe: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["table-handoffs"][recipe], SeparateRuns(name, recipe, tmp_path)
    rows = rows_of(study, name)
    for row in rows:
        size = row.varied["hand_offs"]
        assert_same_figures(row, apart.measure(f"{row.method}, |J| = {size}", row.method, hand_offs=size))
        assert row.is_default is (size == USUAL_SIZE[name, recipe])
    methods = ["OneTimeModel", *["OneTimeCost"] * (recipe == "ours"), "OneTimeScore", "OneTimeEntropy"]
    sizes = (2, 3, apart.task.spec.length + 1)
    assert [(row.varied["hand_offs"], row.method) for row in rows] == list(product(sizes, methods))
    assert_same_contrasts(study, apart)


@both_once
def test_alphas_equal_separate_experiments(name: str, recipe: str, finished: Finished, tmp_path: Path) -> None:
    """Figures agree at all sizes of J; contrasts are of the recipe's alpha_1 with all others at the recipe's size."""
    study, apart = finished.made["figure-alpha"][recipe], SeparateRuns(name, recipe, tmp_path)
    usual, others = "", []
    for row in rows_of(study, name):
        size, alpha, usual_size = row.varied["hand_offs"], row.varied["alpha"], USUAL_SIZE[name, recipe]
        rule = " (rule of thumb)" if row.varied["is_rule"] else ""
        label = f"OneTimeModel, |J| = {size}, alpha = {alpha:.4g}{rule}"
        changes = {} if row.is_default else {"alpha": alpha, "hand_offs": size}  # the recipe's own need no change
        assert_same_figures(row, apart.measure(label, "OneTimeModel", **changes))
        if row.is_default:
            usual = label
        elif size == usual_size:
            others.append(label)
    contrasts = [one for one in study.contrasts if one.task == name]
    assert [(one.first, one.second) for one in contrasts] == [(usual, other) for other in others]
    assert len(others) >= len(PLAN.times)
    assert contrasts == [apart.contrast(usual, other) for other in others]


@both_once
def test_psis_equal_separate_experiments(name: str, recipe: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["table-psi"][recipe], SeparateRuns(name, recipe, tmp_path)
    rows = rows_of(study, name)
    assert [(row.varied, row.is_default) for row in rows] == [({"psi": psi}, psi == "cross_entropy") for psi in PSIS]
    for row in rows:
        psi = row.varied["psi"]
        assert_same_figures(row, apart.measure(f"OneTimeModel, {psi}", "OneTimeModel", psi=psi))
    assert rows[0].improvements != rows[1].improvements
    assert_same_contrasts(study, apart)


@each_recipe
def test_the_ablation_equals_separate_experiments(recipe: str, finished: Finished, tmp_path: Path) -> None:
    study, apart = finished.made["table-ablation"][recipe], SeparateRuns("spell", recipe, tmp_path)
    for row in study.rows:
        if row.varied:
            architecture, strategy = row.varied["architecture"], row.varied["strategy"]
            chosen = ablated_settings(ENTRIES["spell"], settings_of_toy("spell", recipe), architecture, strategy)
            label = f"{architecture.upper()}, {strategy}"
            changes = {"token": chosen.token, "strategy": strategy}
            assert_same_figures(row, apart.measure(label, "TokenwiseModel", **changes))
    assert len(apart.runs[0]) == 6
    assert_same_contrasts(study, apart)


@each_recipe
def test_the_ablation_has_the_baselines_of_table_1(recipe: str, finished: Finished) -> None:
    for name in ("TokenwiseScore", "TokenwiseEntropy"):
        (ours,), (default,) = (
            rows_of(finished.made[study][recipe], "spell", name) for study in ("table-ablation", "table1")
        )
        assert ours == default


# -- curves --------------------------------------------------------------------------------------------------------


def alone(task: Task) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the mean losses of predictor and expert alone on the test instances, seed by seed."""
    examples = task.split("test")
    drawn = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[: SEEDS * 12]
    examples = examples.select(drawn)
    drafted = draft(task.predictor, examples, task.spec).sequences
    completed = task.expert.complete(examples, blank_prefixes(examples, task.spec), task.spec)
    losses = [task.sequence_loss(examples, written).double().view(SEEDS, 12) for written in (drafted, completed)]
    return losses[0].mean(1).numpy(), losses[1].mean(1).numpy()


def lines_of(study: Study, task: str) -> dict[str, Line]:
    return {line.method: line for line in study.lines if line.task == task}


@each_recipe
@each_task
def test_curves_run_from_the_predictor_alone_to_the_expert_alone(name: str, recipe: str, finished: Finished) -> None:
    lines = lines_of(finished.made["figure-curves"][recipe], name)
    assert set(lines) == {row.method for row in rows_of(finished.made["table1"][recipe], name)}
    first, last = (losses.mean() for losses in alone(toy_of(name, recipe)))
    for method, line in lines.items():
        assert len(line.deferred) == len(line.mean) == len(line.std) == 101
        assert line.deferred == pytest.approx(np.linspace(0, line.deferred[-1], 101))
        if not method.startswith("Optimal"):  # oracles may start lower, and need not spend a budget
            assert (line.mean[0], line.mean[-1]) == pytest.approx((first, last))


# -- headroom ------------------------------------------------------------------------------------------------------


@each_recipe
@each_task
def test_headroom_is_the_share_of_what_a_free_expert_gives(name: str, recipe: str, finished: Finished) -> None:
    """A free expert improves Random, the mean of both losses p and e, by 100 (p - e) / (p + e)."""
    losses, expert = alone(toy_of(name, recipe))
    free = 100 * (losses - expert) / (losses + expert)
    assert (free > 0).all()
    for study in finished.made.values():
        for row in rows_of(study[recipe], name) if recipe in study else ():
            assert row.headroom == pytest.approx(np.mean(100 * np.array(row.improvements) / free)), row
    (best,) = rows_of(finished.made["table1"][recipe], name, "OptimalFree")
    assert best.headroom == pytest.approx(100)


@pytest.mark.parametrize("study", ["table1", "table-psi"])
def test_without_anything_to_gain_there_is_no_headroom(study: str, tmp_path: Path) -> None:
    """The predictor never errs, the expert does."""
    choices = replace(TINY, tasks=("solve",), recipes=("ours",), options={"solve": {"slips": "0"}})
    made = reproduce(study, tmp_path, choices)[study]["ours"]
    losses, expert = alone(toy_of("solve", "ours", slips=0))
    assert (losses <= expert).all()
    assert {row.headroom for row in made.rows} == {None}


# -- choices -------------------------------------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("name", ["table-handoffs", "figure-alpha", "table-psi"])
def test_validation_data_chooses_one_variant_of_each_method(name: str, recipe: str, finished: Finished) -> None:
    study = finished.made[name][recipe]
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
    found = studies._with_choices([*rows, *others])
    assert [row.is_chosen for row in found] == [place == chosen for place in range(len(rows))] + [True]


def training_table(task: Task) -> Any:
    examples = task.split("train")
    return hand_off_table(task, examples, draft(task.predictor, examples, task.spec))[0]


def assert_alphas_agree(study: Study, task: Task, times: Sequence[float]) -> None:
    """The grid crosses all sizes of J with the alphas of the plan, the recipe's and the rule of thumb, each once."""
    table, rows, recipe = training_table(task), rows_of(study, task.name), RECIPES[study.recipe]
    gain = float((table.loss[:, -1] - table.loss[:, 0]).double().mean())
    unit, rule = gain if gain > 0 else 1.0, rule_of_thumb(table)
    own = rule if recipe.alpha is None else recipe.alpha
    for row in rows:
        varied = row.varied
        assert varied["alpha"] == pytest.approx(varied["times"] * unit)
        assert varied["alpha_token"] == pytest.approx(varied["alpha"] / task.spec.length)
        assert varied["is_rule"] is (varied["alpha"] == rule)
        planned = [one * unit for one in times]
        assert varied["is_own"] is (varied["alpha"] == own or varied["alpha"] not in planned)
    alphas = sorted({own, rule, *(one * unit for one in times)})
    usual_size = recipe.hand_offs or task.spec.length + 1
    sizes = sorted({2, 3, usual_size, task.spec.length + 1})
    found = [(row.varied["hand_offs"], row.varied["alpha"]) for row in rows]
    assert found == list(product(sizes, alphas))
    (usual,) = (row for row in rows if row.is_default)
    assert (usual.varied["hand_offs"], usual.varied["alpha"]) == (usual_size, own)


@each_recipe
@each_task
def test_alphas_cross_the_sizes_of_j(name: str, recipe: str, finished: Finished) -> None:
    assert_alphas_agree(finished.made["figure-alpha"][recipe], toy_of(name, recipe), PLAN.times)


@each_recipe
@pytest.mark.parametrize(("slips", "gains"), [("2", True), ("0", False)])
def test_a_rule_of_thumb_of_zero(slips: str, gains: bool, recipe: str, tmp_path: Path) -> None:
    """With a good predictor the median gain is 0; where the mean is not above 0 either, the unit of alpha is 1."""
    choices = replace(TINY, tasks=("spell",), recipes=(recipe,), options={"spell": {"slips": slips}})
    study = reproduce("figure-alpha", tmp_path, choices)["figure-alpha"][recipe]
    assert_alphas_agree(study, toy_of("spell", recipe, slips=int(slips)), PLAN.times)
    rules = [row for row in study.rows if row.varied["is_rule"]]
    # The plan has it too, but it appears once for each size.
    assert [(row.varied["alpha"], row.varied["times"]) for row in rules] == [(0, 0)] * 3
    assert sum(row.varied["alpha"] == 0 for row in study.rows) == 3
    assert all(one.first != one.second for one in study.contrasts)
    assert sum(row.is_chosen for row in study.rows) == 1
    assert (max(row.varied["alpha"] for row in study.rows) == max(PLAN.times)) is not gains


def test_without_sizes_only_alpha_varies(tmp_path: Path) -> None:
    """A task whose plan has no sizes keeps the recipe's J."""
    plan = replace(PLAN, tasks={"spell": replace(PLAN.tasks["spell"], hand_offs=())})
    labs = {recipe: open_lab(tmp_path, toy_of("spell", recipe), recipe=recipe) for recipe in RECIPES}
    for recipe, lab in labs.items():
        maker = studies.Studies(plan, "tiny", recipe, SEEDS, lambda _, lab=lab: lab, Clock())
        rows = maker.alpha(lab).rows
        assert {row.varied["hand_offs"] for row in rows} == {USUAL_SIZE["spell", recipe]}
        alphas = [row.varied["alpha"] for row in rows]
        assert alphas == sorted({lab.alpha(DEFAULT_VARIANT), lab.facts.rule, *(one * lab.unit for one in PLAN.times)})


def test_a_rule_of_thumb_among_the_plans_multiples_appears_once(tmp_path: Path) -> None:
    lab = open_lab(tmp_path, toy_of("spell", "published"), recipe="published")
    plan = replace(PLAN, times=(0.0, lab.facts.rule / lab.unit, 0.5 / lab.unit))
    rows = studies.Studies(plan, "tiny", "published", SEEDS, lambda _: lab, Clock()).alpha(lab).rows
    alphas = sorted({0.0, lab.facts.rule, 0.5})
    assert [row.varied["alpha"] for row in rows] == alphas * 3
    assert sum(row.is_default for row in rows) == 1


def test_validation_figures_are_means_over_the_seeds(copied: Path, finished: Finished) -> None:
    """test_lab.py tests the figures of the cells."""
    reproduce("table-handoffs", copied, TINY)
    for name in PLAN.tasks:
        for recipe in RECIPES:
            settings = settings_of_toy(name, recipe)
            lab = Lab(ENTRIES[name], toy_of(name, recipe), settings, copied / name, Clock())
            for row in rows_of(finished.made["table-handoffs"][recipe], name):
                variant = DEFAULT_VARIANT if row.is_default else Variant(hand_offs=row.varied["hand_offs"])
                judged = [lab.cell(variant, row.method, seed).validation for seed in range(SEEDS)]
                assert row.validation == pytest.approx(np.mean([value for value in judged if value is not None]))


def choices_of(study: Study) -> list[Any]:
    return [(row.task, row.method, dict(row.varied), row.validation, row.is_chosen) for row in study.rows]


def test_no_choice_depends_on_test_data(finished: Finished, tmp_path: Path) -> None:
    """Other test data changes the figures, but no rejector, validation figure, alpha or choice."""
    other = {name: {"test_seed": "9"} for name in PLAN.tasks}
    made = reproduce("all", tmp_path, replace(TINY, options=other))
    for name, recipe in product(made, RECIPES):
        study, expected = made[name][recipe], finished.made[name][recipe]
        assert choices_of(study) == choices_of(expected)
        assert study.notes == expected.notes
        assert [row.improvement_mean for row in study.rows] != [row.improvement_mean for row in expected.rows]
    for task in PLAN.tasks:
        ours, theirs = (contents(folder / task / "rejectors") for folder in (tmp_path, finished.folder))
        assert len(ours) > 20
        assert ours == theirs
        assert not {path.name for path in cells_of(tmp_path / task)} & {path.name for path in cells_of(finished.folder)}
