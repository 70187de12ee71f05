"""The machine a run finds itself on: its device, its description for the provenance, and the clock of its stages."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from seqdefer.errors import OptionError, unknown
from seqdefer.interfaces import Meter, Silent


@dataclass
class Clock:
    """Seconds per stage, and the meter that shows the stage meanwhile."""

    meter: Meter = field(default_factory=Silent)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        begun = time.perf_counter()
        with self.meter.stage(name, total) as advance:
            yield advance
        key = name.split(" (", maxsplit=1)[0]
        self.seconds[key] = round(self.seconds.get(key, 0.0) + time.perf_counter() - begun, 3)


def machine(device: torch.device) -> dict[str, str]:
    """Where this runs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def choose_device(name: str) -> torch.device:
    """'auto' takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown("device", name, ("auto", "cpu", "cuda")) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise OptionError(f"device {name!r} is not on this machine; use --device auto or --device cpu")
    return device
