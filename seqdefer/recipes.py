"""Recipes: how the rejectors of a task are made, whatever the amount of data.

`published` is the paper's: its inputs, networks, hyperparameters, losses and training. `ours` is the default. A task
names both in its entry (`TaskEntry.recipes`); docs/recipes.md is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    TreeKind,
)

RecipeName = Literal["ours", "published"]
RECIPE_NAMES: tuple[RecipeName, ...] = get_args(RecipeName)
DEFAULT_PRESET = "quick"  # of commands and of DeferringModel.fit
IN_WORDS = {"published": "as published", "ours": "ours"}


def recipe_in_words(recipe: str, changes: Sequence[str]) -> str:
    """Return the name of a recipe with what was changed: a changed recipe of the paper is no longer the paper's."""
    return f"{recipe}, changed: {', '.join(changes)}" if changes else recipe


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
    trees: TreeKind | None = None  # of long sequences; None: `tree_kind` follows from the strategy
    rollouts: int = 8  # of each example that closed and branched trees are made of
    price: float | None = None  # added to the cost of each expert token; None: `default_price`

    @property
    def tree_kind(self) -> TreeKind:
        """The decision trees that token-level rejectors learn from, where sequences are too long to enumerate.

        Open trees grow wherever a training rollout goes, so that all decisions are followed, and the models are called
        while a rejector learns. Closed trees are made once, of a few rollouts, and a decision that they lack leads to
        the other child. The paper's strategies say who decides, so they need open trees; `explore`, ours, does not.

        Branched trees (ours) are closed ones that know what both decisions lead to if the predictor writes the rest.
        Their losses count up to the end of the sequence: `seqdefer.labels.regrets`."""
        return self.trees or ("closed" if self.strategy == "explore" else "open")


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
