"""Shards are complete or absent; a truncated, changed or renamed shard is reported and made again."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
from seqdefer.storage.shards import NOTE, DamagedShardError, DamagedShardWarning, Store, pack

NAME = "0123456789abcdef"
TENSORS = {
    "loss": torch.arange(40, dtype=torch.float32).view(8, 5) / 4,
    "tokens": torch.arange(24).view(8, 3),
    "halves": torch.ones(8, 2, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "calls": torch.tensor(7),
    "nothing": torch.zeros(0, 3),
}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


def written(folder: Path) -> Store:
    store = Store(folder)
    store.write(NAME, pack(NAME, TENSORS))
    return store


# -- complete ------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    store = written(tmp_path)
    found = store.read(NAME)
    assert found is not None
    assert same(found.tensors, TENSORS)
    assert found.size == store.path(NAME).stat().st_size
    assert os.listdir(tmp_path) == [f"{NAME}.safetensors"]
    assert store.read("f" * 16) is None


def test_tensors_are_memory_mapped(tmp_path: Path) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("the system does not show what is mapped")
    found = written(tmp_path).read(NAME)
    assert found is not None
    assert str(tmp_path / NAME) in Path("/proc/self/maps").read_text()


def test_equal_tensors_are_equal_files_whatever_their_order_and_memory() -> None:
    turned = {key: TENSORS[key] for key in reversed(TENSORS)}
    turned["loss"] = turned["loss"].t().contiguous().t()
    assert pack(NAME, turned) == pack(NAME, TENSORS)
    assert pack("f" * 16, TENSORS) != pack(NAME, TENSORS)


@pytest.mark.parametrize("other", [NAME[1:], f"{NAME}0", NAME.upper(), f"{NAME}.0", "model"])
def test_files_of_other_names_are_ignored(other: str, tmp_path: Path) -> None:
    store = written(tmp_path)
    (tmp_path / f"{other}.safetensors").touch()
    assert store.names() == [NAME]


def test_a_digest_is_verified_once_and_again_after_a_change(tmp_path: Path, spy: Callable[..., list[object]]) -> None:
    store, checked = written(tmp_path), spy(shards, "digest_of")
    for _ in range(3):
        store.read(NAME)
    assert len(checked) == 1
    flip(store.path(NAME), -1)
    with pytest.warns(DamagedShardWarning):
        store.read(NAME)


def replace_with_same_time(path: Path, content: bytes) -> None:
    """Replace a file and keep its times, as some copy tools do."""
    times = path.stat()
    path.with_suffix(".new").write_bytes(content)
    os.replace(path.with_suffix(".new"), path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_replaced_file_is_verified_even_with_the_same_time(tmp_path: Path) -> None:
    store = written(tmp_path)
    assert store.read(NAME) is not None
    content = bytearray(store.path(NAME).read_bytes())
    content[-1] ^= 1
    replace_with_same_time(store.path(NAME), bytes(content))
    with pytest.raises(DamagedShardError, match="its digest does not match its content"):
        store.open(NAME)


def test_load_or_make_makes_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, Tensor]:
        made.append(1)
        return TENSORS

    assert same(Store(tmp_path).load_or_make(NAME, make), TENSORS)
    assert same(Store(tmp_path).load_or_make(NAME, make), TENSORS)
    assert made == [1]


# -- damaged -------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@given(st.integers(0, len(pack(NAME, TENSORS)) - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    """In the length of the header, the header, the digest or the tensors."""
    store = written(tmp_path_factory.mktemp("flipped"))
    flip(store.path(NAME), place, bit)
    with pytest.raises(DamagedShardError, match=f"{NAME}.safetensors is damaged: "):
        store.open(NAME)


@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, -1])
def test_a_truncated_shard_is_reported_and_removed(left: int, tmp_path: Path) -> None:
    store = written(tmp_path)
    store.path(NAME).write_bytes(store.path(NAME).read_bytes()[:left])
    with pytest.warns(DamagedShardWarning, match=f"{NAME}.safetensors is damaged: .*; it is removed and made again"):
        assert store.read(NAME) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("was", "now"),
    [(b'"F32","shape":[8', b'"I32","shape":[8'), (b"[8,5]", b"[5,8]"), (b'"BF16"', b'"F16" '), (b'"loss"', b'"cost"')],
)
def test_reinterpreted_bytes_are_damage(was: bytes, now: bytes, tmp_path: Path) -> None:
    """Another type, shape or name leaves a valid safetensors file."""
    store = written(tmp_path)
    content = store.path(NAME).read_bytes()
    assert content.count(was) == 1
    store.path(NAME).write_bytes(content.replace(was, now))
    with pytest.raises(DamagedShardError, match="its digest does not match its content"):
        store.open(NAME)


def test_damage_that_another_reader_removes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readers find the same damage: the other one removes the file while this one warns."""
    store = written(tmp_path)
    flip(store.path(NAME), -1)
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: store.path(NAME).unlink())
    assert store.read(NAME) is None


def renamed(store: Store) -> None:
    store.path(NAME).write_bytes(pack("f" * 16, TENSORS))


def without_note(store: Store) -> None:
    from safetensors.torch import save_file

    save_file(TENSORS, store.path(NAME))


def odd_note(store: Store) -> None:
    from safetensors.torch import save_file

    save_file(TENSORS, store.path(NAME), metadata={NOTE: "[]"})


def longer(store: Store) -> None:
    store.path(NAME).write_bytes(store.path(NAME).read_bytes() + b"more")


@pytest.mark.parametrize("change", [renamed, without_note, odd_note, longer])
def test_a_file_that_is_not_this_shard_is_made_again(change: Callable[[Store], None], tmp_path: Path) -> None:
    store = written(tmp_path)
    change(store)
    with pytest.warns(DamagedShardWarning, match="is damaged"):
        assert same(store.load_or_make(NAME, lambda: TENSORS), TENSORS)
    assert store.read(NAME) is not None


# -- the disk is full, or the writer is killed ---------------------------------------------------------------------

FULL = """
import resource, sys
import torch
from seqdefer.storage.shards import Store, pack
store = Store(sys.argv[1])
store.write("0" * 16, pack("0" * 16, {"a": torch.zeros(10)}))
if sys.argv[2] == "limit":  # the system then refuses to write more, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    store.write("1" * 16, pack("1" * 16, {"a": torch.zeros(1_000_000)}))
except OSError as error:
    print(error)
"""


def write_too_much(folder: Path, how: str, *before: str) -> str:
    command = [*before, sys.executable, "-c", FULL, str(folder), how]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_failed_write_leaves_finished_shards(tmp_path: Path) -> None:
    error = write_too_much(tmp_path, "limit")
    assert error.startswith(f"cannot write {tmp_path / ('1' * 16)}.safetensors: {os.strerror(errno.EFBIG)}; ")
    assert "finished shards stay: free space and run again" in error
    assert os.listdir(tmp_path) == ["0" * 16 + ".safetensors"]
    assert Store(tmp_path).read("0" * 16) is not None


MOUNT = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=64k none "$0" && exec "$@"',
]


def test_a_full_disk(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*MOUNT, str(tmp_path), "true"], check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    said = write_too_much(tmp_path, "disk", *MOUNT, str(tmp_path))
    assert f"{'1' * 16}.safetensors: {os.strerror(errno.ENOSPC)}; what is finished stays" in said


KILLED = """
import os, signal, sys
from pathlib import Path
from labelling_toy import label_toy
from seqdefer import store
left, replace = int(sys.argv[2]), os.replace
def killed(aside, path):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(aside, path)
store.os.replace = killed
label_toy(Path(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are not there")
@pytest.mark.parametrize("left", [3, 21, 23])
def test_manifests_come_last(left: int, toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    """Killed amid 20 shards, before the first manifest, and between two: what a manifest names is there."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(left)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    store = Store(tmp_path / "labels")
    found = take_inventory(store)
    assert len(found.labellings) == max(0, left - 21)
    assert len(store.names()) == min(left - 1, 20)
    assert [one.missing for one in found.labellings] == [()] * len(found.labellings)
    assert len(found.partial_files) == 1
    assert verify(store) == {}
    label_toy(tmp_path)
    assert files_in(store.folder) == toy_labels
    assert remove_unfinished(store) == list(found.partial_files)
    assert files_in(store.folder) == toy_labels


def _write_often(folder: str, barrier: multiprocessing.synchronize.Barrier) -> None:
    store = Store(folder)
    for number in range(30):
        name = f"{number:016x}"
        barrier.wait()
        store.write(name, pack(name, TENSORS))
        assert store.read(name) is not None


def test_two_writers_of_the_same_shard(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    writers = [context.Process(target=_write_often, args=(str(tmp_path), barrier)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(Store(tmp_path).names()) == 30
    assert verify(Store(tmp_path)) == {}


# -- names ---------------------------------------------------------------------------------------------------------


def another_version(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "__version__", "another")


def another_layout(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SHARD_LAYOUT", jobs.SHARD_LAYOUT + 1)


def another_length(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_examples(task, monkeypatch)
    task.spec = replace(task.spec, length=13)


def another_end(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_examples(task, monkeypatch)
    task.spec = replace(task.spec, end=None)


def keep_examples(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> Examples:
    """The toy makes them anew, of its rules; others do not."""
    examples = task.split("train")
    monkeypatch.setattr(task, "split", lambda _: examples)
    return examples


def another_expert(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    task.expert.fingerprint = "another"


def another_predictor(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    task.predictor.fingerprint = "another"


def another_task(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    task.name = "another"


def another_loss(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    task.loss_unit = task.token_rule = "another"


def another_key(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "loss_key", lambda _: "another")


def another_input(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_examples(task, monkeypatch).inputs[3] += 1


def another_target(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_examples(task, monkeypatch).targets[3] += 1


def another_number(task: HeldToy, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_examples(task, monkeypatch).ids[3] += 1


CHANGES = [
    another_version, another_layout, another_length, another_end, another_expert, another_predictor, another_task,
    another_loss, another_key, another_input, another_target, another_number,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["hand-offs", "trees"])
def test_whatever_changes_has_another_name(
    kind: jobs.LabelKind, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = LabelPart(kind, "train", torch.arange(5), 3)
    before = shard_name(HeldToy(ToyOptions()), part)
    task = HeldToy(ToyOptions())
    assert shard_name(task, part) == before
    change(task, monkeypatch)
    assert shard_name(task, part) != before


def test_names_follow_the_losses_that_are_kept(tmp_path: Path) -> None:
    """Tables hold losses of sequences, trees those of tokens."""
    task, rows = HeldToy(ToyOptions()), torch.arange(5)
    parts = [
        LabelPart("hand-offs", "train", rows),
        LabelPart("trees", "train", rows, 3),
        LabelPart("whole-trees", "train", rows),
    ]
    usual = [shard_name(task, part) for part in parts]
    task.loss_unit = "another"
    assert [shard_name(task, part) == name for part, name in zip(parts, usual, strict=True)] == [False, True, True]
    task.token_rule = "another"
    assert [shard_name(task, part) == name for part, name in zip(parts, usual, strict=True)] == [False, False, False]
    assert len({shard_name(task, part) for part in parts}) == 3  # whatever the losses are called
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
    for kind in ("hand-offs", "whole-trees"):  # nothing is tossed for them: wherever rows stand, their labels are found
        one, other = LabelPart(kind, "train", rows, 3), LabelPart(kind, "train", rows, 4)
        assert shard_name(task, one) == shard_name(task, other, first=5)


# -- what a store holds --------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two labellings that share a shard, a shard of none, a half, and files of others."""
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


@pytest.mark.skipif(sys.platform == "win32", reason="the zone of a process cannot be set there")
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
    assert verify(store)[path] == f"{path} is damaged: its bytes are not those that were written"
    assert set(remove_damaged(store)) == {path, manifest}
    assert list(verify(store).values()) == [
        f"{path} is missing: labelling {take_inventory(store).labellings[0].manifest.name} lists it"
    ]
    assert remove_damaged(store) == []  # what is missing is gone already
    assert others_in(store) == OTHERS


def test_verify_reads_what_was_checked_before(store: Store) -> None:
    """A disk that loses a bit tells nobody the time."""
    path = store.path(NAME)
    assert store.read(NAME) is not None
    times = path.stat()
    flip(path, -1)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert set(verify(store)) == {path}


def test_other_bytes_than_a_manifest_names_are_damage(store: Store) -> None:
    """Whole in itself, and not what was made."""
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
    from seqdefer.labels.manifest import read_manifest

    name = take_inventory(store).labellings[0].manifest.name
    path = store.folder / f"{name}.json"
    other = path.rename(store.folder / f"{'f' * 16}.json")
    with pytest.raises(CheckpointError, match=f"the name inside is '{name}'"):
        read_manifest(other)
    assert set(verify(store)) == {other}
