"""Deferral rules of other people, for comparison with ours: Chow's, those of speculative cascades, typical acceptance,
and BiLD.

q is the predictor's distribution at a position, p the expert's, v the token that the predictor proposes (greedily, so
q(v) = max q unless a model forces a token), TV the sum of max(0, p - q), H the entropy. Each rule has a parameter alpha
and defers where its condition holds. Here it is a score, and alpha a threshold on it:

| name    | defers where                                   | score                                       |
|---------|------------------------------------------------|---------------------------------------------|
| Chow    | max q < 1 - alpha                              | 1 - max q                                   |
| Diff    | max q < max p - alpha                          | max p - max q                               |
| OPT     | max q < max p - alpha TV                       | (max p - max q) / TV; -inf where TV is 0    |
| Token1  | q(v) < max p - alpha                           | max p - q(v)                                |
| Token2  | p(v) < max p - alpha                           | max p - p(v)                                |
| Token3  | p(v) < (1 - alpha) max p                       | 1 - p(v) / max p                            |
| Typical | p(v) <= min(delta^2, delta exp(-H(p)))         | -max(sqrt(p(v)), p(v) exp(H(p))), at -delta |

A sweep defers where the score is at least the threshold. Above, score > alpha defers (Typical: score >= -delta), so the
two agree for all alpha but those that equal a score; a sweep stands at scores, and so passes through every set of
decisions that an alpha makes. Where TV = 0 no alpha defers, and OPT's score is -inf. Typical has two parameters, of
which the authors recommend epsilon = delta^2.

Chow does not ask the expert; all others know p, so the expert has read the position before they decide. BiLD falls back
where Chow's rule defers, and is more than a score: `seqdefer.budgets.rollback_sweeps`.

References: Chow (1970); Diff, OPT, Token1 to Token3: Narasimhan et al., "Faster Cascades via Speculative Decoding",
arXiv 2405.19261; Typical: Cai et al., "Medusa", arXiv 2401.10774; BiLD: Kim et al., arXiv 2302.07863.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import OptionError, require_known
from seqdefer.rejectors.base import pair_statistics
from seqdefer.rejectors.confidence import TokenRule
from seqdefer.types import PairStatistics, Proposal


def _opt(pair: PairStatistics) -> Tensor:
    share = ((pair.max_p - pair.max_q) / pair.distance).clamp(-1, 1)  # no difference exceeds TV, but for rounding
    return torch.where(pair.distance > 0, share, -torch.inf)


def _typical(pair: PairStatistics) -> Tensor:
    return -torch.maximum(pair.p_v.sqrt(), pair.p_v * pair.entropy_p.exp())


READ_FIRST_SCORES: Mapping[str, Callable[[PairStatistics], Tensor]] = {
    "Diff": lambda pair: pair.max_p - pair.max_q,
    "OPT": _opt,
    "Token1": lambda pair: pair.max_p - pair.q_v,
    "Token2": lambda pair: pair.max_p - pair.p_v,
    "Token3": lambda pair: 1 - pair.p_v / pair.max_p,
    "Typical": _typical,
}


def _chow(proposal: Proposal) -> Tensor:
    return -torch.expm1(-proposal.uncertainty)  # which is -log max q


class ChowToken(TokenRule):
    """Chow's rule at every token: 1 - max q. It orders positions as TokenwiseScore does, which takes -log max q."""

    kind = "chow_token"

    def score(self, state: Tensor, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return _chow(proposal), state


class ReadFirstRule(TokenRule):
    """A rule of READ_FIRST_SCORES, by its name."""

    kind = "read_first"
    reads_first = True

    def __init__(self, rule: str) -> None:
        super().__init__()
        require_known("rule that reads first", rule, READ_FIRST_SCORES)
        self.rule = rule

    def options(self) -> dict[str, Any]:
        return {"rule": self.rule}

    def score(self, state: Tensor, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return READ_FIRST_SCORES[self.rule](pair_statistics(proposal)), state


class RollbackRule(TokenRule):
    """BiLD: the score of falling back is Chow's; `rho` is the most that the expert tolerates of -log p(v), in nats."""

    kind = "rollback"
    reads_first = True

    def __init__(self, rho: float) -> None:
        super().__init__()
        if not rho > 0:
            raise OptionError(f"rho is {rho}; it must be above 0")
        self.rho = rho

    def options(self) -> dict[str, Any]:
        return {"rho": self.rho}

    def score(self, state: Tensor, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return _chow(proposal), state
