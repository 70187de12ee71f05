"""Edit distances of batches of sequences, and what is built on them: error rates and the alignment token loss.

D(w, j) is the Levenshtein distance from the tokens w to the first j tokens of a reference of R tokens. One row of the
table, D(w, 0..R), is kept for each sequence; appending a token makes the next row.

- Error rate: 100 x D(w, R) / R, in tokens, words or characters.
- Alignment token loss: how far a token leads away from every prefix of the reference. With best(w) = min over j of
  D(w, j), a token t adds best(w t) - best(w), which is 0 or 1, and the end token adds D(w, R) - best(w): what is left
  unread. The losses of all tokens of an ended sequence therefore add up to its edit distance.

    word_error_rates(["the cat sat"], ["the cat sat down"])  # tensor([25.])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from seqdefer.types import Sequences, SequenceSpec


def edit_distance(sequences: Sequences, references: Sequences) -> Tensor:
    """Return Levenshtein distances between rows. int64 (B,)"""
    return prefix_distances(sequences, references).gather(1, references.lengths[:, None]).squeeze(1)


def prefix_distances(sequences: Sequences, references: Sequences) -> Tensor:
    """Return D(w, j), the distances to the first j tokens of the reference, for j = 0..width. int64 (B, width + 1)

    Columns beyond the length of a reference have no meaning."""
    places = torch.arange(references.tokens.shape[1] + 1, device=references.tokens.device)
    row = places.expand(len(sequences), -1)
    for position in range(max(sequences.lengths.tolist(), default=0)):
        longer = next_row(row, references.tokens != sequences.tokens[:, position, None])
        row = torch.where((position < sequences.lengths)[:, None], longer, row)
    return row


def next_row(row: Tensor, differs: Tensor) -> Tensor:
    """Return the distances after one more token per row, which differs from the tokens of the reference where `differs`
    (bool (B, width)) says so. (B, width + 1)"""
    places = torch.arange(row.shape[1], device=row.device)
    changed = row[:, :-1] + differs
    best = torch.cat([row[:, :1] + 1, torch.minimum(row[:, 1:] + 1, changed)], 1)
    # Insertions cost 1 per step to the right: after subtracting the column index they are a running minimum.
    return (best - places).cummin(1).values + places


# -- tokens --------------------------------------------------------------------------------------------------------


def alignment_loss(prefixes: Sequences, tokens: Tensor, references: Sequences, spec: SequenceSpec) -> Tensor:
    """Return how many edits each token adds when it is appended to its prefix. int64 (B,)

    prefixes    what was written before the token, without an end token
    tokens      (B,) the appended tokens; the end token adds the part of the reference that stays unread
    references  without end tokens
    """
    row = prefix_distances(prefixes, references)
    before = _best(row, references)
    unread = row.gather(1, references.lengths[:, None]).squeeze(1)
    longer = next_row(row, references.tokens != tokens[:, None])
    after = torch.where(spec.is_end(tokens), unread, _best(longer, references))
    return after - before


def _best(row: Tensor, references: Sequences) -> Tensor:
    """Return the least distance to any prefix of the reference. (B,)"""
    places = torch.arange(row.shape[1], device=row.device)
    beyond = places > references.lengths[:, None]
    return row.masked_fill(beyond, torch.iinfo(row.dtype).max).amin(1)


def without_end(sequences: Sequences, spec: SequenceSpec) -> Sequences:
    """Return the sequences without their end tokens, which those of full length may lack."""
    last = sequences.tokens.gather(1, (sequences.lengths[:, None] - 1).clamp(min=0)).squeeze(1)
    has_end = spec.is_end(last) & (sequences.lengths > 0)
    return replace(sequences, lengths=sequences.lengths - has_end.long())


def token_error_rates(sequences: Sequences, references: Tensor, spec: SequenceSpec) -> Tensor:
    """Return 100 x edit distance / length of the nearest reference, without end tokens. (B,)

    references: int64 (B, A, R), A alternatives, each ended and padded by the end token."""
    written, (n, alternatives, width) = without_end(sequences, spec), references.shape
    flat = references.reshape(n * alternatives, width)
    rows = torch.arange(n, device=flat.device).repeat_interleave(alternatives)
    rates = _rates(written.select(rows), Sequences(flat, (~spec.is_end(flat)).sum(1)))
    return rates.view(n, alternatives).amin(1)


def _rates(sequences: Sequences, references: Sequences) -> Tensor:
    rates: Tensor = 100.0 * edit_distance(sequences, references) / references.lengths.clamp(min=1)
    return rates


# -- texts ---------------------------------------------------------------------------------------------------------


def word_error_rates(texts: Sequence[str], references: Sequence[str]) -> Tensor:
    """Return 100 x word edits / words of the reference, for each text. Words are what white space separates. (B,)

    Texts are compared as they are: normalise them first. A reference without words counts as one word."""
    return _unit_error_rates([text.split() for text in texts], [text.split() for text in references])


def character_error_rates(texts: Sequence[str], references: Sequence[str]) -> Tensor:
    """Return 100 x character edits / characters of the reference, for each text. (B,)

    Runs of white space count as one character, and none at the ends. See `word_error_rates` for empty references."""
    return _unit_error_rates([" ".join(text.split()) for text in texts], [" ".join(one.split()) for one in references])


def _unit_error_rates(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Tensor:
    if len(texts) != len(references):
        raise ValueError(f"{len(texts)} texts have {len(references)} references; each needs one")
    numbers: dict[str, int] = {}  # of different words or characters, by first appearance
    return _rates(number_units(texts, numbers), number_units(references, numbers))


def number_units(rows: Sequence[Sequence[str]], numbers: dict[str, int]) -> Sequences:
    """Return rows of words or characters as rows of numbers, padded with 0; new ones are added to `numbers`."""
    width = max(map(len, rows), default=0)
    ids = [[numbers.setdefault(unit, len(numbers)) for unit in row] + [0] * (width - len(row)) for row in rows]
    return Sequences(torch.tensor(ids).view(len(rows), width).long(), torch.tensor([*map(len, rows)], dtype=torch.long))
