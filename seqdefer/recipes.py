"""Recipes: how the rejectors of a task are made, whatever the amount of data.

`published` is the paper's: its inputs, networks, hyperparameters, losses and training. `ours` is the default. A task
names both in its entry (`TaskEntry.recipes`); docs/recipes.md is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from seqdefer.hyperparameters import (
    COST_PERCEPTRON,
    LSTM,
    PERCEPTRON,
    PUBLISHED_ONCE,
    PUBLISHED_TOKEN,
    Settings,
    Strategy,
)

RecipeName = Literal["ours", "published"]
RECIPE_NAMES: tuple[RecipeName, ...] = get_args(RecipeName)
IN_WORDS = {"published": "as published", "ours": "ours"}


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """What can be chosen about fitting, whatever the task and the method."""

    token: Settings = LSTM
    once: Settings = PERCEPTRON
    whole: Settings | None = None  # None: as once
    cost: Settings = COST_PERCEPTRON  # estimates of losses (OneTimeCost)
    phi: str = "logistic"
    psi: str = "cross_entropy"
    strategy: Strategy = "explore"
    hand_offs: int | None = None  # size of J; None allows them all
    alpha: float | None = None  # alpha_1; None is the rule of thumb
    rollouts: int = 8  # of each example that token-level rejectors learn from, where sequences are long
    price: float | None = None  # added to the cost of each expert token; None: a little where some cost nothing


@dataclass(frozen=True, kw_only=True)
class Recipe(LearningSettings):
    """The learning settings of a task, and changes to its options: what rejectors see, how losses are measured."""

    options: Mapping[str, Any] = field(default_factory=dict)


def published(token: Settings = PUBLISHED_TOKEN, once: Settings = PUBLISHED_ONCE, **choices: Any) -> Recipe:
    """Return the paper's recipe: training without teacher forcing, no price, and a whole-sequence rejector that sees
    the predictor's input and confidence."""
    whole = replace(once, inputs=("confidence",))
    return Recipe(token=token, once=once, whole=whole, strategy="free", price=0.0, **choices)


RECIPES: Mapping[str, Recipe] = {"ours": Recipe(), "published": published()}  # of a task that names none
