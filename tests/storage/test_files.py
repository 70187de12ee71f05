"""Files are complete or absent, and fingerprints tell apart whatever differs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seqdefer.errors import CheckpointError, OptionError
from seqdefer.storage import shards
from seqdefer.storage.files import (
    fingerprint,
    read_json,
    read_tensors,
    read_weights,
    writable_folder,
    write_aside,
    write_json,
    write_tensors,
    write_text,
)

# -- written aside -------------------------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o027, 0o640)], indirect=["umask"])
def test_the_umask_decides_who_reads_files(umask: int, mode: int, tmp_path: Path) -> None:
    """Every file was once readable by everyone, whatever the umask."""
    assert mode_of(write_text(tmp_path / "very" / "deep" / "file", "words")) == mode
    assert mode_of(write_tensors(tmp_path / "weights", {"a": torch.zeros(2)})) == mode
    shards.Store(tmp_path).write("0" * 16, b"packed")
    assert mode_of(tmp_path / f"{'0' * 16}.safetensors") == mode


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
def test_a_private_file_stays_private_when_it_is_replaced(tmp_path: Path) -> None:
    path = write_text(tmp_path / "file", "words")
    path.chmod(0o600)
    assert mode_of(write_text(path, "other words")) == 0o600


@pytest.mark.skipif(os.name != "posix", reason="only POSIX can open a folder")
def test_content_is_on_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, a power failure may leave a name without content."""
    events, replace = list[str](), os.replace

    def note_sync(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        events.append(f"sync {'aside' if name.startswith('.file') else name}")

    def note_replace(old: Path, new: Path) -> None:
        events.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_text(tmp_path / "very" / "deep" / "file", "words")
    assert events == [f"sync {tmp_path.name}", "sync very", "sync aside", "rename", "sync deep"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_an_interrupted_write_leaves_the_old_file(error: type[BaseException], tmp_path: Path) -> None:
    def half(aside: Path) -> None:
        aside.write_text("ha")
        raise error

    path = write_text(tmp_path / "file", "whole")
    with pytest.raises(error):
        write_aside(path, half)
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_text() == "whole"


def test_json_rejects_nan(tmp_path: Path) -> None:
    path = write_json(tmp_path / "file.json", {"loss": 0.5})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"loss": 0.5}


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[" * 100_000])
def test_bad_json(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot read .*file\.json: "):
        read_json(path)


# -- tensors -------------------------------------------------------------------------------------------------------


def test_tensors_of_any_memory_layout(tmp_path: Path) -> None:
    turned = torch.arange(6.0, requires_grad=True).view(2, 3).t()
    found = read_tensors(write_tensors(tmp_path / "file", {"turned": turned}))
    assert torch.equal(found["turned"], turned)


@pytest.mark.parametrize("content", [None, b"", b"x" * 300])
def test_bad_tensors(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot read .*file: "):
        read_tensors(tmp_path / "file")


def test_weights_of_another_shape_are_one_line(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "file", nn.Linear(2, 3).state_dict())
    network = nn.Linear(2, 3)
    read_weights(network, path)
    assert torch.equal(network.weight, read_tensors(path)["weight"])
    with pytest.raises(CheckpointError, match=r"file is damaged: [^\n]*; remove its folder and run again$"):
        read_weights(nn.Linear(2, 4), path)


# -- fingerprints ---------------------------------------------------------------------------------------------------

ONES = torch.ones(6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 23), (12, 3)),
        ((1, 23), (123,)),
        ((1, 2), (2, 1)),
        (("1",), (1,)),
        ((None,), ()),
        ((ONES,), (ONES.view(2, 3),)),
        ((ONES,), (ONES.view(torch.float32),)),
        ((torch.tensor([0.0]),), (torch.tensor([-0.0]),)),
        (({"a": 1, "b": 2},), ({"a": 2, "b": 1},)),
    ],
)
def test_different_parts_have_different_fingerprints(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert fingerprint(*one) != fingerprint(*other)


def test_equal_parts_have_equal_fingerprints() -> None:
    turned = torch.arange(6).view(2, 3)
    assert fingerprint({"a": 1, "b": [2]}, turned) == fingerprint({"b": [2], "a": 1}, turned.t().contiguous().t())
    assert fingerprint(torch.ones(2, dtype=torch.bfloat16)) == fingerprint(torch.ones(2, dtype=torch.bfloat16))


# -- folders -------------------------------------------------------------------------------------------------------


def nothing(folder: Path) -> None:
    raise KeyboardInterrupt


def something(folder: Path) -> None:
    (folder / "file").touch()
    raise KeyboardInterrupt


@pytest.mark.parametrize(("leave", "left"), [(nothing, ["there"]), (something, ["deep", "there"])])
def test_folders_of_failed_work_are_removed(leave: Callable[[Path], None], left: list[str], tmp_path: Path) -> None:
    """Except folders that existed before or are not empty."""
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "deep" / "deeper", tmp_path / "there"):
        with pytest.raises(KeyboardInterrupt), writable_folder(folder):
            leave(folder)
    assert sorted(os.listdir(tmp_path)) == left
    with writable_folder(tmp_path / "kept"):
        pass
    assert (tmp_path / "kept").is_dir()


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "folder"]
    if Path("/proc/self/task").is_dir():
        folders.append(Path("/proc/self/task"))  # exists, and rejects new files
    for folder in folders:
        with (
            pytest.raises(OptionError, match=f"cannot write into {folder}: .*; choose another folder with --labels"),
            writable_folder(folder, option="--labels"),
        ):
            pytest.fail("the work began")
    assert os.listdir(tmp_path) == ["file"]
