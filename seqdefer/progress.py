"""Progress of long work: the meter that shows a stage, and the clock that also times it. Loads nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

Progress = Callable[[int], None]  # receives the number of items finished since the last call


class _NoProgress:
    """Progress that is not shown. An object, so that signatures show its name."""

    def __call__(self, steps: int) -> None:
        pass

    def __repr__(self) -> str:
        return "NO_PROGRESS"


NO_PROGRESS: Progress = _NoProgress()


class Meter(Protocol):
    """Where progress is shown. `stage` opens a bar of `total` steps and returns the function that advances it."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Progress]: ...


class Silent:
    """A meter that shows nothing."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Progress]:
        return nullcontext(NO_PROGRESS)


@dataclass
class Clock:
    """Seconds per stage, and the meter that shows the stage meanwhile."""

    meter: Meter = field(default_factory=Silent)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Progress]:
        begun = time.perf_counter()
        with self.meter.stage(name, total) as advance:
            yield advance
        key = name.split(" (", maxsplit=1)[0]
        self.seconds[key] = round(self.seconds.get(key, 0.0) + time.perf_counter() - begun, 3)
