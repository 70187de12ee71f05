"""How many threads or processes to work with. It loads nothing: solvers ask, too."""

from __future__ import annotations

import os

from seqdefer.errors import OptionError

THREADS = "SEQDEFER_THREADS"  # in the environment: how many threads a solver may use, where all cores are too many


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def n_threads() -> int:
    """Threads for a solver: as many as the environment allows, or one for each core."""
    allowed = os.environ.get(THREADS, "")
    if not allowed:
        return n_cores()
    if not (allowed.isdecimal() and int(allowed)):
        raise OptionError(f"{THREADS} is {allowed!r}; it must be a number of threads, 1 or more")
    return int(allowed)
