"""ROUGE-1, on texts and on token ids, for many outputs at once.

With h words in an output, r in its reference and o in both (each word as often as it is in both):

    precision = o / h,   recall = o / r,   F = 2 precision recall / (precision + recall),   0 where o = 0

On texts the words and every figure are those of the package `rouge-score` (RougeScorer(["rouge1"]), no stemmer), to the
last bit: lower case, then maximal runs of a-z and 0-9. So whatever is not in these is no word: é parts a word in two,
and a Greek text is empty. A reference is read once, however many outputs it is held against:

    references = References(["The cat sat.", "It rained."])
    references.score(["a cat sat", "the cat", "dry"], rows=[0, 0, 1])  # float64 (3,): 0.667, 0.8, 0

On token ids the words are the ids themselves: `rouge1_of_ids`; `in_reference` tells of each token whether it is one of
its reference's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, digits

import torch
from torch import Tensor

from seqdefer.types import Sequences

# By byte: letters in lower case and digits stay, everything else parts words.
_WORDS_OR_SPACE = bytes(code if chr(code) in ascii_lowercase + digits else ord(" ") for code in range(256))


@dataclass(frozen=True)
class _Reference:
    """The words of one reference, laid out so that counting the common ones is left to set and list."""

    n_words: int
    words: frozenset[bytes]
    repeated: Sequence[tuple[bytes, int]]  # those that stand there more than once: few

    def count_common(self, words: Sequence[bytes]) -> int:
        """How many words are in both, each as often as it is in both."""
        common = len(self.words.intersection(words))
        for word, most in self.repeated:
            if (count := words.count(word)) > 1:
                common += min(count, most) - 1
        return common


class References:
    """Texts to hold outputs against."""

    def __init__(self, texts: Sequence[str]) -> None:
        read = {text: _read(text) for text in set(texts)}
        self._references = [read[text] for text in texts]

    def __len__(self) -> int:
        return len(self._references)

    def score(self, texts: Sequence[str], rows: Sequence[int] | Tensor | None = None) -> Tensor:
        """ROUGE-1 F of every text against the reference in its row; without `rows`, text by text. float64 (B,)"""
        places = range(len(self)) if rows is None else rows.tolist() if isinstance(rows, Tensor) else rows
        counts = [
            (self._references[row].count_common(words), len(words), self._references[row].n_words)
            for row, words in zip(places, map(split_words, texts), strict=True)
        ]
        common, n_words, n_reference = torch.tensor(counts, dtype=torch.float64).reshape(-1, 3).unbind(1)
        return _f_measure(common, n_words, n_reference)


def rouge1(texts: Sequence[str], references: Sequence[str]) -> Tensor:
    """ROUGE-1 F of every text against its own reference. float64 (B,)"""
    return References(references).score(texts)


def split_words(text: str) -> list[bytes]:
    """The words that ROUGE counts."""
    # lower() comes first: it makes ASCII of a few letters, such as the Kelvin sign. Bytes, because they split faster.
    return text.lower().encode("latin-1", "replace").translate(_WORDS_OR_SPACE).split()


def _read(text: str) -> _Reference:
    counts = Counter(split_words(text))
    repeated = tuple((word, count) for word, count in counts.items() if count > 1)
    return _Reference(counts.total(), frozenset(counts), repeated)


def _f_measure(common: Tensor, n_output: Tensor, n_reference: Tensor) -> Tensor:
    """F from three counts (B,). In the order of operations that gives the very numbers of `rouge-score`."""
    precision, recall = common / n_output.clamp(min=1), common / n_reference.clamp(min=1)
    return torch.where(common > 0, 2 * precision * recall / (precision + recall), 0.0)


# --- token ids -------------------------------------------------------------------------------------------------------


def rouge1_of_ids(outputs: Sequences, references: Sequences, special: Iterable[int] = ()) -> Tensor:
    """ROUGE-1 F on token ids: of every output (B, L) against its reference (B, R). float64 (B,)

    `special` ids (the end, padding) are no words: they count neither in outputs nor in references."""
    is_word, is_reference_word = _is_word(outputs, special), _is_word(references, special)
    # Two negative numbers that differ, so that what is no word equals nothing in the other.
    ids = outputs.tokens.masked_fill(~is_word, -1)
    reference_ids = references.tokens.masked_fill(~is_reference_word, -2)
    common = _count_common(ids, reference_ids).double()
    return _f_measure(common, is_word.sum(1).double(), is_reference_word.sum(1).double())


def _is_word(sequences: Sequences, special: Iterable[int]) -> Tensor:
    """bool (B, L)"""
    ids = torch.tensor(sorted(special), dtype=sequences.tokens.dtype, device=sequences.tokens.device)
    return sequences.mask() & ~torch.isin(sequences.tokens, ids)


def _count_common(ids: Tensor, reference_ids: Tensor) -> Tensor:
    """How many ids are in both, each as often as it is in both: an id counts where it stands for the k-th time in its
    row and is in the reference at least k times. (B, L), (B, R) -> (B,)"""
    n_before, n_in_reference = (torch.zeros_like(ids, dtype=torch.int32) for _ in range(2))  # (B, L)
    for place, column in enumerate(ids.unbind(1)):  # column by column: (B, L, R) at once is slower, and large
        n_before[:, place + 1 :] += ids[:, place + 1 :] == column[:, None]
    for column in reference_ids.unbind(1):
        n_in_reference += ids == column[:, None]
    return (n_before < n_in_reference).sum(1)


def in_reference(tokens: Tensor, references: Tensor) -> Tensor:
    """Whether each token is one of its reference's. (B,), (B, R) -> bool (B,)

    Pad references with a number that is no token (-1): a padded place then equals nothing."""
    return (tokens[:, None] == references).any(1)
