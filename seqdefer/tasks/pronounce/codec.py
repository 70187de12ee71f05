"""Words of users' own to letters, and phonemes back: `onomatopoeia` in, `AA N AH M AA T AH P IY AH` out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from seqdefer.errors import InputError
from seqdefer.interfaces import Codec
from seqdefer.tasks.pronounce.data import ALTERNATIVES, END, LENGTH, LETTERS, LONGEST, SHORTEST, SYMBOLS, encode_letters
from seqdefer.types import Examples

END_SIGN = "∎"
APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"  # as people type it; the dictionary has '


class PhonemeCodec(Codec):
    """Inputs are single words; outputs are phonemes with spaces between."""

    field, kind, hint = "word", "tokens", "onomatopoeia"

    def encode(self, inputs: Sequence[Any]) -> Examples:
        words = [_word(one, f"input {place + 1} of {len(inputs)}") for place, one in enumerate(inputs)]
        letters = encode_letters(words)[:, : max(map(len, words))]  # alone, an input is as wide as its word is long
        nothing = torch.full((len(words), ALTERNATIVES, LENGTH), END)  # targets, which mean nothing
        return Examples(letters, nothing, torch.arange(len(words)))

    def decode(self, tokens: Sequence[Any]) -> str:
        return self.text(tokens)

    def text(self, tokens: Sequence[Any]) -> str:
        return " ".join(SYMBOLS[token] for token in tokens if token != END)

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": rf"^\s*[A-Za-z'{APOSTROPHE}]{{{SHORTEST},{LONGEST}}}\s*$"}

    def pieces(self, tokens: Sequence[Any]) -> list[str]:
        """The end, which no text has, is shown by a sign."""
        pieces = zip(super().pieces(tokens), tokens, strict=True)
        return [piece + (END_SIGN if token == END else "") for piece, token in pieces]


def _word(one: Any, where: str) -> str:
    if not isinstance(one, str):
        raise InputError(f"{where} is a {type(one).__name__}; give a word")
    word = one.strip().lower().replace(APOSTROPHE, "'")
    strange = next((letter for letter in word if letter not in LETTERS), None)
    if strange is not None:
        raise InputError(f"{where} has {strange!r}, which is no letter from a to z; give one word, {_EXAMPLE}")
    if not SHORTEST <= len(word) <= LONGEST:  # the networks have seen no others
        raise InputError(f"{where} has {len(word)} letters; give a word of {SHORTEST} to {LONGEST}, {_EXAMPLE}")
    if not word.strip("'"):
        raise InputError(f"{where} is {word!r}, without a letter; give a word, {_EXAMPLE}")
    return word


_EXAMPLE = f"such as {PhonemeCodec.hint!r}"
