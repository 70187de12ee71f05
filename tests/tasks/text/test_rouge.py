"""ROUGE-1 on texts equals the package rouge-score bit by bit; on token ids it equals a plain loop."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.tasks.text.rouge import References, in_reference, rouge1_of_ids
from seqdefer.types import Sequences

pytestmark = pytest.mark.usefixtures("one_thread")

Scorer = Callable[[Sequence[str], Sequence[str]], list[float]]


@pytest.fixture(scope="module")
def by_package() -> Scorer:
    """Return a function that scores texts with the package rouge-score."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1"], use_stemmer=False)

    def score(texts: Sequence[str], references: Sequence[str]) -> list[float]:
        pairs = zip(references, texts, strict=True)
        return [scorer.score(reference, text)["rouge1"].fmeasure for reference, text in pairs]

    return score


def random_texts(n: int, words: Sequence[str], seed: int) -> list[str]:
    generator = random.Random(seed)
    marks = [" ", " ", " ", "  ", "-", "'", "_", "\n", "\u00a0", ". "]
    return [
        "".join(generator.choice(words) + generator.choice(marks) for _ in range(generator.randrange(12)))
        for _ in range(n)
    ]


# --- texts -----------------------------------------------------------------------------------------------------------

ODD = [
    "",
    " ",
    "...",
    "the the the cat",
    "The THE tHe",
    "snake_case and kebab-case",
    "it's 3.14 or 1,000",
    "٣ ３ ² ½",  # digits of other scripts are not words
    "naïve café",
    "ΑΒΓ",
    "\u212a \u0130stanbul ſ",  # Kelvin sign and dotted I become ASCII in lower case, the long s does not
    "ß ẞ ﬁ",
    "a\u0000b\u0085c\u2028d",
    "😀 a 😀b",
    "\ud800 half a character",
]


def test_odd_texts_equal_the_package(by_package: Scorer) -> None:
    pairs = [(text, reference) for text in ODD for reference in ODD]
    texts, references = zip(*pairs, strict=True)
    assert References(references).score(texts).tolist() == by_package(texts, references)


def test_random_texts_equal_the_package(by_package: Scorer) -> None:
    words = ["the", "The", "cat", "CAT", "a", "A1", "é", "1", "22", "x_y", "Straße", "", "sat", "on"]
    texts, references = random_texts(5000, words, seed=0), random_texts(5000, words, seed=1)
    ours = References(references).score(texts)
    assert ours.tolist() == by_package(texts, references)
    assert 0 < float(ours.mean()) < 1


@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=40)), min_size=1, max_size=20))
def test_any_text_equals_the_package(by_package: Scorer, pairs: list[tuple[str, str]]) -> None:
    texts, references = zip(*pairs, strict=True)
    assert References(references).score(texts).tolist() == by_package(texts, references)


def test_real_texts_equal_the_package(by_package: Scorer, shared_dir: Path) -> None:
    with gzip.open(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    references = [row["summary"] for row in rows]
    for n_words in (5, 20, 100):
        texts = [" ".join(row["document"].split()[:n_words]) for row in rows]
        ours = References(references).score(texts)
        assert ours.tolist() == by_package(texts, references)
        assert (ours > 0).double().mean() > 0.5


def test_the_example_of_the_module() -> None:
    references = References(["The cat sat.", "It rained."])
    assert len(references) == 2
    found = references.score(["a cat sat", "the cat", "dry"], rows=[0, 0, 1])
    torch.testing.assert_close(found, torch.tensor([2 / 3, 0.8, 0.0], dtype=torch.float64))


def test_rows_choose_the_reference() -> None:
    references = References(["one two", "three", "one two"])
    texts, rows = ["three", "one", "one two"], torch.tensor([1, 0, 2])
    assert references.score(texts, rows).tolist() == References(["three", "one two", "one two"]).score(texts).tolist()
    assert references.score(texts, rows.tolist()).equal(references.score(texts, rows))
    assert references.score([], []).shape == (0,)
    with pytest.raises(ValueError, match="zip"):
        references.score(["one"])


# --- token ids -------------------------------------------------------------------------------------------------------


def loop(outputs: Sequences, references: Sequences, special: Sequence[int]) -> list[float]:
    """Score row by row."""
    scores = []
    for row in range(len(outputs)):
        one, other = (
            Counter(token for token in part.tokens[row, : part.lengths[row]].tolist() if token not in special)
            for part in (outputs, references)
        )
        common = (one & other).total()
        precision, recall = common / max(one.total(), 1), common / max(other.total(), 1)
        scores.append(2 * precision * recall / (precision + recall) if common else 0.0)
    return scores


def random_ids(n: int, length: int, generator: torch.Generator) -> Sequences:
    return Sequences(
        torch.randint(0, 12, (n, length), generator=generator),
        torch.randint(0, length + 1, (n,), generator=generator),
    )


@pytest.mark.parametrize("special", [(), (1,), (0, 1, 7)])
@pytest.mark.parametrize(("length", "width"), [(20, 33), (1, 5), (6, 1)])
def test_ids_equal_a_loop(special: Sequence[int], length: int, width: int, generator: torch.Generator) -> None:
    outputs, references = random_ids(300, length, generator), random_ids(300, width, generator)
    found = rouge1_of_ids(outputs, references, special)
    assert found.dtype == torch.float64
    assert found.tolist() == loop(outputs, references, special)


def test_ids_agree_with_texts(generator: torch.Generator) -> None:
    """If every token is a word, both give the same scores."""
    outputs, references = random_ids(200, 9, generator), random_ids(200, 15, generator)
    texts = [
        [" ".join(f"w{token}" for token in part.tokens[row, : part.lengths[row]].tolist()) for row in range(len(part))]
        for part in (outputs, references)
    ]
    assert References(texts[1]).score(texts[0]).equal(rouge1_of_ids(outputs, references))


def test_in_reference() -> None:
    references = torch.tensor([[4, 5, -1], [6, -1, -1], [-1, -1, -1]])
    assert in_reference(torch.tensor([5, 5, 5]), references).tolist() == [True, False, False]
    assert in_reference(torch.tensor([4, 6, 0]), references).tolist() == [True, True, False]
    assert in_reference(torch.tensor([3]), torch.empty(1, 0, dtype=torch.long)).tolist() == [False]
