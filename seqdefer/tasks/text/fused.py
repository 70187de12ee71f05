"""Fewer kernels for the same numbers: norms, rotary positions and linear layers of a Hugging Face model.

One step of a small model on a GPU is as long as its number of kernels. Written out, a root-mean-square norm takes six
and a rotation of queries and keys twelve; here they take one and four. Whether a model computes what is meant is tried
out on random numbers first, so that variants (norms with 1 + weight, rotations of neighbours) stay as they are. Linear
layers that read the same input (queries, keys and values; gate and up) are computed as one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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
        if not self.model.config.is_encoder_decoder:  # whose keys may be those of another input
            for layers in _same_input(self.model):
                found += [(layer, "forward", one) for layer, one in zip(layers, merge(layers), strict=True)]
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


def _same_input(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield linear layers that read the same input."""
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            layers = [getattr(module, name, None) for name in names]
            plain = [layer for layer in layers if type(layer) is nn.Linear]
            if len(plain) == len(layers) and len({layer.bias is None for layer in plain}) == 1:
                yield plain


def merge(layers: Sequence[nn.Linear]) -> list[Callable[[Tensor], Tensor]]:
    """Return the functions of linear layers that are called with one and the same input, one after the other: the first
    computes all. Their weights are laid one behind the other, and take no more memory than before."""
    weight = torch.cat([layer.weight.data for layer in layers])
    biases = [layer.bias.data for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        layer.weight.data = part
    known: list[Any] = [None, ()]  # the input and all results

    def compute(number: int, hidden: Tensor) -> Tensor:
        if number == 0 or known[0] is not hidden:
            known[:] = hidden, nn.functional.linear(hidden, weight, bias).split(sizes, -1)
        result: Tensor = known[1][number]
        if number == len(sizes) - 1:
            known[:] = None, ()
        return result

    return [partial(compute, number) for number in range(len(layers))]


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
