"""How much one request may ask for, and how many may at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from seqdefer.errors import OptionError

MOST = threading.TIMEOUT_MAX  # timers take no more, nor infinity


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 2**20
    request_seconds: float = 120.0
    connections: int = 512  # that are open; more are told to come back
    queue: int = 256  # requests that wait; more are sent away
    inputs: int = 16  # of one request
    batch: int = 32  # sequences of one cohort
    running: int = 128  # sequences of all cohorts: their caches are in memory
    expert_seconds: float | None = None  # for each call; None: a local model as long as it takes, half a request's else
    grace_seconds: float = 5.0  # that requests in flight get at the end

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value <= MOST:
                raise OptionError(f"{name.replace('_', ' ')} is {value}; give more than 0 and at most {MOST:.0f}")
        if not self.inputs <= self.batch <= self.running:
            raise OptionError(
                f"inputs of a request ({self.inputs}) must fit into a batch ({self.batch}), and that into what runs at "
                f"once ({self.running})"
            )
