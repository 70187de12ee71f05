"""Fewer kernels for the same numbers, while a pass runs: a model's norms, rotations and linear layers are replaced by
functions that do the same, or on a GPU with Triton its whole layers.

One step of a small model on a GPU is as long as its number of kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

from torch import nn

from seqdefer.tasks.text.fused_functions import Rotation, is_root_mean_square, merge, norm, rotates_halves
from seqdefer.tasks.text.fused_layers import FusedLayer, can_run_kernels, is_plain_layer

ROTATION = "apply_rotary_pos_emb"  # the function's name in the modules of transformers


class Fused:
    """Lets a model use fused functions where they compute the same:

    with fused(): model(...)
    """

    def __init__(self, model: Any, *, with_kernels: bool | None = None) -> None:
        self.model = model
        self.has_kernels = can_run_kernels(model) if with_kernels is None else with_kernels

    @cached_property
    def _replacements(self) -> list[tuple[Any, str, Any]]:
        modules = list(self.model.modules())
        norms = [module for module in modules if is_root_mean_square(module)]
        found: list[tuple[Any, str, Any]] = [(module, "forward", partial(norm, module)) for module in norms]
        home = sys.modules[type(self.model).__module__]
        rotates = rotates_halves(getattr(home, ROTATION, None))
        whole = [module for module in modules if self.has_kernels and rotates and is_plain_layer(module)]
        found += [(layer, "forward", FusedLayer(layer)) for layer in whole]
        if not (whole or self.model.config.is_encoder_decoder):  # whose keys may be those of another input
            for layers in _same_input(self.model):
                found += [(layer, "forward", one) for layer, one in zip(layers, merge(layers), strict=True)]
        return [*found, (home, ROTATION, Rotation())] if rotates and not whole else found

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


def _same_input(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield linear layers that read the same input."""
    for module in model.modules():
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            layers = [getattr(module, name, None) for name in names]
            plain = [layer for layer in layers if type(layer) is nn.Linear]
            if len(plain) == len(layers) and len({layer.bias is None for layer in plain}) == 1:
                yield plain
