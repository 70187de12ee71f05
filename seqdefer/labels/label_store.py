"""The labels of a task: those that a store has are read, those that are missing are made by an engine and kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import Task, TaskEntry
from seqdefer.labels.executors.base import Engine, in_process
from seqdefer.labels.executors.settings import EngineSettings
from seqdefer.labels.jobs import Job, Part, calls_in, cut, label
from seqdefer.labels.manifest import Manifest, find_manifest, write_manifest
from seqdefer.progress import Progress
from seqdefer.storage.files import writable_folder
from seqdefer.storage.shards import Store

Shards = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Made:
    """What a labelling came to."""

    manifest: Manifest
    found: int  # shards that were there
    made: int  # shards that were made now


class Labels:
    """Of one task, in one store. Without an engine this process makes them. Labels of an expert that has no name are
    made whenever they are asked for, and not kept."""

    def __init__(self, task: Task, store: Store, engine: Engine | None = None, shard_size: int | None = None) -> None:
        self.task, self.store, self.engine, self.shard_size = task, store, engine, shard_size
        if engine is not None:
            require_name(task)

    def jobs(self, part: Part) -> list[Job]:
        """As it was cut the last time, unless a size was asked for: who learns from labels need not know it."""
        size = self.shard_size
        if size is None and self.task.expert.fingerprint:
            found = find_manifest(self.task, part, self.store)
            size = None if found is None else found.shard_size
        return cut(self.task, part, size)

    def has(self, part: Part) -> bool:
        """Whether somebody has made all of it."""
        return bool(self.task.expert.fingerprint) and find_manifest(self.task, part, self.store) is not None

    def read(self, part: Part, progress: Progress = lambda _: None) -> Shards:
        """The shards of a part, in order."""
        if not self.task.expert.fingerprint:
            return list(self._made_anew(self.jobs(part), progress))
        before, (done,) = self.task.expert.unproven, self.make([part], progress)
        shards = [self.store.open(shard.name).tensors for shard in done.manifest.shards]
        # Whoever made them, and whenever: those of stored answers count, too.
        self.task.expert.unproven = before + sum(calls_in(shard)[1] for shard in shards)
        return shards

    def _made_anew(self, jobs: Sequence[Job], progress: Progress) -> Iterator[dict[str, Tensor]]:
        for job in jobs:
            yield label(self.task, job)
            progress(len(job.rows))

    def make(self, parts: Sequence[Part], progress: Progress = lambda _: None) -> list[Made]:
        """Makes the shards of all parts that are missing or damaged, then the manifests. No more than the shards in
        flight are in memory."""
        require_name(self.task)
        plans = [self.jobs(part) for part in parts]
        missing: dict[str, Job] = {}  # parts may share rows
        for job in (job for jobs in plans for job in jobs):
            if job.name not in missing and self.store.read(job.name) is None:
                missing[job.name] = job
            else:
                progress(len(job.rows))
        if missing:
            self._make(list(missing.values()), progress)
        done = []
        for part, jobs in zip(parts, plans, strict=True):
            made = sum(job.name in missing for job in jobs)
            done.append(Made(write_manifest(self.task, part, jobs, self.store), len(jobs) - made, made))
        return done

    def _make(self, jobs: Sequence[Job], progress: Progress) -> None:
        results = in_process(self.task, jobs) if self.engine is None else self.engine.run(jobs)
        with closing(results):  # whatever fails here, the workers end
            for result in results:
                job = jobs[result.place]
                self.store.write(job.name, result.packed)
                for words, kind in result.warnings:
                    warnings.warn(words, kind, stacklevel=2)
                progress(len(job.rows))


def open_labels(
    settings: EngineSettings, entry: TaskEntry, options: Any, task: Task, folder: Path, device: str
) -> Labels:
    """The labels of a task that was prepared in `folder` with these options, as the settings say."""
    engine, store = settings.start(entry, options, folder, device), settings.store_in(folder)
    if settings.labels is not None:
        with writable_folder(store, option="--labels"):  # told before anything is labelled
            pass
    return Labels(task, Store(store), engine, settings.shard_size)


def require_name(task: Task) -> None:
    if not task.expert.fingerprint:
        raise OptionError(
            f"the expert of task {task.name!r} has no name (Expert.fingerprint), so its labels cannot be kept: "
            "give it one that says all that its answers depend on"
        )
