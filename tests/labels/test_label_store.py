"""Jobs, shards and manifests: however a part is cut into shards, reading them gives the part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from labelling_toy import HeldToy, ToyOptions
from torch import Tensor

from seqdefer import __version__
from seqdefer.engine.drafts import draft
from seqdefer.errors import CheckpointError, OptionError
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.hand_offs import Calls, hand_off_table
from seqdefer.labels.inventory import take_inventory
from seqdefer.labels.jobs import MAX_SHARD_NODES, LabelKind, LabelPart, make_jobs, unpack_hand_offs, unpack_trees
from seqdefer.labels.label_store import LabelStore
from seqdefer.labels.manifest import describe_options, labelling_name, read_manifest
from seqdefer.labels.nodes import END
from seqdefer.storage.shards import DamagedShardWarning, Store
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import ToyExpert, ToyState
from seqdefer.types import Examples
from tests.labels.test_exploration import by_prefix

Spy = Callable[[Any, str], list[Any]]

ROWS = torch.tensor([7, 3, 0, 11, 12, 5, 19, 2])


def toy(length: int = 5) -> HeldToy:
    task = HeldToy(ToyOptions(length=length))
    task.predictor.batch_size = 4
    return task


def read(task: ToyTask, part: LabelPart, folder: Path, size: int | None) -> list[dict[str, Tensor]]:
    return LabelStore(task, Store(folder), shard_size=size).read(part)


# -- jobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_jobs_are_the_rows_in_order(size: int) -> None:
    jobs = make_jobs(toy(), LabelPart("hand-offs", "train", ROWS), size)
    assert [row for job in jobs for row in job.rows] == ROWS.tolist()
    assert [len(job.rows) for job in jobs[:-1]] == [size] * (len(jobs) - 1)
    assert [job.first for job in jobs] == list(range(0, 8, size))


def test_empty_shards_are_refused() -> None:
    with pytest.raises(OptionError, match="--shard-size is 0; it must be at least 1"):
        make_jobs(toy(), LabelPart("hand-offs", "train", ROWS), 0)


def default_size(task: ToyTask, kind: LabelKind) -> int:
    return len(make_jobs(task, LabelPart(kind, "train", torch.arange(task.n), 3))[0].rows)


def test_a_shard_is_a_batch_of_the_models() -> None:
    task = ToyTask(n=600, length=14)
    task.expert.fingerprint, task.expert.batch_size, task.predictor.batch_size = "toy", 50, 80
    assert (default_size(task, "hand-offs"), default_size(task, "trees")) == (50, 80)
    task.expert.waits = True  # a remote expert costs money: small shards lose little
    assert default_size(task, "trees") == 50
    task.expert.batch_size = 90
    assert default_size(task, "trees") == 80


@pytest.mark.slow
@pytest.mark.parametrize(("length", "size"), [(3, 500), (12, MAX_SHARD_NODES // 2**12), (30, 1)])
def test_whole_trees_of_a_shard_fit_into_memory(length: int, size: int) -> None:
    task = ToyTask(n=600, length=length)
    task.expert.fingerprint, task.predictor.batch_size = "toy", 500
    assert default_size(task, "whole-trees") == size


# -- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 3, 8])
def test_hand_offs_do_not_depend_on_the_shard_size(size: int | None, tmp_path: Path) -> None:
    task, part = toy(), LabelPart("hand-offs", "train", ROWS)
    examples = part.examples(task)
    drafted, table = unpack_hand_offs(read(task, part, tmp_path, size))
    expected = draft(task.predictor, examples, task.spec)
    for name in ("context", "features", "uncertainty", "entropy"):
        assert torch.equal(getattr(drafted, name), getattr(expected, name))
    assert torch.equal(drafted.sequences.tokens, expected.sequences.tokens)
    assert torch.equal(drafted.sequences.lengths, expected.sequences.lengths)
    fresh, _ = hand_off_table(task, examples, expected)
    assert torch.equal(table.loss, fresh.loss)
    assert torch.equal(table.deferred, fresh.deferred)


@pytest.mark.parametrize("size", [None, 1, 3, 8])
@pytest.mark.parametrize("kind", ["trees", "whole-trees"])
def test_trees_do_not_depend_on_the_shard_size(kind: LabelKind, size: int | None, tmp_path: Path, spy: Spy) -> None:
    """The coins of a row depend on its index in the part, not on its shard."""
    task, part = toy(), LabelPart(kind, "train", ROWS, 3)
    examples = part.examples(task)
    found = unpack_trees(task, part, read(task, part, tmp_path, size))
    expected = enumerate_trees(task, examples) if kind == "whole-trees" else explore_trees(task, examples, 3)
    assert by_prefix(found) == by_prefix(expected)
    assert found.is_complete == (kind == "whole-trees")
    assert found.calls == expected.calls
    assert torch.equal(found.examples.ids, examples.ids)
    asked = spy(task.expert, "start"), spy(task.predictor, "start")
    for decisions in product((0, 1), repeat=task.spec.length):
        nodes = found.roots
        for choice in decisions:
            nodes = found.children(nodes, torch.full_like(nodes, choice))
            nodes = nodes[nodes != END]
    assert asked == ([], [])  # complete or closed: no decision calls a model


class Unsure(ToyExpert):
    """An expert whose unproven answers add up to the ids of the examples."""

    fingerprint, batch_size = "unsure", 5

    def start(self, examples: Examples) -> ToyState:
        self.unproven += int(examples.ids.sum())
        return super().start(examples)


def test_unproven_answers_of_stored_labels_count(tmp_path: Path) -> None:
    part, total = LabelPart("hand-offs", "train", ROWS), int(ROWS.sum())
    for _ in ("made", "found"):
        task = ToyTask(n=20)
        task.expert = Unsure(task)
        for times in (1, 2):  # each read counts them
            read(task, part, tmp_path, 3)
            assert task.expert.unproven == times * total
    (one,) = take_inventory(Store(tmp_path)).labellings
    assert [shard.unproven for shard in one.manifest.shards] == [7 + 3, 11 + 12 + 5, 19 + 2]


@pytest.mark.parametrize("name", ["toy expert", ""])
def test_progress_counts_every_row_once(name: str, tmp_path: Path) -> None:
    """Rows that are made, found, or not stored."""
    advanced: list[int] = []
    task, part = toy(), LabelPart("hand-offs", "train", ROWS)
    task.expert.fingerprint = name
    labels = LabelStore(task, Store(tmp_path), shard_size=3)
    for n_lost in (0, 0, 3, 1):
        for path in sorted(tmp_path.glob("*.safetensors"))[:n_lost]:
            path.unlink()
        advanced.clear()
        labels.read(part, advanced.append)
        assert sorted(advanced) == [2, 3, 3]


def test_shared_shards_are_made_once(tmp_path: Path, spy: Spy) -> None:
    """As with --splits train,train."""
    task, advanced = toy(), list[int]()
    asked = spy(task.expert, "start")
    parts = [LabelPart("hand-offs", "train", rows) for rows in (ROWS, ROWS[3:6], ROWS)]
    made = LabelStore(task, Store(tmp_path), shard_size=3).make(parts, advanced.append)
    assert [(one.found, one.made) for one in made] == [(0, 3), (0, 1), (0, 3)]
    assert sum(len(examples) for (examples,) in asked) == len(ROWS)
    assert sum(advanced) == 8 + 3 + 8


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_labels_of_an_expert_without_a_fingerprint_are_not_stored(tmp_path: Path) -> None:
    task = toy()
    task.expert.fingerprint = ""
    read(task, LabelPart("hand-offs", "train", ROWS), tmp_path / "labels", 3)
    assert not (tmp_path / "labels").exists()


@pytest.mark.parametrize("damage", [lambda whole: whole[:-9], lambda _: b"", lambda _: b"x" * 300])
def test_damaged_labels_are_made_again(damage: Callable[[bytes], bytes], tmp_path: Path, spy: Spy) -> None:
    labelled(toy(), tmp_path, 3)
    expected, path = files_in(tmp_path), sorted(tmp_path.glob("*.safetensors"))[1]
    path.write_bytes(damage(path.read_bytes()))
    asked = spy((task := toy()).expert, "start")
    with pytest.warns(DamagedShardWarning, match=f"{path.name} is damaged"):
        read(task, LabelPart("hand-offs", "train", ROWS), tmp_path, 3)
    assert files_in(tmp_path) == expected
    assert 0 < sum(len(examples) for (examples,) in asked) <= 3


def test_labelling_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spy: Spy) -> None:
    labelled(toy(), tmp_path / "fresh", 3)
    stopped = toy()
    start, last = stopped.expert.start, stopped.split("train").ids[ROWS[6:]].tolist()

    def interrupted(examples: Examples) -> ToyState:
        if {*examples.ids.tolist()} & {*last}:
            raise KeyboardInterrupt
        return start(examples)

    monkeypatch.setattr(stopped.expert, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        labelled(stopped, tmp_path / "stopped", 3)
    assert len(files_in(tmp_path / "stopped")) == 2  # no partial file, and no manifest
    asked = spy((task := toy()).expert, "start")
    labelled(task, tmp_path / "stopped", 3)
    assert {one for (examples,) in asked for one in examples.ids.tolist()} == {*last}
    assert files_in(tmp_path / "stopped") == files_in(tmp_path / "fresh")


# -- manifests -----------------------------------------------------------------------------------------------------


def labelled(task: ToyTask, folder: Path, size: int | None = None) -> Path:
    """Label ROWS; return the path of the manifest."""
    (made,) = LabelStore(task, Store(folder), shard_size=size).make([LabelPart("hand-offs", "train", ROWS)])
    return folder / f"{made.manifest.name}.json"


def test_a_manifest_sums_up_its_shards(tmp_path: Path) -> None:
    task = toy()
    manifest = read_manifest(labelled(task, tmp_path, 3))
    examples = task.split("train").select(ROWS)
    _, calls = hand_off_table(task, examples, draft(task.predictor, examples, task.spec))
    sizes = {path.stem: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert {shard.name: shard.size for shard in manifest.shards} == sizes
    assert (manifest.size, manifest.expert_calls) == (sum(sizes.values()), calls.made)
    assert Calls(manifest.expert_calls, sum(shard.saved for shard in manifest.shards)) == calls
    assert (manifest.version, manifest.rows, manifest.shard_size) == (__version__, 8, 3)
    assert (manifest.task, manifest.split, manifest.kind) == ("toy", "train", "hand-offs")
    assert manifest.options["length"] == 5
    assert (manifest.predictor, manifest.expert) == (task.predictor.fingerprint, "toy expert")


def test_labelling_again_leaves_the_manifest(tmp_path: Path) -> None:
    """Its time shows when labels were made."""
    path = labelled(toy(), tmp_path)
    before = path.stat()
    assert labelled(toy(), tmp_path) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_manifest_lists_the_last_shard_size(tmp_path: Path) -> None:
    path = labelled(toy(), tmp_path, 5)
    assert labelled(toy(), tmp_path, 3) == path
    assert [shard.rows for shard in read_manifest(path).shards] == [3, 3, 2]
    for shard in read_manifest(path).shards[:1]:
        (tmp_path / f"{shard.name}.safetensors").unlink()
    (made,) = LabelStore(toy(), Store(tmp_path)).make([LabelPart("hand-offs", "train", ROWS)])
    assert (made.found, made.made) == (2, 1)


@pytest.mark.parametrize("content", ["", "7", "[]", "{}", '{"shards": 5}', '{"shards": [{}]}', '{"shards": []}'])
def test_a_damaged_manifest_is_reported_and_written_again(content: str, tmp_path: Path) -> None:
    path = labelled(toy(), tmp_path)
    whole = path.read_bytes()
    path.write_text(content)
    with pytest.raises(CheckpointError, match=str(path)):
        read_manifest(path)
    assert labelled(toy(), tmp_path) == path
    assert path.read_bytes() == whole


def test_names_of_long_labellings_differ() -> None:
    """Rows are fingerprinted in chunks."""
    task = HeldToy(ToyOptions(n=5000, length=2))
    rows = torch.arange(5000)
    names = {
        labelling_name(task, LabelPart("hand-offs", "train", some))
        for some in (rows, rows[:-1], rows[:4096], rows[4096:])
    }
    assert len(names) == 4


@dataclass(frozen=True)
class Options:
    data: Path = Path("record.csv")
    cities: int = 9


@pytest.mark.parametrize(
    ("options", "described"),
    [(Options(), {"data": "record.csv", "cities": 9}), (Options, {}), ({"cities": 9}, {}), (None, {})],
)
def test_options_of_a_task_are_described(options: Any, described: dict[str, Any]) -> None:
    task = ToyTask()
    task.options = options  # type: ignore[attr-defined]
    assert describe_options(task) == described
