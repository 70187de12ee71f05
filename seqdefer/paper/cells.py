"""Cells measured by several processes, ahead of the studies that read them.

Fits are small and numerous, and do not fill a machine one after the other. Each process opens the labs that it needs,
with the labels that the driver has made; stored cells are all that comes back.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from seqdefer.labels.executors.processes import block_ctrl_c, exit_with_driver
from seqdefer.paper.lab import Variant
from seqdefer.paper.labs import Choices, Labs
from seqdefer.progress import Clock


@dataclass(frozen=True)
class WantedCell:
    task: str
    recipe: str
    variant: Variant
    method: str
    seed: int


def measure_cells(cells: Sequence[WantedCell], folder: Path, choices: Choices, clock: Clock) -> None:
    """Measure cells in `choices.jobs` processes. Token-level fits take longest and come first."""
    ordered = sorted(dict.fromkeys(cells), key=lambda cell: cell.method != "TokenwiseModel")
    if not ordered:
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the memory that labelling took is for the processes now
    pool = ProcessPoolExecutor(
        min(choices.jobs, len(ordered)),
        multiprocessing.get_context("spawn"),  # a fork would copy locks that threads of this process hold
        _open,
        (folder, choices),
    )
    try:
        with block_ctrl_c():  # the processes start with the first cell
            futures = [pool.submit(_measure, cell) for cell in ordered]
        with clock.stage("fit and measure", len(futures)) as advance:
            for future in as_completed(futures):
                future.result()
                advance(1)
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise


_opened: list[Labs] = []  # those of this process


def _open(folder: Path, choices: Choices) -> None:
    threading.Thread(target=exit_with_driver, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // choices.jobs))
    _opened.append(Labs(folder, choices, Clock()))


def _measure(cell: WantedCell) -> None:
    _opened[0].get(cell.task, cell.recipe).cell(cell.variant, cell.method, cell.seed)
