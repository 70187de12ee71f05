"""The token loss of transcripts: how many word edits a token makes unavoidable.

Let u(w) be the least word edit distance to the reference that any continuation of the text w can have: its last word
may still grow, and words may follow. A token t loses u(w t) - u(w). The end token loses what is then left unread: the
distance of the whole text less u(w). The losses of all tokens of an ended text add up to its word edit distance.

Case and punctuation do not count. References may be written in capitals and without commas, as in LibriSpeech, and
words may be cut into tokens in another way than the models do it. With characters instead of words nothing can grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqdefer.tasks.common.edit_distance import edit_distance, next_row, number_units, prefix_distances
from seqdefer.types import Sequences

DROPPED = "'’.\ufffd"  # within words; \ufffd is half a letter
UNITS = ("words", "characters")


def plain(text: str) -> str:
    """Return a text without case and punctuation, letter by letter, so that longer texts only add to it."""
    kept = (letter if letter.isalnum() else " " for letter in text.casefold() if letter not in DROPPED)
    return "".join(kept)


def split_units(text: str, unit: str) -> tuple[list[str], str]:
    """Return the units of a plain text: those that are complete, and one that may still grow."""
    if unit == "characters":
        return list(" ".join(text.split())), ""
    words = text.split()
    is_open = bool(words) and not text.endswith(" ")
    return (words[:-1], words[-1]) if is_open else (words, "")


class Alignments:
    """Edit distances between texts and references, in words or characters."""

    def __init__(self, references: Sequence[str], unit: str = "words") -> None:
        self.unit = unit
        self.references = [split_units(f"{plain(text)} ", unit)[0] for text in references]

    def unavoidable(self, texts: Sequence[str], rows: Sequence[int]) -> Tensor:
        """Return u of each text and the reference at its row. int64 (B,)"""
        split = [split_units(plain(text), self.unit) for text in texts]
        units, references = self._numbered([closed for closed, _ in split], rows)
        row = prefix_distances(units, references)
        # A word that may still grow differs from the words that do not begin with it.
        width, wanted = references.tokens.shape[1], (self.references[at] for at in rows)
        differs = [
            [*(not unit.startswith(word) for unit in line), *[True] * (width - len(line))]
            for (_, word), line in zip(split, wanted, strict=True)
        ]
        padded = torch.tensor(differs, dtype=torch.bool).view(len(texts), width)
        is_open = torch.tensor([bool(word) for _, word in split])
        row = torch.where(is_open[:, None], next_row(row, padded), row)
        beyond = torch.arange(width + 1) > references.lengths[:, None]
        return row.masked_fill(beyond, torch.iinfo(row.dtype).max).amin(1)

    def whole(self, texts: Sequence[str], rows: Sequence[int]) -> Tensor:
        """Return the distance of each text, now complete, to the reference at its row. int64 (B,)"""
        units, references = self._numbered([split_units(f"{plain(text)} ", self.unit)[0] for text in texts], rows)
        return edit_distance(units, references)

    def _numbered(self, units: Sequence[Sequence[str]], rows: Sequence[int]) -> tuple[Sequences, Sequences]:
        numbers: dict[str, int] = {}
        return number_units(units, numbers), number_units([self.references[at] for at in rows], numbers)
