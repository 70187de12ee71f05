"""The paper's confidence baselines: rules that are not trained, only read off the predictor (appendix C).

Uncertainty is -log p of the token where there is a vocabulary, and the Monte Carlo dropout variance where tokens are
real numbers; entropy exists with a vocabulary alone. Larger means less certain, so larger means defer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import DraftRejector, TokenRejector
from seqdefer.rejectors.base import SavedRejector
from seqdefer.types import Draft, Proposal

Measure = Literal["uncertainty", "entropy"]


class ConfidenceRule(SavedRejector):
    """Base of the rules: nothing is trained, so a checkpoint holds the options alone. Any predictor will do until
    `predictor` is set."""

    def __init__(self) -> None:
        self.predictor, self.notes = "", {}

    def options(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Self:
        options = {name: value for name, value in config.items() if name not in ("kind", "predictor", "notes")}
        rule = cls(**options)
        rule.predictor, rule.notes = config["predictor"], dict(config["notes"])
        return rule

    @property
    def length(self) -> int | None:
        return None


class TokenRule(ConfidenceRule, TokenRejector[Tensor]):
    """A rule that scores token by token, each by itself: its state is empty."""

    has_memory = False

    def start(self, context: Tensor) -> Tensor:
        return context[:, :0]

    def join(self, states: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(states))


class DraftRule(ConfidenceRule, DraftRejector):
    """A rule that scores whole drafts."""


class Confidence(TokenRule):
    """TokenwiseScore and TokenwiseEntropy: the uncertainty or the entropy of the proposed token."""

    kind = "confidence"

    def __init__(self, measure: Measure = "uncertainty") -> None:
        super().__init__()
        self.measure = measure

    def options(self) -> dict[str, Any]:
        return {"measure": self.measure}

    def score(self, state: Tensor, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return _read(proposal, self.measure), state


class DraftConfidence(DraftRule):
    """OneTimeScore and OneTimeEntropy: hand off before the least certain token of the draft.

    The score of a hand-off after k tokens is the uncertainty of token k, -inf past the end of the draft; the last
    column, no deferral, is 0 and plays no part in the rule `largest`.
    """

    kind = "draft_confidence"

    def __init__(self, hand_offs: Sequence[int], measure: Measure = "uncertainty") -> None:
        super().__init__()
        self.hand_offs, self.measure = tuple(hand_offs), measure

    def options(self) -> dict[str, Any]:
        return {"hand_offs": list(self.hand_offs), "measure": self.measure}

    @property
    def length(self) -> int:
        return self.hand_offs[-1]

    def score(self, draft: Draft) -> Tensor:
        allowed = torch.tensor(self.hand_offs[:-1], dtype=torch.long)
        is_inside = allowed < draft.sequences.lengths[:, None]  # (n, J - 1)
        scores = torch.where(is_inside, _read(draft, self.measure)[:, allowed], -torch.inf)
        return torch.nn.functional.pad(scores, (0, 1))


def _read(source: Proposal | Draft, measure: Measure) -> Tensor:
    values = source.uncertainty if measure == "uncertainty" else source.entropy
    if values is None:
        raise OptionError("this predictor has no entropy (its tokens are real numbers); use 'uncertainty'")
    return values


class ChowSum(DraftRule):
    """Whole deferral by the sum of the tokens' uncertainties."""

    kind = "chow_sum"

    def score(self, draft: Draft) -> Tensor:
        return draft.uncertainty.where(draft.sequences.mask(), 0).sum(1)


class ChowMean(DraftRule):
    """Whole deferral by the mean of the tokens' uncertainties."""

    kind = "chow_mean"

    def score(self, draft: Draft) -> Tensor:
        return ChowSum().score(draft) / draft.sequences.lengths


class ChowQuantile(DraftRule):
    """Whole deferral by a quantile of the tokens' uncertainties: level 0 is the most certain token, 1 the least."""

    kind = "chow_quantile"

    def __init__(self, level: float) -> None:
        super().__init__()
        if not 0.0 <= level <= 1.0:
            raise OptionError(f"quantile level is {level}; it must be from 0 to 1")
        self.level = level

    def options(self) -> dict[str, Any]:
        return {"level": self.level}

    def score(self, draft: Draft) -> Tensor:
        masked = draft.uncertainty.where(draft.sequences.mask(), torch.nan)
        return masked.nanquantile(self.level, dim=1)
