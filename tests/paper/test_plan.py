"""Plans name tasks and options that exist, and change only what they study."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seqdefer.paper import plan
from seqdefer.paper.plan import settings_of
from seqdefer.recipes import RECIPE_NAMES
from seqdefer.registry import load_task

planned = pytest.mark.parametrize(
    ("preset", "name"), [(preset, name) for preset in ("paper", "quick") for name in plan.PLANS[preset].tasks]
)


@planned
def test_plans_name_tasks_and_options_that_exist(preset: str, name: str) -> None:
    entry, task = load_task(name), plan.PLANS[preset].tasks[name]
    for recipe in RECIPE_NAMES:  # raises for unknown names and values out of range
        replace(entry.presets[task.preset], **{**entry.recipes[recipe].options, **task.options})
        settings = settings_of(entry, task, 7, recipe)
        assert (settings.recipe, settings.seeds) == (recipe, 7)
    assert not {*task.options} & {key for recipe in RECIPE_NAMES for key in entry.recipes[recipe].options}
    assert plan.PLANS[preset].ablated_task in plan.PLANS[preset].tasks


@planned
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_cells_of_the_ablation_differ_only_in_what_is_ablated(preset: str, name: str, recipe: str) -> None:
    """Both architectures have the paper's hyperparameters, with at most the epochs of the preset."""
    entry, task = load_task(name), plan.PLANS[preset].tasks[name]
    default = settings_of(entry, task, 2, recipe)
    papers = replace(entry.recipes["published"].token, inputs=default.token.inputs)
    for architecture in plan.ARCHITECTURES:
        for strategy in plan.STRATEGIES:
            chosen = plan.ablated_settings(entry, default, architecture, strategy)
            assert (chosen.token.architecture, chosen.strategy) == (architecture, strategy)
            assert chosen.token.epochs <= default.token.epochs
            same = replace(chosen.token, architecture=papers.architecture, epochs=papers.epochs)
            assert same == papers
            assert replace(chosen, token=default.token, strategy=default.strategy) == default
