"""Manifests: the shards of a labelling. A manifest is written last, so one that exists is of a finished labelling.

A manifest's name does not depend on the size of the shards. It holds nothing that changes between runs (a date,
seconds): labelling the same data again, with any executor, gives the same folder, byte for byte.
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
from seqdefer.labels.jobs import Job, LabelPart, shard_name, unpack_calls
from seqdefer.storage.files import fingerprint, read_json, write_json
from seqdefer.storage.shards import Store

HASHED_ROWS = 4096  # rows that are fingerprinted together: the data may be large


@dataclass(frozen=True)
class ShardRecord:
    """One shard in a manifest."""

    name: str
    rows: int
    size: int  # bytes
    digest: str
    made: int  # expert calls
    saved: int
    unproven: int


@dataclass(frozen=True)
class Manifest:
    """A finished labelling and its shards."""

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


def describe_options(task: Task) -> dict[str, Any]:
    """Return the task's options as plain JSON, if it keeps a dataclass as `options`."""
    options = getattr(task, "options", None)
    if not is_dataclass(options) or isinstance(options, type):
        return {}
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return plain


def labelling_name(task: Task, part: LabelPart) -> str:
    """Return the fingerprint of a part, which names its manifest."""
    parts = [replace(part, rows=rows) for rows in part.rows.split(HASHED_ROWS)]
    return fingerprint("labelling", *(shard_name(task, some) for some in parts))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; raise CheckpointError if the file is not one."""
    found = read_json(path)
    try:
        shards = tuple(ShardRecord(**shard) for shard in found.pop("shards"))
        manifest = Manifest(**found, shards=shards)
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a manifest of a labelling: {error}") from error
    if manifest.name != path.stem:
        raise CheckpointError(f"{path} is damaged: the name inside is {manifest.name!r:.60}")
    return manifest


def find_manifest(task: Task, part: LabelPart, store: Store) -> Manifest | None:
    """Return the manifest of a part, or None if the part was never labelled completely."""
    path = store.folder / f"{labelling_name(task, part)}.json"
    if not path.is_file():
        return None
    with suppress(CheckpointError):  # a damaged manifest is written again
        return read_manifest(path)
    return None


def write_manifest(task: Task, part: LabelPart, jobs: Sequence[Job], store: Store) -> Manifest:
    """Read every shard once more, then write the manifest unless an equal one exists."""
    name = labelling_name(task, part)
    made = Manifest(
        name, __version__, task.name, part.kind, part.split, len(part.rows), len(jobs[0].rows),
        task.predictor.fingerprint, task.expert.fingerprint, describe_options(task),
        tuple(_record(store, job) for job in jobs),
    )  # fmt: skip
    found = find_manifest(task, part, store)
    if found is None or found.shards != made.shards:
        write_json(store.folder / f"{name}.json", asdict(made))
    return made


def _record(store: Store, job: Job) -> ShardRecord:
    shard = store.open(job.name)
    calls, unproven = unpack_calls(shard.tensors)
    return ShardRecord(job.name, len(job.rows), shard.size, shard.digest, calls.made, calls.saved, unproven)
