"""Losses equal plain counting and the package rouge-score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.types import Examples, Sequences

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_runs import id_score, package_scores
from tiny_models import random_documents, task_of, tiny_pair
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text.data import Document
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.task import TextTask

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]


token = st.integers(1, 7)  # 1 is the end, 2 is unknown; few, so that many are equal
texts = st.lists(token, min_size=1, max_size=6)

SUMMARIES = [
    "w3 w4 w4 w5", "W3, w4! w4-w6", "w3 w3 w3", "Paris in April", "???", "Ωμέγα", "w3_w4 é w5", "</s> w7", "w6"
]  # fmt: skip


def padded(rows: Sequence[Sequence[int]], width: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


@cache
def counting(**options: str) -> TextTask:
    """Shared: do not modify."""
    documents = [Document(str(row), f"w{row + 3}", text) for row, text in enumerate(SUMMARIES)]
    return task_of(tiny_pair("t5"), documents, **options)


def with_references(references: list[list[int]]) -> Examples:
    n, width = len(references), max(map(len, references))
    return Examples(torch.zeros(n, 1), padded(references, width, PADDING), torch.arange(n))


@given(st.lists(st.tuples(texts, texts, st.integers(0, 5), token), min_size=1, max_size=5))
def test_token_losses_equal_plain_counting(cases: list[tuple[list[int], list[int], int, int]]) -> None:
    """Tokens after the length of a prefix are ignored."""
    references = [[*reference, 1] for reference, _, _, _ in cases]
    examples, tokens = with_references(references), torch.tensor([one for *_, one in cases])
    lengths = [min(kept, len(prefix)) for _, prefix, kept, _ in cases]
    prefixes = Sequences(padded([prefix for _, prefix, _, _ in cases], 6, 3), torch.tensor(lengths))
    paper, clipped = [], []
    for reference, (_, prefix, _, one), kept in zip(references, cases, lengths, strict=True):
        paper.append(float(one not in reference))
        clipped.append(float(prefix[:kept].count(one) >= reference.count(one)))
    for rule, expected in {"paper": paper, "clipped": clipped}.items():
        task = counting(token_loss=rule)
        assert task.token_loss(examples, prefixes, tokens).tolist() == expected
        assert task.token_cost(examples, prefixes, tokens).tolist() == expected


@pytest.mark.parametrize("rule", ["paper", "clipped"])
def test_the_end_is_always_right_and_empty_prefixes_count_nothing(rule: str) -> None:
    task = task_of(tiny_pair("t5"), random_documents(9), token_loss=rule)
    examples = task.split("train")
    blank = Sequences(examples.inputs[:, :0], torch.zeros(3, dtype=torch.long))
    assert task.token_loss(examples, blank, torch.ones(3, dtype=torch.long)).tolist() == [0, 0, 0]
    assert task.token_loss(examples, blank, examples.targets[:, 0]).tolist() == [0, 0, 0]
    assert task.token_rule == rule


@given(st.lists(st.tuples(st.integers(0, len(SUMMARIES) - 1), texts, st.integers(1, 6)), min_size=1, max_size=6))
@settings(max_examples=60)
def test_sequence_losses_equal_the_package_and_plain_counting(
    cases: list[tuple[int, list[int], int]],
) -> None:
    lengths = torch.tensor([min(kept, len(tokens)) for _, tokens, kept in cases])
    sequences = Sequences(padded([tokens for _, tokens, _ in cases], 6, 4), lengths)
    kept = [tokens[:length] for (_, tokens, _), length in zip(cases, lengths.tolist(), strict=True)]
    vocabulary = {number: word for word, number in tiny_tokenizer().get_vocab().items() if number > 2}
    for rule in ("words", "ids"):
        task = counting(rouge=rule)
        order = {one.summary: place for place, one in enumerate(task.documents)}
        everyone = [task.split(name) for name in ("test", "validation", "train")]  # in the order of ids
        targets = torch.cat([part.targets for part in everyone])
        rows = torch.tensor([order[SUMMARIES[which]] for which, _, _ in cases])
        examples = Examples(torch.zeros(len(rows), 1), targets[rows], rows)
        found = task.sequence_loss(examples, sequences)
        if rule == "words":
            written = [" ".join(vocabulary[one] for one in row if one in vocabulary) for row in kept]
            expected = package_scores(written, [SUMMARIES[which] for which, _, _ in cases])
        else:
            plain = [tiny_tokenizer()(SUMMARIES[which])["input_ids"] for which, _, _ in cases]
            expected = [id_score(row, reference) for row, reference in zip(kept, plain, strict=True)]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-4)


def test_labels_on_words_depend_on_the_words() -> None:
    """Unknown words share one id, so references can be equal as ids and differ as words."""
    one, other = (
        task_of(tiny_pair("t5"), [Document(str(row), f"w{row + 3}", text) for row in range(6)])
        for text in ("red", "blue")
    )
    assert torch.equal(one.split("test").targets, other.split("test").targets)
    assert one.loss_key(one.split("test")) != other.loss_key(other.split("test"))


def test_equal_texts_are_scored_once(spy: Spy) -> None:
    task = task_of(tiny_pair("t5"), random_documents(6))
    examples = task.split("test").select(torch.tensor([0, 1, 0, 0, 1]))
    scored = spy(task.references, "score")
    tokens = torch.tensor([[3, 4, 9], [3, 4, 9], [3, 4, 5], [3, 5, 9], [3, 4, 7]])
    loss = task.sequence_loss(examples, Sequences(tokens, torch.tensor([2, 2, 2, 2, 2])))
    assert len(scored[0][0]) == 3
    assert loss[0] == loss[2]
    assert loss[1] == loss[4]


def test_a_summary_without_words_scores_zero() -> None:
    task = task_of(tiny_pair("t5"), [replace(one, summary="???") for one in random_documents(3)])
    examples = task.split("test")
    drafts = draft(task.predictor, examples, task.spec).sequences
    assert task.sequence_loss(examples, drafts).tolist() == [100]
