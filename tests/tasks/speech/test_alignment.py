"""The token loss of transcripts: unavoidable edits, against brute force."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqdefer.tasks.speech.alignment import Alignments, plain

words = st.text(alphabet="ab ", max_size=6)


def distance(one: list[str], other: list[str]) -> int:
    """Return the edit distance by its recursive definition."""
    if not one or not other:
        return len(one) + len(other)
    same = distance(one[:-1], other[:-1]) + (one[-1] != other[-1])
    return min(same, distance(one[:-1], other) + 1, distance(one, other[:-1]) + 1)


@settings(max_examples=60, deadline=None)
@given(words, words)
def test_unavoidable_edits_are_those_of_the_best_continuation(text: str, reference: str) -> None:
    """Try all continuations of up to four letters, and the rest of the reference after its every place."""
    short = ["".join(letters) for n in range(5) for letters in product("ab ", repeat=n)]
    rest = [reference[start:] for start in range(len(reference) + 1)]
    endings = [*short, *(f"{middle}{end}" for middle in ("", " ", "a", "b", "a ", "b ") for end in rest)]
    best = min(distance((text + ending).split(), reference.split()) for ending in endings)
    found = Alignments([reference])
    assert found.unavoidable([text], [0]).tolist() == [best]
    assert found.whole([text], [0]).tolist() == [distance(text.split(), reference.split())]


@pytest.mark.parametrize("unit", ["words", "characters"])
@settings(max_examples=60, deadline=None)
@given(words, words)
def test_losses_never_fall_and_add_up_to_the_distance(unit: str, text: str, reference: str) -> None:
    found = Alignments([reference], unit)
    grown = [text[:n] for n in range(len(text) + 1)]
    edits = found.unavoidable(grown, [0] * len(grown))
    assert (edits.diff() >= 0).all()
    assert int(edits[0]) == 0
    assert int(found.whole([text], [0])[0]) >= int(edits[-1])


def test_a_word_may_still_grow() -> None:
    found = Alignments(["the cat sat"])
    texts = [" the", " the ca", " the car", " the ca sat", " the cat sat on"]
    assert found.unavoidable(texts, [0] * 5).tolist() == [0, 0, 1, 1, 1]
    assert found.whole(texts, [0] * 5).tolist() == [2, 2, 2, 1, 1]


def test_characters_cannot_grow() -> None:
    found = Alignments(["ab"], "characters")
    assert found.unavoidable(["a", "b", "ab", "ac", "abc"], [0] * 5).tolist() == [0, 1, 0, 1, 1]


def test_case_and_punctuation_do_not_count() -> None:
    assert plain("Don't, U.S.-led!").split() == ["dont", "us", "led"]
    found = Alignments(["DONT STOP THE US LED TALKS"])
    assert found.whole([" Don't stop the U.S.-led talks."], [0]).tolist() == [0]


def test_each_text_has_its_own_reference() -> None:
    found = Alignments(["a b", "c", "..."])
    assert torch.equal(found.whole(["a b", "a b", "c", "c"], [0, 1, 1, 2]), torch.tensor([0, 2, 0, 1]))
    assert torch.equal(found.unavoidable(["a b", "a b", "c", "c"], [0, 1, 1, 2]), torch.tensor([0, 2, 0, 1]))
    assert found.unavoidable(["c"], [2]).tolist() == [1], "a reference without words"


def test_long_texts_do_not_recurse_too_deeply() -> None:
    text = "ab" * 700  # longer than the limit of Python
    assert Alignments([text], "characters").whole([text], [0]).tolist() == [0]
