"""Files on disk: written aside and renamed, so that what exists is whole; JSON and safetensors, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from torch import Tensor, nn


def write_aside(path: Path, write: Callable[[Path], None]) -> Path:
    """Calls `write` with a temporary path beside `path`, then renames: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)  # mkstemp makes private files; artifacts are for sharing
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def write_text(path: Path, text: str) -> Path:
    def write(aside: Path) -> None:
        aside.write_text(text, encoding="utf-8")

    return write_aside(path, write)


def write_json(path: Path, value: Any) -> Path:
    return write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(aside: Path) -> None:
        try:
            save_file(flat, str(aside), metadata=dict(metadata or {}))
        except SafetensorError as error:  # a full disk is an OSError to all who write, but not to this library
            raise OSError(f"cannot write {path}: {error}") from error

    return write_aside(path, write)


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_weights(network: nn.Module, path: Path) -> None:
    """Reads the weights of a network into one of the same shape."""
    try:
        network.load_state_dict(read_tensors(path))
    except RuntimeError as error:  # its message takes many lines
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is damaged: {reason}; remove its folder and run again") from error


def fingerprint(*parts: Any) -> str:
    """A short name for what made something: JSON-able settings, bytes, or tensors. Equal parts, equal name."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_bytes_of(part))
        digest.update(b"\x00")
    return digest.hexdigest()[:16]


def _bytes_of(part: Any) -> bytes:
    if isinstance(part, bytes):
        return part
    if hasattr(part, "detach"):  # a tensor; torch is loaded by whoever made it
        from torch import uint8

        raw = part.detach().cpu().contiguous().reshape(-1).view(uint8)  # numpy knows no bfloat16
        return f"{part.dtype}{tuple(part.shape)}".encode() + bytes(raw.numpy().tobytes())
    return json.dumps(part, sort_keys=True).encode()


@contextmanager
def writable_folder(folder: Path, option: str = "--out") -> Iterator[None]:
    """Makes `folder` and tries a file in it, because minutes of work should not end in what cannot be written.
    `option` chooses another.

    Where the work within fails, the folders that were made for it go again unless something is in them.
    """
    made: list[Path] = []
    try:
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]  # the deepest first
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            reason = f"cannot write into {folder}: {error.strerror}"
            raise OptionError(f"{reason}; choose another folder with {option}") from error
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise
