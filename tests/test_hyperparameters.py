"""Hyperparameters: the record's bounds, and the paper's table in the recipes of the tasks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from seqdefer.errors import OptionError
from seqdefer.hyperparameters import COST_PERCEPTRON, INPUTS, STRATEGIES, Settings
from seqdefer.recipes import LearningSettings
from seqdefer.registry import load_task

PAPER_TABLE: dict[str, tuple[Any, ...]] = {
    "learning_rate": (5e-4, 1e-3, 5e-4, 5e-4, 5e-4),
    "patience": (20, 7, 20, 7, 20),
    "delta": (1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
    "architecture": ("draft_mlp", "lstm", "draft_mlp", "lstm", "draft_mlp"),
    "layers": (1, 3, 1, 2, 1),
    "units": (8, 128, 8, 64, 8),
    "dropout": (0.2, 0.4, 0.2, 0.4, 0.2),
    "epochs": (200, 100, 200, 100, 200),
    "samples": (2400, 800, 2400, 70080, 70080),
    "clip_norm": (1.0, 1.0, 1.0, 1.0, 1.0),
    "weight_decay": (0.005, 0.001, 0.005, 0.001, 0.005),
}


def test_published_recipes_hold_the_papers_table() -> None:
    tsp, xsum, weather = (load_task(name).recipes["published"] for name in ("tsp", "xsum", "weather"))
    columns = (tsp.once, xsum.token, xsum.once, weather.token, weather.once)
    for name, row in PAPER_TABLE.items():
        assert tuple(getattr(column, name) for column in columns) == row, name
    for recipe in (tsp, xsum, weather):
        assert (recipe.strategy, recipe.price) == ("free", 0.0)
        assert recipe.token.inputs == ("states",)
        assert recipe.once.inputs == ("states", "confidence")
        assert recipe.whole == replace(recipe.once, inputs=("confidence",))
    # The best sizes of J and costs alpha_L = 0.01 of its appendix; a loss of 1 is 100 here.
    assert (xsum.hand_offs, xsum.alpha) == (4, 0.01 * 100 * 20)
    assert (tsp.hand_offs, weather.hand_offs, weather.alpha) == (45, None, None)
    assert load_task("text").recipes["published"] == xsum


def test_presets_have_the_papers_numbers_of_samples() -> None:
    tsp, xsum, weather = (load_task(name) for name in ("tsp", "xsum", "weather"))
    recipes = [entry.recipes["published"] for entry in (tsp, xsum, weather)]
    assert tsp.presets["paper"].train == recipes[0].once.samples
    assert xsum.presets["paper-token"].train_documents == recipes[1].token.samples
    assert xsum.presets["paper-once"].train_documents == recipes[1].once.samples
    assert weather.presets["paper-size"].train_windows == recipes[2].token.samples == recipes[2].once.samples
    assert (xsum.presets["paper-token"].max_words, xsum.presets["paper-once"].max_words) == (14, 20)
    assert (tsp.presets["paper"].cities, xsum.presets["paper"].length) == (50, 20)


def test_ours_sees_all_there_is() -> None:
    for name in ("tsp", "xsum", "weather", "pronounce"):
        recipe = load_task(name).recipes["ours"]
        assert {one.inputs for one in (recipe.token, recipe.once, recipe.cost)} == {INPUTS}
        assert recipe.whole is None


@pytest.mark.parametrize(
    "wrong",
    [{"learning_rate": 0.0}, {"learning_rate": math.nan}, {"epochs": 0}, {"batch_size": 0}, {"layers": 0},
     {"units": -1}, {"patience": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": math.nan}, {"least_steps": 0},
     {"inputs": ()}, {"inputs": ("states", "luck")}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong)).removesuffix("s")):
        replace(COST_PERCEPTRON, **wrong)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        Settings(5e-4, 20, "draft_mlp", 1, 8, 0.2, 200, 0.005, 2400)  # type: ignore[misc]


def test_trees_follow_from_the_strategy_unless_chosen() -> None:
    kinds = {strategy: LearningSettings(strategy=strategy).tree_kind for strategy in STRATEGIES}
    assert kinds == {"free": "open", "teacher": "open", "scheduled": "open", "explore": "closed"}
    assert {LearningSettings(strategy=strategy, trees="closed").tree_kind for strategy in STRATEGIES} == {"closed"}
    assert LearningSettings(trees="open").tree_kind == "open"
