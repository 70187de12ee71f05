"""The networks that score where to defer: `LSTMRejector` and `MLPRejector` by token, `DraftMLP` and
`DraftTransformer` by draft.

Features in, scores out, nothing else: thresholds belong to `seqdefer.budgets`. Each network standardises what it sees
with statistics of the training set that it carries along, and is saved as safetensors and JSON. A checkpoint names the
predictor it was fitted for and refuses another.

    rejector.save_pretrained("runs/demo/rejectors/TokenwiseModel-seed0")
    rejector = load_rejector("runs/demo/rejectors/TokenwiseModel-seed0", predictor=task.predictor)
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError, OptionError, unknown
from seqdefer.interfaces import DraftRejector, Predictor, TokenRejector
from seqdefer.rejectors.losses import is_ended, merge_ended
from seqdefer.storage.files import read_json, read_weights, write_json, write_tensors
from seqdefer.types import Draft, Proposal

RULES = ("odds", "cost")
HEAD_SIZE = 16  # of a transformer's attention heads
SCORED_AT_ONCE = 1024  # drafts
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
    rule: str = "odds"  # how one-time scores are turned into decisions: policies.choose_hand_off or choose_by_cost

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


class DraftNetwork(_Network, DraftRejector):
    """What the networks that score whole drafts share: one output for each hand-off, or a single one.

    By the rule `odds` an output is a score as it is. By the rule `cost` it is, standardised, how much more is lost by
    this hand-off than by the one before it; their sum is the loss expected of a hand-off, and its score minus that."""

    loss_mean: Tensor
    loss_scale: Tensor

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        if sizes.rule not in RULES:
            raise unknown("decision rule", sizes.rule, RULES)
        if sizes.rule == "cost":
            self.register_buffer("loss_mean", torch.zeros(sizes.outputs))
            self.register_buffer("loss_scale", torch.ones(sizes.outputs))

    @abstractmethod
    def outputs(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        """(B, J) from standardised context (B, C) and steps (B, L, F + confidence), mask bool (B, L)."""

    def forward(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        """Scores (B, J), from what a draft shows: context (B, C), steps (B, L, F + confidence), mask bool (B, L)"""
        seen = torch.where(mask[..., None], self._steps(steps), 0.0)
        scores = self.outputs(self._context(context), seen, mask)
        if not self.sizes.hand_offs:
            return scores
        grid, lengths = torch.tensor(self.sizes.hand_offs, device=scores.device), mask.sum(1)
        ended = is_ended(grid, lengths)
        if self.sizes.rule == "odds":
            return merge_ended(scores, ended)
        more = self.loss_mean + self.loss_scale * scores
        # Past the end of a draft nothing more can be lost.
        more[:, 1:] = torch.where(grid[:-1] < lengths[:, None], more[:, 1:], 0.0)
        return torch.where(ended, -torch.inf, -more.cumsum(1))

    def standardise_losses(self, losses: Tensor) -> None:
        """Takes mean and scale of what each hand-off loses more than the one before it. losses: (n, J)

        Where all examples agree (the last city of a tour, whoever writes it), the scale is 0 and nothing is learned."""
        more = torch.cat([losses[:, :1], losses.diff(dim=1)], 1)
        self.loss_mean.copy_(more.mean(0))
        if len(losses) > 1:
            self.loss_scale.copy_(more.std(0))

    @torch.no_grad()
    def score(self, draft: Draft) -> Tensor:
        scores = [self(*(tensor.to(self.device) for tensor in draft_inputs(draft.select(rows)))).cpu()
                  for rows in torch.arange(len(draft)).split(SCORED_AT_ONCE)]  # fmt: skip
        joined = torch.cat(scores)
        return joined.squeeze(1) if self.sizes.outputs == 1 else joined


def draft_inputs(draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """What the networks by draft see: context, steps, mask."""
    return draft.context, step_inputs(draft.features, draft.uncertainty, draft.entropy), draft.sequences.mask()


class DraftMLP(DraftNetwork):
    """The paper's for one-time deferral: all steps of a draft in one row, one perceptron."""

    kind = "draft_mlp"

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.body = _perceptron(sizes.context + sizes.length * self.step_size, sizes, sizes.outputs)

    def outputs(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.body(torch.cat([context, steps.flatten(1)], 1))
        return scores


class DraftTransformer(DraftNetwork):
    """Attention over the steps of a draft and one token of context. The output of a hand-off after k tokens is read
    where token k stands; that of no deferral, and of a whole draft, at the context."""

    kind = "draft_transformer"

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        if sizes.units % HEAD_SIZE:
            raise OptionError(f"{sizes.units} units; a transformer needs a multiple of {HEAD_SIZE}")
        self.read_context = nn.Linear(sizes.context, sizes.units)
        self.read_step = nn.Linear(self.step_size, sizes.units)
        self.places = nn.Parameter(0.02 * torch.randn(sizes.length + 1, sizes.units))
        layer = nn.TransformerEncoderLayer(
            sizes.units, sizes.units // HEAD_SIZE, 2 * sizes.units, sizes.dropout, "gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.body = nn.TransformerEncoder(layer, sizes.layers, nn.LayerNorm(sizes.units), enable_nested_tensor=False)
        self.head = nn.Linear(sizes.units, 1)

    def outputs(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        tokens = torch.cat([self.read_step(steps), self.read_context(context)[:, None]], 1) + self.places  # (B, L+1, D)
        hidden = nn.functional.pad(~mask, (0, 1), value=False)
        scores: Tensor = self.head(self.body(tokens, src_key_padding_mask=hidden)).squeeze(2)  # (B, L + 1)
        if not self.sizes.hand_offs:
            return scores[:, -1:]
        return scores[:, torch.tensor(self.sizes.hand_offs, device=scores.device)]


def _perceptron(inputs: int, sizes: Sizes, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in [inputs] + [sizes.units] * (sizes.layers - 1):
        layers += [nn.Linear(size, sizes.units), nn.ReLU(), nn.Dropout(sizes.dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes.units, outputs))


TOKEN_NETWORKS: dict[str, type[LSTMRejector] | type[MLPRejector]] = {"lstm": LSTMRejector, "mlp": MLPRejector}
DRAFT_NETWORKS: dict[str, type[DraftMLP] | type[DraftTransformer]] = {
    "draft_mlp": DraftMLP,
    "draft_transformer": DraftTransformer,
}
NETWORKS: dict[str, type[LSTMRejector] | type[MLPRejector] | type[DraftMLP] | type[DraftTransformer]] = {
    **TOKEN_NETWORKS,
    **DRAFT_NETWORKS,
}


def load_rejector(folder: Path | str, predictor: Predictor[Any] | None = None) -> TokenNetwork | DraftNetwork:
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
        wanted = [field.name for field in fields(Sizes) if field.name in config or field.default is MISSING]
        sizes = Sizes(**{name: config[name] for name in wanted})
        sizes = replace(sizes, hand_offs=tuple(sizes.hand_offs))
        network = NETWORKS[kind](sizes, config["predictor"], config["notes"])
    except (KeyError, TypeError, ValueError, RuntimeError, OptionError) as error:
        raise CheckpointError(f"{folder} does not hold a whole rejector: {error!r}; fit it again") from error
    read_weights(network, folder / "model.safetensors")
    # By token it scores what the predictor has just computed; by draft it works on the CPU, where drafts are kept.
    if predictor is not None and isinstance(network, TokenNetwork):
        network.to(predictor.device)
    return network.eval()
