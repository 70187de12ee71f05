"""Functions that compute what parts of Hugging Face models compute, in fewer kernels.

Written out, a root-mean-square norm takes six kernels and a rotation of queries and keys twelve; here they take one and
four. Linear layers that read the same input (queries, keys and values; gate and up) are computed as one. Whether a part
of a model computes what is meant is tried out on random numbers first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def norm(module: Any, hidden: Tensor) -> Tensor:
    weight: Tensor = module.weight
    return nn.functional.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), epsilon_of(module))


def epsilon_of(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", None)
    return found if found is not None else getattr(module, "eps", None)


def is_root_mean_square(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if "Norm" not in type(module).__name__ or not isinstance(weight, Tensor) or weight.ndim != 1:
        return False
    hidden = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1).sin()
    return epsilon_of(module) is not None and _agree(lambda: [module(hidden)], lambda: [norm(module, hidden)])


class Rotation:
    """Rotates queries and keys by halves, as most models do: x * cos + (-second half, first half) * sin."""

    def __init__(self) -> None:
        self._known = torch.zeros(0), torch.zeros(0)

    def __call__(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        known, signed = self._known
        if sin is not known:  # the same for all layers
            first, second = sin.chunk(2, -1)
            signed = torch.cat([-first, second], -1).unsqueeze(1)
            self._known = sin, signed
        both = torch.cat([queries, keys], 1)  # (R, H, T, D)
        turned = torch.addcmul(both * cos.unsqueeze(1), both.roll(both.shape[-1] // 2, -1), signed)
        return turned[:, : queries.shape[1]], turned[:, queries.shape[1] :]


def stack(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Lay the weights of linear layers one behind the other; return them and their biases. The layers share the memory,
    so that weights take as much as before."""
    weight = torch.cat([layer.weight.data for layer in layers])
    biases = [layer.bias.data for layer in layers if layer.bias is not None]
    for layer, part in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part
    return weight, torch.cat(biases) if biases else None


def merge(layers: Sequence[nn.Linear]) -> list[Callable[[Tensor], Tensor]]:
    """Return the functions of linear layers that are called with one and the same input, one after the other: the first
    computes all."""
    weight, bias = stack(layers)
    sizes = [layer.out_features for layer in layers]
    known: list[Any] = [None, ()]  # the input and all results

    def compute(number: int, hidden: Tensor) -> Tensor:
        if number == 0 or known[0] is not hidden:
            known[:] = hidden, nn.functional.linear(hidden, weight, bias).split(sizes, -1)
        result: Tensor = known[1][number]
        if number == len(sizes) - 1:
            known[:] = None, ()
        return result

    return [partial(compute, number) for number in range(len(layers))]


def rotates_halves(function: Callable[..., Any] | None) -> bool:
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
