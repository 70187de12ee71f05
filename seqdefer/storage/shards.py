"""Shards: tensors on disk, named by everything that made them and verified on reading.

A shard is a safetensors file `NAME.safetensors`. NAME is a fingerprint of its inputs: if an input changes, the name
changes. Shards are written aside and renamed, so a shard that exists is complete. Its metadata hold its name and a
digest of its tensors (names, types, shapes, bytes). A truncated, changed or renamed shard raises a
`DamagedShardWarning` and is removed and made again. Tensors are memory-mapped, not copied.

    store = Store(folder)
    tensors = store.load_or_make(name, make)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seqdefer.errors import CheckpointError
from seqdefer.storage.files import write_bytes

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
NOTE = "shard"  # the only metadata entry: safetensors writes several in random order, so equal shards would differ


class DamagedShardWarning(UserWarning):
    """A shard was damaged; it is removed and made again."""


class DamagedShardError(CheckpointError):
    """A shard that fails verification."""


@dataclass(frozen=True)
class Shard:
    """A verified shard."""

    name: str
    digest: str
    size: int  # bytes of the file
    tensors: dict[str, Tensor]


def is_name(text: str) -> bool:
    """Whether a text has the form of a fingerprint, which names shards and manifests."""
    return re.fullmatch("[0-9a-f]{16}", text) is not None


def pack(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a shard's file. Equal tensors, equal bytes."""
    from safetensors.torch import save

    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    note = {"name": name, "digest": digest_of(name, plain)}
    return save(plain, metadata={NOTE: json.dumps(note, sort_keys=True)})


def digest_of(name: str, tensors: Mapping[str, Tensor]) -> str:
    from torch import uint8

    digest = hashlib.sha256(name.encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"\n{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(uint8).numpy().data)  # no copy: shards may be large
    return digest.hexdigest()


class Store:
    """A folder of shards. Concurrent writers of one shard are safe: they write the same bytes."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._checked: dict[str, tuple[tuple[int, ...], str]] = {}  # name: file status and digest when verified

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """Return the names of all shards; other files, such as a model's weights, are ignored."""
        return sorted(path.stem for path in self.folder.glob(f"*{SUFFIX}") if is_name(path.stem))

    def read(self, name: str) -> Shard | None:
        """Return a shard, or None if it does not exist or is damaged. Warn about a damaged one and remove it."""
        try:
            return self.open(name)
        except FileNotFoundError:
            return None
        except DamagedShardError as error:
            warnings.warn(f"{error}; it is removed and made again", DamagedShardWarning, stacklevel=2)
            self.path(name).unlink(missing_ok=True)
            return None

    def open(self, name: str) -> Shard:
        """Return a shard. Raise FileNotFoundError if it does not exist, DamagedShardError if it is damaged.

        The digest is verified once, and again after the file has changed.
        """
        path = self.path(name)
        tensors, note = _read(path)
        if note.get("name") != name:
            raise DamagedShardError(f"{path} is damaged: it claims the name {note.get('name')!r:.60}")
        status = os.stat(path)
        seen, digest = (status.st_ino, status.st_size, status.st_mtime_ns), str(note.get("digest"))
        if self._checked.get(name) != (seen, digest):
            if digest_of(name, tensors) != digest:
                raise DamagedShardError(f"{path} is damaged: its digest does not match its content")
            self._checked[name] = seen, digest
        return Shard(name, digest, status.st_size, tensors)

    def write(self, name: str, packed: bytes) -> None:
        """Write the bytes that `pack` returned. A full disk is an OSError and leaves finished shards intact."""
        path = self.path(name)
        try:
            write_bytes(path, packed)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"cannot write {path}: {reason}; finished shards stay: free space and run again") from error

    def load_or_make(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of a shard; call `make` and write them if it is missing or damaged."""
        found = self.read(name)
        if found is not None:
            return found.tensors
        made = dict(make())
        self.write(name, pack(name, made))
        return made


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the memory-mapped tensors and the shard's note."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            note = json.loads((file.metadata() or {}).get(NOTE, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a mapping
    except (SafetensorError, ValueError) as error:
        raise DamagedShardError(f"{path} is damaged: {error}") from error
    return tensors, note if isinstance(note, dict) else {}
