"""Labelling holds the keys and values of few clips, however many rows it follows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'speech'")
pytest.importorskip("soundfile", reason="needs the extra 'speech'")

from tiny_whisper import LENGTH, save_place, tiny_whisper, write_corpus

from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.engine.drafts import draft
from seqdefer.labels.exploration import draw_decisions, grow_along
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import Silent
from seqdefer.rejectors.confidence import Confidence
from seqdefer.tasks.speech.options import SpeechOptions
from seqdefer.tasks.speech.task import SpeechTask, _source_bytes, prepare
from seqdefer.tasks.text.passes import KeyValueCache
from seqdefer.tasks.text.reading import Reader

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, ROLLOUTS = 8, 4


@pytest.fixture
def task(tmp_path: Path) -> SpeechTask:
    folder = save_place(tmp_path)
    write_corpus(folder, 12)
    given = {name: str(folder / name) for name in ("predictor", "expert")}
    sizes = {"train_clips": 8, "validation_clips": 2, "test_clips": 2, "length": LENGTH}
    task = prepare(SpeechOptions(**given, train=str(folder), **sizes), folder, torch.device("cpu"), Silent())
    task.predictor.batch_size = task.expert.batch_size = BATCH
    return task


@pytest.fixture
def new_objects() -> Iterator[None]:
    """Let `gc.get_objects` list what is made from now on: other modules leave a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held_bytes() -> int:
    """Return the bytes of all keys and values of clips that are in memory."""
    storages = {}
    for cache in (one for one in gc.get_objects() if type(one) is KeyValueCache):
        for tensor in (tensor for layer in cache.source for tensor in layer):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def largest(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> int:
    """Return the most bytes held after any pass."""
    most, real = [0], Reader._new_block

    def counted(self: Reader, *arguments: Any) -> Any:
        block = real(self, *arguments)
        most.append(held_bytes())
        return block

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "_new_block", counted)
        work()
    return max(most)


@pytest.mark.usefixtures("new_objects")
def test_labels_hold_the_keys_of_one_batch(task: SpeechTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row used to hold those of its clip: on a GPU of 140 GB, whisper-small did not fit."""
    limit = BATCH * sum(_source_bytes(one.model.model) for one in (task.predictor, task.expert))
    examples = task.split("train")
    decisions = draw_decisions(0, len(examples), ROLLOUTS, task.spec.length)
    assert 0 < largest(monkeypatch, lambda: grow_along(task, examples, decisions)) <= limit
    drafted = draft(task.predictor, examples, task.spec)
    assert 0 < largest(monkeypatch, lambda: hand_off_table(task, examples, drafted)) <= limit


@pytest.mark.usefixtures("new_objects")
def test_sweeps_hold_the_keys_of_one_batch(task: SpeechTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each level kept copies for rows of different clips. 10 clips took 6 GB with whisper-base."""
    task.predictor.batch_size = task.expert.batch_size = 8 * BATCH
    examples = task.split("train")
    limit = len(examples) * sum(_source_bytes(one.model.model) for one in (task.predictor, task.expert))
    trees = DecisionTrees(task, examples)
    assert 0 < largest(monkeypatch, lambda: sweep_thresholds(Confidence(), trees)) <= limit


def test_bytes_of_a_clip_are_those_of_a_pass(task: SpeechTask) -> None:
    network = task.expert.model.network
    run = network.prefill(task.split("test").inputs, torch.zeros(2, 0, dtype=torch.long))
    assert sum(tensor.nbytes for layer in run.cache.source for tensor in layer) == 2 * _source_bytes(tiny_whisper(2, 1))
