"""One forward pass of a Hugging Face model: tokens in; caches, the last hidden state and its logits out.

A `Memory` holds the caches of rows that have read equally far. It is a value: a pass gives a new one, and shares the
tensors that did not change. transformers' own cache objects are filled in place, so each pass gets a new, empty shell
around the tensors.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError, DataError
from seqdefer.tasks.text.encodings import Encodings

PADDING = -1  # in inputs, after the last token of a row: no vocabulary has it, while the usual pad tokens may be eos
Layer = tuple[Tensor, Tensor]  # keys and values, both (P, H, W, D)


@dataclass(frozen=True)
class Memory:
    """What P rows have read: W columns of it, the first `base` of which stand before the first token."""

    own: tuple[Layer, ...]  # self-attention, (P, H, W, D): the start token or the prompt, then the tokens
    source: tuple[Layer, ...]  # cross-attention, (P, H, S, D); empty where there is none
    mask: Tensor | None  # bool (P, S): where the input stands; None where no row is padded
    base: int

    def __len__(self) -> int:
        return len(self.own[0][0])

    @property
    def width(self) -> int:
        return self.own[0][0].shape[2]

    @property
    def n_inputs(self) -> int:
        """S, the longest input."""
        return self.source[0][0].shape[2] if self.source else self.base

    def take(self, rows: Tensor | slice, read: int) -> Memory:
        """`rows` (repeats allowed) after the first `read` tokens. A slice copies nothing."""
        width = self.base + read
        own = tuple((keys[:, :, :width][rows], values[:, :, :width][rows]) for keys, values in self.own)
        source = tuple((_shared(keys, rows), _shared(values, rows)) for keys, values in self.source)
        return Memory(own, source, None if self.mask is None else self.mask[rows], self.base)

    @staticmethod
    def join(parts: Sequence[Memory]) -> Memory:
        """The rows of all parts, which have read equally many tokens of inputs that need not be equally long."""
        if len(parts) == 1:
            return parts[0]
        longest, base = max(part.n_inputs for part in parts), max(part.base for part in parts)
        # A source is padded at its end; a prompt at its front, so that what follows stands in the same column.
        own = _joined([part.own for part in parts], at_end=False)
        source = _joined([part.source for part in parts], at_end=True)
        if all(part.mask is None and part.n_inputs == longest for part in parts):
            return Memory(own, source, None, base)
        rows = [
            part.own[0][0].new_ones(len(part), part.n_inputs, dtype=torch.bool) if part.mask is None else part.mask
            for part in parts
        ]
        mask = torch.cat([_pad(row, longest, at_end=bool(source)) for row in rows])
        return Memory(own, source, mask, base)


def _pad(mask: Tensor, longest: int, *, at_end: bool) -> Tensor:
    missing = longest - mask.shape[1]
    return torch.nn.functional.pad(mask, (0, missing) if at_end else (missing, 0), value=False)


def _joined(parts: list[tuple[Layer, ...]], *, at_end: bool) -> tuple[Layer, ...]:
    """Layers with the rows of all parts, shorter ones padded with zeros at their end or front."""
    return tuple(
        (_stacked([keys for keys, _ in layers], at_end), _stacked([values for _, values in layers], at_end))
        for layers in zip(*parts, strict=True)
    )


def _shared(source: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of a source. Those of one document are one row, seen several times: copying it would cost more than reading
    with it."""
    if not _is_one(source):
        return source[rows]
    n = len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start
    return source[:1].expand(n, -1, -1, -1)


def _is_one(source: Tensor) -> bool:
    return len(source) == 1 or source.stride(0) == 0


def _stacked(parts: list[Tensor], at_end: bool) -> Tensor:
    if all(_is_one(part) and part.data_ptr() == parts[0].data_ptr() for part in parts):
        return parts[0][:1].expand(sum(map(len, parts)), -1, -1, -1)
    width = max(part.shape[2] for part in parts)
    if all(part.shape[2] == width for part in parts):
        return torch.cat(parts)
    stacked = parts[0].new_zeros(sum(map(len, parts)), parts[0].shape[1], width, parts[0].shape[3])
    for part, place in zip(parts, stacked.split([len(part) for part in parts]), strict=True):
        n = part.shape[2]
        (place[:, :, :n] if at_end else place[:, :, width - n :]).copy_(part)
    return stacked


@dataclass(frozen=True)
class Pass:
    """What a forward pass over R rows gives."""

    memory: Memory
    hidden: Tensor  # (R, H): what the output layer sees at the last position
    logits: Tensor  # (R, V) at the last position
    context: Tensor | None = None  # (R, C) mean state of the input, of the pass that reads it


class Network(ABC):
    """A model that reads: `begin` with the input, `go_on` from a memory. Both take tokens (R, T), all real ones."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, model.device
        self.head: nn.Module = model.get_output_embeddings()
        self.caches = import_module("transformers.cache_utils")

    @abstractmethod
    def begin(self, inputs: Tensor, tokens: Tensor) -> Pass:
        """Reads inputs (R, S), padded at the end with PADDING, and tokens (R, T), T possibly 0."""

    @abstractmethod
    def go_on(self, memory: Memory, tokens: Tensor) -> Pass:
        """Reads tokens (R, T), T at least 1, after what the memory holds."""

    def limit(self) -> int | None:
        """How many positions the model has, where it has so many and no more."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def check_width(self, width: int) -> None:
        limit = self.limit()
        if limit is not None and width > limit:
            raise DataError(f"an input of {width} tokens; the model has {limit} positions: cut the input")

    def _shell(self, layers: tuple[Layer, ...]) -> Any:
        """A cache of transformers around the tensors. Its layers join new columns to old ones in new tensors."""
        cache = self.caches.DynamicCache()
        for keys, values in layers:
            layer = self.caches.DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            cache.layers.append(layer)
        return cache

    @contextmanager
    def _last_position(self) -> Iterator[list[Tensor]]:
        """Lets the output layer, the dearest one of small models, see the last position alone, and notes what all
        positions would have shown it. Models add to, scale or clip its logits in ways of their own; they still do."""
        seen: list[Tensor] = []

        def cut(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(arguments[0])
            last = arguments[0][:, -1:].contiguous()  # of a view, torch would multiply row by row
            return (last, *arguments[1:])

        handle = self.head.register_forward_pre_hook(cut)
        try:
            yield seen
        finally:
            handle.remove()


def _layers(cache: Any, width: int) -> tuple[Layer, ...]:
    layers = tuple((layer.keys, layer.values) for layer in cache.layers)
    if any(not isinstance(keys, Tensor) or keys.ndim != 4 or keys.shape[2] != width for keys, _ in layers):
        raise CheckpointError("the model keeps something else than keys and values of all positions; it cannot branch")
    return layers


class EncoderDecoder(Network):
    """T5, mT5, BART, Pegasus and their like. The encoder reads the input once; `encodings` may remember it."""

    def __init__(self, model: Any, start: int, encodings: Encodings) -> None:
        super().__init__(model)
        self.start, self.encodings = start, encodings
        self.encoder = model.get_encoder()

    def begin(self, inputs: Tensor, tokens: Tensor) -> Pass:
        self.check_width(inputs.shape[1])
        states = self.encodings.of(inputs, self._encode)  # (R, S, H)
        given = inputs != PADDING
        context = (states * given[:, :, None]).sum(1, dtype=torch.float32) / given.sum(1, keepdim=True)
        mask = None if bool(given.all()) else given
        start = inputs.new_full((len(inputs), 1), self.start)
        empty = self.caches.EncoderDecoderCache(self._shell(()), self._shell(()))
        return self._decode(empty, states, mask, torch.cat([start, tokens], 1), context)

    def go_on(self, memory: Memory, tokens: Tensor) -> Pass:
        cache = self.caches.EncoderDecoderCache(self._shell(memory.own), self._shell(memory.source))
        keys = memory.source[0][0]
        # The keys and values of the input are in the cache; of the states themselves only the shape is looked at.
        states = keys.new_zeros(1, 1, 1).expand(len(keys), keys.shape[2], self.model.config.hidden_size)
        return self._decode(cache, states, memory.mask, tokens, None)

    def _decode(self, cache: Any, states: Tensor, mask: Tensor | None, tokens: Tensor, context: Tensor | None) -> Pass:
        with self._last_position() as seen:
            output = self.model(
                encoder_outputs=(states,),
                attention_mask=None if mask is None else mask.long(),
                decoder_input_ids=tokens,
                past_key_values=cache,
                use_cache=True,
            )
        cache = output.past_key_values
        own = _layers(cache.self_attention_cache, cache.self_attention_cache.get_seq_length())
        source = _layers(cache.cross_attention_cache, states.shape[1])
        return Pass(Memory(own, source, mask, base=1), seen[-1][:, -1], output.logits[:, -1], context)

    def _encode(self, inputs: Tensor) -> Tensor:
        given = inputs != PADDING
        mask = None if bool(given.all()) else given.long()
        states: Tensor = self.encoder(input_ids=inputs.clamp(min=0), attention_mask=mask).last_hidden_state
        return states


class DecoderOnly(Network):
    """GPT-2, Llama, Qwen and their like. The prompt is padded at its front, so that all rows go on in one column."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def begin(self, inputs: Tensor, tokens: Tensor) -> Pass:
        base = inputs.shape[1]
        self.check_width(base + tokens.shape[1])
        prompt = to_the_end(inputs)
        given = prompt != PADDING
        mask = None if bool(given.all()) else given
        read = torch.cat([prompt.clamp(min=0), tokens], 1)
        run, hidden = self._read(self._shell(()), read, mask, base, 0)
        context = (hidden[:, :base] * given[:, :, None]).sum(1, dtype=torch.float32) / given.sum(1, keepdim=True)
        return Pass(run.memory, run.hidden, run.logits, context)

    def go_on(self, memory: Memory, tokens: Tensor) -> Pass:
        self.check_width(memory.width + tokens.shape[1])
        return self._read(self._shell(memory.own), tokens, memory.mask, memory.base, memory.width)[0]

    def _read(self, cache: Any, tokens: Tensor, mask: Tensor | None, base: int, width: int) -> tuple[Pass, Tensor]:
        """The pass, and the hidden states of all its positions."""
        end = width + tokens.shape[1]
        options: dict[str, Tensor] = {}
        if mask is not None:
            attended = torch.nn.functional.pad(mask, (0, end - base), value=True)  # (R, end)
            options["attention_mask"] = attended.long()
            if self.takes_positions:
                options["position_ids"] = (attended.long().cumsum(1) - 1).clamp(min=0)[:, width:]
        with self._last_position() as seen:
            output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **options)
        memory = Memory(_layers(output.past_key_values, end), (), mask, base)
        return Pass(memory, seen[-1][:, -1], output.logits[:, -1]), seen[-1]


def to_the_end(inputs: Tensor) -> Tensor:
    """Rows (R, S) that begin with their padding instead of ending with it."""
    n_missing = (inputs == PADDING).sum(1, keepdim=True)
    columns = torch.arange(inputs.shape[1], device=inputs.device) - n_missing
    return torch.where(columns < 0, PADDING, inputs.gather(1, columns.clamp(min=0)))
