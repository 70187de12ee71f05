"""Networks that score whole drafts, for whole and one-time deferral. A new one is a class here, or in another package
(see `checkpoints`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqdefer.errors import OptionError, require_known
from seqdefer.hyperparameters import ATTENTION, COST_PERCEPTRON, PERCEPTRON, Settings
from seqdefer.interfaces import DraftRejector
from seqdefer.rejectors.base import RejectorNetwork, Sizes, perceptron
from seqdefer.rejectors.losses import is_ended, merge_ended
from seqdefer.types import Draft

OUTPUT_RULES = ("odds", "cost")
HEAD_SIZE = 16  # of a transformer's attention heads
SCORING_BATCH = 1024  # drafts


class DraftNetwork(RejectorNetwork, DraftRejector):
    """Base of the networks that score whole drafts: one output for each hand-off, or a single one.

    By the rule `odds` an output is a score as it is. By the rule `cost` it is, standardised, how much more is lost by
    this hand-off than by the one before it; their sum is the loss expected of a hand-off, and its score minus that.

    `cost_defaults` are the `defaults` for the rule `cost`.
    """

    defaults: ClassVar[Settings] = PERCEPTRON
    cost_defaults: ClassVar[Settings] = COST_PERCEPTRON
    loss_mean: Tensor
    loss_scale: Tensor

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        require_known("decision rule", sizes.rule, OUTPUT_RULES)
        self.hand_offs = sizes.hand_offs
        self.rule = sizes.rule if sizes.hand_offs else "largest"
        if sizes.rule == "cost":
            self.register_buffer("loss_mean", torch.zeros(sizes.outputs))
            self.register_buffer("loss_scale", torch.ones(sizes.outputs))

    @abstractmethod
    def outputs(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        """Return (B, J) from standardised context (B, C) and steps (B, L, sizes.step), mask bool (B, L)."""

    def forward(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        """Return scores (B, J) of a draft: context (B, C), steps (B, L, sizes.step), mask bool (B, L)"""
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
        """Take mean and scale of what each hand-off loses more than the one before it. losses: (n, J)

        Where all examples agree (a tour has but one last city), the scale is 0 and nothing is learned."""
        more = torch.cat([losses[:, :1], losses.diff(dim=1)], 1)
        self.loss_mean.copy_(more.mean(0))
        if len(losses) > 1:
            self.loss_scale.copy_(more.std(0))

    @torch.no_grad()
    def score(self, draft: Draft) -> Tensor:
        scores = [self(*(tensor.to(self.device) for tensor in self.draft_inputs(draft.select(rows)))).cpu()
                  for rows in torch.arange(len(draft)).split(SCORING_BATCH)]  # fmt: skip
        joined = torch.cat(scores)
        return joined.squeeze(1) if self.sizes.outputs == 1 else joined

    def draft_inputs(self, draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the network sees of drafts: context, steps, mask."""
        return draft.context, self.sizes.step_inputs(draft), draft.sequences.mask()


class DraftMLP(DraftNetwork):
    """The paper's network for one-time deferral: all steps of a draft in one row, one perceptron."""

    kind = "draft_mlp"

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        self.body = perceptron(sizes.context + sizes.length * sizes.step, sizes, sizes.outputs)

    def outputs(self, context: Tensor, steps: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.body(torch.cat([context, steps.flatten(1)], 1))
        return scores


class DraftTransformer(DraftNetwork):
    """Attention over the steps of a draft and one token of context (ours). The output of a hand-off after k tokens is
    read where token k stands; that of no deferral, and of a whole draft, at the context."""

    kind = "draft_transformer"
    defaults = cost_defaults = ATTENTION

    def __init__(self, sizes: Sizes, predictor: str, notes: dict[str, Any] | None = None) -> None:
        super().__init__(sizes, predictor, notes)
        if sizes.units % HEAD_SIZE:
            raise OptionError(f"{sizes.units} units; a transformer needs a multiple of {HEAD_SIZE}")
        self.read_context = nn.Linear(sizes.context, sizes.units)
        self.read_step = nn.Linear(sizes.step, sizes.units)
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
