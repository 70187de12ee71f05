"""Forward passes of a Hugging Face model: tokens in; key-value cache, last hidden state and its logits out.

A `KeyValueCache` is immutable: a pass returns a new one, which shares the tensors that did not change. The cache
objects of transformers are filled in place, so each pass wraps the tensors in new ones.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from seqdefer.errors import CheckpointError, DataError
from seqdefer.tasks.text.document_rows import DocumentRows
from seqdefer.tasks.text.encoder_cache import EncoderCache
from seqdefer.tasks.text.fused import Fused

PADDING = -1  # ends short rows of inputs; no vocabulary has it, while a model's pad token may be its end token
KeysAndValues = tuple[Tensor, Tensor]  # keys and values, each (P, H, W, D)


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of P rows that have read equally many tokens.

    Rows of one document share what the decoder attends to: with `documents`, row r attends to the document
    `documents[r]` of `source`. Whisper has 110 MB of it for each clip, and trees have many rows of a clip."""

    own: tuple[KeysAndValues, ...]  # self-attention, (P, H, W, D): the start token or the prompt, then the tokens
    source: tuple[KeysAndValues, ...]  # cross-attention, (U, H, S, D); empty without an encoder
    mask: Tensor | None  # bool (P, S): False at padding of the input; None if no row is padded
    base: int  # columns before the first token
    documents: Tensor | None = None  # int64 (P,); None: U = P, and each row has its own

    def __len__(self) -> int:
        return len(self.own[0][0])

    @property
    def width(self) -> int:
        return self.own[0][0].shape[2]

    @property
    def n_inputs(self) -> int:
        """Return S, the length of the longest input."""
        return self.source[0][0].shape[2] if self.source else self.base

    def take(self, rows: Tensor | slice, n_read: int, *, shares: bool = False) -> KeyValueCache:
        """Return `rows` (repeats allowed) after their first `n_read` tokens. A slice copies nothing, and no rows that
        share a document copy it. With `shares`, rows of different documents copy none either: a copy would save a
        decoder that needs keys and values row by row from making one in every pass."""
        width = self.base + n_read
        own = tuple((keys[:, :, :width][rows], values[:, :, :width][rows]) for keys, values in self.own)
        mask = None if self.mask is None else self.mask[rows]
        n = len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start
        if not self.source or _is_one(self.source[0][0]):
            return KeyValueCache(own, _expanded(self.source, n), mask, self.base)
        if not shares and self.documents is None and (isinstance(rows, slice) or len(rows.unique()) == n):
            source = tuple((keys[rows], values[rows]) for keys, values in self.source)
            return KeyValueCache(own, source, mask, self.base)
        return KeyValueCache(own, self.source, mask, self.base, self._documents()[rows])

    @staticmethod
    def pooled(parts: Sequence[KeyValueCache]) -> list[KeyValueCache]:
        """Return the parts with one source for all of them: to join their rows later takes no further copy of it."""
        source, documents = _joined_sources(parts)
        if _is_one(source[0][0]):
            return list(parts)
        documents = torch.arange(len(source[0][0]), device=source[0][0].device) if documents is None else documents
        places = documents.split([len(part) for part in parts])
        return [replace(part, source=source, documents=some) for part, some in zip(parts, places, strict=True)]

    def shared_layers(self, *, even_one: bool) -> list[SharedLayer]:
        """Return the source as layers that rows share, where they do. Rows of one document share its memory anyway."""
        source, documents = self.source, self.documents
        if documents is None and even_one and len(self) > 1 and _is_one(source[0][0]):
            source = tuple((keys[:1], values[:1]) for keys, values in source)
            documents = torch.zeros(len(self), dtype=torch.long, device=source[0][0].device)
        if documents is None:
            return []
        rows = DocumentRows(documents, len(source[0][0]))
        return [SharedLayer(layer, rows) for layer in source]

    def _documents(self) -> Tensor:
        device = self.source[0][0].device
        return torch.arange(len(self), device=device) if self.documents is None else self.documents

    @staticmethod
    def join(parts: Sequence[KeyValueCache]) -> KeyValueCache:
        """Concatenate the rows of parts that have read equally many tokens; their inputs may differ in length."""
        if len(parts) == 1:
            return parts[0]
        longest, base = max(part.n_inputs for part in parts), max(part.base for part in parts)
        # Sources are padded on the right, prompts on the left, so that tokens share their columns.
        own = _joined([part.own for part in parts], at_end=False)
        source, documents = _joined_sources(parts)
        if all(part.mask is None and part.n_inputs == longest for part in parts):
            return KeyValueCache(own, source, None, base, documents)
        rows = [
            part.own[0][0].new_ones(len(part), part.n_inputs, dtype=torch.bool) if part.mask is None else part.mask
            for part in parts
        ]
        mask = torch.cat([_pad(row, longest, at_end=bool(source)) for row in rows])
        return KeyValueCache(own, source, mask, base, documents)


def _pad(mask: Tensor, longest: int, *, at_end: bool) -> Tensor:
    missing = longest - mask.shape[1]
    return torch.nn.functional.pad(mask, (0, missing) if at_end else (missing, 0), value=False)


def _joined(parts: list[tuple[KeysAndValues, ...]], *, at_end: bool) -> tuple[KeysAndValues, ...]:
    """Concatenate the rows of all parts layer by layer; pad shorter ones with zeros."""
    return tuple(
        (_stacked([keys for keys, _ in layers], at_end), _stacked([values for _, values in layers], at_end))
        for layers in zip(*parts, strict=True)
    )


def _joined_sources(parts: Sequence[KeyValueCache]) -> tuple[tuple[KeysAndValues, ...], Tensor | None]:
    """Return the documents of all parts, each once, and the document of each row."""
    if not parts[0].source:
        return (), None
    sources: dict[tuple[int, ...], tuple[KeysAndValues, ...]] = {}  # by the memory that they are in
    first: dict[tuple[int, ...], int] = {}
    documents, n_documents = [], 0
    for part in parts:
        keys = part.source[0][0]
        is_one = _is_one(keys)
        one = tuple((keys[:1], values[:1]) for keys, values in part.source) if is_one else part.source
        place = (keys.data_ptr(), len(one[0][0]), keys.shape[2])
        if place not in sources:
            sources[place], first[place] = one, n_documents
            n_documents += len(one[0][0])
        numbers = torch.zeros(len(part), dtype=torch.long, device=keys.device) if is_one else part._documents()
        documents.append(first[place] + numbers)
    numbers = torch.cat(documents)
    if n_documents == 1:
        return _expanded(next(iter(sources.values())), len(numbers)), None
    source = _joined(list(sources.values()), at_end=True)
    is_plain = n_documents == len(numbers) and all(part.documents is None for part in parts)
    return source, None if is_plain else numbers


def _expanded(source: tuple[KeysAndValues, ...], n: int) -> tuple[KeysAndValues, ...]:
    """Return one document for n rows, which share its memory: a copy would cost more than the pass."""
    return tuple((keys[:1].expand(n, -1, -1, -1), values[:1].expand(n, -1, -1, -1)) for keys, values in source)


def _is_one(source: Tensor) -> bool:
    return len(source) == 1 or source.stride(0) == 0


def _stacked(parts: list[Tensor], at_end: bool) -> Tensor:
    width = max(part.shape[2] for part in parts)
    if all(part.shape[2] == width for part in parts):
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    stacked = parts[0].new_zeros(sum(map(len, parts)), parts[0].shape[1], width, parts[0].shape[3])
    for part, place in zip(parts, stacked.split([len(part) for part in parts]), strict=True):
        n = part.shape[2]
        (place[:, :, :n] if at_end else place[:, :, width - n :]).copy_(part)
    return stacked


@dataclass(frozen=True)
class SharedLayer:
    """A layer of a transformers cache whose rows share documents. A model that asks for keys and values gets a copy for
    each row, one layer at a time."""

    source: KeysAndValues  # (U, H, S, D) each
    rows: DocumentRows
    is_initialized: bool = True

    @property
    def keys(self) -> Tensor:
        return self.source[0][self.rows.documents]

    @property
    def values(self) -> Tensor:
        return self.source[1][self.rows.documents]

    def get_seq_length(self) -> int:
        return self.source[0].shape[2]


@dataclass(frozen=True)
class ForwardPass:
    """The result of a forward pass over R rows."""

    cache: KeyValueCache
    hidden: Tensor  # (R, H): the output layer's input at the last position
    logits: Tensor  # (R, V) at the last position
    context: Tensor | None = None  # (R, C): mean state of the input, from `prefill`


class Network(ABC):
    """A model that reads an input (`prefill`) and then more tokens (`extend`). Tokens (R, T) hold no padding.

    Inputs (R, S) are token ids, padded on the right with `padding`; a subclass may read something else.
    Passes change parts of the model while they run (hooks, positions, attention), so threads take turns: `lock`."""

    padding: int = PADDING
    n_noted: int = 0  # numbers that `watching` adds to hidden states
    attends_by_document = False  # whether the decoder needs no copy of a document for each row: see `DocumentRows`

    def __init__(self, model: Any) -> None:
        self.lock = threading.RLock()
        self.model, self.device = model, model.device
        self.head: nn.Module = model.get_output_embeddings()
        self.cache_classes = import_module("transformers.cache_utils")
        self.fused = Fused(model)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock", "cache_classes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock(), cache_classes=import_module("transformers.cache_utils"))

    @abstractmethod
    def prefill(self, inputs: Tensor, tokens: Tensor, *, says_all: bool = False) -> ForwardPass:
        """Read inputs (R, S), padded on the right with PADDING, and tokens (R, T), T possibly 0. With `says_all`,
        hidden states and logits are those before the first token and after each: (R, T + 1, H), (R, T + 1, V)."""

    @abstractmethod
    def extend(self, cache: KeyValueCache, tokens: Tensor, *, says_all: bool = False) -> ForwardPass:
        """Read tokens (R, T), T at least 1, after those in the cache. With `says_all`, hidden states and logits are
        those of all T positions: (R, T, H), (R, T, V)."""

    @property
    def n_tokens(self) -> int:
        """Return the size of the output layer."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def check_inputs(self, inputs: Tensor) -> None:
        """Raise a DataError for ids outside the vocabulary, which would crash a GPU process."""
        n_tokens = self.n_tokens
        if inputs.numel() and (int(inputs.max()) >= n_tokens or int(inputs.min()) < PADDING):
            found = f"{int(inputs.min())} to {int(inputs.max())}"
            raise DataError(
                f"inputs hold ids from {found}; the model has 0 to {n_tokens - 1}, and {PADDING} is padding"
            )

    def split_inputs(self, inputs: Tensor) -> list[Any]:
        """Return the rows of inputs (R, S) one by one, without padding."""
        return [[token for token in line if token != PADDING] for line in inputs.tolist()]

    def stack_inputs(self, rows: Sequence[Any]) -> Tensor:
        """Return rows of `split_inputs` as inputs (R, S) again, on the device."""
        return _stacked_ids(rows, self.device)

    def input_size(self, row: Any) -> int:
        """Return how many tokens, or as much work as that, it takes to read a row of `split_inputs`."""
        return len(row)

    @contextmanager
    def watching(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Watch a pass. Yield a function that adds what was noted (R, T, `n_noted`) to its hidden states (R, T, H)."""
        yield lambda hidden: hidden

    def for_trial(self) -> tuple[Network, list[Any]]:
        """Return a network for `seqdefer.tasks.text.row_probe`, and two inputs of different lengths as rows."""
        n = self.n_tokens
        ids = [(n // 4 + place * max(n // 64, 1)) % n for place in range(7)]  # special tokens are at both ends
        return self, [ids[:5], ids[5:]]

    def limit(self) -> int | None:
        """Return the number of positions the model has, or None if it has no limit."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def check_width(self, width: int) -> None:
        limit = self.limit()
        if limit is not None and width > limit:
            raise DataError(f"an input has {width} tokens; the model has {limit} positions: shorten the input")

    def _wrap(self, layers: tuple[KeysAndValues, ...]) -> Any:
        """Return a transformers cache of the tensors. It concatenates new columns into new tensors."""
        cache = self.cache_classes.DynamicCache()
        for keys, values in layers:
            layer = self.cache_classes.DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            cache.layers.append(layer)
        return cache

    @contextmanager
    def _last_position(self, *, says_all: bool = False) -> Iterator[list[Tensor]]:
        """Restrict the output layer, the slowest one of small models, to the last position; yield its full inputs.

        A hook on the layer keeps what models add to it, such as a bias, a scale or a clip of the logits.
        """
        seen: list[Tensor] = []

        def cut(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(noted(arguments[0]))
            if says_all:
                return arguments
            last = arguments[0][:, -1:].contiguous()  # torch multiplies a view row by row
            return (last, *arguments[1:])

        with self.lock, self.watching() as noted:
            handle = self.head.register_forward_pre_hook(cut)
            try:
                yield seen
            finally:
                handle.remove()


def _said(
    cache: KeyValueCache, hidden: Tensor, logits: Tensor, says_all: bool, context: Tensor | None = None
) -> ForwardPass:
    if says_all:
        return ForwardPass(cache, hidden, logits, context)
    return ForwardPass(cache, hidden[:, -1], logits[:, -1], context)


def _layers(cache: Any, width: int) -> tuple[KeysAndValues, ...]:
    layers = tuple((layer.keys, layer.values) for layer in cache.layers)
    if any(not isinstance(keys, Tensor) or keys.ndim != 4 or keys.shape[2] != width for keys, _ in layers):
        raise CheckpointError("the model does not cache keys and values of all positions, so its states cannot branch")
    return layers


@dataclass(frozen=True)
class EncoderStates:
    """What an encoder made of R inputs."""

    states: Tensor  # (R, S, H)
    given: Tensor  # bool (R, S): False at padding; the mean of the others is the context
    mask: Tensor | None  # bool (R, S): where the decoder may look; None: everywhere

    @property
    def context(self) -> Tensor:
        total = (self.states * self.given[:, :, None]).sum(1, dtype=torch.float32)
        return total / self.given.sum(1, keepdim=True)


class EncoderDecoder(Network):
    """T5, mT5, BART, Pegasus and similar models. The encoder reads an input once; the decoder starts with a prompt of
    one token or more."""

    reads_ids = True  # as `prefill_unseen` expects

    def __init__(self, model: Any, prompt: Sequence[int], encoder_cache: EncoderCache) -> None:
        super().__init__(model)
        self.prompt, self.encoder_cache = tuple(prompt), encoder_cache
        self.encoder = model.get_encoder()

    @property
    def base(self) -> int:
        """Return the columns before the first token."""
        return len(self.prompt)

    def prefill(self, inputs: Tensor, tokens: Tensor, *, says_all: bool = False) -> ForwardPass:
        encoded = self.encode(inputs)
        empty = self.cache_classes.EncoderDecoderCache(self._wrap(()), self._wrap(()))
        run = self._decode(empty, encoded.states, encoded.mask, self._prompted(tokens), encoded.context, says_all)
        if says_all and self.base > 1:
            run = replace(run, hidden=run.hidden[:, self.base - 1 :], logits=run.logits[:, self.base - 1 :])
        return run

    def encode(self, inputs: Tensor) -> EncoderStates:
        """Return what the encoder makes of inputs, from its cache where it has read them before."""
        self.check_width(inputs.shape[1])
        given = inputs != PADDING
        states = self.encoder_cache.get(inputs, self._encode)
        return EncoderStates(states, given, None if bool(given.all()) else given)

    def _prompted(self, tokens: Tensor) -> Tensor:
        prompt = torch.tensor(self.prompt, device=tokens.device).expand(len(tokens), -1)
        return torch.cat([prompt, tokens], 1)

    def prefill_unseen(self, inputs: Tensor, tokens: Tensor) -> ForwardPass:
        """Read as `prefill` with `says_all`, without the cache of encoder states and without a look at any value, so
        that a CUDA graph can record it."""
        given = inputs != PADDING
        bias = to_bias(given[:, None, None], self.model.dtype)  # (R, 1, 1, S)
        mask = bias.expand(-1, -1, inputs.shape[1], -1)
        states = self.encoder(input_ids=inputs.clamp(min=0), attention_mask=mask).last_hidden_state
        context = (states * given[:, :, None]).sum(1, dtype=torch.float32) / given.sum(1, keepdim=True).clamp(min=1)
        tokens = torch.cat([torch.full_like(inputs[:, :1], self.prompt[0]), tokens], 1)
        empty = self.cache_classes.EncoderDecoderCache(self._wrap(()), self._wrap(()))
        return self._decode(empty, states, bias.expand(-1, -1, tokens.shape[1], -1), tokens, context, says_all=True)

    def extend(self, cache: KeyValueCache, tokens: Tensor, *, says_all: bool = False) -> ForwardPass:
        shared = cache.shared_layers(even_one=self.attends_by_document)
        source = self._wrap(() if shared else cache.source)
        if shared:
            self.cache_classes.CacheLayerMixin.register(SharedLayer)  # transformers asks for its kind
            source.layers += shared
        wrapped = self.cache_classes.EncoderDecoderCache(self._wrap(cache.own), source)
        # The model takes the input's keys and values from the cache; of the states it uses only the shape.
        blank = cache.source[0][0].new_zeros(1, 1, 1)
        states = blank.expand(len(cache), cache.n_inputs, self.model.config.hidden_size)
        return self._decode(wrapped, states, cache.mask, tokens, None, says_all, cache)

    def _decode(
        self,
        wrapped: Any,
        states: Tensor,
        mask: Tensor | None,
        tokens: Tensor,
        context: Tensor | None,
        says_all: bool = False,
        before: KeyValueCache | None = None,
    ) -> ForwardPass:
        """Let the decoder read. `before` has the source, where the decoder has read it."""
        with self._last_position(says_all=says_all) as seen:
            output = self.model(
                encoder_outputs=(states,),
                attention_mask=mask.long() if mask is not None and mask.dtype == torch.bool else mask,
                decoder_input_ids=tokens,
                past_key_values=wrapped,
                use_cache=True,
            )
        wrapped = output.past_key_values
        own = _layers(wrapped.self_attention_cache, wrapped.self_attention_cache.get_seq_length())
        if before is None:
            cache = KeyValueCache(own, _layers(wrapped.cross_attention_cache, states.shape[1]), mask, self.base)
        else:
            cache = replace(before, own=own)
        return _said(cache, seen[-1], output.logits, says_all, context)

    def _encode(self, inputs: Tensor) -> Tensor:
        given = inputs != PADDING
        mask = None if bool(given.all()) else given.long()
        states: Tensor = self.encoder(input_ids=inputs.clamp(min=0), attention_mask=mask).last_hidden_state
        return states


class DecoderOnly(Network):
    """GPT-2, Llama, Qwen and similar models. Prompts are padded on the left, so that tokens share their columns."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def prefill(self, inputs: Tensor, tokens: Tensor, *, says_all: bool = False) -> ForwardPass:
        base = inputs.shape[1]
        self.check_width(base + tokens.shape[1])
        prompt = pad_left(inputs)
        given = prompt != PADDING
        mask = None if bool(given.all()) else given
        run, hidden = self._read(self._wrap(()), torch.cat([prompt.clamp(min=0), tokens], 1), mask, base, 0, says_all)
        context = (hidden[:, :base] * given[:, :, None]).sum(1, dtype=torch.float32) / given.sum(1, keepdim=True)
        if says_all:
            run = replace(run, hidden=run.hidden[:, base - 1 :], logits=run.logits[:, base - 1 :])
        return replace(run, context=context)

    def extend(self, cache: KeyValueCache, tokens: Tensor, *, says_all: bool = False) -> ForwardPass:
        self.check_width(cache.width + tokens.shape[1])
        return self._read(self._wrap(cache.own), tokens, cache.mask, cache.base, cache.width, says_all)[0]

    def _read(
        self, wrapped: Any, tokens: Tensor, mask: Tensor | None, base: int, width: int, says_all: bool = False
    ) -> tuple[ForwardPass, Tensor]:
        """Return the pass and the hidden states of all its positions."""
        end = width + tokens.shape[1]
        options: dict[str, Tensor] = {}
        if mask is not None:
            attended = torch.nn.functional.pad(mask, (0, end - base), value=True)  # (R, end)
            options["attention_mask"] = attended.long()
            if self.takes_positions:
                options["position_ids"] = (attended.long().cumsum(1) - 1).clamp(min=0)[:, width:]
        with self._last_position(says_all=says_all) as seen:
            output = self.model(input_ids=tokens, past_key_values=wrapped, use_cache=True, **options)
        cache = KeyValueCache(_layers(output.past_key_values, end), (), mask, base)
        return _said(cache, seen[-1], output.logits, says_all), seen[-1]


def _stacked_ids(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, rows))
    padded = [[*row, *[PADDING] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device).view(len(rows), longest)


def to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query may look and the least number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def pad_left(inputs: Tensor) -> Tensor:
    """Move the padding of rows (R, S) from the right to the left."""
    n_missing = (inputs == PADDING).sum(1, keepdim=True)
    columns = torch.arange(inputs.shape[1], device=inputs.device) - n_missing
    return torch.where(columns < 0, PADDING, inputs.gather(1, columns.clamp(min=0)))
