"""What can be chosen about an experiment: settings, tasks, devices, methods, and the settings of its networks."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from oracles import WithExpert, completing
from small_runs import TINY

from seqdefer.environment import choose_device
from seqdefer.errors import ContractError, OptionError
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings, experiment_settings, recipe_changes
from seqdefer.hyperparameters import ATTENTION, COST_PERCEPTRON, INPUTS
from seqdefer.methods.registry import all_methods
from seqdefer.recipes import RECIPE_NAMES, LearningSettings, recipe_in_words
from seqdefer.registry import find_tasks, load_task
from seqdefer.tasks.weather.task import ENTRY
from seqdefer.testing import ToyTask


@pytest.mark.parametrize(
    "wrong",
    [{"seeds": 0}, {"instances": 0}, {"resamples": -1}, {"alpha": float("nan")}, {"alpha": float("inf")},
     {"alpha": -1.0}, {"phi": "hinge"}, {"psi": "squared"}, {"strategy": "luck"}, {"trees": "ajar"},
     {"methods": ("Luck",)}],
)  # fmt: skip
def test_settings_are_checked_first(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=str(next(iter(wrong.values()))).strip("(',)")):
        replace(TINY, **wrong)


@pytest.mark.parametrize("hand_offs", [-1, 0, 1, 7])
def test_hand_offs_out_of_range(hand_offs: int, tmp_path: Path) -> None:
    """0 once meant all of them."""
    with pytest.raises(OptionError, match="give from 2 to 6"):
        Experiment(ToyTask(n=4), replace(TINY, hand_offs=hand_offs), tmp_path)


def test_tasks_are_found_by_name() -> None:
    assert "weather" in find_tasks()
    assert load_task("weather") is ENTRY
    with pytest.raises(OptionError, match=r"unknown task 'tps'; available: .*weather"):
        load_task("tps")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")
    for name in ("tpu", "cpu:x", "meta"):
        with pytest.raises(OptionError, match="device"):
            choose_device(name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(OptionError, match="device 'cuda' is not on this machine; use --device auto or --device cpu"):
        choose_device("cuda")


def test_only_chosen_methods_run(tmp_path: Path) -> None:
    settings = replace(ExperimentSettings(), seeds=1, instances=8, methods=("ChowMean", "OneTimeModel"))
    results = Experiment(ToyTask(n=40), settings, tmp_path).run()
    references = {"Random", "OptimalFree", "OptimalWhole", "OptimalOneTime", "OptimalToken", "MyopicToken"}
    assert set(results.summary) == {"ChowMean", "OneTimeModel"} | references
    assert [path.name for path in (tmp_path / "rejectors").iterdir()] == ["OneTimeModel-seed0"]
    assert [(row.method, row.against) for row in results.comparisons] == [("OneTimeModel", "ChowMean")]


def test_a_method_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    settings = replace(ExperimentSettings(), seeds=1, instances=8, methods=("TokenwiseModel",))
    with pytest.raises(OptionError, match=r"'TokenwiseModel' does not apply to task 'toy': .*; available: ChowMean, "):
        Experiment(WithExpert(completing, n=20), settings, tmp_path).run()
    assert not list(tmp_path.iterdir())


def test_a_method_that_needs_an_entropy_is_refused_before_labelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ToyTask(n=20)
    propose = task.predictor.propose
    monkeypatch.setattr(task.predictor, "propose", lambda state: replace(propose(state), entropy=None))
    settings = replace(ExperimentSettings(), seeds=1, instances=8, methods=("OneTimeEntropy",))
    with pytest.raises(OptionError, match=r"'OneTimeEntropy' .* gives no entropy .*; available: .*OneTimeScore"):
        Experiment(task, settings, tmp_path).run()
    assert not list(tmp_path.iterdir())


def test_a_whole_method_labels_the_ends_alone(tmp_path: Path) -> None:
    """It once labelled every hand-off of the grid."""
    kept = {
        method: Experiment(ToyTask(n=20), replace(ExperimentSettings(), methods=(method,)), tmp_path).splits.kept
        for method in ("ChowMean", "WholeModelEmbed", "OneTimeModel")
    }
    assert [len(each) for each in kept.values()] == [0, 1, ToyTask(n=20).spec.length]
    assert kept["WholeModelEmbed"] == (0,)


# -- the settings of networks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weather", "xsum", "tsp"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_settings_are_those_of_the_recipe(name: str, recipe: str) -> None:
    entry = load_task(name)
    settings, record = experiment_settings(entry, "paper", recipe=recipe), entry.recipes[recipe]
    assert settings.recipe == recipe
    for field in fields(LearningSettings):
        assert getattr(settings, field.name) == getattr(record, field.name)


def test_changes_of_a_recipe_are_named() -> None:
    entry = load_task("weather")
    for recipe in RECIPE_NAMES:
        options = replace(entry.presets["paper"], **entry.recipes[recipe].options)
        settings = experiment_settings(entry, "paper", recipe=recipe)
        assert recipe_changes(entry, options, settings) == ()
        assert recipe_changes(entry, replace(options, noise=3.0), replace(settings, seeds=2, instances=7)) == ()
        assert recipe_changes(entry, options, replace(settings, alpha=3.0, psi="mean_absolute_error")) == (
            "psi",
            "alpha",
        )
    ours = experiment_settings(entry, "paper")
    assert recipe_changes(entry, replace(entry.presets["paper"], facts=False), ours) == ("facts",)
    assert recipe_in_words("ours", ()) == "ours"
    assert recipe_in_words("published", ("facts", "alpha")) == "published, changed: facts, alpha"
    papers = experiment_settings(entry, "paper", recipe="published")
    options = replace(entry.presets["paper"], **entry.recipes["published"].options)
    assert recipe_changes(entry, replace(options, facts=True), papers) == ("facts",)
    assert recipe_changes(entry, options, replace(papers, methods=("OneTimeModel", "OneTimeCost"))) == ("methods",)
    assert recipe_changes(entry, options, replace(papers, methods=("OneTimeModel",))) == ()


def test_the_published_recipe_runs_the_papers_methods() -> None:
    ours, papers = (experiment_settings(ENTRY, "quick", recipe=recipe) for recipe in ("ours", "published"))
    assert [name for name in all_methods() if ours.wants(name) != papers.wants(name)] == ["OneTimeCost"]
    assert replace(papers, methods=("OneTimeCost",)).wants("OneTimeCost")


@pytest.mark.parametrize("name", ["weather", "xsum", "tsp"])
def test_draft_settings_by_architecture(name: str) -> None:
    entry = load_task(name)
    default = experiment_settings(entry, "paper")
    by_perceptron = experiment_settings(entry, "paper", "draft_mlp")
    assert by_perceptron.once == replace(entry.recipes["published"].once, inputs=INPUTS)
    assert by_perceptron.cost == COST_PERCEPTRON
    by_attention = experiment_settings(entry, "paper", "draft_transformer")
    assert by_attention.once == by_attention.cost == ATTENTION
    assert by_perceptron.token == by_attention.token == default.token
    papers = experiment_settings(entry, "paper", "draft_transformer", recipe="published")
    assert papers.once == replace(ATTENTION, inputs=("states", "confidence"))
    assert papers.whole == replace(ATTENTION, inputs=("confidence",))


def test_the_papers_token_network_comes_with_the_papers_hyperparameters() -> None:
    xsum = load_task("xsum")
    papers, ours = xsum.recipes["published"].token, xsum.recipes["ours"].token
    by_lstm = experiment_settings(xsum, "paper", architecture="lstm").token
    assert by_lstm == replace(papers, inputs=INPUTS) != ours
    assert experiment_settings(xsum, "paper", architecture="mlp").token == ours
    by_mlp = experiment_settings(ENTRY, "paper", architecture="mlp").token
    assert by_mlp == replace(ENTRY.recipes["ours"].token, architecture="mlp")


@pytest.mark.parametrize("name", ["weather", "xsum", "tsp", "pronounce"])
@pytest.mark.parametrize("recipe", ["ours", "published"])
def test_presets_change_sizes_and_nothing_else(name: str, recipe: str) -> None:
    """A preset says how much data and how many seeds there are; a recipe says how rejectors are made."""
    entry = load_task(name)
    paper, quick = (experiment_settings(entry, one, recipe=recipe) for one in ("paper", "quick"))
    assert quick.seeds < paper.seeds
    assert replace(quick, seeds=paper.seeds, instances=paper.instances) == paper


def test_unknown_architectures_and_recipes_are_named() -> None:
    with pytest.raises(ContractError, match="recipe 'ours' of task 'weather' is 'table 9'; give a record"):
        experiment_settings(replace(ENTRY, recipes={"ours": "table 9"}), "quick")
    with pytest.raises(OptionError, match="unknown recipe of task weather 'papers'; available: ours, published"):
        experiment_settings(ENTRY, "quick", recipe="papers")
    message = "unknown draft architecture 'lstm'; available: draft_mlp, draft_transformer"
    with pytest.raises(OptionError, match=message):
        experiment_settings(ENTRY, "quick", "lstm")
    with pytest.raises(OptionError, match="unknown token-level architecture 'gru'; available: lstm, mlp"):
        experiment_settings(ENTRY, "quick", architecture="gru")
