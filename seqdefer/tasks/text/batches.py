"""Batches of rows: halved when a GPU runs out of memory, grouped by length to save padding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from seqdefer.errors import OptionError

Result = TypeVar("Result")


class SmallerBatchWarning(UserWarning):
    """A batch did not fit into GPU memory and was halved."""


class AdaptiveBatch:
    """A batch size that is halved, for good, when a batch does not fit into GPU memory."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise OptionError(f"the batch size is {size}; it must be at least 1")
        self.size = size

    def map(self, rows: Tensor, work: Callable[[Tensor], Result]) -> list[Result]:
        """Call `work` with consecutive batches of `rows` (R,) and return its results in order."""
        results: list[Result] = []
        size = self.size
        while len(rows):
            batch = rows[: self.size]
            try:
                results.append(work(batch))
            except torch.OutOfMemoryError as error:
                if len(batch) == 1:
                    self.size = size  # what fills the memory is elsewhere, so smaller batches did not help
                    raise OptionError(f"a single row does not fit into GPU memory{_in_use()}") from error
            else:
                rows = rows[len(batch) :]
                continue
            self._halve(len(batch))  # outside `except`, where the traceback no longer holds the batch's memory
        return results

    def _halve(self, n: int) -> None:
        self.size = n // 2
        torch.cuda.empty_cache()
        warnings.warn(
            f"a batch of {n} rows does not fit into GPU memory; continuing with {self.size} rows",
            SmallerBatchWarning,
            stacklevel=3,
        )


def _in_use() -> str:
    """Say who fills the memory of the GPU, and what to do."""
    advice = "use half precision, a smaller model or shorter inputs"
    if not torch.cuda.is_available():
        return f"; {advice}"
    (free, total), ours = torch.cuda.mem_get_info(), torch.cuda.memory_allocated()
    others = total - free - torch.cuda.memory_reserved()
    used = f"{ours / 1e9:.1f} of {total / 1e9:.1f} GB are in use here, {max(0, others) / 1e9:.1f} by other programs"
    return f": {used}; end other programs, or {advice}"


def group_by_length(rows: Tensor, lengths: Tensor, n_tokens: int) -> Iterator[Tensor]:
    """Yield rows of similar length together, about `n_tokens` tokens including padding."""
    rows = rows[lengths[rows].argsort(descending=True)]
    while len(rows):
        group, rows = rows.tensor_split([max(1, n_tokens // int(lengths[rows[0]]))])
        yield group
