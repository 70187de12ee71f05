"""Manifests: what a labelling consists of. Written when all its shards are there, so that one that exists is finished.

A manifest is named as its labelling, whatever the size of the shards. It holds nothing that differs from one time to
the next (a date, seconds): who labels the same again, by whatever engine, gets the same folder, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from seqdefer import __version__
from seqdefer.errors import CheckpointError
from seqdefer.interfaces import Task
from seqdefer.labels.jobs import Job, Part, calls_in, name_of
from seqdefer.storage.files import fingerprint, read_json, write_json
from seqdefer.storage.shards import Store

AT_ONCE = 4096  # rows whose name is made together


@dataclass(frozen=True)
class ShardRecord:
    name: str
    rows: int
    size: int  # bytes
    digest: str
    made: int  # expert calls
    saved: int
    unproven: int


@dataclass(frozen=True)
class Manifest:
    name: str
    version: str
    task: str
    kind: str
    split: str
    rows: int
    shard_size: int
    predictor: str
    expert: str
    options: Mapping[str, Any]
    shards: tuple[ShardRecord, ...]

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def expert_calls(self) -> int:
        return sum(shard.made for shard in self.shards)


def described_options(task: Task) -> dict[str, Any]:
    """A task's options, if it keeps them as `options`, a dataclass."""
    options = getattr(task, "options", None)
    if not is_dataclass(options) or isinstance(options, type):
        return {}
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return plain


def name_of_all(task: Task, part: Part) -> str:
    """Some rows at a time: the data may be large."""
    parts = [replace(part, rows=rows) for rows in part.rows.split(AT_ONCE)]
    return fingerprint("labelling", *(name_of(task, some) for some in parts))


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def read_manifest(path: Path) -> Manifest:
    """Raises CheckpointError where it is none."""
    found = read_json(path)
    try:
        shards = tuple(ShardRecord(**shard) for shard in found.pop("shards"))
        manifest = Manifest(**found, shards=shards)
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path} is no manifest of a labelling: {error}") from error
    if manifest.name != path.stem:
        raise CheckpointError(f"{path} is damaged: it says that its name is {manifest.name!r:.60}")
    return manifest


def find_manifest(task: Task, part: Part, store: Store) -> Manifest | None:
    """That of a part, where it has been labelled to its end."""
    path = path_of(store.folder, name_of_all(task, part))
    if not path.is_file():
        return None
    with suppress(CheckpointError):  # it is written anew
        return read_manifest(path)
    return None


def write_manifest(task: Task, part: Part, jobs: Sequence[Job], store: Store) -> Manifest:
    """Reads every shard once more: what a manifest names was whole on the disk."""
    name = name_of_all(task, part)
    made = Manifest(
        name, __version__, task.name, part.kind, part.split, len(part.rows), len(jobs[0].rows),
        task.predictor.fingerprint, task.expert.fingerprint, described_options(task),
        tuple(_record(store, job) for job in jobs),
    )  # fmt: skip
    found = find_manifest(task, part, store)
    if found is None or found.shards != made.shards:
        write_json(path_of(store.folder, name), asdict(made))
    return made


def _record(store: Store, job: Job) -> ShardRecord:
    shard = store.open(job.name)
    calls, unproven = calls_in(shard.tensors)
    return ShardRecord(job.name, len(job.rows), shard.size, shard.digest, calls.made, calls.saved, unproven)
