"""Features of a proposed token that need no model: is it in the document, was it written before, is it rare.

A reference summary repeats words of its document and seldom its own. To learn this from hidden states takes many
documents; from these plain numbers, a few hundred are enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from seqdefer.tasks.text.passes import PADDING

NO_TOKEN = -2  # equals no token and no padding


@dataclass(frozen=True)
class ProposedTokens:
    """What facts are drawn from, for B rows. Inputs and prefixes are padded on the right."""

    inputs: Tensor  # (B, S)
    prefix: Tensor  # (B, T)
    likeliest: Tensor  # (B, 2): the proposed token and the runner-up
    log_probs: Tensor  # (B, 2): theirs
    noted: Tensor  # (B, K): what `Network.watching` noted at this position
    weighed: Tensor  # (B, `TokenFacts.n_weighed`): what `of_distribution` made of the predictor's distribution


class TokenFacts(ABC):
    """Plain numbers that rejectors may see. `name` tells apart what the tasks of one predictor may show."""

    name: str = ""
    n_weighed: int = 0  # numbers that `of_distribution` returns

    @abstractmethod
    def of_inputs(self, inputs: Tensor) -> Tensor:
        """Return numbers (B, C) about inputs (B, S), before any token is written."""

    @abstractmethod
    def of_tokens(self, proposed: ProposedTokens) -> Tensor:
        """Return numbers (B, F) about the proposed tokens."""

    def of_distribution(self, log_probs: Tensor, tokens: Tensor) -> Tensor:
        """Return numbers (B, `n_weighed`) about the proposed tokens (B,) that take all log probabilities (B, V)."""
        return log_probs[:, :0]


class DocumentFacts(TokenFacts):
    """TokenFacts about documents of token ids: their length, and `facts_of`."""

    def of_inputs(self, inputs: Tensor) -> Tensor:
        return (inputs != PADDING).sum(1, keepdim=True).float().log()

    def of_tokens(self, proposed: ProposedTokens) -> Tensor:
        return facts_of(proposed.inputs, proposed.prefix, proposed.likeliest, proposed.log_probs)


def facts_of(inputs: Tensor, prefix: Tensor, likeliest: Tensor, log_probs: Tensor) -> Tensor:
    """Return facts (B, F) about the token proposed after `prefix` (B, T) for `inputs` (B, S), both padded with PADDING
    on the right.

    likeliest (B, 2): the proposed token and the runner-up; log_probs (B, 2): theirs.
    """
    length = (inputs != PADDING).sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    n_written = (prefix != PADDING).sum(1, keepdim=True)  # (B, 1)
    started = torch.nn.functional.pad(prefix, (1, 0), value=NO_TOKEN)
    last = started.gather(1, n_written)
    tokens = torch.cat([last, likeliest], 1)  # (B, 3)
    found = inputs[:, None] == tokens[..., None]  # (B, 3, S)
    together = found[:, 0, :-1] & found[:, 1, 1:]  # the last token and the proposed one
    places = torch.arange(inputs.shape[1], device=inputs.device)
    first = torch.where(found[:, 1], places, inputs.shape[1]).amin(1, keepdim=True).minimum(length)
    # Few, large operations: with one document per step, the overhead of each dominates.
    in_document, in_prefix = _log_count(found), _log_count(prefix[:, None] == likeliest[..., None])
    rarity = likeliest.clamp(min=0).log1p()  # vocabularies are sorted by token frequency
    of_token = torch.stack([in_document[:, 1:], in_prefix, rarity], 2).flatten(1)  # (B, 6)
    position = n_written.to(log_probs)
    columns = [log_probs[:, 1:], length.log(), in_document[:, :1], of_token]
    return torch.cat([*columns, first / length, _log_count(together[:, None]), position], 1)


def _log_count(found: Tensor) -> Tensor:
    """Return log(1 + count). bool (B, K, S) -> (B, K)"""
    return found.sum(2).log1p()
