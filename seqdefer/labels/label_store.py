"""The labels of a task: shards that a store has are read, missing ones are made by an executor and stored."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import OptionError
from seqdefer.interfaces import Task, TaskEntry
from seqdefer.labels.executors.base import Executor, run_in_process
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.jobs import Job, LabelPart, make_jobs, run_job, shard_name, unpack_calls
from seqdefer.labels.manifest import Manifest, find_manifest, write_manifest
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.storage.files import writable_folder
from seqdefer.storage.shards import Store, pack


@dataclass(frozen=True)
class LabellingResult:
    """The manifest of a part, and where its shards came from."""

    manifest: Manifest
    found: int  # shards that were in the store
    made: int  # shards made by this call


class LabelStore:
    """The labels of one task in one store of shards. Without an executor, this process makes missing labels.

    If the expert has no fingerprint, its labels are made on every read and not stored."""

    def __init__(
        self, task: Task, store: Store, executor: Executor | None = None, shard_size: int | None = None
    ) -> None:
        self.task, self.store, self.executor, self.shard_size = task, store, executor, shard_size
        if executor is not None:
            require_fingerprint(task)

    def jobs(self, part: LabelPart) -> list[Job]:
        """Cut a part into jobs: by `shard_size` if given, else as the store's manifest did."""
        found = find_manifest(self.task, part, self.store) if self.shard_size is None else None
        return make_jobs(self.task, part, self.shard_size if found is None else found.shard_size)

    def has(self, part: LabelPart) -> bool:
        """Return whether a part has been labelled completely."""
        return find_manifest(self.task, part, self.store) is not None

    def read(self, part: LabelPart, progress: Progress = NO_PROGRESS) -> list[dict[str, Tensor]]:
        """Return the shards of a part in order; make the missing ones."""
        expert, shards = self.task.expert, []
        if not expert.fingerprint:
            for job in self.jobs(part):
                shards.append(run_job(self.task, job))
                progress(len(job.rows))
            return shards
        before, (result,) = expert.unproven, self.make([part], progress)
        shards = [self.store.open(shard.name).tensors for shard in result.manifest.shards]
        # Count the unproven answers of stored shards too, whichever run made them.
        expert.unproven = before + sum(unpack_calls(shard)[1] for shard in shards)
        return shards

    def make(self, parts: Sequence[LabelPart], progress: Progress = NO_PROGRESS) -> list[LabellingResult]:
        """Make all missing or damaged shards of the parts, then write the manifests."""
        require_fingerprint(self.task)
        plans = [self.jobs(part) for part in parts]
        missing: dict[str, Job] = {}  # parts may share rows
        for job in (job for jobs in plans for job in jobs):
            if job.name not in missing and self.store.read(job.name) is None:
                missing[job.name] = job
            else:
                progress(len(job.rows))
        if missing:
            self._make(list(missing.values()), progress)
        results = []
        for part, jobs in zip(parts, plans, strict=True):
            made = sum(job.name in missing for job in jobs)
            manifest = write_manifest(self.task, part, jobs, self.store)
            results.append(LabellingResult(manifest, len(jobs) - made, made))
        return results

    def read_grown(self, part: LabelPart) -> dict[str, Tensor] | None:
        """Return what `write_grown` stored of open trees, if anything."""
        found = self.store.read(shard_name(self.task, part)) if self.task.expert.fingerprint else None
        return None if found is None else found.tensors

    def write_grown(self, part: LabelPart, trees: DecisionTrees) -> None:
        """Store open trees as far as they have grown, in the place of what was stored of them before."""
        if self.task.expert.fingerprint:
            (job,) = make_jobs(self.task, part, len(part.rows))
            calls = torch.tensor([trees.calls.made, trees.calls.saved, 0])
            self.store.write(job.name, pack(job.name, {**trees.tensors(), "calls": calls}))
            write_manifest(self.task, part, [job], self.store)

    def _make(self, jobs: Sequence[Job], progress: Progress) -> None:
        results = run_in_process(self.task, jobs) if self.executor is None else self.executor.run(jobs)
        with closing(results):  # ends the workers if anything fails here
            for result in results:
                job = jobs[result.index]
                self.store.write(job.name, result.packed)
                for message, category in result.warnings:
                    warnings.warn(message, category, stacklevel=2)
                progress(len(job.rows))


def open_labels(
    settings: ExecutorSettings, entry: TaskEntry, options: Any, task: Task, folder: Path, device: str
) -> LabelStore:
    """Open the labels of a task that was prepared in `folder` with these options."""
    executor, store = settings.start(entry, options, folder, device), settings.store_in(folder)
    if settings.labels is not None:
        with writable_folder(store, option="--labels"):  # fail before anything is labelled
            pass
    return LabelStore(task, Store(store), executor, settings.shard_size)


def require_fingerprint(task: Task) -> None:
    """Raise if the task's expert has no fingerprint."""
    if not task.expert.fingerprint:
        raise OptionError(
            f"the expert of task {task.name!r} has no fingerprint, so its labels cannot be stored; "
            "set Expert.fingerprint to a text that names all that its answers depend on"
        )
