"""The machine a run finds itself on: its device, cores and threads, and its description for the provenance.

PyTorch is imported on use: solvers ask for their number of threads without it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from seqdefer.errors import OptionError, unknown
from seqdefer.renames import names_moved

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch
else:
    __getattr__ = names_moved(__name__)

THREADS_VARIABLE = "SEQDEFER_THREADS"  # limits the threads of a solver where all cores are too many


def n_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def n_threads() -> int:
    """Count the threads for a solver: as many as SEQDEFER_THREADS allows, or one per core."""
    allowed = os.environ.get(THREADS_VARIABLE, "")
    if not allowed:
        return n_cores()
    if not (allowed.isdecimal() and int(allowed)):
        raise OptionError(f"{THREADS_VARIABLE} is {allowed!r}; it must be a number of threads, 1 or more")
    return int(allowed)


def cache_directory() -> Path:
    """Return the directory of downloaded files, which environment variables choose."""
    if own := os.environ.get("SEQDEFER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqdefer"


def machine(device: torch.device) -> dict[str, str]:
    """Describe this machine for the provenance of a run."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def send(values: list[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of numbers on a device. On a GPU the copy is asynchronous: the host does not wait."""
    import torch

    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def fetch(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Return tensors as lists of numbers. The host waits for a GPU once, not for each of them."""
    import torch

    if tensors[0].is_cuda:
        on_host = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
        for host, one in zip(on_host, tensors, strict=True):
            host.copy_(one, non_blocking=True)
        torch.cuda.current_stream(tensors[0].device).synchronize()
        tensors = on_host
    return [one.tolist() for one in tensors]


def choose_device(name: str) -> torch.device:
    """Return the device of this name; 'auto' takes a GPU where there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown("device", name, ("auto", "cpu", "cuda")) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise OptionError(f"device {name!r} is not on this machine; use --device auto or --device cpu")
    return device
