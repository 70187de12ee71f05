"""Text normalisation before error rates: Whisper's own, as Transformers ships it.

English texts lose case, punctuation, fillers (um) and contractions; numbers become digits; British spellings become
American. Texts in other languages lose case, punctuation and symbols; those written without spaces are spelt out, so
that a word error rate counts characters, as in the paper (Radford et al., 2022, appendix C).

    normalize = normalizer("en", tokenizer.english_spelling_normalizer)  # of a checkpoint of Whisper
    normalize("Mr. Brown's colour-blind, um, isn't he?")  # "mister brown is color blind is not he"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from seqdefer.errors import missing_extra

ENGLISH = ("en", "english")
WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue", "chinese", "japanese", "thai", "lao", "myanmar", "cantonese")


def normalizer(language: str | None, spellings: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return the function that normalises texts of a language, named or by its code; None is any language.

    `spellings` maps British spellings to American ones; only English uses it."""
    try:
        normalizers = import_module("transformers.models.whisper.english_normalizer")
    except ImportError as error:
        raise missing_extra("transformers", "speech", "the normalisation of texts") from error
    name = (language or "").lower()
    by_language = (
        normalizers.EnglishTextNormalizer(dict(spellings or {}))
        if name in ENGLISH
        else normalizers.BasicTextNormalizer(split_letters=name in WITHOUT_SPACES)
    )

    def normalize(text: str) -> str:
        return " ".join(str(by_language(text)).split())  # Transformers leaves spaces at both ends

    return normalize
