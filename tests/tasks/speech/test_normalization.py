"""Texts are normalised as Whisper normalises them, in English and in other languages."""

from __future__ import annotations

import gzip
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from seqdefer.errors import MissingExtraError
from seqdefer.tasks.speech.normalization import normalizer

pytest.importorskip("transformers")

ODD = [
    "Mr. Brown's colour-blind, um, isn't he?",
    "It cost $2.50, i.e. two hundred and fifty cents (about) [applause].",
    "Twenty-one men, 1,000 women and one half of 3%",
    "I'd've GONE; won't you? They'd been there since '99.",
    "Æsop ate  naïve   crêpes\u2026",
    "",
    " \n ",
]


def test_english() -> None:
    normalize = normalizer("en", {"colour": "color"})
    assert normalize(ODD[0]) == "mister brown is color blind is not he"
    assert normalize(ODD[1]) == "it cost $2.50 i e ¢250"
    assert normalize("") == normalize(" [noise] ") == ""
    assert normalizer("English", {})("Colour!") == "colour"


def test_other_languages() -> None:
    assert normalizer("fr")("C'était l'été, à Orléans (France)!") == "c était l été à orléans"
    assert normalizer(None)("It's twenty") == "it s twenty"
    assert normalizer("ja")("東京 です。") == "東 京 で す"


def test_english_equals_another_package(shared_dir: Path) -> None:
    """whisper-normalizer, except that it turns the word `cause` into `because`, which Whisper does not."""
    english = pytest.importorskip("whisper_normalizer.english").EnglishTextNormalizer()
    normalize = normalizer("en", english.standardize_spellings.mapping)
    with gzip.open(shared_dir / "data" / "xsum" / "xsum_test.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [*ODD, *(json.loads(line)["summary"] for line in lines)]
    compared = [text for text in texts if "cause" not in text.lower().split()]
    assert len(compared) > 500
    for text in compared:
        assert normalize(text) == " ".join(english(text).split())


def test_other_languages_equal_another_package() -> None:
    basic = pytest.importorskip("whisper_normalizer.basic").BasicTextNormalizer
    for text in [*ODD, "Où est l'œuvre? Straße 12, žluťoučký kůň."]:
        assert normalizer("de")(text) == " ".join(basic()(text).split())
        assert normalizer("zh")(text) == " ".join(basic(split_letters=True)(text).split())


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("transformers")
    monkeypatch.setitem(sys.modules, "transformers.models.whisper.english_normalizer", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'transformers'.*seqdefer\[speech\]"):
        normalizer("en")
