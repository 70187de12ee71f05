"""Edit distances of batches of short sequences, and the phoneme error rate."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqdefer.types import Sequences, SequenceSpec


def error_rates(sequences: Sequences, references: Tensor, spec: SequenceSpec) -> Tensor:
    """Return 100 x edit distance / length of the nearest reference, without end tokens. (B,)

    references: int64 (B, A, R), A alternatives, each ended and padded by the end token."""
    written, (n, alternatives, width) = without_end(sequences, spec), references.shape
    flat = references.reshape(n * alternatives, width)
    lengths = (~spec.is_end(flat)).sum(1)
    rows = torch.arange(n, device=flat.device).repeat_interleave(alternatives)
    rates: Tensor = 100.0 * edit_distance(written.select(rows), Sequences(flat, lengths)) / lengths.clamp(min=1)
    return rates.view(n, alternatives).amin(1)


def without_end(sequences: Sequences, spec: SequenceSpec) -> Sequences:
    """Return the sequences without their end tokens, which those of full length may lack."""
    last = sequences.tokens.gather(1, (sequences.lengths[:, None] - 1).clamp(min=0)).squeeze(1)
    return replace(sequences, lengths=sequences.lengths - spec.is_end(last).long())


def edit_distance(sequences: Sequences, references: Sequences) -> Tensor:
    """Return Levenshtein distances between rows, one row of the table at a time. int64 (B,)"""
    places = torch.arange(references.tokens.shape[1] + 1, device=references.tokens.device)
    row = places.expand(len(sequences), -1)  # distances to the first j tokens of the reference
    for position, column in enumerate(sequences.tokens.unbind(1)):
        is_there = position < sequences.lengths
        if not bool(is_there.any()):
            break
        changed = row[:, :-1] + (references.tokens != column[:, None])
        best = torch.cat([row[:, :1] + 1, torch.minimum(row[:, 1:] + 1, changed)], 1)
        # Insertions cost 1 per step to the right: after subtracting the column index they are a running minimum.
        best = (best - places).cummin(1).values + places
        row = torch.where(is_there[:, None], best, row)
    return row.gather(1, references.lengths[:, None]).squeeze(1)
