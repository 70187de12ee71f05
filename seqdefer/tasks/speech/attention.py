"""Where a decoder listens: cross-attention of chosen heads, computed again from queries and cached keys.

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
from typing import Any

import torch
from torch import Tensor

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
        every = _log_weights(module, hidden, options["past_key_values"])
        # One by one: a CUDA graph cannot record an index that is a list.
        seen.extend(every[:, head : head + 1] for head in heads[module.layer_idx])

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


def _log_weights(module: Any, hidden: Tensor, cache: Any) -> Tensor:
    """Return the logs of the weights of all heads of a cross-attention layer. (R, H, T, S)"""
    keys: Tensor = cache.cross_attention_cache.layers[module.layer_idx].keys  # (R, H, S, D)
    n, length, _ = hidden.shape
    queries = (module.q_proj(hidden) * module.scaling).view(n, length, -1, module.head_dim).transpose(1, 2)
    if n > 1 and keys.stride(0) == 0:  # rows of one clip share its keys, which a product would copy
        shared = queries.transpose(0, 1).reshape(1, queries.shape[1], n * length, -1) @ keys[:1].transpose(2, 3)
        scores = shared.view(queries.shape[1], n, length, -1).transpose(0, 1)
    else:
        scores = queries @ keys.transpose(2, 3)
    log_weights: Tensor = scores.float().log_softmax(-1)
    return log_weights
