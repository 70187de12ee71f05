"""What can be chosen about an experiment: seeds, methods, losses, hyperparameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from seqdefer.errors import ContractError, OptionError, unknown
from seqdefer.hyperparameters import Hyperparameters, Settings
from seqdefer.interfaces import TaskEntry
from seqdefer.methods.base import LearningSettings
from seqdefer.methods.registry import get_method
from seqdefer.rejectors.base import RejectorNetwork
from seqdefer.rejectors.checkpoints import draft_networks, token_networks
from seqdefer.rejectors.losses import get_phi, get_psi
from seqdefer.rejectors.token_training import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings(LearningSettings):
    """What can be chosen about an experiment, whatever the task."""

    seeds: int = 5
    instances: int = 100  # test instances per seed
    methods: tuple[str, ...] | None = None  # None runs them all; Random and the oracles are always there
    resamples: int = 1000

    def wants(self, method: str) -> bool:
        return self.methods is None or method in self.methods

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
        if self.strategy not in STRATEGIES:
            raise unknown("training strategy", self.strategy, STRATEGIES)
        if self.token.architecture not in token_networks():
            raise unknown("token-level architecture", self.token.architecture, token_networks())
        for settings in (self.once, self.cost):
            if settings.architecture not in draft_networks():
                raise unknown("draft architecture", settings.architecture, draft_networks())
        for method in self.methods or ():
            get_method(method)


def experiment_settings(
    entry: TaskEntry, preset: str, draft_architecture: str | None = None, architecture: str | None = None
) -> ExperimentSettings:
    """Return the settings of a task; `quick` takes fewer seeds, and what its networks change for it.

    `draft_architecture` changes what scores whole drafts, `architecture` what scores tokens. The paper's architecture
    comes with the paper's hyperparameters for the task."""
    start = entry.hyperparameters
    if not isinstance(start, Hyperparameters):
        raise ContractError(
            f"hyperparameters of task {entry.name!r} are {start!r}; give a record: seqdefer.hyperparameters."
            "Hyperparameters(), or leave them out"
        )
    token = start.token if architecture is None else _token_settings(start, architecture)
    once, cost = (start.once, start.cost) if draft_architecture is None else _draft_settings(start, draft_architecture)
    settings = ExperimentSettings(token=token, once=once, cost=cost)
    if preset != "quick":
        return settings
    networks: dict[str, type[RejectorNetwork]] = {**token_networks(), **draft_networks()}
    token, once, cost = (replace(one, **networks[one.architecture].quick) for one in (token, once, cost))
    return replace(settings, seeds=3, instances=entry.quick_instances, token=token, once=once, cost=cost)


def _token_settings(start: Hyperparameters, architecture: str) -> Settings:
    if architecture not in token_networks():
        raise unknown("token-level architecture", architecture, token_networks())
    published = start.published_token or start.token
    if architecture == published.architecture:
        return published
    return replace(token_networks()[architecture].defaults or start.token, architecture=architecture)


def _draft_settings(start: Hyperparameters, architecture: str) -> tuple[Settings, Settings]:
    """Return the settings of whole and one-time rejectors, and those of estimated losses."""
    networks = draft_networks()
    if architecture not in networks:
        raise unknown("draft architecture", architecture, networks)
    network, published = networks[architecture], start.published_once
    once = published if architecture == published.architecture else network.defaults
    # A subclass may inherit the defaults of another architecture.
    return replace(once, architecture=architecture), replace(network.cost_defaults, architecture=architecture)
