"""Hyperparameters of rejectors: the record of one fit, and the values that several tasks share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from seqdefer.errors import OptionError, require_known

Input = Literal["states", "confidence", "entropy"]
INPUTS: tuple[Input, ...] = get_args(Input)
Strategy = Literal["free", "teacher", "scheduled", "explore"]  # how training rollouts continue: `Steering`
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
TreeKind = Literal["open", "closed", "branched"]  # decision trees of long sequences in training: `LearningSettings`
TREE_KINDS: tuple[TreeKind, ...] = get_args(TreeKind)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyperparameters of one fit. `architecture` is the kind of a network (see `seqdefer.rejectors`). `inputs` is what
    it sees of a step besides the context: the predictor's states, its confidence, and its entropy where it has one."""

    learning_rate: float
    patience: int
    architecture: str
    layers: int
    units: int
    dropout: float
    epochs: int
    weight_decay: float
    samples: int  # training examples that the paper, or we, chose these values with
    delta: float = 1e-4
    clip_norm: float = 1.0
    batch_size: int = 256  # the paper does not say
    least_steps: int = 16  # small data is cut into smaller batches, or an epoch would hardly move the weights
    inputs: tuple[Input, ...] = INPUTS

    def __post_init__(self) -> None:
        for one in self.inputs:
            require_known("input of a rejector", one, INPUTS)
        if not self.inputs:
            raise OptionError(f"a rejector without inputs; choose from {', '.join(INPUTS)}")
        for name in ("learning_rate", "epochs", "batch_size", "layers", "units", "patience", "least_steps"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.dropout < 1:
            raise OptionError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


def published_lstm(*, layers: int, units: int, samples: int, learning_rate: float = 5e-4) -> Settings:
    """Return the paper's token-level network. It sees states alone."""
    return Settings(
        learning_rate=learning_rate, patience=7, architecture="lstm", layers=layers, units=units, dropout=0.4,
        epochs=100, weight_decay=0.001, samples=samples, inputs=("states",),
    )  # fmt: skip


def published_perceptron(*, samples: int) -> Settings:
    """Return the paper's one-time network, the same for all of its tasks. It sees states and confidence."""
    return Settings(
        learning_rate=5e-4, patience=20, architecture="draft_mlp", layers=1, units=8, dropout=0.2, epochs=200,
        weight_decay=0.005, samples=samples, inputs=("states", "confidence"),
    )  # fmt: skip


# Ours, for what the paper does not have: attention over the steps of a draft, and the estimates of OneTimeCost.
ATTENTION = Settings(
    learning_rate=1e-3, patience=8, architecture="draft_transformer", layers=2, units=64, dropout=0.1, epochs=40,
    weight_decay=0.1, samples=2400, least_steps=32,
)  # fmt: skip
COST_PERCEPTRON = Settings(
    learning_rate=1e-3, patience=8, architecture="draft_mlp", layers=2, units=64, dropout=0.2, epochs=60,
    weight_decay=0.01, samples=2400, least_steps=32,
)  # fmt: skip
# The paper's for its weather data, which has the most examples.
PUBLISHED_TOKEN = published_lstm(layers=2, units=64, samples=70080)
PUBLISHED_ONCE = published_perceptron(samples=70080)
# Ours where a task has no others: the same networks, which see all there is.
LSTM = replace(PUBLISHED_TOKEN, inputs=INPUTS)
PERCEPTRON = replace(PUBLISHED_ONCE, inputs=INPUTS)
