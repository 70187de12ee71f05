"""Jobs, shards read back, and manifests: however the rows of a part are cut, together they are the part."""

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
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.hand_offs import Calls, hand_off_table
from seqdefer.labels.inventory import contents
from seqdefer.labels.jobs import NODES, Kind, Part, cut, hand_offs_in, trees_in
from seqdefer.labels.label_store import Labels
from seqdefer.labels.manifest import described_options, name_of_all, read_manifest
from seqdefer.labels.trees import END, enumerate_trees
from seqdefer.storage.shards import Store
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import ToyExpert, ToyState
from seqdefer.types import Examples
from tests.labels.test_exploration import by_prefix

Spy = Callable[[Any, str], list[Any]]

ROWS = torch.tensor([7, 3, 0, 11, 12, 5, 19, 2])  # in an order of their own


def toy(length: int = 5) -> HeldToy:
    task = HeldToy(ToyOptions(length=length))
    task.predictor.batch_size = 4
    return task


def read(task: ToyTask, part: Part, folder: Path, size: int | None) -> list[dict[str, Tensor]]:
    return Labels(task, Store(folder), shard_size=size).read(part)


# -- jobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_jobs_are_the_rows_in_order(size: int) -> None:
    jobs = cut(toy(), Part("hand-offs", "train", ROWS), size)
    assert [row for job in jobs for row in job.rows] == ROWS.tolist()
    assert [len(job.rows) for job in jobs[:-1]] == [size] * (len(jobs) - 1)
    assert [job.first for job in jobs] == list(range(0, 8, size))


def test_shards_of_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match="shards of 0 rows; give --shard-size of 1 or more"):
        cut(toy(), Part("hand-offs", "train", ROWS), 0)


def usual_size(task: ToyTask, kind: Kind) -> int:
    return len(cut(task, Part(kind, "train", torch.arange(task.n), 3))[0].rows)


def test_a_shard_is_what_the_models_take_at_once() -> None:
    task = ToyTask(n=600, length=14)
    task.expert.fingerprint, task.expert.batch_size, task.predictor.batch_size = "toy", 50, 80
    assert (usual_size(task, "hand-offs"), usual_size(task, "trees")) == (50, 80)
    task.expert.waits = True  # its answers are paid for: little is lost where little is kept together
    assert usual_size(task, "trees") == 50
    task.expert.batch_size = 90
    assert usual_size(task, "trees") == 80


@pytest.mark.parametrize(("length", "size"), [(3, 500), (12, NODES // 2**12), (30, 1)])
def test_whole_trees_of_a_shard_fit_into_memory(length: int, size: int) -> None:
    """2^L nodes each, however long."""
    task = ToyTask(n=600, length=length)
    task.expert.fingerprint, task.predictor.batch_size = "toy", 500
    assert usual_size(task, "whole-trees") == size


# -- read back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 3, 8])
def test_hand_offs_are_those_of_all_rows_however_they_are_cut(size: int | None, tmp_path: Path) -> None:
    task, part = toy(), Part("hand-offs", "train", ROWS)
    examples = part.examples(task)
    drafted, table = hand_offs_in(read(task, part, tmp_path, size))
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
def test_trees_are_those_of_all_rows_however_they_are_cut(
    kind: Kind, size: int | None, tmp_path: Path, spy: Spy
) -> None:
    """Rollouts, too: the coins of a row hang on its place in the part, not on its shard."""
    task, part = toy(), Part(kind, "train", ROWS, 3)
    examples = part.examples(task)
    found = trees_in(task, part, read(task, part, tmp_path, size))
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
    assert asked == ([], [])  # they are whole, or closed: whatever is decided


class Unsure(ToyExpert):
    """As many answers are unproven as the numbers of the examples add up to."""

    fingerprint, batch_size = "unsure", 5

    def start(self, examples: Examples) -> ToyState:
        self.unproven += int(examples.ids.sum())
        return super().start(examples)


def test_unproven_answers_are_counted_whoever_made_them(tmp_path: Path) -> None:
    part, total = Part("hand-offs", "train", ROWS), int(ROWS.sum())
    for _ in ("made", "found"):
        task = ToyTask(n=20)
        task.expert = Unsure(task)
        for times in (1, 2):  # who reads them once more relies on them once more
            read(task, part, tmp_path, 3)
            assert task.expert.unproven == times * total
    (one,) = contents(Store(tmp_path)).labellings
    assert [shard.unproven for shard in one.manifest.shards] == [7 + 3, 11 + 12 + 5, 19 + 2]


@pytest.mark.parametrize("name", ["toy expert", ""])
def test_progress_is_told_of_every_row_once(name: str, tmp_path: Path) -> None:
    """Of rows that are made, of those that are found, and of those that are not kept."""
    told: list[int] = []
    task, part = toy(), Part("hand-offs", "train", ROWS)
    task.expert.fingerprint = name
    labels = Labels(task, Store(tmp_path), shard_size=3)
    for n_lost in (0, 0, 3, 1):
        for path in sorted(tmp_path.glob("*.safetensors"))[:n_lost]:
            path.unlink()
        del told[:]
        labels.read(part, told.append)
        assert sorted(told) == [2, 3, 3]


def test_shards_that_parts_share_are_made_once(tmp_path: Path, spy: Spy) -> None:
    """As with --splits train,train."""
    task, told = toy(), list[int]()
    asked = spy(task.expert, "start")
    parts = [Part("hand-offs", "train", rows) for rows in (ROWS, ROWS[3:6], ROWS)]
    made = Labels(task, Store(tmp_path), shard_size=3).make(parts, told.append)
    assert [(one.found, one.made) for one in made] == [(0, 3), (0, 1), (0, 3)]
    assert sum(len(examples) for (examples,) in asked) == len(ROWS)
    assert sum(told) == 8 + 3 + 8


# -- manifests -----------------------------------------------------------------------------------------------------


def labelled(task: ToyTask, folder: Path, size: int | None = None) -> Path:
    """The manifest's file."""
    (made,) = Labels(task, Store(folder), shard_size=size).make([Part("hand-offs", "train", ROWS)])
    return folder / f"{made.manifest.name}.json"


def test_a_manifest_adds_up_what_its_shards_hold(tmp_path: Path) -> None:
    task = toy()
    manifest = read_manifest(labelled(task, tmp_path, 3))
    examples = task.split("train").select(ROWS)
    _, calls = hand_off_table(task, examples, draft(task.predictor, examples, task.spec))
    sizes = {path.stem: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert {shard.name: shard.size for shard in manifest.shards} == sizes
    assert (manifest.size, manifest.expert_calls) == (sum(sizes.values()), calls.made)
    assert Calls(manifest.expert_calls, sum(shard.saved for shard in manifest.shards)) == calls
    assert (manifest.version, manifest.rows, manifest.shard_size) == (__version__, 8, 3)
    assert (manifest.predictor, manifest.expert) == (task.predictor.fingerprint, "toy expert")


def test_labelling_again_leaves_the_manifest(tmp_path: Path) -> None:
    """It tells when labels were made."""
    path = labelled(toy(), tmp_path)
    before = path.stat()
    assert labelled(toy(), tmp_path) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_manifest_is_that_of_the_last_cut(tmp_path: Path) -> None:
    path = labelled(toy(), tmp_path, 5)
    assert labelled(toy(), tmp_path, 3) == path
    assert [shard.rows for shard in read_manifest(path).shards] == [3, 3, 2]
    for shard in read_manifest(path).shards[:1]:
        (tmp_path / f"{shard.name}.safetensors").unlink()
    (made,) = Labels(toy(), Store(tmp_path)).make([Part("hand-offs", "train", ROWS)])
    assert (made.found, made.made) == (2, 1)


@pytest.mark.parametrize("content", ["", "7", "[]", "{}", '{"shards": 5}', '{"shards": [{}]}', '{"shards": []}'])
def test_what_is_no_manifest_is_told_and_written_anew(content: str, tmp_path: Path) -> None:
    path = labelled(toy(), tmp_path)
    whole = path.read_bytes()
    path.write_text(content)
    with pytest.raises(CheckpointError, match=str(path)):
        read_manifest(path)
    assert labelled(toy(), tmp_path) == path
    assert path.read_bytes() == whole


def test_labellings_that_differ_late_have_names_of_their_own() -> None:
    """Names of many rows are made of some at a time."""
    task = HeldToy(ToyOptions(n=5000, length=2))
    rows = torch.arange(5000)
    names = {
        name_of_all(task, Part("hand-offs", "train", some)) for some in (rows, rows[:-1], rows[:4096], rows[4096:])
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
def test_options_are_described_where_a_task_keeps_them(options: Any, described: dict[str, Any]) -> None:
    task = ToyTask()
    task.options = options  # type: ignore[attr-defined]
    assert described_options(task) == described
