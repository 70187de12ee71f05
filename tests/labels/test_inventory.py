"""Label shards in a folder: their names, what an inventory finds, and what each removal leaves."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from labelling_toy import HeldToy, ToyOptions, files_in, label_toy

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.labels import jobs
from seqdefer.labels.inventory import (
    remove_all,
    remove_damaged,
    remove_labellings,
    remove_unfinished,
    take_inventory,
    verify,
)
from seqdefer.labels.jobs import LabelPart, shard_name
from seqdefer.labels.label_store import LabelStore
from seqdefer.labels.manifest import read_manifest
from seqdefer.storage.shards import Store, pack
from seqdefer.types import Examples
from tests.storage.test_shards import NAME, TENSORS, flip


@pytest.mark.parametrize("stop", [3, 21, 23])
def test_manifests_come_last(
    stop: int, toy_labels: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run stopped among 20 shards, before the first manifest or between two leaves no manifest without its shards."""
    move, calls = os.replace, count(1)

    def interrupted(aside: Path, path: Path) -> None:
        if next(calls) == stop:
            raise KeyboardInterrupt
        move(aside, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            label_toy(tmp_path)
    store = Store(tmp_path / "labels")
    found = take_inventory(store)
    assert len(found.labellings) == max(0, stop - 21)
    assert len(store.names()) == min(stop - 1, 20)
    assert [one.missing for one in found.labellings] == [()] * len(found.labellings)
    assert verify(store) == {}
    label_toy(tmp_path)
    assert files_in(store.folder) == toy_labels


# -- names ---------------------------------------------------------------------------------------------------------


def freeze_examples(task: HeldToy) -> Examples:
    """Make the task return the same examples again, which the toy would derive from its rules."""
    examples = task.split("train")
    task.split = lambda _: examples  # type: ignore[method-assign]
    return examples


def change_spec(task: HeldToy, **changes: int | None) -> None:
    freeze_examples(task)
    task.spec = replace(task.spec, **changes)  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[HeldToy, pytest.MonkeyPatch], object]] = {
    "version": lambda _, patch: patch.setattr(jobs, "__version__", "another"),
    "layout": lambda _, patch: patch.setattr(jobs, "SHARD_LAYOUT", jobs.SHARD_LAYOUT + 1),
    "length": lambda task, _: change_spec(task, length=13),
    "end": lambda task, _: change_spec(task, end=None),
    "expert": lambda task, _: setattr(task.expert, "fingerprint", "another"),
    "predictor": lambda task, _: setattr(task.predictor, "fingerprint", "another"),
    "task": lambda task, _: setattr(task, "name", "another"),
    "loss unit": lambda task, _: (setattr(task, "loss_unit", "another"), setattr(task, "token_rule", "another")),
    "loss key": lambda task, _: setattr(task, "loss_key", lambda _: "another"),
    "inputs": lambda task, _: freeze_examples(task).inputs[3].add_(1),
    "targets": lambda task, _: freeze_examples(task).targets[3].add_(1),
    "ids": lambda task, _: freeze_examples(task).ids[3].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["hand-offs", "trees"])
def test_any_change_changes_the_name(kind: jobs.LabelKind, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = LabelPart(kind, "train", torch.arange(5), 3)
    before = shard_name(HeldToy(ToyOptions()), part)
    task = HeldToy(ToyOptions())
    assert shard_name(task, part) == before
    CHANGES[change](task, monkeypatch)
    assert shard_name(task, part) != before


def test_names_follow_the_losses_that_are_kept(tmp_path: Path) -> None:
    """Tables hold sequence losses, trees hold token losses."""
    task, rows = HeldToy(ToyOptions()), torch.arange(5)
    parts = [
        LabelPart("hand-offs", "train", rows),
        LabelPart("trees", "train", rows, 3),
        LabelPart("whole-trees", "train", rows),
    ]
    before = [shard_name(task, part) for part in parts]
    task.loss_unit = "another"
    assert [shard_name(task, part) == name for part, name in zip(parts, before, strict=True)] == [False, True, True]
    task.token_rule = "another"
    assert [shard_name(task, part) == name for part, name in zip(parts, before, strict=True)] == [False, False, False]
    assert len({shard_name(task, part) for part in parts}) == 3  # also if the losses share a name
    task.expert.fingerprint = ""
    assert [shard_name(task, part) for part in parts] == ["", "", ""]


def test_rows_rollouts_and_places_have_names_of_their_own() -> None:
    task, rows = HeldToy(ToyOptions()), torch.arange(5)
    names = [
        shard_name(task, LabelPart("hand-offs", "train", rows)),
        shard_name(task, LabelPart("hand-offs", "train", rows.flip(0))),
        shard_name(task, LabelPart("hand-offs", "train", rows[:4])),
        shard_name(task, LabelPart("hand-offs", "validation", rows)),
        shard_name(task, LabelPart("hand-offs", "train", rows, kept=(0, 2))),
        shard_name(task, LabelPart("hand-offs", "train", rows, kept=(0, 3))),
        shard_name(task, LabelPart("trees", "train", rows, 3)),
        shard_name(task, LabelPart("trees", "train", rows, 4)),
        shard_name(task, LabelPart("trees", "train", rows, 3), first=5),
    ]
    assert len(set(names)) == len(names)
    for kind in ("hand-offs", "whole-trees"):  # not random: independent of the first row
        one, other = LabelPart(kind, "train", rows, 3), LabelPart(kind, "train", rows, 4)
        assert shard_name(task, one) == shard_name(task, other, first=5)


# -- what a store holds --------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with two labellings that share a shard, an unused shard, partial files and unrelated files."""
    task, kept = HeldToy(ToyOptions()), Store(tmp_path / "labels")
    labels = LabelStore(task, kept, shard_size=5)
    labels.make(
        [LabelPart("hand-offs", "train", torch.arange(10)), LabelPart("hand-offs", "train", torch.arange(5, 10))]
    )
    kept.write(NAME, pack(NAME, TENSORS))
    for half in HALVES:
        (kept.folder / half).write_bytes(b"half")
    for other in OTHERS:
        (kept.folder / other).write_text("others'")
    return kept


HALVES = [f".{NAME}.json.x7", f".{NAME}.safetensors.x7"]
OTHERS = [".model.safetensors.x7", "model.safetensors", "results.json"]


def others_in(store: Store) -> list[str]:
    return sorted(name for name in os.listdir(store.folder) if name in OTHERS)


def test_what_there_is(store: Store) -> None:
    found = take_inventory(store)
    assert sorted((one.manifest.rows, len(one.manifest.shards)) for one in found.labellings) == [(5, 1), (10, 2)]
    assert found.orphans == (NAME,)
    assert found.orphan_bytes == store.path(NAME).stat().st_size
    assert [path.name for path in found.partial_files] == HALVES
    assert found.damaged == {}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no tzset")
def test_times_are_those_of_greenwich(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = take_inventory(store).labellings[0].manifest
    os.utime(store.folder / f"{manifest.name}.json", (0, 86_400))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert take_inventory(store).labellings[0].made == "1970-01-02 00:00"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_shards_of_another_labelling_stay(store: Store) -> None:
    small, large = sorted(
        (one.manifest for one in take_inventory(store).labellings), key=lambda manifest: manifest.rows
    )
    with pytest.raises(OptionError, match=r"'' matches several names: .*; give more letters"):
        remove_labellings(store, [""])
    with pytest.raises(OptionError, match=f"unknown labelling '{large.name[1:]}'"):
        remove_labellings(store, [large.name[1:]])
    removed = remove_labellings(store, [large.name[:15]])
    assert [path.name for path in removed] == [f"{large.name}.json", f"{large.shards[0].name}.safetensors"]
    assert verify(store) == {}
    assert [one.manifest for one in take_inventory(store).labellings] == [small]
    with pytest.raises(OptionError, match=f"unknown labelling '{large.name}'; available: {small.name}"):
        remove_labellings(store, [large.name])


def test_what_is_damaged_or_missing_is_named_and_removed(store: Store) -> None:
    (path, *_) = (store.path(shard.name) for shard in take_inventory(store).labellings[0].manifest.shards)
    manifest = store.folder / f"{take_inventory(store).labellings[1].manifest.name}.json"
    flip(path, -1)
    manifest.write_text("{}")
    assert set(verify(store)) == {path, manifest}
    assert verify(store)[path] == f"{path} is damaged: its digest does not match its content"
    assert set(remove_damaged(store)) == {path, manifest}
    assert list(verify(store).values()) == [
        f"{path} is missing: labelling {take_inventory(store).labellings[0].manifest.name} lists it"
    ]
    assert remove_damaged(store) == []  # missing files need no removal
    assert others_in(store) == OTHERS


def test_verify_reads_what_was_checked_before(store: Store) -> None:
    """A flipped bit does not change the modification time."""
    path = store.path(NAME)
    assert store.read(NAME) is not None
    times = path.stat()
    flip(path, -1)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert set(verify(store)) == {path}


def test_other_bytes_than_a_manifest_names_are_damage(store: Store) -> None:
    """A valid shard with another content."""
    shard = take_inventory(store).labellings[0].manifest.shards[0]
    store.write(shard.name, pack(shard.name, TENSORS))
    assert [words.partition(": ")[2][:9] for words in verify(store).values()] == ["labelling"] * len(verify(store))
    assert set(verify(store)) == {store.path(shard.name)}


def test_files_of_others_stay(store: Store) -> None:
    assert [path.name for path in remove_unfinished(store)] == [*HALVES, f"{NAME}.safetensors"]
    assert len(remove_all(store)) == 4
    assert sorted(os.listdir(store.folder)) == OTHERS


def test_all_is_also_what_is_damaged_and_half_written(store: Store) -> None:
    manifest = store.folder / f"{take_inventory(store).labellings[0].manifest.name}.json"
    manifest.write_text("{}")
    assert {manifest, *(store.folder / half for half in HALVES)} <= set(remove_all(store))
    assert sorted(os.listdir(store.folder)) == OTHERS


def test_a_manifest_under_another_name_is_none(store: Store) -> None:
    name = take_inventory(store).labellings[0].manifest.name
    path = store.folder / f"{name}.json"
    other = path.rename(store.folder / f"{'f' * 16}.json")
    with pytest.raises(CheckpointError, match=f"the name inside is '{name}'"):
        read_manifest(other)
    assert set(verify(store)) == {other}
