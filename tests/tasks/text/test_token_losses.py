"""Losses of tokens follow from metrics of texts: each against plain Python, and cost-to-go against completions."""

from __future__ import annotations

import pytest
import torch

from seqdefer.types import Examples, Sequences, SequenceSpec

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import pair_of, random_documents, task_of

from seqdefer.tasks.common.cost_to_go import CostToGo
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.task import TextOptions, chosen_metric, length_of
from seqdefer.tasks.text.token_losses import alignment, clipped, first_error, paper

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = SequenceSpec(6, 1)
REFERENCE = [5, 6, 5, 7, 1]  # ends with the end token


def loss_of(rule: object, prefix: list[int], token: int) -> float:
    examples = Examples(torch.zeros(1, 1), torch.tensor([[*REFERENCE, PADDING]]), torch.arange(1))
    before = Sequences(torch.tensor([[*prefix, 9]]), torch.tensor([len(prefix)]))  # 9 is past the end
    return float(rule(examples, before, torch.tensor([token]), SPEC))  # type: ignore[operator]


def test_rouge_counts_tokens() -> None:
    assert [loss_of(clipped, [5, 5], token) for token in (5, 6, 8, 1)] == [1, 0, 1, 0]
    assert [loss_of(paper, [5, 5], token) for token in (5, 6, 8, 1)] == [0, 0, 1, 0]


def test_exact_match_counts_the_first_error() -> None:
    assert [loss_of(first_error, [5, 6], token) for token in (5, 6, 1)] == [0, 1, 1]
    assert [loss_of(first_error, [5, 7], token) for token in (5, 6, 1)] == [0, 0, 0]  # it is wrong already
    assert loss_of(first_error, [5, 6, 5, 7], 1) == 0
    assert loss_of(first_error, [5, 6, 5, 7, 7], 1) == 0


def test_error_rates_count_edits() -> None:
    assert [loss_of(alignment, [5, 6], token) for token in (5, 7, 8, 1)] == [0, 1, 1, 2]
    prefix, total = [], 0.0
    for token in (5, 8, 7, 1):  # two edits from 5 6 5 7
        total += loss_of(alignment, prefix, token)
        prefix.append(token)
    assert total == 2


def test_cost_to_go_is_what_a_token_spoils() -> None:
    """Against the difference of two completions; the expert's own tokens cost nothing and no call."""
    task = task_of(pair_of("t5"), random_documents(12), metric="exact_match", length=6, token_loss="to_go")
    examples, spec = task.split("train"), task.spec
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 60, (len(examples), spec.length), generator=generator)
    before = Sequences(tokens, torch.full((len(examples),), 2))

    def digits(some: Examples, written: Sequences) -> torch.Tensor:
        return (written.tokens % 7).masked_fill(~written.mask(), 0).sum(1).float()

    def loss(sequences: Sequences) -> torch.Tensor:
        return digits(examples, task.expert.complete(examples, sequences, spec))

    asked: list[int] = []

    class Counting:
        deterministic, batch_size = True, 2

        def complete(self, some: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
            asked.append(len(some))
            return task.expert.complete(some, prefixes, spec)

    to_go = CostToGo(Counting(), spec, digits)  # type: ignore[arg-type]
    after = Sequences(tokens, before.lengths + 1)
    expected = (loss(after) - loss(before)).clamp(min=0)
    assert torch.equal(to_go.token_losses(examples, before, tokens[:, 2]), expected)
    assert float(expected.max()) > 0
    assert sum(asked) <= 2 * len(examples)
    n_asked = sum(asked)
    own = task.expert.complete(examples, before, spec).tokens[:, 2]
    assert torch.equal(to_go.token_losses(examples, before, own), torch.zeros(len(examples)))
    assert sum(asked) == n_asked


def test_metrics_choose_their_token_loss() -> None:
    documents, pair = random_documents(9), pair_of("t5")
    rules = {"rouge1": "clipped", "exact_match": "first_error", "wer": "alignment", "cer": "alignment"}
    for metric, rule in rules.items():
        assert task_of(pair, documents, metric=metric).token_rule == rule
    assert task_of(pair, documents, metric="wer", token_loss="paper").token_rule == "paper"
    assert task_of(pair, documents, metric="wer").max_loss is None
    keys = {
        task_of(pair, documents, metric=metric).loss_key(task_of(pair, documents).split("test")) for metric in rules
    }
    assert len(keys) == len(rules)
    assert chosen_metric(TextOptions()) is None


def test_lengths_follow_from_references() -> None:
    lengths = torch.cat([torch.full((95,), 7), torch.full((5,), 40)])
    references = torch.where(torch.arange(40) < lengths[:, None], 5, PADDING)
    assert length_of(references) == 7
    assert length_of(references[90:]) == 40
    assert length_of(torch.full((3, 999), 5)) == 256
    documents = random_documents(30)
    task = task_of(pair_of("t5"), documents)
    fitted_on = [one.summary for place, one in enumerate(documents) if place % 3 < 2]  # not the test documents
    assert task.spec.length == max(len(summary.split()) for summary in fitted_on) + 1
    assert task.options.length == task.spec.length
    assert task_of(pair_of("t5"), documents, length=3).spec.length == 3
