"""Out of memory on a GPU: halve the batch, say so, go on. Nothing that was done is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from seqdefer.errors import OptionError

Result = TypeVar("Result")


class SmallerBatchWarning(UserWarning):
    """A batch did not fit into the memory of the GPU and was halved."""


class Halving:
    """A batch size that is halved where the memory of a GPU does not hold a batch, and stays so."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise OptionError(f"a batch of {size} rows; give 1 or more")
        self.size = size

    def over(self, rows: Tensor, work: Callable[[Tensor], Result]) -> list[Result]:
        """`work` of `rows` (R,), part by part, in order."""
        results: list[Result] = []
        while len(rows):
            part = rows[: self.size]
            try:
                results.append(work(part))
            except torch.OutOfMemoryError as error:
                if len(part) == 1:
                    reason = "one row alone does not fit into the memory of the GPU"
                    raise OptionError(f"{reason}; take a smaller model, half precision or shorter inputs") from error
            else:
                rows = rows[len(part) :]
                continue
            self._halve(len(part))  # only here is the failed attempt forgotten, and its memory free
        return results

    def _halve(self, n: int) -> None:
        self.size = n // 2
        torch.cuda.empty_cache()
        warnings.warn(
            f"{n} rows do not fit into the memory of the GPU; going on with {self.size} at once",
            SmallerBatchWarning,
            stacklevel=3,
        )
