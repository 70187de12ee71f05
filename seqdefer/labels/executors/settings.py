"""Settings of labelling: the executor, its workers, and where labels are stored."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from seqdefer.errors import OptionError, missing_extra, unknown
from seqdefer.interfaces import TaskEntry
from seqdefer.labels.executors.base import EXECUTORS, Executor, TaskSource, default_workers


@dataclass(frozen=True)
class ExecutorSettings:
    """Settings of labelling; the fields are options of the commands that label."""

    engine: str | None = None  # None: this process
    address: str | None = None  # of a Ray cluster; None starts a local one
    workers: int | None = None  # None: one per core, or per GPU
    threads: int = 1  # per worker
    shard_size: int | None = None  # rows; None: a batch of the models
    labels: Path | None = None  # the store; None: `labels` in the folder of the task

    def __post_init__(self) -> None:
        if self.engine not in (None, *EXECUTORS):
            raise unknown("engine", self.engine, EXECUTORS)
        for name in ("workers", "threads", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.address is not None and self.engine != "ray":
            raise OptionError(f"--address needs --engine ray; the engine is {self.engine or 'this process'}")
        if self.engine == "ray" and find_spec("ray") is None:  # fail before anything is prepared
            raise missing_extra("ray", "ray", "labelling on a Ray cluster")
        if self.engine is None and self.workers not in (None, 1):
            raise OptionError(f"--workers {self.workers} needs an engine; add --engine local or --engine ray")

    def store_in(self, folder: Path) -> Path:
        """Return the folder of the labels of a task prepared in `folder`."""
        return folder / "labels" if self.labels is None else self.labels

    def start(self, entry: TaskEntry, options: Any, folder: Path, device: str) -> Executor | None:
        """Return the executor for a task that has been prepared in `folder`; None for this process."""
        if self.engine is None:
            return None
        source = TaskSource(entry, options, folder.resolve(), device, self.threads)
        if self.engine == "local":
            from seqdefer.labels.executors.processes import ProcessExecutor

            return ProcessExecutor(source, self.workers or default_workers(device))
        from seqdefer.labels.executors.ray import RayExecutor

        return RayExecutor(source, self.workers, self.address)
