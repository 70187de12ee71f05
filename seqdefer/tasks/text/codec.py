"""Texts to ids and back: what users paste, what the models read, and what each token adds to a text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqdefer.errors import InputError
from seqdefer.interfaces import Codec
from seqdefer.tasks.text.data import encode
from seqdefer.tasks.text.pairs import TextPair
from seqdefer.types import Examples

END_SIGN = "∎"


class CutWarning(UserWarning):
    """Documents are longer than what is read of them."""


class TextCodec(Codec):
    def __init__(
        self, pair: TextPair, *, prefix: str, suffix: str, length: int, input_tokens: int, field: str = "document"
    ) -> None:
        self.tokenizer, self.end = pair.predictor.model.tokenizer, pair.predictor.end
        self.prefix, self.suffix, self.field = prefix, suffix, field
        # Tokens to read, where `length` are to be written.
        limits = [model.longest_input(length) for model in (pair.predictor.model, pair.expert.model)]
        self.longest = min([input_tokens, *(limit for limit in limits if limit is not None)])

    def read(self, texts: Sequence[str], *, stacklevel: int = 2) -> tuple[Tensor, int]:
        """Ids (n, S), rows ending with PADDING where they are shorter; and how many texts were cut, which is said."""
        ids, n_cut = encode(self.tokenizer, texts, self.prefix, self.longest, suffix=self.suffix)
        if n_cut:
            warnings.warn(
                f"{n_cut} of {len(texts)} documents are longer than {self.longest} tokens and were cut there",
                CutWarning,
                stacklevel=stacklevel,
            )
        return ids, n_cut

    def encode(self, inputs: Sequence[Any]) -> Examples:
        for place, text in enumerate(inputs):
            if not isinstance(text, str) or not text.strip():
                what = "empty" if isinstance(text, str) else f"a {type(text).__name__}"
                raise InputError(f"input {place + 1} of {len(inputs)} is {what}; give a text")
        ids, _ = self.read(inputs, stacklevel=4)
        return Examples(ids, ids[:, :1], torch.arange(len(ids)))

    def decode(self, tokens: Sequence[Any]) -> str:
        # Without the clean-up of some tokenizers: it takes back spaces that a stream has shown already.
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def text(self, tokens: Sequence[Any]) -> str:
        return self.decode(tokens)

    def pieces(self, tokens: Sequence[Any]) -> list[str]:
        """The end, which no text has, is shown by a sign."""
        pieces = zip(super().pieces(tokens), tokens, strict=True)
        return [piece + (END_SIGN if token == self.end else "") for piece, token in pieces]
