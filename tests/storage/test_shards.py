"""Shards are complete or absent; a truncated, changed or renamed shard is reported and made again."""

from __future__ import annotations

import errno
import multiprocessing
import os
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

from seqdefer.storage import shards
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
from seqdefer.storage.files import write_tensors
from seqdefer.storage.shards import Store, pack
store, large = Store(sys.argv[1]), {"a": torch.zeros(1_000_000)}
store.write("0" * 16, pack("0" * 16, {"a": torch.zeros(10)}))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # writes beyond it fail, as on a full disk
shard, file = lambda: store.write("1" * 16, pack("1" * 16, large)), lambda: write_tensors(store.folder / "file", large)
for write in (shard, file):
    try:
        write()
    except OSError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_failed_write_leaves_finished_shards(tmp_path: Path) -> None:
    """safetensors, which writes other tensors, reports a full disk as an error of its own."""
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    of_shard, of_tensors = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert of_shard.startswith(f"cannot write {tmp_path / ('1' * 16)}.safetensors: {os.strerror(errno.EFBIG)}; ")
    assert "finished shards stay: free space and run again" in of_shard
    assert of_tensors.startswith(f"cannot write {tmp_path / 'file'}: ")
    assert os.listdir(tmp_path) == ["0" * 16 + ".safetensors"]
    assert Store(tmp_path).read("0" * 16) is not None


def _write_often(folder: str, barrier: multiprocessing.synchronize.Barrier) -> None:
    store = Store(folder)
    for number in range(30):
        name = f"{number:016x}"
        barrier.wait()
        store.write(name, pack(name, TENSORS))
        assert store.read(name) is not None


@pytest.mark.slow
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
