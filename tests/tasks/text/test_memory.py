"""Batches that do not fit into the memory of a GPU are halved, and nothing is lost; a GPU labels as the CPU does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.errors import OptionError
from seqdefer.evaluation import experiment
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.labels.trees import UNKNOWN, DecisionTrees

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

from seqdefer.tasks.text.memory import Halving, SmallerBatchWarning
from seqdefer.tasks.text.models import text_model
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.tasks.text.task import TextTask, _remembered

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 14  # more than trees are enumerated for


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that holds three rows: the same tokens come out, in passes of at most three rows."""
    pair, examples = TextPair.of(tiny_text_model("t5", 1, 1), tiny_text_model("t5", 2, 6)), documents(12)
    pattern = random_pattern(12)
    expected = written(pair, examples, Decided(pattern))
    for writer in (pair.predictor, pair.expert):
        for name in ("begin", "go_on"):
            monkeypatch.setattr(writer.model.network, name, holding_three(getattr(writer.model.network, name)))
    with pytest.warns(SmallerBatchWarning) as told:
        assert written(pair, examples, Decided(pattern)) == expected
    assert str(told[0].message) == "12 rows do not fit into the memory of the GPU; going on with 6 at once"
    assert pair.predictor.batch_size == 3


def holding_three(method: Callable[..., Any]) -> Callable[..., Any]:
    def limited(first: Any, tokens: Tensor) -> Any:
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(first, tokens)

    return limited


def test_one_row_that_does_not_fit_ends_it() -> None:
    def full(_: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OptionError, match="one row alone does not fit"), pytest.warns(SmallerBatchWarning):
        Halving(2).over(torch.arange(5), full)
    with pytest.raises(OptionError, match="a batch of 0 rows"):
        Halving(0)


def failing_once(method: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Call number `at` of more than one row does not fit."""
    calls = 0

    def limited(first: Any, tokens: Tensor) -> Any:
        nonlocal calls
        calls += len(tokens) > 1
        if calls == at and len(tokens) > 1:
            calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return method(first, tokens)

    return limited


def label(task: TextTask, folder: Path) -> experiment.Labelled:
    return Experiment(task, ExperimentSettings(seeds=1, instances=1, rollouts=4), folder).splits.train


@pytest.mark.parametrize(
    ("writer", "name", "at"), [("predictor", "begin", 1), ("expert", "go_on", 1), ("expert", "go_on", 9)]
)
def test_a_batch_that_does_not_fit_loses_nothing(
    writer: str, name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = random_documents(24)
    expected = label(task_of(pair_of("t5"), documents, length=LENGTH), tmp_path / "plain")
    task = task_of(pair_of("t5"), documents, length=LENGTH)
    network = getattr(task, writer).model.network
    monkeypatch.setattr(network, name, failing_once(getattr(network, name), at))
    with pytest.warns(SmallerBatchWarning, match="rows do not fit into the memory of the GPU; going on with"):
        found = label(task, tmp_path / "halved")
    assert torch.equal(found.table.loss, expected.table.loss)
    assert torch.equal(found.table.deferred, expected.table.deferred)
    assert found.trees is not None
    assert expected.trees is not None
    assert known(found.trees) == known(expected.trees)


def known(trees: DecisionTrees) -> dict[tuple[int, ...], list[Any]]:
    """Tokens and losses of every node, by its example and the tokens before it."""
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


@pytest.mark.parametrize(("free", "most"), [(2**40, 2**33), (2**34, 2**31)])
def test_encodings_leave_a_gpu_room(free: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They once took 8 GiB for each model, of a GPU that might not have them; batches were then halved in vain."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    assert _remembered(torch.device("cuda")) == most
    assert _remembered(torch.device("cpu")) == 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_labels_and_pictures_on_a_gpu_are_those_on_the_cpu(family: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    documents = random_documents(24)
    here = task_of(pair_of(family), documents, length=LENGTH)
    networks = [text_model(tiny(family, *sizes).cuda(), tiny_tokenizer(), family) for sizes in ((1, 1), (2, 6))]
    there = task_of(TextPair.of(*networks, "both"), documents, length=LENGTH)
    found, expected = label(there, tmp_path / "there"), label(here, tmp_path / "here")
    assert torch.equal(found.table.loss, expected.table.loss)
    assert found.trees is not None
    assert expected.trees is not None
    assert known(found.trees) == known(expected.trees)
    kept = HandOff(torch.full((8,), 3))
    pictures = [
        task.draw(task.split("test"), {0.5: roll_out(task.predictor, task.expert, task.split("test"), kept, task.spec)})
        for task in (here, there)
    ]
    assert pictures[0] == pictures[1]
