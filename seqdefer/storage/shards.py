"""Shards: tensors on disk, named by all that made them, and used only where every byte is as it was written.

A shard is a safetensors file `NAME.safetensors`. The name says what made it, so that whatever changes finds another
shard or none. It is written aside and renamed: what exists was finished. Inside stand its name and a digest of its
tensors (names, types, shapes, bytes): a shard that was cut short, changed or renamed is told (`DamagedShardWarning`),
removed and made again. Tensors are mapped into memory as they are read, not copied.

    store = Store(folder)
    tensors = store.kept(name, make)    # read, or made and written
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
from seqdefer.storage.files import write_aside

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
NOTE = "shard"  # the one entry of the metadata: safetensors writes several in any order, and no two files were equal


class DamagedShardWarning(UserWarning):
    """A shard is not as it was written: it is removed, and made again."""


class DamagedShardError(CheckpointError):
    """What is wrong with a shard."""


@dataclass(frozen=True)
class Shard:
    """A shard that is whole."""

    name: str
    digest: str
    size: int  # bytes of the file
    tensors: dict[str, Tensor]


def is_name(text: str) -> bool:
    """Whether it looks like what `store.fingerprint` gives."""
    return re.fullmatch("[0-9a-f]{16}", text) is not None


def pack(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    """A shard as the bytes of its file. Equal tensors, equal bytes."""
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
    """A folder of shards. Of two who write the same shard at once either may be last: both write the same bytes."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._checked: dict[str, tuple[tuple[int, ...], str]] = {}  # files whose digest was checked, as they were then

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """Of all shards. Other files, such as a model's weights, are nobody's here."""
        return sorted(path.stem for path in self.folder.glob(f"*{SUFFIX}") if is_name(path.stem))

    def read(self, name: str) -> Shard | None:
        """None where there is no such shard; or a damaged one, which is told and removed."""
        try:
            return self.open(name)
        except FileNotFoundError:
            return None
        except DamagedShardError as error:
            warnings.warn(f"{error}; it is removed and made again", DamagedShardWarning, stacklevel=2)
            self.path(name).unlink(missing_ok=True)
            return None

    def open(self, name: str) -> Shard:
        """Raises FileNotFoundError where there is no such shard, DamagedShardError where it is damaged. The digest is
        checked once, and again where the file has changed."""
        path = self.path(name)
        tensors, note = _read(path)
        if note.get("name") != name:
            raise DamagedShardError(f"{path} is damaged: it says that its name is {note.get('name')!r:.60}")
        status = os.stat(path)
        seen, digest = (status.st_ino, status.st_size, status.st_mtime_ns), str(note.get("digest"))
        if self._checked.get(name) != (seen, digest):
            if digest_of(name, tensors) != digest:
                raise DamagedShardError(f"{path} is damaged: its bytes are not those that were written")
            self._checked[name] = seen, digest
        return Shard(name, digest, status.st_size, tensors)

    def write(self, name: str, packed: bytes) -> None:
        """What `pack` gave. On a full disk an OSError, and all that was finished stays."""
        path = self.path(name)
        try:
            write_aside(path, lambda aside: _write(aside, packed))
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"cannot write {path}: {reason}; what is finished stays: make room there") from error

    def kept(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of a shard; where it is missing or damaged they are made and written."""
        found = self.read(name)
        if found is not None:
            return found.tensors
        made = dict(make())
        self.write(name, pack(name, made))
        return made


def _write(path: Path, packed: bytes) -> None:
    with path.open("wb") as file:
        file.write(packed)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors, mapped, and what the shard says of itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            note = json.loads((file.metadata() or {}).get(NOTE, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is no mapping
    except (SafetensorError, ValueError) as error:
        raise DamagedShardError(f"{path} is damaged: {error}") from error
    return tensors, note if isinstance(note, dict) else {}
