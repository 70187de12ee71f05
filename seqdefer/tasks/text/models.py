"""A Hugging Face model with its tokenizer, restricted to greedy decoding.

A checkpoint may configure more: beams, penalties, minimum lengths, a forced last token. Predictor and expert cannot
share such rules token by token, so they are dropped, also from the model's own `generation_config`: its
`generate(max_new_tokens=L)` then writes the same tokens as this package. The tokens that start a sequence
(`decoder_start_token_id`, then `forced_bos_token_id`: BART) and those that end it stay. A sequence has one end token:
if a model has several, the first stands for all.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import CheckpointError, OptionError, import_extra
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.text.encoder_cache import EncoderCache
from seqdefer.tasks.text.passes import DecoderOnly, EncoderDecoder, Network

# Rules that change or replace greedy decoding.
DROPPED_RULES = (
    "num_beams",
    "do_sample",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "bad_words_ids",
    "force_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "penalty_alpha",
)
# Settings that change the computation and do not show in the shapes of the weights.
CONFIG_KEYS = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "activation_function",
    "feed_forward_proj",
    "relative_attention_max_distance",
    "scale_embedding",
)
SAMPLED_VALUES = 1024  # of each tensor, for the fingerprint


class DroppedRuleWarning(UserWarning):
    """A checkpoint configures more than greedy decoding."""


def transformers() -> Any:
    """Import the package, or raise an error that says how to install it."""
    return import_extra("transformers", "text", "a Hugging Face model")


@dataclass(frozen=True)
class TextModel:
    """A frozen model with its tokenizer."""

    name: str  # as the user gave it
    model: Any
    tokenizer: Any
    network: Network
    ends: tuple[int, ...]  # tokens that end a sequence; the first stands for all
    first_token: int | None  # forced at the start of every sequence
    n_tokens: int  # size of the output layer
    encoder_cache: EncoderCache = field(default_factory=EncoderCache)
    suppressed: tuple[int, ...] = ()  # tokens that are never written
    suppressed_first: tuple[int, ...] = ()  # tokens that are not written first

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def is_encoder_decoder(self) -> bool:
        return isinstance(self.network, EncoderDecoder)

    def fingerprint(self) -> str:
        """Return a fingerprint of the decoding rules and of a sample of each tensor; whole tensors take long."""
        weights = self.model.state_dict().items()
        sample = [f"{name}{_sample(tensor)}" for name, tensor in weights]
        start, *prompt = getattr(self.network, "prompt", [None])
        rules = [start, self.ends, self.first_token, self.n_tokens]
        if prompt or self.suppressed or self.suppressed_first:
            rules += [prompt, self.suppressed, self.suppressed_first]
        config = [str(getattr(self.model.config, name, None)) for name in CONFIG_KEYS]
        return fingerprint(type(self.model).__name__, sample, *rules, *config)

    def restrict(self, logits: Tensor, is_first: Tensor) -> Tensor:
        """Return logits (R, V) without tokens that may not be written; `is_first` (bool (R,)) marks first tokens."""
        if not (self.suppressed or self.suppressed_first):
            return logits
        never, not_first = (mask[: logits.shape[1]] for mask in self._suppression)
        return logits.masked_fill(never | (is_first[:, None] & not_first), -torch.inf)

    @cached_property
    def _suppression(self) -> tuple[Tensor, Tensor]:
        """Mark the tokens that are never written, and those that are not written first. bool (V,) each"""
        ids = torch.arange(self.n_tokens, device=self.device)
        never, not_first = (
            torch.isin(ids, torch.tensor(some, dtype=torch.long, device=self.device))
            for some in (self.suppressed, self.suppressed_first)
        )
        return never, not_first

    def max_input_tokens(self, n_new: int) -> int | None:
        """Return the maximum length of an input if `n_new` tokens follow, or None if there is no limit."""
        limit = self.network.limit()
        if limit is None:
            return None
        if n_new > limit - (not self.is_encoder_decoder):  # without an encoder, the input takes positions
            raise OptionError(f"{self.name} has {limit} positions, too few to write {n_new} tokens; lower --length")
        return limit if self.is_encoder_decoder else limit - n_new


def _sample(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    return fingerprint(tuple(tensor.shape), flat[:: max(1, len(flat) // SAMPLED_VALUES)])


def text_model(model: Any, tokenizer: Any, name: str = "", *, cache_bytes: int = 0) -> TextModel:
    """Freeze `model` and reduce its `generation_config` to greedy decoding, in place.

    `cache_bytes` is the size of the cache of encoder states.
    """
    name, model = name or type(model).__name__, model.eval().requires_grad_(False)
    if model.get_output_embeddings() is None:
        raise CheckpointError(f"{name} is a {type(model).__name__}, which has no output layer and cannot write")
    rules, n_tokens = model.generation_config, int(model.get_output_embeddings().weight.shape[0])
    if len(tokenizer) > n_tokens:
        raise CheckpointError(f"the tokenizer of {name} has {len(tokenizer)} tokens, the model only {n_tokens}")
    ends = _ids(rules.eos_token_id if rules.eos_token_id is not None else tokenizer.eos_token_id)
    start = _start(model, name)
    first: int | None = None if start is None else rules.forced_bos_token_id
    _warn_dropped(name, rules)
    model.generation_config = _greedy(rules, ends, start, first)
    cache = EncoderCache(cache_bytes)
    network = DecoderOnly(model) if start is None else EncoderDecoder(model, (start,), cache)
    return TextModel(name, model, tokenizer, network, ends, first, n_tokens, cache)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _start(model: Any, name: str) -> int | None:
    """Return the token that a decoder starts with; None without an encoder."""
    if not model.config.is_encoder_decoder:
        return None
    for rules in (model.generation_config, model.config):
        for key in ("decoder_start_token_id", "bos_token_id"):
            ids = _ids(getattr(rules, key, None))
            if len(ids) == 1:
                return ids[0]
    raise CheckpointError(f"{name} does not name the token that its decoder starts with; set decoder_start_token_id")


def _warn_dropped(name: str, rules: Any) -> None:
    found = {key: getattr(rules, key, None) for key in DROPPED_RULES}
    dropped = [f"{key}={value}" for key, value in found.items() if value not in (None, False, 0, 1, [], {}, ())]
    if found["do_sample"]:
        dropped.append("do_sample=True")
    if dropped:
        listed = ", ".join(text if len(text) <= 60 else f"{text[:57]}..." for text in dropped)
        warnings.warn(f"{name} is decoded greedily; dropped: {listed}", DroppedRuleWarning, stacklevel=3)


def _greedy(rules: Any, ends: tuple[int, ...], start: int | None, first: int | None) -> Any:
    padding = rules.pad_token_id if rules.pad_token_id is not None else next(iter(ends), 0)
    return transformers().GenerationConfig(
        pad_token_id=padding,
        bos_token_id=rules.bos_token_id,
        eos_token_id=list(ends) or None,
        decoder_start_token_id=start,
        forced_bos_token_id=first,
    )


def check_vocabulary(one: Any, other: Any, names: tuple[str, str] = ("predictor", "expert")) -> None:
    """Raise an OptionError that names the first difference if two tokenizers do not share their ids."""
    words = [{number: word for word, number in tokenizer.get_vocab().items()} for tokenizer in (one, other)]
    for number in sorted(words[0].keys() | words[1].keys()):
        if words[0].get(number) != words[1].get(number):
            meanings = " and ".join(
                f"{known[number]!r} for the {name}" if number in known else f"nothing for the {name}"
                for known, name in zip(words, names, strict=True)
            )
            sizes = " and ".join(f"{len(known):,}" for known in words)
            raise OptionError(
                f"the models do not share a vocabulary: id {number} is {meanings} ({sizes} tokens);"
                " choose two of one family"
            )
