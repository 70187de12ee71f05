"""Cross-attention of decoders: rows that share a clip attend to it together, and where they listen.

Where a decoder listens is computed again from queries and cached keys, for chosen heads.

A model computes attention in one fused operation, which does not tell the weights. To switch it to the written-out
attention slows every layer down. Instead a hook takes the input of one or two cross-attention layers, computes their
queries and compares them with the keys in the cache: the same formula, for these layers alone.

Whisper's checkpoints name the heads that follow the sound (`alignment_heads`); without them, all heads of the last
layer are watched. The geometric mean of their weights is large where they agree. Three numbers say where a position
listens, in states of the encoder (20 ms each):

sharpness   log of the largest weight
spread      entropy of the weights, in nats
place       mean place, weighted by the fourth power of the weights: the peak counts, the tail does not, and unlike the
            place of the largest weight it does not jump where two are about equal
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.tasks.text.passes import SharedLayer

N_NOTED = 3
MAX_LAYERS = 2
PEAKEDNESS = 4


def chosen_heads(model: Any, named: Sequence[Sequence[int]] | None) -> dict[int, list[int]]:
    """Return the heads to watch by layer: the named ones of the last layers, or all of the last layer."""
    n_layers, n_heads = int(model.config.decoder_layers), int(model.config.decoder_attention_heads)
    heads: dict[int, list[int]] = {}
    for layer, head in named or ():
        if 0 <= layer < n_layers and 0 <= head < n_heads:
            heads.setdefault(int(layer), []).append(int(head))
    kept = sorted(heads)[-MAX_LAYERS:]
    return {layer: sorted(heads[layer]) for layer in kept} or {n_layers - 1: list(range(n_heads))}


@contextmanager
def watched_attention(model: Any, heads: Mapping[int, Sequence[int]]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Watch a pass. Yield a function that adds the three numbers to hidden states (R, T, H)."""
    seen: list[Tensor] = []

    def watch(module: Any, arguments: tuple[Any, ...], options: dict[str, Any], _: Any) -> None:
        hidden = options["hidden_states"] if "hidden_states" in options else arguments[0]
        seen.append(_log_weights(module, hidden, options["past_key_values"], heads[module.layer_idx]))

    def noted(hidden: Tensor) -> Tensor:
        return torch.cat([hidden.float(), summarize(torch.cat(seen, 1))], -1)

    layers = model.get_decoder().layers
    with ExitStack() as stack:
        for layer in heads:
            handle = layers[layer].encoder_attn.register_forward_hook(watch, with_kwargs=True)
            stack.callback(handle.remove)
        yield noted


def summarize(log_weights: Tensor) -> Tensor:
    """Return sharpness, spread and place, of the logs of the weights of all heads (R, H, T, S). (R, T, 3)"""
    together = log_weights.mean(1).log_softmax(-1)
    places = torch.arange(together.shape[-1], device=together.device, dtype=together.dtype)
    place = (PEAKEDNESS * together).softmax(-1) @ places
    spread = -(together.exp() * together).sum(-1)
    return torch.stack([together.amax(-1), spread, place], -1)


def _log_weights(module: Any, hidden: Tensor, cache: Any, heads: Sequence[int]) -> Tensor:
    """Return the logs of the weights of some heads of a cross-attention layer. (R, H, T, S)"""
    layer = cache.cross_attention_cache.layers[module.layer_idx]
    # Heads one by one: a CUDA graph cannot record an index that is a list.
    queries = torch.cat([_queries(module, hidden)[:, head : head + 1] for head in heads], 1)
    if isinstance(layer, SharedLayer):
        keys = torch.cat([layer.source[0][:, head : head + 1] for head in heads], 1).transpose(2, 3)
        scores = layer.rows.attend(queries, lambda some, clips: some @ keys[clips])
    else:
        scores = queries @ torch.cat([layer.keys[:, head : head + 1] for head in heads], 1).transpose(2, 3)
    return scores.float().log_softmax(-1)


def _queries(module: Any, hidden: Tensor) -> Tensor:
    n, length, _ = hidden.shape
    queries: Tensor = (module.q_proj(hidden) * module.scaling).view(n, length, -1, module.head_dim).transpose(1, 2)
    return queries


@contextmanager
def attention_by_clip(model: Any) -> Iterator[None]:
    """Let the rows of a pass whose cache has `SharedLayer`s attend to each clip together."""
    modules = [layer.encoder_attn for layer in model.get_decoder().layers]
    for module in modules:
        module.forward = partial(_attend_by_clip, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _attend_by_clip(module: Any, hidden_states: Tensor, *, past_key_values: Any, **_: Any) -> tuple[Tensor, None]:
    """Return what Whisper's cross-attention returns."""
    layer = past_key_values.cross_attention_cache.layers[module.layer_idx]
    keys, values = layer.source

    def attend(queries: Tensor, clips: slice) -> Tensor:
        return nn.functional.scaled_dot_product_attention(queries, keys[clips], values[clips], scale=1.0)

    mixed = layer.rows.attend(_queries(module, hidden_states), attend)
    return module.out_proj(mixed.transpose(1, 2).reshape(hidden_states.shape)), None
