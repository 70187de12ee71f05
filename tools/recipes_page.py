"""docs/recipes.md: what each recipe sets, by task, from the entries of the tasks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from page_parts import table

from seqdefer.hyperparameters import Settings
from seqdefer.interfaces import TaskEntry
from seqdefer.recipes import RECIPE_NAMES, LearningSettings, Recipe
from seqdefer.registry import load_task

TASKS = ("weather", "tsp", "xsum", "speech", "pronounce")
HEAD = """# Recipes

A recipe says how rejectors are made: what they see, their networks and hyperparameters, the losses and the training.
`published` is the paper's; `ours` is the default. `seqdefer run`, `fit`, `label` and `reproduce` take it as `--recipe`;
results and reports name it. `--preset` says how much data and how many seeds. Options on the command line override
both.

Networks are `kind layers x units`. *Inputs* are what a network sees of each step besides the context, which is the
encoder's state. What is the same in both columns is left out, except for the networks. By the published recipe the
paper's methods alone run: OneTimeCost is ours. The paper has neither `pronounce`, where `published` is what it sets for
short sequences, nor `speech`, where it is what it sets for summaries. `text` has the recipes of `xsum`, whose
published alpha_1 is for 20 tokens.
"""
PARTS = {
    "token": "TokenwiseModel",
    "once": "OneTimeModel",
    "whole": "WholeModelEmbed",
    "cost": "OneTimeCost",
}
WORDS = {
    "strategy": "training rollouts of TokenwiseModel",
    "price": "price added to each expert token",
    "hand_offs": "hand-offs that OneTimeModel chooses from",
    "alpha": "alpha_1, the cost of deferring a whole sequence",
    "rollouts": "rollouts of each example that closed and branched trees are made of",
}
ONLY_BY_TOKEN = ("token", "strategy", "price")
LONG = ("xsum", "speech")  # sequences of too many tokens to try all decisions
NONE = {"price": "5 % of the mean loss where some cost nothing", "hand_offs": "all", "alpha": "rule of thumb"}


def recipes_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *(_section(load_task(name)) for name in TASKS)])


def _section(entry: TaskEntry) -> str:
    recipes = [entry.recipes[name] for name in RECIPE_NAMES]
    unused = ONLY_BY_TOKEN if entry.name == "tsp" else ()  # a solver names no next token
    rows = [(PARTS[name], *(_network(one, name) for one in recipes)) for name in PARTS if name not in unused]
    for name in (field.name for field in fields(LearningSettings) if field.name not in (*PARTS, *unused, "trees")):
        values = [getattr(one, name) for one in recipes]
        if len(set(values)) > 1:
            rows.append((WORDS[name], *(_value(name, value) for value in values)))
    if entry.name in LONG:
        rows.append(("decision trees of training rollouts", *(one.tree_kind for one in recipes)))
    defaults = next(iter(entry.presets.values()))
    for option in dict.fromkeys(option for one in recipes for option in one.options):
        values = [one.options.get(option, getattr(defaults, option)) for one in recipes]
        rows.append((f"`--{option.replace('_', '-')}`", *(_value(option, value) for value in values)))
    return f"## {entry.name}\n\n{table(('', *RECIPE_NAMES), rows)}"


def _network(recipe: Recipe, name: str) -> str:
    settings: Settings = getattr(recipe, name) or recipe.once
    if name == "cost" and recipe.price == 0.0:
        return "not in the paper"
    return (
        f"`{settings.architecture}` {settings.layers} x {settings.units}, dropout {settings.dropout}, learning rate "
        f"{settings.learning_rate}, weight decay {settings.weight_decay}, up to {settings.epochs} epochs, patience "
        f"{settings.patience}; inputs: {', '.join(settings.inputs)}"
    )


def _value(name: str, value: Any) -> str:
    if value is None:
        return NONE[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
