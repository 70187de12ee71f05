"""Fewer kernels for the same numbers: normalisation and rotary positions of a Hugging Face model.

One step of a small model on a GPU is as long as its number of kernels. Written out, a root-mean-square norm takes six
and a rotation of queries and keys twelve; here they take one and four. Whether a model computes what is meant is tried
out on random numbers first, so that variants (norms with 1 + weight, rotations of neighbours) stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

ROTATION = "apply_rotary_pos_emb"  # the function's name in the modules of transformers


class Fused:
    """Lets a model use fused functions where they compute the same:

    with fused(): model(...)
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @cached_property
    def _replacements(self) -> list[tuple[Any, str, Any]]:
        norms = [module for module in self.model.modules() if _is_root_mean_square(module)]
        found: list[tuple[Any, str, Any]] = [(module, "forward", partial(_norm, module)) for module in norms]
        home = sys.modules[type(self.model).__module__]
        return [*found, (home, ROTATION, Rotation())] if _rotates_halves(getattr(home, ROTATION, None)) else found

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for replacement in self._replacements:
                stack.enter_context(_replaced(*replacement))
            yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(name)  # a module's function; an instance has none and uses its class's
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _norm(module: Any, hidden: Tensor) -> Tensor:
    weight: Tensor = module.weight
    return nn.functional.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), _epsilon(module))


def _epsilon(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", None)
    return found if found is not None else getattr(module, "eps", None)


def _is_root_mean_square(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if "Norm" not in type(module).__name__ or not isinstance(weight, Tensor) or weight.ndim != 1:
        return False
    hidden = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1).sin()
    return _epsilon(module) is not None and _agree(lambda: [module(hidden)], lambda: [_norm(module, hidden)])


class Rotation:
    """Rotates queries and keys by halves, as most models do: x * cos + (-second half, first half) * sin."""

    def __init__(self) -> None:
        self._sin, self._signed = torch.zeros(0), torch.zeros(0)

    def __call__(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if sin is not self._sin:  # the same for all layers
            first, second = sin.chunk(2, -1)
            self._sin, self._signed = sin, torch.cat([-first, second], -1).unsqueeze(1)
        both = torch.cat([queries, keys], 1)  # (R, H, T, D)
        turned = torch.addcmul(both * cos.unsqueeze(1), both.roll(both.shape[-1] // 2, -1), self._signed)
        return turned[:, : queries.shape[1]], turned[:, queries.shape[1] :]


def _rotates_halves(function: Callable[..., Any] | None) -> bool:
    if function is None:
        return False
    queries, keys = torch.linspace(-2, 3, 96).sin().view(2, 2, 3, 8), torch.linspace(-3, 2, 48).cos().view(2, 1, 3, 8)
    angles = torch.linspace(0, 2, 24).view(2, 3, 4).repeat(1, 1, 2)
    given = queries, keys, angles.cos(), angles.sin()
    return _agree(lambda: function(*given), lambda: Rotation()(*given))


def _agree(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    try:
        return all(torch.allclose(a.float(), b.float(), atol=1e-5) for a, b in zip(one(), other(), strict=True))
    except Exception:  # another signature, or other shapes
        return False
