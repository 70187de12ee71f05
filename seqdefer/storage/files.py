"""Read and write JSON and safetensors, never pickle. Files are written aside and renamed: what exists is complete."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from torch import Tensor, nn


def write_aside(path: Path, write: Callable[[Path], None]) -> Path:
    """Call `write` with a temporary path beside `path`, then rename it: readers never see a partial file.

    The content is on disk before the name is, and the name before this returns: a power failure leaves the old file or
    the new one. The umask decides who may read it, and a file that is replaced keeps no more readers than it had."""
    make_folder(path.parent)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        mode = stat.S_IMODE(aside.stat().st_mode)
        write(aside)
        with suppress(FileNotFoundError):
            mode &= stat.S_IMODE(path.stat().st_mode)
        aside.chmod(mode)  # safetensors replaces the file by a private one
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return path


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; their names are on disk when this returns."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(created):
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if path.is_dir() and os.name != "posix":  # others cannot open a folder
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> Path:
    def write(aside: Path) -> None:
        aside.write_bytes(content)

    return write_aside(path, write)


def write_text(path: Path, text: str) -> Path:
    """Write UTF-8 with the line ends that the text has, on every system."""
    return write_bytes(path, text.encode())


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
        except SafetensorError as error:  # safetensors reports a full disk as its own error
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
    """Load weights into a network of the same shape."""
    try:
        network.load_state_dict(read_tensors(path))
    except RuntimeError as error:  # its message spans many lines
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is damaged: {reason}; remove its folder and run again") from error


def fingerprint(*parts: Any) -> str:
    """Return a short name for what made an artifact: JSON-able settings, bytes, tensors. Equal parts, equal name."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_bytes_of(part))
        digest.update(b"\x00")
    return digest.hexdigest()[:16]


def _bytes_of(part: Any) -> bytes:
    if isinstance(part, bytes):
        return part
    if hasattr(part, "detach"):  # a tensor; torch is loaded already
        from torch import uint8

        raw = part.detach().cpu().contiguous().reshape(-1).view(uint8)  # numpy has no bfloat16
        return f"{part.dtype}{tuple(part.shape)}".encode() + bytes(raw.numpy().tobytes())
    return json.dumps(part, sort_keys=True).encode()


@contextmanager
def writable_folder(folder: Path, option: str = "--out") -> Iterator[None]:
    """Create `folder` and check that it is writable before minutes of work. Errors name `option`, which chooses it.

    If the body fails, remove the folders created here, unless they hold something.
    """
    created: list[Path] = []
    try:
        try:
            created = [path for path in (folder, *folder.parents) if not path.exists()]  # deepest first
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise OptionError(
                f"cannot write into {folder}: {error.strerror}; choose another folder with {option}"
            ) from error
        yield
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise
