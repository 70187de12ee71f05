"""A Hugging Face model with its tokenizer and the rules it decodes by: greedy, and nothing else.

A checkpoint may ask `generate` for more: beams, penalties, shortest lengths, a forced last token. Two writers cannot
share such rules token by token, so they are dropped, from the model's own `generation_config` too: its
`generate(max_new_tokens=L)` then writes what a predictor or expert here writes, token for token. Kept are the tokens
that begin a sequence (`decoder_start_token_id`, then `forced_bos_token_id`: BART) and those that end it. A sequence
here has one end token: where a model has several, the first stands for all.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import CheckpointError, DataError, OptionError, missing_extra
from seqdefer.storage.files import fingerprint
from seqdefer.tasks.text.encodings import Encodings
from seqdefer.tasks.text.passes import PADDING, DecoderOnly, EncoderDecoder, Network

# What changes the tokens of greedy decoding, or replaces it.
DROPPED = (
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
# What a config says of the computation that the shapes of the weights do not.
SHAPE = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "activation_function",
    "feed_forward_proj",
    "relative_attention_max_distance",
    "scale_embedding",
)
SAMPLED = 1024  # values of each tensor that its fingerprint looks at


class DroppedRuleWarning(UserWarning):
    """A checkpoint asks for more than greedy decoding."""


def transformers() -> Any:
    """The package, or an error that says how to get it."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise missing_extra("transformers", "text", "a Hugging Face model") from error


@dataclass(frozen=True)
class TextModel:
    """A frozen model, ready to read. `name` is what the user called it."""

    name: str
    model: Any
    tokenizer: Any
    network: Network
    ends: tuple[int, ...]  # the tokens that end a sequence; the first one stands for all
    first: int | None  # the token every sequence begins with, where there is one
    n_tokens: int  # ids the model can write
    encodings: Encodings = field(default_factory=Encodings)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def is_encoder_decoder(self) -> bool:
        return isinstance(self.network, EncoderDecoder)

    def fingerprint(self) -> str:
        """Names the weights by a sample of every tensor (all of them would take long), and the rules."""
        weights = self.model.state_dict().items()
        sample = [f"{name}{_sample(tensor)}" for name, tensor in weights]
        rules = [getattr(self.network, "start", None), self.ends, self.first, self.n_tokens]
        shape = [str(getattr(self.model.config, name, None)) for name in SHAPE]
        return fingerprint(type(self.model).__name__, sample, *rules, *shape)

    def longest_input(self, n_new: int) -> int | None:
        """Tokens an input may have where `n_new` are to be written, or None where any number will do."""
        limit = self.network.limit()
        if limit is None:
            return None
        if n_new > limit - (not self.is_encoder_decoder):  # without an encoder, the input takes positions too
            raise OptionError(f"{self.name} has {limit} positions, too few to write {n_new} tokens; write fewer")
        return limit if self.is_encoder_decoder else limit - n_new

    def encode(self, texts: Sequence[str], longest: int | None = None) -> tuple[Tensor, Tensor]:
        """Token ids (n, S), rows ending with PADDING where they are shorter, and which texts were cut. bool (n,)"""
        ids = self.tokenizer(list(texts), verbose=False)["input_ids"] if len(texts) else []
        cut = torch.tensor([longest is not None and len(row) > longest for row in ids], dtype=torch.bool)
        if bool(cut.any()):  # anew, because a tokenizer cuts before it adds its end token
            ids = self.tokenizer(list(texts), truncation=True, max_length=longest)["input_ids"]
        width = max((len(row) for row in ids), default=0)
        return torch.tensor([[*row, *[PADDING] * (width - len(row))] for row in ids]).view(len(ids), width), cut

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (T,)."""
        text: str = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text


def _sample(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    return fingerprint(tuple(tensor.shape), flat[:: max(1, len(flat) // SAMPLED)])


def text_model(model: Any, tokenizer: Any, name: str = "", *, remember: int = 0) -> TextModel:
    """Freezes `model` and strips its `generation_config` to what greedy decoding needs, in place.

    `remember`: bytes of encoder states to keep, so that a document that comes again is not encoded again.
    """
    name, model = name or type(model).__name__, model.eval().requires_grad_(False)
    if model.get_output_embeddings() is None:
        raise CheckpointError(f"{name} is a {type(model).__name__}: it has no output layer, so it writes nothing")
    rules, n_tokens = model.generation_config, int(model.get_output_embeddings().weight.shape[0])
    if len(tokenizer) > n_tokens:
        raise CheckpointError(f"the tokenizer of {name} has {len(tokenizer)} tokens, the model {n_tokens}: no pair")
    ends = _ids(rules.eos_token_id if rules.eos_token_id is not None else tokenizer.eos_token_id)
    start, first = _start(model, name), _first(rules) if model.config.is_encoder_decoder else None
    _tell_dropped(name, rules)
    model.generation_config = _greedy(rules, ends, start, first)
    encodings = Encodings(remember)
    network = DecoderOnly(model) if start is None else EncoderDecoder(model, start, encodings)
    return TextModel(name, model, tokenizer, network, ends, first, n_tokens, encodings)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _start(model: Any, name: str) -> int | None:
    """The token a decoder begins with; None where there is no encoder."""
    if not model.config.is_encoder_decoder:
        return None
    for rules in (model.generation_config, model.config):
        for key in ("decoder_start_token_id", "bos_token_id"):
            ids = _ids(getattr(rules, key, None))
            if len(ids) == 1:
                return ids[0]
    raise CheckpointError(f"{name} does not say which token its decoder begins with: set decoder_start_token_id")


def _first(rules: Any) -> int | None:
    first: int | None = rules.forced_bos_token_id
    return first


def _tell_dropped(name: str, rules: Any) -> None:
    asked = {key: getattr(rules, key, None) for key in DROPPED}
    dropped = [f"{key}={value}" for key, value in asked.items() if value not in (None, False, 0, 1, [], {}, ())]
    if asked["do_sample"]:
        dropped.append("do_sample=True")
    if dropped:
        told = ", ".join(text if len(text) <= 60 else f"{text[:57]}..." for text in dropped)
        warnings.warn(f"{name} is decoded greedily; dropped: {told}", DroppedRuleWarning, stacklevel=3)


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
    """Two tokenizers that write each other's ids, or an error that names the first difference."""
    words = [{number: word for word, number in tokenizer.get_vocab().items()} for tokenizer in (one, other)]
    for number in sorted(words[0].keys() | words[1].keys()):
        if words[0].get(number) != words[1].get(number):
            said = " and ".join(
                f"{known[number]!r} for the {name}" if number in known else f"nothing for the {name}"
                for known, name in zip(words, names, strict=True)
            )
            sizes = " and ".join(f"{len(known):,}" for known in words)
            raise OptionError(f"the pair shares no vocabulary: id {number} is {said} ({sizes} tokens); take one family")


def check_inputs(inputs: Tensor, n_tokens: int) -> None:
    """Ids that the model has: others would be looked up outside its embeddings, which kills a GPU's process."""
    if inputs.numel() and (int(inputs.max()) >= n_tokens or int(inputs.min()) < PADDING):
        found = f"{int(inputs.min())} to {int(inputs.max())}"
        raise DataError(f"inputs hold ids from {found}; the model has 0 to {n_tokens - 1}, and {PADDING} pads")
