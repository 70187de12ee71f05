"""Text normalisation before error rates: Whisper's own, as Transformers ships it.

English texts lose case, punctuation, fillers (um) and contractions; numbers become digits; British spellings become
American. Texts in other languages lose case, punctuation and symbols; those written without spaces are spelt out, so
that a word error rate counts characters, as in the paper (Radford et al., 2022, appendix C).

    normalize = normalizer("en", read_spellings(Path("openai/whisper-tiny")))
    normalize("Mr. Brown's colour-blind, um, isn't he?")  # "mister brown is color blind is not he"
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from seqdefer.errors import CheckpointError, missing_extra

ENGLISH = ("en", "english")
WITHOUT_SPACES = ("zh", "ja", "th", "lo", "my", "yue", "chinese", "japanese", "thai", "lao", "myanmar", "cantonese")
SPELLINGS = "normalizer.json"  # in the folder of a checkpoint


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


def read_spellings(folder: Path) -> dict[str, str]:
    """Return the spellings in the folder of a checkpoint, none if it has no such file."""
    path = folder / SPELLINGS
    if not path.is_file():
        return {}
    try:
        spellings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; fetch the checkpoint again") from error
    if not isinstance(spellings, dict) or not all(isinstance(one, str) for one in spellings.values()):
        raise CheckpointError(f"{path} does not map words to words; fetch the checkpoint again")
    return spellings
