"""What can be chosen about labelling: which executor, how many workers, where the labels are kept."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from seqdefer.errors import OptionError, missing_extra, unknown
from seqdefer.interfaces import TaskEntry
from seqdefer.labels.executors.base import ENGINES, Engine, Source, usual_workers


@dataclass(frozen=True)
class EngineSettings:
    """What can be chosen about labelling; the fields are options of the commands that label."""

    engine: str | None = None  # None: this process
    address: str | None = None  # of a Ray cluster; None starts one here
    workers: int | None = None  # None: as many as there are cores, or GPUs
    threads: int = 1  # of each worker
    shard_size: int | None = None  # rows; None: what the models take at once
    labels: Path | None = None  # the store; None: `labels` in the folder of the task

    def __post_init__(self) -> None:
        if self.engine not in (None, *ENGINES):
            raise unknown("engine", self.engine, ENGINES)
        for name in ("workers", "threads", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.address is not None and self.engine != "ray":
            raise OptionError(f"--address is for --engine ray; the engine is {self.engine or 'this process'}")
        if self.engine == "ray" and find_spec("ray") is None:  # told before anything is prepared
            raise missing_extra("ray", "ray", "labelling on a Ray cluster")
        if self.engine is None and self.workers not in (None, 1):
            raise OptionError(f"--workers {self.workers} needs an engine: --engine local, or --engine ray")

    def store_in(self, folder: Path) -> Path:
        return folder / "labels" if self.labels is None else self.labels

    def start(self, entry: TaskEntry, options: Any, folder: Path, device: str) -> Engine | None:
        """The engine for a task that has been prepared in `folder`; what it needs is looked for at once."""
        if self.engine is None:
            return None
        source = Source.of(entry, options, folder, device, self.threads)
        if self.engine == "local":
            from seqdefer.labels.executors.processes import Processes

            return Processes(source, self.workers or usual_workers(device))
        from seqdefer.labels.executors.ray import OnRay

        return OnRay(source, self.workers, self.address)
