"""What can be told of a proposed token without a model: is it in the document, was it written before, is it rare.

A summary's reference repeats words of its document and seldom repeats its own. A network would have to learn this from
hidden states, document by document; as plain numbers a few hundred documents are enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seqdefer.tasks.text.passes import PADDING

NO_TOKEN = -2  # equals no token and no padding


def facts_of(inputs: Tensor, prefix: Tensor, likeliest: Tensor, log_probs: Tensor) -> Tensor:
    """Facts (B, F) of what is proposed after `prefix` (B, T) for documents `inputs` (B, S), padded with PADDING.
    likeliest (B, 2): the proposed token and the next likely one; log_probs (B, 2): theirs."""
    given = inputs != PADDING
    length = given.sum(1).clamp(min=1)  # (B,)
    n, n_written = prefix.shape
    last = prefix[:, -1] if n_written else inputs.new_full((n,), NO_TOKEN)
    columns = [log_probs[:, 1], length.log(), _log_count(inputs == last[:, None])]
    for token in likeliest.unbind(1):
        found = inputs == token[:, None]  # (B, S)
        # Vocabularies are ordered by how common a token was when they were made.
        columns += [_log_count(found), _log_count(prefix == token[:, None]), token.clamp(min=0).log1p()]
    found = inputs == likeliest[:, :1]
    places = torch.arange(inputs.shape[1], device=inputs.device)
    first = torch.where(found, places, inputs.shape[1]).amin(1).clamp(max=length)
    together = (inputs[:, :-1] == last[:, None]) & (inputs[:, 1:] == likeliest[:, :1])
    columns += [first / length, _log_count(together), torch.full_like(log_probs[:, 0], n_written)]
    return torch.stack([column.float() for column in columns], 1)


def _log_count(found: Tensor) -> Tensor:
    """log(1 + how many). bool (B, S) -> (B,)"""
    return found.sum(1).log1p()
