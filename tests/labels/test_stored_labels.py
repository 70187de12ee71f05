"""Stored labels: repaired, resumed, and none of an expert without a fingerprint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from oracles import WithExpert, completing

from seqdefer.labels.hand_offs import Calls
from seqdefer.labels.jobs import LabelPart, unpack_calls, unpack_hand_offs
from seqdefer.labels.label_store import LabelStore
from seqdefer.storage.files import write_tensors
from seqdefer.storage.shards import DamagedShardWarning, Store
from seqdefer.testing import FunctionExpert, ToyTask
from seqdefer.types import Examples, Sequences, SequenceSpec


class Named(FunctionExpert):
    """An expert with a fingerprint, which records the examples it was asked about."""

    def __init__(self, task: ToyTask) -> None:
        super().__init__(completing(task).function)
        self.fingerprint, self.batch_size, self.asked = f"named-{task.seed}", 5, list[int]()
        self.stop_after = 10**9

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += examples.ids.tolist()
        return super().complete(examples, prefixes, spec)


class StoredToy:
    """A toy task whose labels are stored in a folder."""

    def __init__(self, folder: Path) -> None:
        self.task, self.folder = WithExpert(Named, n=18, length=4), folder
        self.examples = self.task.split("test")
        self.task.split = lambda _: self.examples  # type: ignore[method-assign]

    @property
    def expert(self) -> Named:
        assert isinstance(self.task.expert, Named)
        return self.task.expert

    def label(self) -> tuple[list[list[float]], list[list[int]], Calls]:
        shards = LabelStore(self.task, Store(self.folder)).read(LabelPart("hand-offs", "test", torch.arange(18)))
        table, counts = unpack_hand_offs(shards)[1], [unpack_calls(shard)[0] for shard in shards]
        return table.loss.tolist(), table.deferred.tolist(), sum(counts, start=Calls())


@pytest.mark.parametrize("damage", ["cut short", "empty", "other tensors", "not tensors"])
def test_damaged_labels_are_made_again(damage: str, tmp_path: Path) -> None:
    toy = StoredToy(tmp_path)
    first = toy.label()
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = path.read_bytes()
    if damage == "other tensors":
        write_tensors(path, {"loss": torch.zeros(5, 5), "deferred": torch.zeros(5, 5)})
    else:
        path.write_bytes({"cut short": whole[:-9], "empty": b"", "not tensors": b"x" * 300}[damage])
    again = StoredToy(tmp_path)
    with pytest.warns(DamagedShardWarning, match=f"{path.name} is damaged"):
        assert again.label() == first
    assert 5 >= len(set(again.expert.asked)) > 0
    assert path.read_bytes() == whole


def test_labels_of_an_expert_without_a_fingerprint_are_not_stored(tmp_path: Path) -> None:
    toy = StoredToy(tmp_path / "labels")
    toy.expert.fingerprint = ""
    toy.label()
    toy.label()
    assert not (tmp_path / "labels").exists()
    assert Counter(toy.expert.asked).most_common()[-1][1] >= 2  # every example was asked about again


def test_labelling_resumes_where_it_stopped(tmp_path: Path) -> None:
    fresh = StoredToy(tmp_path / "fresh")
    expected = fresh.label()
    batches = [set(ids.tolist()) for ids in fresh.examples.ids.split(5)]
    stopped = StoredToy(tmp_path / "stopped")
    first = next(index for index, one in enumerate(fresh.expert.asked) if one in batches[2])
    stopped.expert.stop_after = 1 + first  # in the middle of the third batch
    with pytest.raises(KeyboardInterrupt):
        stopped.label()
    assert len(list(stopped.folder.iterdir())) == 2  # no partial file, and no manifest
    resumed = StoredToy(tmp_path / "stopped")
    assert resumed.label() == expected
    assert set(resumed.expert.asked) == batches[2] | batches[3]
    files = [{path.name: path.read_bytes() for path in toy.folder.iterdir()} for toy in (fresh, resumed)]
    assert files[0] == files[1]
