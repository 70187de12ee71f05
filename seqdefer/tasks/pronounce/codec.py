"""The codec of users' inputs and outputs: `onomatopoeia` in, `AA N AH M AA T AH P IY AH` out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from seqdefer.errors import InputError
from seqdefer.interfaces import Codec
from seqdefer.tasks.pronounce.data import (
    END,
    LETTERS,
    MAX_LETTERS,
    MAX_PRONUNCIATIONS,
    MAX_TOKENS,
    MIN_LETTERS,
    SYMBOLS,
    encode_letters,
)
from seqdefer.types import Examples

END_SIGN = "∎"
APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"  # a common spelling of the dictionary's '


class PhonemeCodec(Codec):
    """Inputs are single words; outputs are phonemes separated by spaces."""

    field, kind, hint = "word", "tokens", "onomatopoeia"
    about = "reads an English word and writes how it is pronounced, in phonemes of CMUdict"
    examples = ("onomatopoeia", "thoroughly", "colonel", "rhythm", "catastrophe")

    def encode(self, inputs: Sequence[Any]) -> Examples:
        words = [_word(one, f"input {place + 1} of {len(inputs)}") for place, one in enumerate(inputs)]
        letters = encode_letters(words)[:, : max(map(len, words))]  # no wider than the longest word
        nothing = torch.full((len(words), MAX_PRONUNCIATIONS, MAX_TOKENS), END)  # placeholder targets
        return Examples(letters, nothing, torch.arange(len(words)))

    def decode(self, tokens: Sequence[Any]) -> str:
        return self.text(tokens)

    def text(self, tokens: Sequence[Any]) -> str:
        return " ".join(SYMBOLS[token] for token in tokens if token != END)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": rf"^\s*[A-Za-z'{APOSTROPHE}]{{{MIN_LETTERS},{MAX_LETTERS}}}\s*$"}

    def pieces(self, tokens: Sequence[Any]) -> list[str]:
        """Return what each token adds; the end token is shown as a sign."""
        pieces = zip(super().pieces(tokens), tokens, strict=True)
        return [piece + (END_SIGN if token == END else "") for piece, token in pieces]


def _word(one: Any, where: str) -> str:
    if not isinstance(one, str):
        raise InputError(f"{where} is a {type(one).__name__}; give a word")
    word = one.strip().lower().replace(APOSTROPHE, "'")
    strange = next((letter for letter in word if letter not in LETTERS), None)
    if strange is not None:
        raise InputError(f"{where} has {strange!r}, which is not a letter from a to z; give one word, {_EXAMPLE}")
    if not MIN_LETTERS <= len(word) <= MAX_LETTERS:  # the networks were trained on no others
        raise InputError(f"{where} has {len(word)} letters; give a word of {MIN_LETTERS} to {MAX_LETTERS}, {_EXAMPLE}")
    if not word.strip("'"):
        raise InputError(f"{where} is {word!r}, which has no letter; give a word, {_EXAMPLE}")
    return word


_EXAMPLE = f"such as {PhonemeCodec.hint!r}"
