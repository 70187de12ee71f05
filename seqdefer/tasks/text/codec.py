"""Texts to ids and back: what users paste, what the models read, and what each token adds to a text."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seqdefer.errors import InputError
from seqdefer.interfaces import Codec
from seqdefer.tasks.text.data import encode
from seqdefer.tasks.text.pairs import RemotePair, TextPair
from seqdefer.tasks.text.passes import PADDING
from seqdefer.types import Examples

END_SIGN = "∎"


class CutWarning(UserWarning):
    """Documents are longer than what is read of them."""


class Rendered(str):
    """A chat as the tokenizer's template writes it: no prefix, suffix or special token comes besides."""


class TextCodec(Codec):
    kind, hint = "text", "A text to read."

    def __init__(
        self,
        pair: TextPair | RemotePair,
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
        # Tokens to read, where `length` are to be written.
        limits = [model.longest_input(length) for model in pair.models]
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
        if any(isinstance(text, Rendered) for text in inputs):
            rows = [self._read_chat(one) if isinstance(one, Rendered) else self.read([one])[0][0] for one in inputs]
            ids = pad_sequence(rows, batch_first=True, padding_value=PADDING)
        else:
            ids, _ = self.read(inputs, stacklevel=4)
        return Examples(ids, ids[:, :1], torch.arange(len(ids)))

    def _read_chat(self, chat: Rendered) -> Tensor:
        """Not cut: its end tells the model that it is its turn, and its beginning what the turn is about."""
        ids = self.tokenizer(str(chat), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > self.longest:
            raise InputError(f"the chat has {len(ids)} tokens, and {self.longest} can be read; say less")
        return torch.tensor(ids, dtype=torch.long)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if not self.knows_roles:
            joined: str = super().chat(messages)
            return joined
        try:
            said = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # some know no system, or want the roles to take turns
            raise InputError(f"the model's chat template refuses these messages: {error}; say it otherwise") from error
        return Rendered(said)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"\S"}

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
