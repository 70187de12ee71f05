"""Whole layers of decoder-only models by few kernels: those of Llama, Qwen2, Qwen3, Mistral and others of that plan.

    y = norm(x);  queries, keys, values = Q y, K y, V y;  x += O attention(...)
    y = norm(x);  x += D (silu(G y) * U y)

Layers of the families below are replaced, if their parts compute these functions; what else a variant might do
differently shows when the model is tried out (`seqdefer.tasks.text.row_probe`). Other families have layers with the
same parts that scale or rotate them by rules of their own, some only at positions that no short trial reaches.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.tasks.text.attention import current_pass
from seqdefer.tasks.text.fused_functions import epsilon_of, is_root_mean_square, norm, stack

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # of transformers
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}


def can_run_kernels(model: nn.Module) -> bool:
    """Tell whether kernels of our own can run: the model is on one GPU, and Triton is there."""
    devices = {weight.device for weight in model.parameters()}
    return {device.type for device in devices} == {"cuda"} and len(devices) == 1 and find_spec("triton") is not None


def is_plain_layer(layer: Any) -> bool:
    """Tell whether a module is a layer that `FusedLayer` computes."""
    if type(layer).__module__ not in {f"transformers.models.{one}.modeling_{one}" for one in FAMILIES}:
        return False
    if {name for name, _ in layer.named_children()} != PARTS:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    linear = [attention.get(name) for name in PROJECTIONS] + [mlp.get(name) for name in FEED_FORWARD]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(attention.get(name) for name in HEAD_NORMS)]
    return (
        set(attention) in (PROJECTIONS, PROJECTIONS | HEAD_NORMS)
        and set(mlp) - {"act_fn"} == FEED_FORWARD
        and all(type(one) is nn.Linear for one in linear)
        and len({attention[name].bias is None for name in ("q_proj", "k_proj", "v_proj")}) == 1
        and all(mlp[name].bias is None for name in FEED_FORWARD)
        and all(one is None or is_root_mean_square(one) for one in norms)
        and _is_silu(layer.mlp.act_fn)
    )


def _is_silu(function: Any) -> bool:
    numbers = torch.linspace(-3, 3, 8)
    return torch.allclose(function(numbers), nn.functional.silu(numbers))


class FusedLayer:
    """The forward function of a layer, in a packed pass on a GPU. It changes its input in place, which nobody else
    uses."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.index, self.scale = attention.layer_idx, attention.scaling
        self.n_keys = attention.k_proj.out_features // attention.head_dim
        self.projection = stack([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out, self.up, self.down = attention.o_proj, stack([mlp.gate_proj, mlp.up_proj])[0], mlp.down_proj
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm, attention.k_norm
            epsilon = epsilon_of(norms[0])
            assert epsilon is not None
            self.head_norms = norms[0].weight, norms[1].weight, epsilon

    def __call__(self, hidden_states: Tensor, *_: Any, position_embeddings: Any, **__: Any) -> Tensor:
        from seqdefer.tasks.text.kernels import attend, gate, rotate_and_store

        now, hidden = current_pass.get(), hidden_states[0]  # (N, H)
        layer, (cos, sin) = now.layers[self.index], position_embeddings
        given = nn.functional.linear(norm(self.norms[0], hidden), *self.projection)
        layer.make_room(now.target, given.new_empty(1, self.n_keys, 0, cos.shape[-1]))
        queries = rotate_and_store(
            given, (cos[0], sin[0]), layer, now.target.index, now.target.columns, self.head_norms
        )
        attended = attend(queries, layer, now.blocks, self.scale).flatten(1)
        hidden.addmm_(attended, self.out.weight.t())
        if self.out.bias is not None:
            hidden += self.out.bias
        hidden.addmm_(gate(nn.functional.linear(norm(self.norms[1], hidden), self.up)), self.down.weight.t())
        return hidden_states
