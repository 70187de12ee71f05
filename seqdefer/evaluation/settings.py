"""What can be chosen about an experiment: seeds, methods, losses, hyperparameters; and what each task starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from seqdefer.errors import OptionError, unknown
from seqdefer.interfaces import TaskEntry
from seqdefer.rejectors.confidence import CHOW
from seqdefer.rejectors.losses import get_phi, get_psi
from seqdefer.rejectors.networks import DRAFT_NETWORKS, TOKEN_NETWORKS
from seqdefer.rejectors.training import (
    BY_FACTS,
    BY_TOKEN,
    PERCEPTRON,
    PRESETS,
    STRATEGIES,
    TRANSFORMER,
    Settings,
    Strategy,
)
from seqdefer.types import Granularity

GRANULARITY: dict[str, Granularity] = {
    "Random": "whole", "OptimalWhole": "whole", **dict.fromkeys(CHOW, "whole"), "WholeModelEmbed": "whole",
    "OptimalOneTime": "once", "OneTimeModel": "once", "OneTimeCost": "once",
    "OneTimeScore": "once", "OneTimeEntropy": "once",
    "OptimalToken": "token", "TokenwiseModel": "token", "TokenwiseScore": "token", "TokenwiseEntropy": "token",
}  # fmt: skip

BY_DRAFT = ("WholeModelEmbed", "OneTimeModel", "OneTimeCost")  # learned from hand-offs
METHODS = [name for name in GRANULARITY if name != "Random" and not name.startswith("Optimal")]


@dataclass(frozen=True)
class ExperimentSettings:
    """What can be chosen about an experiment, whatever the task."""

    seeds: int = 5
    instances: int = 100  # test instances a seed
    token: Settings = PRESETS["mwp-token"]
    once: Settings = PRESETS["mwp-once"]
    cost: Settings = PERCEPTRON
    phi: str = "logistic"
    psi: str = "cross_entropy"
    strategy: Strategy = "explore"
    hand_offs: int | None = None  # size of J; None allows them all
    alpha: float | None = None  # alpha_1; None is the rule of thumb
    rollouts: int = 8  # of each example that token-level rejectors learn from, where sequences are long
    price: float | None = None  # added to the cost of each expert token; None: a little where some cost nothing
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
        if self.token.architecture not in TOKEN_NETWORKS:
            raise unknown("token-level architecture", self.token.architecture, TOKEN_NETWORKS)
        if self.strategy not in STRATEGIES:
            raise unknown("training strategy", self.strategy, STRATEGIES)
        for method in self.methods or ():
            if method not in METHODS:
                raise unknown("method", method, METHODS)


# What rejectors start from: token level, one-time and whole, estimates of losses. By the columns of the paper's table,
# and ours.
STARTING_POINTS: dict[str, tuple[Settings, Settings, Settings]] = {
    "mwp": (PRESETS["mwp-token"], PRESETS["mwp-once"], PERCEPTRON),
    "xsum": (BY_FACTS, TRANSFORMER, TRANSFORMER),
    "tsp": (PRESETS["mwp-token"], TRANSFORMER, TRANSFORMER),
    "pronounce": (BY_TOKEN, PRESETS["mwp-once"], PERCEPTRON),
}


def experiment_settings(
    entry: TaskEntry, preset: str, draft_architecture: str | None = None, architecture: str | None = None
) -> ExperimentSettings:
    """The hyperparameters of a task; `quick` stops after fewer epochs and seeds, and takes smaller transformers.

    `draft_architecture` changes what scores whole drafts: the paper's perceptron, or attention over the steps.
    `architecture` changes what scores tokens; where ours is another than the paper's, the paper's comes with the
    paper's hyperparameters."""
    if entry.hyperparameters not in STARTING_POINTS:
        raise unknown(f"hyperparameters of task {entry.name!r}", entry.hyperparameters, STARTING_POINTS)
    token, once, cost = STARTING_POINTS[entry.hyperparameters]
    if draft_architecture not in (None, *DRAFT_NETWORKS):
        raise unknown("architecture by draft", draft_architecture, DRAFT_NETWORKS)
    if draft_architecture == "draft_mlp":
        once, cost = PRESETS.get(f"{entry.hyperparameters}-once", PRESETS["mwp-once"]), PERCEPTRON
    elif draft_architecture is not None:
        once = cost = TRANSFORMER
    if architecture not in (None, *TOKEN_NETWORKS):
        raise unknown("token-level architecture", architecture, TOKEN_NETWORKS)
    if architecture is not None:
        papers = PRESETS.get(f"{entry.hyperparameters}-token", token)
        token = replace(papers if architecture == papers.architecture else token, architecture=architecture)
    settings = ExperimentSettings(token=token, once=once, cost=cost)
    if preset != "quick":
        return settings
    token = replace(token, epochs=20, learning_rate=2e-3)
    return replace(
        settings, seeds=3, instances=entry.quick_instances, token=token, once=_quick(once), cost=_quick(cost)
    )


def _quick(settings: Settings) -> Settings:
    if settings.architecture == "draft_transformer":
        return replace(settings, layers=2, units=32, epochs=25, learning_rate=2e-3, patience=5)
    return replace(settings, epochs=30)
