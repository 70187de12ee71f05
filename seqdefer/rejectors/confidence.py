"""The paper's confidence baselines: rejectors that are not trained, only read off the predictor (appendix C).

Uncertainty is -log p of the token where there is a vocabulary, and the Monte Carlo dropout variance where tokens are
real numbers; entropy exists with a vocabulary alone. Larger means less sure, so larger means defer.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import DraftRejector, TokenRejector
from seqdefer.types import Draft, Proposal

Measure = Literal["uncertainty", "entropy"]


class Confidence(TokenRejector[Tensor]):
    """TokenwiseScore and TokenwiseEntropy: the uncertainty or the entropy of the token at hand."""

    def __init__(self, measure: Measure = "uncertainty") -> None:
        self.measure = measure

    def start(self, context: Tensor) -> Tensor:
        return context[:, :0]  # nothing to remember

    def score(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return _read(proposal, self.measure), state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


def confidence_of(draft: Draft, measure: Measure) -> Tensor:
    """What OneTimeScore and OneTimeEntropy hand off by: before the least sure token. (n, L)"""
    return _read(draft, measure)


def _read(source: Proposal | Draft, measure: Measure) -> Tensor:
    values = source.uncertainty if measure == "uncertainty" else source.entropy
    if values is None:
        raise OptionError("this predictor has no entropy (its tokens are real numbers); use 'uncertainty'")
    return values


class ChowSum(DraftRejector):
    """Whole deferral by the sum of the tokens' uncertainties."""

    def score(self, draft: Draft) -> Tensor:
        return draft.uncertainty.where(draft.sequences.mask(), 0).sum(1)


class ChowMean(DraftRejector):
    """Whole deferral by their mean (over the tokens that the draft has)."""

    def score(self, draft: Draft) -> Tensor:
        return ChowSum().score(draft) / draft.sequences.lengths


class ChowQuantile(DraftRejector):
    """Whole deferral by a quantile of them: level 0 looks at the surest token, 1 at the least sure."""

    def __init__(self, level: float) -> None:
        if not 0.0 <= level <= 1.0:
            raise OptionError(f"quantile level is {level}; it must be from 0 to 1")
        self.level = level

    def score(self, draft: Draft) -> Tensor:
        masked = draft.uncertainty.where(draft.sequences.mask(), torch.nan)
        return masked.nanquantile(self.level, dim=1)


CHOW: dict[str, DraftRejector] = {
    "ChowMean": ChowMean(),
    "ChowSum": ChowSum(),
    **{f"ChowQuantile{level}": ChowQuantile(level) for level in (0.0, 0.4, 0.8, 1.0)},
}
