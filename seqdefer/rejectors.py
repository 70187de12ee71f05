"""The networks that score where to defer: `LSTMRejector` and `MLPRejector` by token, `DraftMLP` by draft.

Features in, scores out, nothing else: thresholds belong to `seqdefer.policies`. Each network standardises what it sees
with statistics of the training set that it carries along, and is saved as safetensors and JSON. A checkpoint names the
predictor it was fitted for and refuses another.

    rejector.save_pretrained("runs/demo/rejectors/TokenwiseModel-seed0")
    rejector = load_rejector("runs/demo/rejectors/TokenwiseModel-seed0", predictor=task.predictor)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError, unknown
from seqdefer.interfaces import DraftRejector, Predictor, TokenRejector
from seqdefer.losses import is_ended, merge_ended
from seqdefer.store import read_json, read_weights, write_json, write_tensors
from seqdefer.types import Draft, Proposal

LARGEST = 10.0  # standard deviations; what lies further out is cut, so that one wild input cannot rule a score


@dataclass(frozen=True)
class Sizes:
    """What a rejector network looks at and how large it is."""

    context: int  # C
    features: int  # F
    length: int  # L
    has_entropy: bool
    layers: int
    units: int
    dropout: float
    hand_offs: tuple[int, ...] = ()  # the grid that a one-time rejector scores; a whole one gives a single score

    @property
    def outputs(self) -> int:
        return max(1, len(self.hand_offs))


class _Network(nn.Module):
    """Standardised inputs, and files. Subclasses are final."""

    kind: ClassVar[str]
    context_mean: Tensor
    context_scale: Tensor
    step_mean: Tensor
    step_scale: Tensor

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.sizes, self.predictor, self.notes = sizes, predictor, dict(notes or {})
        self.step_size = sizes.features + 1 + int(sizes.has_entropy)  # decoder state and confidence
        for name, size in (("context", sizes.context), ("step", self.step_size)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def standardise(self, context: Tensor, steps: Tensor) -> None:
        """Takes mean and scale from training inputs: context (n, C), steps (m, F + confidence)."""
        for name, values in (("context", context), ("step", steps)):
            scale = values.std(0) if len(values) > 1 else torch.ones(values.shape[1])
            getattr(self, f"{name}_mean").copy_(values.mean(0))
            getattr(self, f"{name}_scale").copy_(torch.where(scale > 1e-6, scale, 1.0))

    def _context(self, context: Tensor) -> Tensor:
        return ((context - self.context_mean) / self.context_scale).clamp(-LARGEST, LARGEST)

    def _steps(self, steps: Tensor) -> Tensor:
        return ((steps - self.step_mean) / self.step_scale).clamp(-LARGEST, LARGEST)

    @classmethod
    def from_pretrained(cls, folder: Path | str, predictor: Predictor[Any] | None = None) -> Self:
        """Reads a checkpoint of this very kind; `load_rejector` reads any."""
        network = load_rejector(folder, predictor)
        if not isinstance(network, cls):
            raise CheckpointError(
                f"{folder} holds a {network.kind!r} rejector, not a {cls.kind!r} one; use load_rejector"
            )
        return network

    def save_pretrained(self, folder: Path | str) -> Path:
        """Writes config.json last: where it exists, the checkpoint is whole."""
        folder = Path(folder)
        (folder / "config.json").unlink(missing_ok=True)  # or new weights could be left under an old name
        write_tensors(folder / "model.safetensors", self.state_dict())
        config = {"kind": self.kind, "predictor": self.predictor, "notes": self.notes, **asdict(self.sizes)}
        write_json(folder / "config.json", config)
        return folder


def step_inputs(features: Tensor, uncertainty: Tensor, entropy: Tensor | None) -> Tensor:
    """What a network sees of a step: decoder state, uncertainty on a log scale (variances span decades), entropy."""
    parts = [features, uncertainty.clamp(min=1e-12).log()[..., None]]
    return torch.cat(parts if entropy is None else [*parts, entropy[..., None]], -1)


class TokenNetwork(_Network, TokenRejector[Tensor]):
    """What the token-level networks share. The state is one tensor (B, S), so that a batch branches by indexing."""

    @abstractmethod
    def forward(self, state: Tensor, position: int, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B,) and the next state, from standardised steps (B, F + confidence)."""

    def score(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor]:
        steps = step_inputs(proposal.features, proposal.uncertainty, proposal.entropy)
        scores: Tensor
        scores, state = self(state, position, self._steps(steps))
        return scores, state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


class LSTMRejector(TokenNetwork):
    """The paper's: hidden states start from the encoder's state, decoder states come in one by one."""

    kind = "lstm"

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.begin = nn.Linear(sizes.context, 2 * sizes.layers * sizes.units)
        inputs = [self.step_size] + [sizes.units] * (sizes.layers - 1)
        self.cells = nn.ModuleList(nn.LSTMCell(size, sizes.units) for size in inputs)
        self.dropout = nn.Dropout(sizes.dropout)
        self.head = nn.Linear(sizes.units, 1)

    def start(self, context: Tensor) -> Tensor:
        return torch.tanh(self.begin(self._context(context)))

    def forward(self, state: Tensor, position: int, steps: Tensor) -> tuple[Tensor, Tensor]:
        states = state.split(self.sizes.units, 1)
        following = []
        for layer, cell in enumerate(self.cells):
            hidden, memory = cell(steps, (states[2 * layer], states[2 * layer + 1]))
            following += [hidden, memory]
            steps = self.dropout(hidden)
        return self.head(steps).squeeze(1), torch.cat(following, 1)


class MLPRejector(TokenNetwork):
    """Without memory: each position is scored from the context, the decoder state and the position."""

    kind = "mlp"

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.body = _perceptron(sizes.context + self.step_size + sizes.length, sizes, 1)

    def start(self, context: Tensor) -> Tensor:
        return self._context(context)

    def forward(self, state: Tensor, position: int, steps: Tensor) -> tuple[Tensor, Tensor]:
        where = torch.zeros(len(state), self.sizes.length, device=state.device)
        where[:, position] = 1.0
        return self.body(torch.cat([state, steps, where], 1)).squeeze(1), state


class DraftMLP(_Network, DraftRejector):
    """One-time and whole deferral: context, all decoder states and confidences of a draft in, all scores out."""

    kind = "draft_mlp"

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.body = _perceptron(sizes.context + sizes.length * self.step_size, sizes, sizes.outputs)

    def forward(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        """context (B, C), steps (B, L, F + confidence), mask bool (B, L) -> (B, J)"""
        seen = torch.where(mask[..., None], self._steps(steps), 0.0)
        scores: Tensor = self.body(torch.cat([self._context(context), seen.flatten(1)], 1))
        if not self.sizes.hand_offs:
            return scores
        grid = torch.tensor(self.sizes.hand_offs, device=scores.device)
        return merge_ended(scores, is_ended(grid, mask.sum(1)))

    @torch.no_grad()
    def score(self, draft: Draft) -> Tensor:
        steps = step_inputs(draft.features, draft.uncertainty, draft.entropy)
        inputs = (draft.context, steps, draft.sequences.mask())
        scores: Tensor = self(*(tensor.to(self.device) for tensor in inputs)).cpu()
        return scores.squeeze(1) if self.sizes.outputs == 1 else scores


def _perceptron(inputs: int, sizes: Sizes, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in [inputs] + [sizes.units] * (sizes.layers - 1):
        layers += [nn.Linear(size, sizes.units), nn.ReLU(), nn.Dropout(sizes.dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes.units, outputs))


TOKEN_NETWORKS: dict[str, type[LSTMRejector] | type[MLPRejector]] = {"lstm": LSTMRejector, "mlp": MLPRejector}
NETWORKS: dict[str, type[LSTMRejector] | type[MLPRejector] | type[DraftMLP]] = {
    **TOKEN_NETWORKS,
    "draft_mlp": DraftMLP,
}


def load_rejector(folder: Path | str, predictor: Predictor[Any] | None = None) -> LSTMRejector | MLPRejector | DraftMLP:
    """Reads what `save_pretrained` wrote, ready to score. With `predictor`, refuses a checkpoint made for another."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"no rejector in {folder}: it has no config.json; fit one with: seqdefer run TASK")
    config = read_json(folder / "config.json")
    kind, made_for = (config.get(key) if isinstance(config, dict) else None for key in ("kind", "predictor"))
    if not (isinstance(kind, str) and kind in NETWORKS):
        raise CheckpointError(f"{folder}: {unknown('rejector kind', kind, NETWORKS)}")
    if predictor is not None and predictor.fingerprint != made_for:
        raise CheckpointError(
            f"{folder} was fitted for predictor {made_for}, not for {predictor.fingerprint}; "
            "load that predictor, or fit a rejector for this one"
        )
    try:
        sizes = Sizes(**{field.name: config[field.name] for field in fields(Sizes)})
        sizes = replace(sizes, hand_offs=tuple(sizes.hand_offs))
        network = NETWORKS[kind](sizes, config["predictor"], config["notes"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} does not hold a whole rejector: {error!r}; fit it again") from error
    read_weights(network, folder / "model.safetensors")
    # By token it scores what the predictor has just computed; by draft it works on the CPU, where drafts are kept.
    if predictor is not None and isinstance(network, TokenNetwork):
        network.to(predictor.device)
    return network.eval()
