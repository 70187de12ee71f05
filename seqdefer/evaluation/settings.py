"""The settings of an experiment: seeds, methods, losses, hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from seqdefer.errors import ContractError, OptionError, look_up, require_known
from seqdefer.hyperparameters import STRATEGIES, TREE_KINDS, Settings
from seqdefer.interfaces import TaskEntry
from seqdefer.methods.registry import get_method
from seqdefer.recipes import DEFAULT_PRESET, LearningSettings, Recipe
from seqdefer.rejectors.checkpoints import draft_networks, token_networks
from seqdefer.rejectors.losses import get_phi, get_psi


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(LearningSettings):
    """The settings of an experiment, whatever the task."""

    seeds: int = 5
    instances: int = 100  # test instances per seed
    methods: tuple[str, ...] | None = None  # None runs the paper's and ours; Random and the oracles are always there
    resamples: int = 1000
    recipe: str = "ours"  # what the learning settings started from

    def wants(self, method: str) -> bool:
        """Return whether a method is to be run. Where none is named, the paper's recipe runs the paper's methods, ours
        runs our own too, and neither those that run only when named."""
        if self.methods is not None:
            return method in self.methods
        one = get_method(method)
        return not one.runs_when_named and (self.recipe == "ours" or not one.is_ours)

    def __post_init__(self) -> None:
        for name, least in {"seeds": 1, "instances": 1, "resamples": 1, "rollouts": 2}.items():
            if getattr(self, name) < least:
                raise OptionError(f"--{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("alpha", "price"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise OptionError(f"--{name} is {value}; it must be a cost, 0 or more")
        get_phi(self.phi)
        get_psi(self.psi)
        require_known("training strategy", self.strategy, STRATEGIES)
        if self.trees is not None:
            require_known("kind of trees", self.trees, TREE_KINDS)
        require_known("token-level architecture", self.token.architecture, token_networks())
        for settings in (self.once, self.cost):
            require_known("draft architecture", settings.architecture, draft_networks())
        for method in self.methods or ():
            get_method(method)


def experiment_settings(
    entry: TaskEntry,
    preset: str,
    draft_architecture: str | None = None,
    architecture: str | None = None,
    recipe: str = "ours",
) -> ExperimentSettings:
    """Return the settings of a task by a recipe. `quick` has fewer seeds and test instances.

    `draft_architecture` changes what scores whole drafts, `architecture` what scores tokens. The paper's architecture
    comes with the paper's hyperparameters for the task."""
    start = get_recipe(entry, recipe)
    learning = {one.name: getattr(start, one.name) for one in fields(LearningSettings)}
    settings = ExperimentSettings(**learning, recipe=recipe)
    published = entry.recipes.get("published", start)
    if architecture is not None:
        settings = replace(settings, token=_token_settings(start.token, published.token, architecture))
    if draft_architecture is not None:
        once, cost = _draft_settings(start.once, published.once, draft_architecture)
        whole = start.whole and replace(once, inputs=start.whole.inputs)
        settings = replace(settings, once=once, cost=cost, whole=whole)
    if preset != "quick":
        return settings
    return replace(settings, seeds=3, instances=entry.quick_instances)


def choose_settings(
    entry: TaskEntry, given: Mapping[str, Any], *, preset: str = DEFAULT_PRESET, recipe: str = "ours"
) -> tuple[Any, ExperimentSettings]:
    """Return the options of a task and the settings of an experiment: those of preset and recipe, replaced by `given`.

    Commands and `DeferringModel.fit` start here, so that both have the same defaults. Names that are neither an option
    nor a setting are left alone."""
    require_known("preset", preset, entry.presets)
    start, given = replace(entry.presets[preset], **get_recipe(entry, recipe).options), dict(given)
    # An option of the task is not one of the experiment, even if both have that name.
    own = {one.name: given.pop(one.name) for one in fields(start) if one.name in given}
    networks = (given.get("draft_architecture"), given.get("architecture"))
    settings = experiment_settings(entry, preset, *networks, recipe)
    require_choices(start, own)
    known = {one.name: given[one.name] for one in fields(settings) if one.name in given}
    if known.get("strategy", settings.strategy) != settings.strategy:
        known.setdefault("trees", None)  # they follow from the strategy
    return replace(start, **own), replace(settings, **known)


def require_choices(options: Any, given: Mapping[str, Any]) -> None:
    """Raise where an option whose values the class of options lists, as `choices`, was given another."""
    for name, values in getattr(options, "choices", {}).items():
        if name in given:
            require_known(f"--{name.replace('_', '-')}", given[name], values)


def recipe_changes(entry: TaskEntry, options: Any, settings: ExperimentSettings) -> tuple[str, ...]:
    """Return the names of options and settings that differ from those of the recipe."""
    recipe = get_recipe(entry, settings.recipe)
    names = dict.fromkeys(name for one in entry.recipes.values() for name in one.options)
    defaults = next(iter(entry.presets.values()), None)
    usual = {name: recipe.options[name] if name in recipe.options else getattr(defaults, name) for name in names}
    changed = [name for name, value in usual.items() if getattr(options, name) != value]
    changed += [
        one.name for one in fields(LearningSettings) if getattr(settings, one.name) != getattr(recipe, one.name)
    ]
    added = (get_method(name) for name in settings.methods or ())
    if settings.recipe != "ours" and any(one.is_ours or one.source for one in added):
        changed.append("methods")
    return tuple(changed)


def get_recipe(entry: TaskEntry, name: str) -> Recipe:
    """Return a recipe of a task."""
    recipe = look_up(f"recipe of task {entry.name}", name, entry.recipes)
    if not isinstance(recipe, Recipe):
        raise ContractError(
            f"the recipe {name!r} of task {entry.name!r} is {recipe!r}; give a record: seqdefer.recipes.Recipe()"
        )
    return recipe


def _token_settings(default: Settings, published: Settings, architecture: str) -> Settings:
    network = look_up("token-level architecture", architecture, token_networks())
    settings = published if architecture == published.architecture else network.defaults or default
    return replace(settings, architecture=architecture, inputs=default.inputs)


def _draft_settings(default: Settings, published: Settings, architecture: str) -> tuple[Settings, Settings]:
    """Return the settings of whole and one-time rejectors, and those of estimated losses."""
    network = look_up("draft architecture", architecture, draft_networks())
    once = published if architecture == published.architecture else network.defaults
    # A subclass may inherit the defaults of another architecture.
    return (
        replace(once, architecture=architecture, inputs=default.inputs),
        replace(network.cost_defaults, architecture=architecture),
    )
