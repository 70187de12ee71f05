"""Batches that do not fit into GPU memory are halved without loss; a GPU makes the same labels as a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.errors import OptionError
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.labels.labelled import LearningData
from seqdefer.labels.nodes import UNKNOWN

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import (
    Decided,
    documents,
    pair_of,
    random_documents,
    random_pattern,
    task_of,
    tiny,
    tiny_text_model,
    written,
)
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text.batches import AdaptiveBatch, SmallerBatchWarning
from seqdefer.tasks.text.models import text_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.task import TextTask, _encoder_cache_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 14  # too long to enumerate decision trees


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that holds three rows writes the same tokens, in passes of at most three rows."""
    pair, examples = TextPair.of(tiny_text_model("t5", 1, 1), tiny_text_model("t5", 2, 6)), documents(12)
    pattern = random_pattern(12)
    expected = written(pair, examples, Decided(pattern))
    for writer in (pair.predictor, pair.expert):
        for name in ("prefill", "extend"):
            monkeypatch.setattr(writer.model.network, name, holding_three(getattr(writer.model.network, name)))
    with pytest.warns(SmallerBatchWarning) as warned:
        assert written(pair, examples, Decided(pattern)) == expected
    assert str(warned[0].message) == "a batch of 12 rows does not fit into GPU memory; continuing with 6 rows"
    assert pair.predictor.batch_size == 3


def holding_three(method: Callable[..., Any]) -> Callable[..., Any]:
    def limited(first: Any, tokens: Tensor, **options: Any) -> Any:
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(first, tokens, **options)

    return limited


def test_a_single_row_that_does_not_fit_is_an_error() -> None:
    def full(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OptionError, match="a single row does not fit"), pytest.warns(SmallerBatchWarning):
        AdaptiveBatch(2).map(torch.arange(5), full)
    with pytest.raises(OptionError, match="the batch size is 0"):
        AdaptiveBatch(0)


def failing_once(method: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Run out of memory at call number `at` with more than one row."""
    calls = 0

    def limited(first: Any, tokens: Tensor, **options: Any) -> Any:
        nonlocal calls
        calls += len(tokens) > 1
        if calls == at and len(tokens) > 1:
            calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(first, tokens, **options)

    return limited


def label(task: TextTask, folder: Path) -> LearningData:
    return Experiment(task, ExperimentSettings(seeds=1, instances=1, rollouts=4), folder).splits.train


def labelled_task() -> TextTask:
    return task_of(pair_of("t5"), random_documents(24), length=LENGTH)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LearningData:
    return label(labelled_task(), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("writer", "name", "at"), [("predictor", "prefill", 1), ("expert", "extend", 1), ("expert", "extend", 9)]
)
def test_labels_survive_a_halved_batch(
    writer: str, name: str, at: int, plain: LearningData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = labelled_task()
    network = getattr(task, writer).model.network
    monkeypatch.setattr(network, name, failing_once(getattr(network, name), at))
    with pytest.warns(SmallerBatchWarning, match="does not fit into GPU memory; continuing with"):
        found = label(task, tmp_path / "halved")
    assert torch.equal(found.table.loss, plain.table.loss)
    assert torch.equal(found.table.deferred, plain.table.deferred)
    assert known(found) == known(plain)


def known(labelled: LearningData) -> dict[tuple[int, ...], list[Any]]:
    """Return tokens and losses of every node of closed trees by its example and the tokens before it."""
    trees = labelled.trees_of("closed")
    assert trees is not None
    table, places = trees.nodes, list[tuple[int, ...]]()
    for node in range(table.size):
        parent = int(table.parent[node])
        choice = table.children[parent].tolist().index(node) if parent >= 0 else 0
        places.append(
            (*places[parent], int(table.tokens[parent, choice])) if parent >= 0 else (int(table.example[node]),)
        )
    return {
        place: [table.tokens[node].tolist(), table.losses[node].tolist(), (table.children[node] == UNKNOWN).tolist()]
        for node, place in enumerate(places)
    }


@pytest.mark.parametrize(("free", "expected"), [(2**40, 2**33), (2**34, 2**31)])
def test_the_encoder_cache_leaves_gpu_memory_free(free: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once took 8 GiB per model whatever the GPU had, and batches were halved in vain."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    assert _encoder_cache_bytes(torch.device("cuda")) == expected
    assert _encoder_cache_bytes(torch.device("cpu")) == 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_gpu_makes_the_labels_and_drawings_of_a_cpu(family: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    documents = random_documents(24)
    here = task_of(pair_of(family), documents, length=LENGTH)
    networks = [text_model(tiny(family, *sizes).cuda(), tiny_tokenizer(), family) for sizes in ((1, 1), (2, 6))]
    there = task_of(TextPair.of(*networks, "both"), documents, length=LENGTH)
    found, expected = label(there, tmp_path / "there"), label(here, tmp_path / "here")
    assert torch.equal(found.table.loss, expected.table.loss)
    assert known(found) == known(expected)
    kept = HandOff(torch.full((8,), 3))
    pictures = [
        task.draw(task.split("test"), {0.5: roll_out(task.predictor, task.expert, task.split("test"), kept, task.spec)})
        for task in (here, there)
    ]
    assert pictures[0] == pictures[1]
