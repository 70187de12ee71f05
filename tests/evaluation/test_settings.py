"""What can be chosen of an experiment: settings, tasks, devices, methods, and what its networks start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import WithExpert, completing

from seqdefer.engine.drafts import draft
from seqdefer.environment import choose_device
from seqdefer.errors import DataError, OptionError
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings, experiment_settings
from seqdefer.hyperparameters import Settings
from seqdefer.interfaces import TaskEntry
from seqdefer.progress import Clock
from seqdefer.registry import find_tasks, load_task
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.training import BY_FACTS, PERCEPTRON, PRESETS, TRANSFORMER
from seqdefer.tasks.weather.task import ENTRY
from seqdefer.testing import ToyTask
from tests.evaluation.test_experiment import TINY


@pytest.mark.parametrize(
    "wrong",
    [{"seeds": 0}, {"instances": 0}, {"resamples": -1}, {"alpha": float("nan")}, {"alpha": float("inf")},
     {"alpha": -1.0}, {"phi": "hinge"}, {"psi": "squared"}, {"strategy": "luck"}],
)  # fmt: skip
def test_settings_are_checked_before_anything_is_done(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=str(next(iter(wrong.values())))):
        replace(TINY, **wrong)


@pytest.mark.parametrize("hand_offs", [-1, 0, 1, 7])
def test_hand_offs_out_of_range(hand_offs: int, tmp_path: Path) -> None:
    """0 once meant all of them."""
    with pytest.raises(OptionError, match="choose from 2 to 6"):
        Experiment(ToyTask(n=4), replace(TINY, hand_offs=hand_offs), tmp_path)


def test_too_many_instances_are_refused_before_labelling(tmp_path: Path) -> None:
    clock = Clock()
    with pytest.raises(DataError, match="the test split has 40 examples, 2 seeds x 21"):
        Experiment(ToyTask(n=40), replace(TINY, instances=21), tmp_path, clock).run()
    assert clock.seconds == {}


def test_presets_are_the_papers() -> None:
    paper, quick = (experiment_settings(load_task("weather"), preset) for preset in ("paper", "quick"))
    assert (paper.token, paper.once) == (PRESETS["mwp-token"], PRESETS["mwp-once"])
    assert (paper.seeds, paper.instances) == (5, 100)
    assert (quick.token.units, quick.once.units) == (paper.token.units, paper.once.units)
    assert quick.seeds < paper.seeds
    assert quick.token.epochs < paper.token.epochs


def test_tasks_are_found_by_name() -> None:
    assert "weather" in find_tasks()
    assert load_task("weather") is ENTRY
    with pytest.raises(OptionError, match=r"unknown task 'tps'; available: .*weather"):
        load_task("tps")


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda")
    for name in ("tpu", "cpu:x", "meta"):
        with pytest.raises(OptionError, match="device"):
            choose_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="device 'cuda' is not on this machine; use --device auto"):
            choose_device("cuda")


def test_only_the_methods_that_are_asked_for(tmp_path: Path) -> None:
    settings = replace(ExperimentSettings(), seeds=1, instances=8, methods=("ChowMean", "OneTimeModel"))
    results = Experiment(ToyTask(n=40), settings, tmp_path).run()
    references = {"Random", "OptimalWhole", "OptimalOneTime", "OptimalToken"}
    assert set(results.summary) == {"ChowMean", "OneTimeModel"} | references
    assert [path.name for path in (tmp_path / "rejectors").iterdir()] == ["OneTimeModel-seed0"]
    assert [(row.method, row.against) for row in results.comparisons] == [("OneTimeModel", "ChowMean")]


def test_a_method_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    settings = replace(ExperimentSettings(), seeds=1, instances=8, methods=("TokenwiseModel",))
    with pytest.raises(OptionError, match="'TokenwiseModel' does not apply to task 'toy'; available: ChowMean, "):
        Experiment(WithExpert(completing, n=20), settings, tmp_path).run()
    assert not list(tmp_path.iterdir())


# -- what networks start from --------------------------------------------------------------------------------------


def entry_for(hyperparameters: str) -> TaskEntry:
    return replace(ENTRY, hyperparameters=hyperparameters)


@pytest.mark.parametrize(
    ("hyperparameters", "once", "cost"),
    [("mwp", PRESETS["mwp-once"], PERCEPTRON), ("xsum", TRANSFORMER, TRANSFORMER), ("tsp", TRANSFORMER, TRANSFORMER)],
)
def test_what_scores_drafts_by_task_and_by_choice(hyperparameters: str, once: Settings, cost: Settings) -> None:
    entry = entry_for(hyperparameters)
    usual = experiment_settings(entry, "paper")
    assert (usual.once, usual.cost) == (once, cost)
    by_perceptron = experiment_settings(entry, "paper", "draft_mlp")
    assert (by_perceptron.once, by_perceptron.cost) == (PRESETS[f"{hyperparameters}-once"], PERCEPTRON)
    by_attention = experiment_settings(entry, "paper", "draft_transformer")
    assert by_attention.once == by_attention.cost == TRANSFORMER
    assert by_perceptron.token == by_attention.token == usual.token


def test_the_papers_network_by_token_comes_with_the_papers_hyperparameters() -> None:
    entry = entry_for("xsum")
    assert experiment_settings(entry, "paper").token == BY_FACTS
    assert experiment_settings(entry, "paper", architecture="lstm").token == PRESETS["xsum-token"]
    assert experiment_settings(entry, "paper", architecture="mlp").token == BY_FACTS
    assert experiment_settings(entry_for("mwp"), "paper", architecture="mlp").token == replace(
        PRESETS["mwp-token"], architecture="mlp"
    )


@pytest.mark.parametrize("hyperparameters", ["mwp", "xsum", "tsp"])
@pytest.mark.parametrize("architecture", [None, "draft_mlp", "draft_transformer"])
def test_quick_settings_are_the_same_but_smaller(hyperparameters: str, architecture: str | None) -> None:
    """And every one of them makes a network."""
    paper, quick = (experiment_settings(entry_for(hyperparameters), one, architecture) for one in ("paper", "quick"))
    drafted = draft(ToyTask(n=4).predictor, ToyTask(n=4).split("train"), ToyTask(n=4).spec)
    for one, other in ((paper.once, quick.once), (paper.cost, quick.cost)):
        assert one.architecture == other.architecture
        assert other.epochs < one.epochs
        assert other.units * other.layers <= one.units * one.layers
        for settings in (one, other):
            sizes = Sizes(2, 3, 5, True, settings.layers, settings.units, settings.dropout, (0, 5))
            assert draft_networks()[settings.architecture](sizes, "toy").eval().score(drafted).shape == (4, 2)


def test_hyperparameters_and_architectures_that_nobody_knows() -> None:
    with pytest.raises(
        OptionError,
        match=r"unknown hyperparameters of task 'weather' 'table 9'; available: mwp, pronounce, tsp, xsum",
    ):
        experiment_settings(entry_for("table 9"), "quick")
    message = "unknown architecture by draft 'lstm'; available: draft_mlp, draft_transformer"
    with pytest.raises(OptionError, match=message):
        experiment_settings(ENTRY, "quick", "lstm")
    with pytest.raises(OptionError, match="unknown token-level architecture 'gru'; available: lstm, mlp"):
        experiment_settings(ENTRY, "quick", architecture="gru")
