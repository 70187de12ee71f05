"""ROUGE-1, on texts and on token ids, for many outputs at once.

For an output of h words, a reference of r words and an overlap of o words (each as often as it occurs in both):

    precision = o / h,   recall = o / r,   F = 2 precision recall / (precision + recall),   0 where o = 0

On texts, words and scores equal those of the package `rouge-score` (RougeScorer(["rouge1"]), no stemmer) to the last
bit: words are maximal runs of a-z and 0-9 after lower-casing, so é splits a word and a Greek text has none. Each
reference is parsed once, however many outputs are scored against it:

    references = References(["The cat sat.", "It rained."])
    references.score(["a cat sat", "the cat", "dry"], rows=[0, 0, 1])  # float64 (3,): 0.667, 0.8, 0

`rouge1_of_ids` counts token ids instead of words; `in_reference` marks tokens that their reference contains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, digits

import torch
from torch import Tensor

from seqdefer.types import Sequences

# Per byte: lower-case letters and digits stay, everything else separates words.
_WORDS_OR_SPACE = bytes(code if chr(code) in ascii_lowercase + digits else ord(" ") for code in range(256))


@dataclass(frozen=True)
class _Reference:
    """The words of one reference, laid out for fast counting of common words."""

    n_words: int
    words: frozenset[bytes]
    repeated: Sequence[tuple[bytes, int]]  # words that occur more than once, with their counts

    def count_common(self, words: Sequence[bytes]) -> int:
        """Return the overlap with `words`."""
        common = len(self.words.intersection(words))
        for word, most in self.repeated:
            if (count := words.count(word)) > 1:
                common += min(count, most) - 1
        return common


class References:
    """Reference texts to score outputs against."""

    def __init__(self, texts: Sequence[str]) -> None:
        parsed = {text: _parse(text) for text in set(texts)}
        self._references = [parsed[text] for text in texts]

    def __len__(self) -> int:
        return len(self._references)

    def score(self, texts: Sequence[str], rows: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return ROUGE-1 F of each text against the reference in its row (default: its own place). float64 (B,)"""
        places = range(len(self)) if rows is None else rows.tolist() if isinstance(rows, Tensor) else rows
        counts = [
            (self._references[row].count_common(words), len(words), self._references[row].n_words)
            for row, words in zip(places, map(split_words, texts), strict=True)
        ]
        common, n_words, n_reference = torch.tensor(counts, dtype=torch.float64).reshape(-1, 3).unbind(1)
        return _f_measure(common, n_words, n_reference)


def split_words(text: str) -> list[bytes]:
    """Return the words that ROUGE counts."""
    # lower() comes first: it turns a few letters, such as the Kelvin sign, into ASCII. Bytes split faster.
    return text.lower().encode("latin-1", "replace").translate(_WORDS_OR_SPACE).split()


def _parse(text: str) -> _Reference:
    counts = Counter(split_words(text))
    repeated = tuple((word, count) for word, count in counts.items() if count > 1)
    return _Reference(counts.total(), frozenset(counts), repeated)


def _f_measure(common: Tensor, n_output: Tensor, n_reference: Tensor) -> Tensor:
    """Return F from three counts (B,), in the order of operations of `rouge-score`."""
    precision, recall = common / n_output.clamp(min=1), common / n_reference.clamp(min=1)
    return torch.where(common > 0, 2 * precision * recall / (precision + recall), 0.0)


# --- token ids -------------------------------------------------------------------------------------------------------


def rouge1_of_ids(outputs: Sequences, references: Sequences, special: Iterable[int] = ()) -> Tensor:
    """Return ROUGE-1 F of each output (B, L) against its reference (B, R), on token ids. float64 (B,)

    `special` ids (the end, padding) count neither in outputs nor in references.
    """
    is_word, is_reference_word = _is_word(outputs, special), _is_word(references, special)
    # Different negative ids, so that masked positions never match.
    ids = outputs.tokens.masked_fill(~is_word, -1)
    reference_ids = references.tokens.masked_fill(~is_reference_word, -2)
    common = _count_common(ids, reference_ids).double()
    return _f_measure(common, is_word.sum(1).double(), is_reference_word.sum(1).double())


def _is_word(sequences: Sequences, special: Iterable[int]) -> Tensor:
    """bool (B, L)"""
    ids = torch.tensor(sorted(special), dtype=sequences.tokens.dtype, device=sequences.tokens.device)
    return sequences.mask() & ~torch.isin(sequences.tokens, ids)


def _count_common(ids: Tensor, reference_ids: Tensor) -> Tensor:
    """Return the overlap: the k-th occurrence of an id counts if the reference has it at least k times.

    (B, L), (B, R) -> (B,)
    """
    n_before, n_in_reference = (torch.zeros_like(ids, dtype=torch.int32) for _ in range(2))  # (B, L)
    for place, column in enumerate(ids.unbind(1)):  # by column: a (B, L, R) tensor is slower and large
        n_before[:, place + 1 :] += ids[:, place + 1 :] == column[:, None]
    for column in reference_ids.unbind(1):
        n_in_reference += ids == column[:, None]
    return (n_before < n_in_reference).sum(1)


def in_reference(tokens: Tensor, references: Tensor) -> Tensor:
    """Whether each token occurs in its reference. (B,), (B, R) -> bool (B,)

    Pad references with -1, which equals no token.
    """
    return (tokens[:, None] == references).any(1)
