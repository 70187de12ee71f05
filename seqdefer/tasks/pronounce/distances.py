"""Edit distances of many short sequences at once: what a phoneme error rate counts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqdefer.types import Sequences, SequenceSpec


def error_rates(sequences: Sequences, references: Tensor, spec: SequenceSpec) -> Tensor:
    """100 x edit distance / length of the reference that comes nearest, ends not counted. (B,)

    references: int64 (B, A, R), A alternatives, each with its end and padded with it."""
    written, (n, alternatives, width) = without_end(sequences, spec), references.shape
    flat = references.reshape(n * alternatives, width)
    lengths = (~spec.is_end(flat)).sum(1)
    rows = torch.arange(n, device=flat.device).repeat_interleave(alternatives)
    rates: Tensor = 100.0 * edit_distance(written.select(rows), Sequences(flat, lengths)) / lengths.clamp(min=1)
    return rates.view(n, alternatives).amin(1)


def without_end(sequences: Sequences, spec: SequenceSpec) -> Sequences:
    """The sequences without their end tokens; one that ran to full length may have none."""
    last = sequences.tokens.gather(1, (sequences.lengths[:, None] - 1).clamp(min=0)).squeeze(1)
    return replace(sequences, lengths=sequences.lengths - spec.is_end(last).long())


def edit_distance(sequences: Sequences, references: Sequences) -> Tensor:
    """Insertions, deletions and substitutions between rows: one row of Levenshtein's table at a time. int64 (B,)"""
    places = torch.arange(references.tokens.shape[1] + 1, device=references.tokens.device)
    row = places.expand(len(sequences), -1)  # distances to the first j tokens of the reference
    for position, column in enumerate(sequences.tokens.unbind(1)):
        is_there = position < sequences.lengths
        if not bool(is_there.any()):
            break
        changed = row[:, :-1] + (references.tokens != column[:, None])
        best = torch.cat([row[:, :1] + 1, torch.minimum(row[:, 1:] + 1, changed)], 1)
        # A step to the right costs 1 more: with the places taken off, it is the least of what lies to the left.
        best = (best - places).cummin(1).values + places
        row = torch.where(is_there[:, None], best, row)
    return row.gather(1, references.lengths[:, None]).squeeze(1)
