"""Edit distances, error rates and the alignment token loss equal their definitions, the textbook's table and jiwer."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqdefer.tasks.common.edit_distance import (
    alignment_loss,
    character_error_rates,
    edit_distance,
    prefix_distances,
    token_error_rates,
    without_end,
    word_error_rates,
)
from seqdefer.types import Sequences, SequenceSpec

pytestmark = pytest.mark.usefixtures("one_thread")

END = 0
SPEC = SequenceSpec(9, end=END)
Tokens = tuple[int, ...]
tokens = st.lists(st.integers(1, 4), max_size=7).map(tuple)
pairs_of_tokens = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6)


@cache
def levenshtein(left: Tokens, right: Tokens) -> int:
    """Compute the distance by its recursive definition."""
    if not left or not right:
        return len(left) + len(right)
    changed = levenshtein(left[:-1], right[:-1]) + (left[-1] != right[-1])
    return min(changed, levenshtein(left[:-1], right) + 1, levenshtein(left, right[:-1]) + 1)


def best(written: Tokens, reference: Tokens) -> int:
    """Return the least distance to any prefix of the reference."""
    return min(levenshtein(written, reference[:j]) for j in range(len(reference) + 1))


def padded(rows: list[Tokens], width: int = 8, padding: int = 0) -> Sequences:
    return Sequences(
        torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows]), torch.tensor([*map(len, rows)])
    )


# -- distances -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(pairs=pairs_of_tokens, padding=st.integers(0, 4))
def test_distances_equal_the_definition(pairs: list[tuple[Tokens, Tokens]], padding: int) -> None:
    left, right = ([pair[side] for pair in pairs] for side in (0, 1))
    written, references = padded(left, padding=padding), padded(right, width=9, padding=padding)
    assert edit_distance(written, references).tolist() == [levenshtein(one, two) for one, two in pairs]
    rows = prefix_distances(written, references).tolist()
    for row, (one, two) in zip(rows, pairs, strict=True):
        assert row[: len(two) + 1] == [levenshtein(one, two[:j]) for j in range(len(two) + 1)]


def test_an_empty_batch() -> None:
    nothing = Sequences(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    assert edit_distance(nothing, nothing).shape == (0,)
    assert word_error_rates([], []).shape == (0,)


def test_the_nearest_alternative_counts() -> None:
    spec = SequenceSpec(5, end=0)
    references = torch.tensor([[[1, 2, 3, 4, 0], [1, 2, 0, 0, 0]]]).repeat(5, 1, 1)
    written = padded([(1, 2, 0), (1, 0), (1, 2, 3, 4, 4), (0,), (3, 3, 3, 3, 0)], width=5)
    assert token_error_rates(written, references, spec).tolist() == [0.0, 50.0, 25.0, 100.0, 75.0]


def test_end_tokens_are_removed_once() -> None:
    rows = padded([(1, 2, 0), (0,), (1, 2, 3), ()], width=3)
    assert without_end(rows, SPEC).lengths.tolist() == [2, 0, 3, 0]


# -- the alignment token loss --------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(pairs=pairs_of_tokens, appended=st.lists(st.integers(1, 4), min_size=6, max_size=6), padding=st.integers(0, 4))
def test_a_token_adds_what_it_leads_away(pairs: list[tuple[Tokens, Tokens]], appended: list[int], padding: int) -> None:
    next_tokens = appended[: len(pairs)]
    prefixes, references = (padded([pair[side] for pair in pairs], padding=padding) for side in (0, 1))
    got = alignment_loss(prefixes, torch.tensor(next_tokens), references, SPEC).tolist()
    cases = zip(pairs, next_tokens, strict=True)
    assert got == [best((*prefix, token), one) - best(prefix, one) for (prefix, one), token in cases]
    assert set(got) <= {0, 1}


@settings(max_examples=60)
@given(pairs=pairs_of_tokens)
def test_the_end_adds_what_is_left_unread(pairs: list[tuple[Tokens, Tokens]]) -> None:
    prefixes, references = (padded([pair[side] for pair in pairs]) for side in (0, 1))
    got = alignment_loss(prefixes, torch.full((len(pairs),), END), references, SPEC).tolist()
    assert got == [levenshtein(prefix, one) - best(prefix, one) for prefix, one in pairs]


@settings(max_examples=40)
@given(pairs=pairs_of_tokens)
def test_losses_of_a_whole_sequence_add_up_to_its_distance(pairs: list[tuple[Tokens, Tokens]]) -> None:
    references = padded([reference for _, reference in pairs])
    ended = padded([(*written, END) for written, _ in pairs])
    total = torch.zeros(len(pairs), dtype=torch.long)
    for position in range(8):
        prefixes = ended.truncate(torch.full((len(pairs),), position))
        losses = alignment_loss(prefixes, ended.tokens[:, position], references, SPEC)
        total += losses.where(position < ended.lengths, 0)
    assert total.tolist() == [levenshtein(written, reference) for written, reference in pairs]


def test_one_missing_token_does_not_condemn_the_rest() -> None:
    """A loss by position would count every token after a skipped one as wrong."""
    reference, written = (1, 2, 3, 4, 1, 2), (1, 3, 4, 1, 2, END)
    losses = [
        int(alignment_loss(padded([written[:k]]), torch.tensor([written[k]]), padded([reference]), SPEC))
        for k in range(len(written))
    ]
    assert losses == [0, 1, 0, 0, 0, 0]


# -- texts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reference", "words", "characters"),
    [
        ("the cat sat", "the cat sat down", 25.0, 100 * 5 / 16),
        ("the cat sat", "the cat sat", 0.0, 0.0),
        (" the  cat\n", "the cat", 0.0, 0.0),
        ("", "a bc", 100.0, 100.0),
        ("a b c d", "a", 300.0, 600.0),
        ("", "", 0.0, 0.0),
        ("two words", "", 200.0, 900.0),
        ("thecat", "the cat", 100.0, 100 / 7),
    ],
)
def test_error_rates_of_texts(text: str, reference: str, words: float, characters: float) -> None:
    assert word_error_rates([text], [reference]).item() == pytest.approx(words)
    assert character_error_rates([text], [reference]).item() == pytest.approx(characters)


def test_each_text_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="2 texts have 1 references"):
        word_error_rates(["a", "b"], ["a"])


texts = st.text(alphabet="ab cé\u00a0", max_size=12)


@settings(max_examples=60)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_error_rates_do_not_depend_on_the_batch(pairs: list[tuple[str, str]]) -> None:
    written, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for rates in (word_error_rates, character_error_rates):
        alone = torch.cat([rates([one], [two]) for one, two in pairs])
        assert torch.equal(rates(written, references), alone)


@settings(max_examples=60)
@given(text=texts, reference=texts.filter(str.strip))
def test_error_rates_equal_jiwer(text: str, reference: str) -> None:
    jiwer = pytest.importorskip("jiwer")
    text, reference = (" ".join(one.split()) for one in (text, reference))
    assert word_error_rates([text], [reference]).item() == pytest.approx(100 * jiwer.wer(reference, text))
    assert character_error_rates([text], [reference]).item() == pytest.approx(100 * jiwer.cer(reference, text))
