"""Base classes: rejectors with checkpoints, and networks with standardised inputs.

Features in, scores out, nothing else: thresholds belong to `seqdefer.budgets`. A checkpoint is safetensors and JSON; it
names the predictor it was fitted for and refuses another.

    rejector.save_pretrained("runs/demo/rejectors/TokenwiseModel-seed0")
    rejector = load_rejector("runs/demo/rejectors/TokenwiseModel-seed0", predictor=task.predictor)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.hyperparameters import Settings
from seqdefer.interfaces import Predictor
from seqdefer.storage.files import fingerprint, read_json, read_weights
from seqdefer.storage.made_once import CONFIG, WEIGHTS, save_network
from seqdefer.types import Draft, PairStatistics, Proposal

MAX_DEVIATIONS = 10.0  # standard deviations; inputs are clipped there, so that one wild input cannot rule a score


MIN_PROBABILITY = 1e-6  # smaller ones look alike to a network


def pair_statistics(seen: Proposal | Draft) -> PairStatistics:
    """Return the statistics of both models at a position; raise OptionError where the expert has not read it."""
    pair = seen.pair if isinstance(seen, Proposal) else None
    if pair is None:
        raise OptionError(
            "this rejector reads first: it needs both models' distributions at a position, which are known on decision "
            "trees made with reads_first=True alone; to generate, fit a method that decides before the expert reads"
        )
    return pair


class SavedRejector(ABC):
    """A rejector that can be stored in a folder. `kind` names the class in the checkpoint."""

    kind: ClassVar[str]
    predictor: str  # fingerprint of the predictor it was fitted for
    notes: dict[str, Any]  # how it was made

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return what the constructor needs besides predictor and notes, as JSON."""

    @classmethod
    @abstractmethod
    def build(cls, config: Mapping[str, Any]) -> Self:
        """Make the rejector of a config, without its weights."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """The longest sequence it can score; None where any will do."""

    @property
    def fingerprint(self) -> str:
        """A name of what it computes: a calibration belongs to it."""
        if self.module is None:
            return fingerprint(self.kind, self.options())
        return fingerprint(*self.module.state_dict().values())

    @property
    def module(self) -> nn.Module | None:
        """The module with the weights, if any."""
        return None

    @classmethod
    def from_pretrained(cls, folder: Path | str, predictor: Predictor[Any] | None = None) -> Self:
        """Read a checkpoint of this class; `load_rejector` reads any. With `predictor`, refuse a checkpoint made for
        another."""
        folder = Path(folder)
        config = read_config(folder)
        if config["kind"] != cls.kind:
            raise CheckpointError(
                f"{folder} holds a {config['kind']!r} rejector, not a {cls.kind!r} one; use load_rejector"
            )
        if predictor is not None and config.get("predictor") not in ("", predictor.fingerprint):
            raise CheckpointError(
                f"{folder} was fitted for predictor {config.get('predictor')}, not for {predictor.fingerprint}; "
                "load that predictor, or fit a rejector for this one"
            )
        try:
            rejector = cls.build(config)
        except (KeyError, TypeError, ValueError, RuntimeError, OptionError) as error:
            raise CheckpointError(f"{folder} holds an incomplete rejector: {error!r}; fit it again") from error
        if rejector.module is not None:
            read_weights(rejector.module, folder / WEIGHTS)
            rejector.module.eval()
        return rejector

    def save_pretrained(self, folder: Path | str) -> Path:
        """Write the checkpoint, config.json last: where it exists, the rest is complete."""
        folder = Path(folder)
        config = {"kind": self.kind, "predictor": self.predictor, "notes": self.notes, **self.options()}
        save_network(self.module, folder, config)
        return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a checkpoint; `kind` is a string in it."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"no rejector in {folder}: it has no {CONFIG}; fit one with: seqdefer fit TASK")
    config = read_json(folder / CONFIG)
    if not (isinstance(config, dict) and isinstance(config.get("kind"), str)):
        raise CheckpointError(f"{folder / CONFIG} names no kind of rejector; fit it again")
    return config


@dataclass(frozen=True)
class Sizes:
    """The inputs and the size of a rejector network."""

    context: int  # C
    features: int  # F
    length: int  # L
    has_entropy: bool
    layers: int
    units: int
    dropout: float
    hand_offs: tuple[int, ...] = ()  # the grid that a one-time rejector scores; a whole one gives a single score
    rule: str = "odds"  # how one-time scores become decisions: seqdefer.budgets.hand_off_rules
    has_states: bool = True
    has_confidence: bool = True
    has_statistics: bool = False  # those of both models, which need the expert to read first

    @property
    def outputs(self) -> int:
        return max(1, len(self.hand_offs))

    @property
    def step(self) -> int:
        """Numbers that the network sees of a step."""
        statistics = len(fields(PairStatistics)) * self.has_statistics
        return self.features * self.has_states + self.has_confidence + self.has_entropy + statistics

    def step_inputs(self, seen: Proposal | Draft) -> Tensor:
        """Join what the network sees of a step or of all steps: decoder state, log uncertainty (variances span
        decades), entropy, statistics of both models. (..., step)"""
        parts = [seen.features] if self.has_states else []
        if self.has_confidence:
            parts.append(seen.uncertainty.clamp(min=1e-12).log()[..., None])
        if self.has_entropy:
            assert seen.entropy is not None
            parts.append(seen.entropy[..., None])
        if self.has_statistics:
            pair = pair_statistics(seen)
            probabilities = torch.stack([pair.max_q, pair.max_p, pair.q_v, pair.p_v], 1)
            parts.append(probabilities.clamp(min=MIN_PROBABILITY).log())
            parts.append(torch.stack([pair.entropy_p, pair.distance, pair.differ], 1))
        return torch.cat(parts, -1)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Sizes:
        """Take the sizes from a checkpoint's config."""
        wanted = [field.name for field in fields(cls) if field.name in config or field.default is MISSING]
        sizes = cls(**{name: config[name] for name in wanted})
        return replace(sizes, hand_offs=tuple(sizes.hand_offs))


class RejectorNetwork(nn.Module, SavedRejector):
    """A trained rejector. It standardises its inputs with statistics of the training set, which it carries along.

    `defaults` are the hyperparameters that come with the architecture where a task starts from another one; None keeps
    the task's.
    """

    defaults: ClassVar[Settings | None] = None
    context_mean: Tensor
    context_scale: Tensor
    step_mean: Tensor
    step_scale: Tensor

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.sizes, self.predictor, self.notes = sizes, predictor, dict(notes or {})
        for name, size in (("context", sizes.context), ("step", sizes.step)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))

    @property
    def module(self) -> nn.Module:
        return self

    def options(self) -> dict[str, Any]:
        return asdict(self.sizes)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Self:
        return cls(Sizes.read(config), config["predictor"], config["notes"])

    @property
    def length(self) -> int:
        return self.sizes.length

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def standardise(self, context: Tensor, steps: Tensor) -> None:
        """Take mean and scale from training inputs: context (n, C), steps (m, sizes.step)."""
        for name, values in (("context", context), ("step", steps)):
            scale = values.std(0) if len(values) > 1 else torch.ones(values.shape[1])
            getattr(self, f"{name}_mean").copy_(values.mean(0))
            getattr(self, f"{name}_scale").copy_(torch.where(scale > 1e-6, scale, 1.0))

    def _context(self, context: Tensor) -> Tensor:
        return ((context - self.context_mean) / self.context_scale).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)

    def _steps(self, steps: Tensor) -> Tensor:
        return ((steps - self.step_mean) / self.step_scale).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)


def perceptron(inputs: int, sizes: Sizes, outputs: int) -> nn.Sequential:
    """Build `sizes.layers` hidden layers with ReLU and dropout, and a linear head."""
    layers: list[nn.Module] = []
    for size in [inputs] + [sizes.units] * (sizes.layers - 1):
        layers += [nn.Linear(size, sizes.units), nn.ReLU(), nn.Dropout(sizes.dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes.units, outputs))
