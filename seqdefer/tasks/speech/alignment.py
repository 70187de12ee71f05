"""The token loss of transcripts: how many word edits a token makes unavoidable.

Let u(w) be the least word edit distance to the reference that any continuation of the text w can have: its last word
may still grow, and words may follow. A token t loses u(w t) - u(w). The end token loses what is then left unread: the
distance of the whole text less u(w). The losses of all tokens of an ended text add up to its word edit distance.

Case and punctuation do not count. References may be written in capitals and without commas, as in LibriSpeech, and
words may be cut into tokens in another way than the models do it. With characters instead of words nothing can grow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_DROPPED = re.compile("['’.\ufffd]")  # within words; \ufffd is half a letter
_SEPARATORS = re.compile(r"[\W_]")  # what is neither a letter nor a digit
UNITS = ("words", "characters")
KEPT_ROWS = 2**16
MAX_DEPTH = 200  # of recursion


def plain(text: str) -> str:
    """Return a text without case and punctuation, letter by letter, so that longer texts only add to it."""
    return _SEPARATORS.sub(" ", _DROPPED.sub("", text.casefold()))


def split_units(text: str, unit: str) -> tuple[list[str], str]:
    """Return the units of a plain text: those that are complete, and one that may still grow."""
    if unit == "characters":
        return list(" ".join(text.split())), ""
    words = text.split()
    is_open = bool(words) and not text.endswith(" ")
    return (words[:-1], words[-1]) if is_open else (words, "")


class Alignments:
    """Edit distances between texts and references, in words or characters.

    A row has the distances of a text to the first 0, 1, 2, ... units of its reference. The texts of a clip share their
    beginnings, whose rows are kept: a longer text costs one step for each unit that it adds."""

    def __init__(self, references: Sequence[str], unit: str = "words") -> None:
        self.unit = unit
        self.references = [split_units(f"{plain(text)} ", unit)[0] for text in references]
        self._row = lru_cache(KEPT_ROWS)(self._make_row)

    def unavoidable(self, texts: Sequence[str], rows: Sequence[int]) -> Tensor:
        """Return u of each text and the reference at its row. int64 (B,)"""
        return torch.tensor([self._unavoidable(*one) for one in zip(texts, rows, strict=True)], dtype=torch.long)

    def whole(self, texts: Sequence[str], rows: Sequence[int]) -> Tensor:
        """Return the distance of each text, now complete, to the reference at its row. int64 (B,)"""
        units = (tuple(split_units(f"{plain(text)} ", self.unit)[0]) for text in texts)
        found = [self._row(at, closed)[-1] for closed, at in zip(units, rows, strict=True)]
        return torch.tensor(found, dtype=torch.long)

    def _unavoidable(self, text: str, at: int) -> int:
        closed, growing = split_units(plain(text), self.unit)
        row = self._row(at, tuple(closed))
        if growing:  # it differs from the words that do not begin with it
            row = _next_row(row, [not unit.startswith(growing) for unit in self.references[at]])
        return min(row)

    def _make_row(self, at: int, units: tuple[str, ...]) -> Sequence[int]:
        reference = self.references[at]
        if not units:
            return range(len(reference) + 1)
        for n in range(MAX_DEPTH, len(units), MAX_DEPTH):  # else a long text would recurse too deeply
            self._row(at, units[:n])
        return _next_row(self._row(at, units[:-1]), [unit != units[-1] for unit in reference])


def _next_row(row: Sequence[int], differs: Sequence[bool]) -> list[int]:
    """Return the row after one more unit, which differs from those of the reference where `differs` says so."""
    following = [row[0] + 1]
    for place, is_other in enumerate(differs):
        following.append(min(row[place] + is_other, row[place + 1] + 1, following[-1] + 1))
    return following
