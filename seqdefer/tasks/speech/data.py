"""Clips of speech with their words: read from a manifest, split without leaks.

A manifest has one JSON object a line, plain or gzip, as NeMo and others write it: an audio file, relative to the
manifest, and its text. Errors are DataErrors that name the manifest and the line.

    {"audio_filepath": "clips/0001.flac", "text": "the cat sat", "duration": 1.3}

    corpus = read_manifest(Path("corpus/manifest.jsonl"))
    splits = split_clips(corpus, None, {"train": 800, "validation": 200, "test": 500}, seed=0)
    splits.parts["test"][0].read()  # samples at 16,000 Hz

Lengths and formats are checked in the headers of all files before work begins. A text that was seen before is left out,
so no sentence is in two parts, whoever reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from seqdefer.errors import DataError
from seqdefer.interfaces import SplitName
from seqdefer.storage.files import fingerprint, write_text
from seqdefer.storage.user_files import check_filled, check_id, join_quoted, join_some, parse_record, quote, read_lines
from seqdefer.tasks.common.splits import DealtSplits, ItemPool, count_nouns, deal_splits
from seqdefer.tasks.speech.audio import Samples, read_clip, read_seconds

MANIFEST = "manifest.jsonl"  # in the folder of a corpus that we write
AUDIO_FIELDS = ("audio_filepath", "audio", "file", "path", "file_name")  # NeMo, Hugging Face, Common Voice
TEXT_FIELDS = ("text", "sentence", "transcript", "transcription")
Normalize = Callable[[str], str]
_KIND = "a manifest: one JSON object a line with the fields 'audio_filepath' and 'text'"


@dataclass(frozen=True)
class Clip:
    """A recording and what is said in it."""

    id: str  # from the manifest, else the line number
    audio: Path
    text: str
    duration: float  # seconds

    def digest(self, seed: str = "") -> bytes:
        """Return a hash of the text, ignoring case and white space; a seed makes it a random number."""
        text = " ".join(self.text.casefold().split())
        return blake2b(text.encode(), key=seed.encode(), digest_size=16).digest()

    def read(self) -> Samples:
        """Return the samples at 16,000 Hz."""
        return read_clip(self.audio)


@dataclass(frozen=True)
class SpeechCorpus:
    """Clips of one source with different texts, with counts of what was left out."""

    name: str
    clips: Sequence[Clip]
    synthetic: bool = False  # whether a program reads any of them
    repeated: int = 0  # clips whose text was seen before
    unusable: int = 0  # rows of a dataset without words, or with audio that cannot be used

    def __len__(self) -> int:
        return len(self.clips)

    @property
    def fingerprint(self) -> str:
        """Return a fingerprint of the clips' files, lengths and texts, in order."""
        return fingerprint([[one.audio.name, round(one.duration, 3), one.text] for one in self.clips])

    def describe(self) -> str:
        """Return a description for the provenance."""
        kind = "synthetic clip" if self.synthetic else "clip"
        minutes = sum(one.duration for one in self.clips) / 60
        left_out = {"with a repeated text": self.repeated, "unusable": self.unusable}
        counted = ", ".join(f"{count} {what}" for what, count in left_out.items() if count)
        clips = f"{count_nouns(len(self), kind)} ({minutes:.1f} minutes) of {self.name} ({self.fingerprint})"
        return f"{clips}{counted and f', left out: {counted}'}"


def split_clips(
    train: SpeechCorpus, test: SpeechCorpus | None, counts: Mapping[SplitName, int], seed: int
) -> DealtSplits[Clip]:
    """Deal clips into parts of at most `counts`, from one corpus or from two; see `deal_splits`."""
    return deal_splits(_pool(train), None if test is None else _pool(test), counts, seed)


def _pool(corpus: SpeechCorpus) -> ItemPool[Clip]:
    return ItemPool(corpus.name, corpus.clips, corpus.describe(), noun="clip")


# -- manifests -----------------------------------------------------------------------------------------------------


def read_manifest(path: Path, normalize: Normalize | None = None) -> SpeechCorpus:
    """Read a manifest, plain or gzip, or the one in a folder that a command of seqdefer wrote.

    With `normalize`, texts that it leaves without words are refused: they have no error rate."""
    path = path / MANIFEST if path.is_dir() else path
    clips, wordless, is_synthetic = [], dict[int, str](), False
    for number, line in read_lines(path, kind=_KIND):
        place = f"{path.name}, line {number}"
        record = parse_record(line, place)
        clips.append(_clip(record, path.parent, place, number))
        is_synthetic |= record.get("synthetic") is True
        if normalize is not None and not has_words(clips[-1].text, normalize):
            wordless[number] = clips[-1].text
    if wordless:
        lines, first = join_some(map(str, wordless)), quote(next(iter(wordless.values())))
        place = f"{path.name}, line{'s' * (len(wordless) > 1)} {lines}"
        raise DataError(f"{place}: no words in the text ({first}); correct it, or remove the line")
    return without_repeats(SpeechCorpus(path.name, clips, is_synthetic))


def write_manifest(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write a manifest in one go: where it exists, it is complete."""
    return write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def without_repeats(corpus: SpeechCorpus) -> SpeechCorpus:
    """Keep the first clip of each text."""
    different: dict[bytes, Clip] = {}
    for one in corpus.clips:
        different.setdefault(one.digest(), one)
    dropped = len(corpus) - len(different)
    return replace(corpus, clips=list(different.values()), repeated=corpus.repeated + dropped)


def has_words(text: str, normalize: Normalize) -> bool:
    return any(letter.isalnum() for letter in normalize(text))


def _clip(record: Mapping[str, Any], folder: Path, place: str, number: int) -> Clip:
    name, text = (_text(record, names, place) for names in (AUDIO_FIELDS, TEXT_FIELDS))
    if record.get("offset"):
        raise DataError(
            f"{place}: the clip begins at an offset of {quote(str(record['offset']))} s in {quote(name)}; write each"
            " clip into a file of its own, and no offset"
        )
    audio = folder / name
    try:
        seconds = read_seconds(audio)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    return Clip(check_id(record.get("id"), number, place), audio, text, seconds)


def _text(record: Mapping[str, Any], names: Sequence[str], place: str) -> str:
    """Return the text in the first of the fields `names` that the record has."""
    name = next((name for name in names if name in record), None)
    if name is None:
        raise DataError(
            f"{place}: there is no {quote(names[0])}, nor {' or '.join(map(quote, names[1:]))}; the fields are:"
            f" {join_quoted(record)}"
        )
    return check_filled(record[name], name, place)
