"""CUDA graphs: functions of tensors that are recorded once for each shape and then replayed.

A step of a small model starts hundreds of kernels, each of which runs for a few microseconds; Python and the launches
take ten times as long. A graph starts them all at once. Its inputs and outputs lie at fixed addresses, so inputs are
copied in and outputs out, and shapes are rounded up (`rounded`) to have few of them. On other devices, and where a
function cannot be recorded, it is called.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CALLS_BEFORE = 1  # calls of a shape before it is recorded, which takes as long as two or three
MAX_GRAPHS = 96  # of a function; the oldest is forgotten
MAX_FAILURES = 3
_one_at_a_time = threading.Lock()  # CUDA records one graph at a time

Function = Callable[..., Sequence[Tensor]]


def rounded(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def finely_rounded(n: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, 24... that is not below n."""
    less = rounded(n) * 3 // 4
    return less if less >= n else rounded(n)


@dataclass(frozen=True)
class _Graph:
    graph: Any
    given: list[Tensor]
    result: list[Tensor]

    def replay(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self.given, list(tensors))
        self.graph.replay()
        result = [torch.empty_like(one) for one in self.result]
        torch._foreach_copy_(result, self.result)
        return result


class Replayed:
    """`function(*constants, *tensors)`, which returns tensors. Whatever else it reads or writes must stay where it is
    until `forget`. `while_recording` is entered then."""

    def __init__(
        self, function: Function, while_recording: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.function, self.while_recording = function, while_recording
        self.is_off = False
        self._lock = threading.Lock()  # threads would overwrite each other's inputs
        self._graphs: dict[Hashable, _Graph] = {}
        self._calls: Counter[Hashable] = Counter()
        self._pool: Any = None
        self._failures = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the functions alone: graphs know the addresses of the original's weights."""
        return Replayed, (self.function, self.while_recording)

    def __call__(self, tensors: Sequence[Tensor], constants: tuple[Hashable, ...] = ()) -> Sequence[Tensor]:
        if self.is_off or not tensors[0].is_cuda or torch.is_grad_enabled():
            return self.function(*constants, *tensors)
        key = (constants, tensors[0].device, *((tensor.shape, tensor.dtype) for tensor in tensors))
        with self._lock:
            graph = self._graphs.get(key) or self._record_if_known(key, tensors, constants)
            return graph.replay(tensors) if graph else self.function(*constants, *tensors)

    def _record_if_known(
        self, key: Hashable, tensors: Sequence[Tensor], constants: tuple[Hashable, ...]
    ) -> _Graph | None:
        """Record a graph of a shape that has come before; None for a new one, and where it cannot be recorded."""
        self._calls[key] += 1
        if self._calls[key] <= CALLS_BEFORE:
            return None
        try:
            graph = self._graphs[key] = self._record(tensors, constants)
        except Exception as error:  # whatever a model does that cannot be recorded
            self._failures += 1
            self.is_off = self._failures == MAX_FAILURES
            level = logging.WARNING if self.is_off else logging.INFO
            logger.log(level, "no CUDA graph of %s: %s", self.function, error)
            return None
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def padded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function with tensors (n, ...), padded with rows of zeros; return the first n rows."""
        n = len(tensors[0])
        if self.is_off or not tensors[0].is_cuda or torch.is_grad_enabled():
            return list(self.function(*tensors))
        rows = rounded(n)
        more = [torch.cat([one, one.new_zeros(rows - n, *one.shape[1:])]) if rows > n else one for one in tensors]
        return [one[:n] for one in self(more)]

    def forget(self) -> None:
        self._graphs.clear()
        self._calls.clear()
        self._pool = None  # a pool goes with its last graph

    def _record(self, tensors: Sequence[Tensor], constants: tuple[Hashable, ...]) -> _Graph:
        given = [tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # One pool for all: a result is copied out before another graph runs.
        device = given[0].device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):  # even if it fails
            recording = torch.cuda.graph(
                graph, pool=self._pool, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"
            )
            with _one_at_a_time, self.while_recording(), _without_collection(), recording:
                result = list(self.function(*constants, *given))
        return _Graph(graph, given, result)


def weakly(method: Function) -> Function:
    """Return a method that does not keep its object alive; caches would wait for a garbage collection."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Sequence[Tensor]:
        found = reference()
        assert found is not None
        return found(*arguments)

    return call


@contextmanager
def _without_collection() -> Iterator[None]:
    """Let no garbage be collected: an old graph that is destroyed meanwhile would spoil the new one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
