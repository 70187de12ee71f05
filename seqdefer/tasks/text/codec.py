"""Texts to token ids and back: what users give, what the models read, and what each token adds to a text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seqdefer.errors import InputError, OptionError
from seqdefer.interfaces import Codec
from seqdefer.tasks.text.pairs import MixedPair, TextPair
from seqdefer.tasks.text.passes import PADDING
from seqdefer.types import Examples

END_SIGN = "∎"
LETTERS_PER_TOKEN = 16  # more than most tokens have
MARGIN_TOKENS = 64  # tokens before the end of a text that further text may change


class TruncationWarning(UserWarning):
    """Documents are longer than the models read."""


class Rendered(str):
    """A chat rendered by the tokenizer's template, to be read without prefix, suffix or special tokens."""


class TokenIds(tuple[int, ...]):
    """An input as token ids, to be read without prefix, suffix or special tokens."""


class TextCodec(Codec):
    """The codec of text tasks: a text or a chat in, a text out."""

    kind, hint = "text", "A text to read."
    about = "reads a text and writes another"
    examples = (
        "The lighthouse on the eastern cape has been dark since a storm damaged its lamp in March. The harbour board "
        "said on Tuesday that a replacement would arrive by ship next week. Until then, fishing boats are asked to use "
        "the western channel, where two buoys with lights have been put out.",
        "A school in the valley has planted four hundred trees along its playing field. The pupils chose the kinds "
        "themselves, after measuring how much water the soil holds. The first apples are expected in five years.",
    )

    def __init__(
        self,
        pair: TextPair | MixedPair,
        *,
        prefix: str,
        suffix: str,
        length: int,
        input_tokens: int,
        field: str = "document",
    ) -> None:
        self.tokenizer, self.end = pair.predictor.model.tokenizer, pair.predictor.end
        self.prefix, self.suffix, self.field = prefix, suffix, field
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        self.knows_roles = has_template and not pair.predictor.model.is_encoder_decoder
        limits = [model.max_input_tokens(length) for model in pair.models]
        self.max_tokens = min([input_tokens, *(limit for limit in limits if limit is not None)])

    def read(self, texts: Sequence[str], *, stacklevel: int = 2) -> tuple[Tensor, int]:
        """Return ids (n, S), padded with PADDING, and how many texts were truncated. Warn about those."""
        ids, n_truncated = encode(self.tokenizer, texts, self.prefix, self.max_tokens, suffix=self.suffix)
        if n_truncated:
            warnings.warn(
                f"{n_truncated} of {len(texts)} documents are longer than {self.max_tokens} tokens and were truncated",
                TruncationWarning,
                stacklevel=stacklevel,
            )
        return ids, n_truncated

    def encode(self, inputs: Sequence[Any]) -> Examples:
        for place, text in enumerate(inputs):
            if not isinstance(text, TokenIds) and (not isinstance(text, str) or not text.strip()):
                what = "empty" if isinstance(text, str) else f"a {type(text).__name__}"
                raise InputError(f"input {place + 1} of {len(inputs)} is {what}; give a text")
        if any(isinstance(text, Rendered | TokenIds) for text in inputs):
            ids = pad_sequence([self._read_one(one) for one in inputs], batch_first=True, padding_value=PADDING)
        else:
            ids, _ = self.read(inputs, stacklevel=4)
        return Examples(ids, ids[:, :1], torch.arange(len(ids)))

    def _read_one(self, one: Any) -> Tensor:
        if isinstance(one, TokenIds):
            return torch.tensor(one, dtype=torch.long)
        return self._read_chat(one) if isinstance(one, Rendered) else self.read([one])[0][0]

    def _read_chat(self, chat: Rendered) -> Tensor:
        """Return the ids of a chat, which is never truncated: both its beginning and its end matter."""
        ids = self.tokenizer(str(chat), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > self.max_tokens:
            raise InputError(f"the chat has {len(ids)} tokens; at most {self.max_tokens} can be read: shorten it")
        return torch.tensor(ids, dtype=torch.long)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.knows_roles:
            joined: str = super().chat(messages)
            return joined
        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # for example, a template without system messages
            raise InputError(f"the model's chat template rejects these messages: {error}; change them") from error
        return Rendered(rendered)

    def words(self, examples: Examples) -> list[str]:
        rows = ([one for one in row if one != PADDING] for row in examples.inputs.tolist())
        return [" ".join(self.decode(row).split()) for row in rows]

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"\S"}

    def ids_schema(self) -> dict[str, Any]:
        one = {"type": "integer", "minimum": 0, "maximum": len(self.tokenizer) - 1}
        return {"type": "array", "items": one, "minItems": 1, "maxItems": self.max_tokens}

    def from_ids(self, ids: Sequence[int]) -> TokenIds:
        """Return an input of these ids. Ids are never truncated: clients that send them must keep within the limit."""
        if not 0 < len(ids) <= self.max_tokens:
            raise InputError(f"the prompt has {len(ids)} token ids; give 1 to {self.max_tokens}")
        if wrong := [one for one in ids if not 0 <= one < len(self.tokenizer)]:
            raise InputError(f"token id {wrong[0]} is not in the vocabulary; give 0 to {len(self.tokenizer) - 1}")
        return TokenIds(ids)

    def decode(self, tokens: Sequence[Any]) -> str:
        # No clean-up: it would remove spaces that a stream has already sent.
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def text(self, tokens: Sequence[Any]) -> str:
        return self.decode(tokens)

    def pieces(self, tokens: Sequence[Any]) -> list[str]:
        """Return what each token adds; the end token, which has no text, is shown as a sign."""
        pieces = zip(super().pieces(tokens), tokens, strict=True)
        return [piece + (END_SIGN if token == self.end else "") for piece, token in pieces]


def encode(
    tokenizer: Callable[..., Any], texts: Sequence[str], prefix: str, max_tokens: int, *, suffix: str = ""
) -> tuple[Tensor, int]:
    """Return the ids (n, S) of prefix + text + suffix, padded with PADDING, and how many texts were truncated.

    A row has at most `max_tokens` ids. Only the text is truncated; an end token that the tokenizer adds stays last.
    `tokenizer` is one of transformers, or has the same call.
    """
    after = _ids(tokenizer, [suffix], add_special_tokens=False)[0] if suffix else []
    n_left = max_tokens - len(after)
    if n_left < len(_ids(tokenizer, [prefix])[0]) + 1:
        extra = " beside prefix and suffix" if prefix + suffix else ""
        raise OptionError(f"an input of {max_tokens} tokens leaves no room for a document{extra}; allow more")
    if not texts:
        return torch.empty(0, 0, dtype=torch.long), 0
    whole = [_beginning(tokenizer, prefix + text, n_left) for text in texts]
    rows = _ids(tokenizer, whole, truncation=True, max_length=n_left)
    full = [text for text, row in zip(whole, rows, strict=True) if len(row) == n_left]
    n_truncated = sum(len(row) > n_left for row in _ids(tokenizer, full))
    if after:
        end: Any = getattr(tokenizer, "eos_token_id", None)
        rows = [[*row[:-1], *after, end] if row[-1:] == [end] else [*row, *after] for row in rows]
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=PADDING), n_truncated


def _beginning(tokenizer: Callable[..., Any], text: str, n_tokens: int) -> str:
    """Return the part of a text that determines its first `n_tokens` tokens: to tokenize a book would take seconds.

    Return all of it if the part has too few tokens, for example because the tokenizer drops spaces.
    """
    size = LETTERS_PER_TOKEN * n_tokens
    if len(text) <= 2 * size:
        return text
    return text[:size] if len(_ids(tokenizer, [text[:size]])[0]) > n_tokens + MARGIN_TOKENS else text


def _ids(tokenizer: Callable[..., Any], texts: Sequence[str], **options: Any) -> Sequence[Sequence[int]]:
    # verbose=False: the codec warns about long texts itself
    found: Sequence[Sequence[int]] = tokenizer(texts, verbose=False, **options)["input_ids"] if texts else []
    return found
