"""Where clips come from: a manifest, or a dataset of the Hub by name.

    read_speech("corpus/manifest.jsonl", split="train")
    read_speech("openslr/librispeech_asr:clean/validation", split="train")

A dataset is streamed, because LibriSpeech has tens of gigabytes and other splits are not needed. Its first clips are
stored once, as files with a manifest, in the folder of downloads. Clips that cannot be used (longer than 30 s, without
words) are left out and counted: users cannot repair a dataset of the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from seqdefer.environment import cache_directory
from seqdefer.errors import DataError
from seqdefer.progress import Meter, Silent
from seqdefer.storage.files import read_json, write_json
from seqdefer.storage.user_files import check_filled, join_quoted, looks_like_file
from seqdefer.tasks.speech.audio import SAMPLE_RATE, read_clip
from seqdefer.tasks.speech.data import (
    MANIFEST,
    TEXT_FIELDS,
    Normalize,
    SpeechCorpus,
    has_words,
    read_manifest,
    write_manifest,
)
from seqdefer.tasks.text.hub import DatasetName, dataset_errors, load_dataset, parse_dataset_name

MAX_ROWS = 3000  # of a dataset; a split of LibriSpeech for validation or test has about 2,700
AUDIO = "audio"  # the column of a dataset
_INSTEAD = "give a manifest instead: one JSON object a line with the fields 'audio_filepath' and 'text'"
_SUMMARY = "dataset.json"


def read_speech(
    source: str,
    *,
    split: str = "train",
    normalize: Normalize | None = None,
    cache: Path | None = None,
    meter: Meter | None = None,
) -> SpeechCorpus:
    """Read a manifest, plain or gzip, or a dataset of the Hub: NAME[:CONFIG][/SPLIT].

    `split` applies to a dataset without one. Datasets are stored in the directory `cache`. Texts that `normalize`
    leaves without words are refused in a manifest, and left out of a dataset."""
    if not source:
        raise DataError("the name of the data is empty; give a manifest or a dataset of the Hub")
    if looks_like_file(Path(source)):
        return read_manifest(Path(source), normalize)
    wanted, folder = parse_dataset_name(source, split), (cache or cache_directory()) / "speech"
    corpus = fetch_clips(wanted, folder, meter or Silent())
    clips = [one for one in corpus.clips if normalize is None or has_words(one.text, normalize)]
    return replace(corpus, clips=clips, unusable=corpus.unusable + len(corpus) - len(clips))


def fetch_clips(wanted: DatasetName, cache: Path, meter: Meter, max_rows: int = MAX_ROWS) -> SpeechCorpus:
    """Return the first rows of a dataset, from the directory `cache`, else from the Hub."""
    folder = cache / f"{re.sub(r'[^A-Za-z0-9.]+', '-', wanted.label)}-{max_rows}"
    if not (folder / MANIFEST).is_file():
        rows = load_dataset(wanted, _INSTEAD, extra="speech", streaming=True)
        with meter.stage(f"fetch {wanted.label}", max_rows) as advance, dataset_errors(wanted, _INSTEAD):
            records = []
            for record in _store_rows(islice(_plain_rows(rows, wanted), max_rows), folder):
                records.append(record)
                advance(1)
        _write_summary(folder, wanted, records)
    corpus = read_manifest(folder)
    return replace(corpus, name=wanted.label, unusable=int(read_json(folder / _SUMMARY)["unusable"]))


def _plain_rows(rows: Any, wanted: DatasetName) -> Iterator[tuple[Any, bytes | None, Any]]:
    """Yield id, encoded audio and text of each row. Decoding is ours: that of `datasets` needs another package."""
    columns = list(rows.column_names or [])
    text = next((one for one in TEXT_FIELDS if one in columns), None)
    if AUDIO not in columns or text is None:
        lacking = repr(AUDIO) if AUDIO not in columns else f"column for texts, such as {TEXT_FIELDS[0]!r}"
        raise DataError(f"{wanted.label} has no {lacking}; the columns are: {join_quoted(columns)}")
    for row in rows.cast_column(AUDIO, import_module("datasets").Audio(decode=False)):
        yield row.get("id"), row[AUDIO]["bytes"], row[text]


def _store_rows(rows: Iterator[tuple[Any, bytes | None, Any]], folder: Path) -> Iterator[Mapping[str, Any]]:
    """Write the audio of each row. Yield its record, or the reason why it cannot be used."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, content, text) in enumerate(rows):
        try:
            samples = read_clip(content or b"", f"row {number}")
            check_filled(text, "text", f"row {number}")
        except DataError as error:
            yield {"unusable": str(error)}
            continue
        assert content is not None  # it has a header
        file = f"{number:05}.{'flac' if content.startswith(b'fLaC') else 'wav'}"
        (folder / file).write_bytes(content)  # written again if this is interrupted: there is no manifest yet
        yield {
            "id": str(number if name is None else name),
            "audio_filepath": file,
            "text": text,
            "duration": round(len(samples) / SAMPLE_RATE, 3),
        }


def _write_summary(folder: Path, wanted: DatasetName, records: list[Mapping[str, Any]]) -> None:
    """Write the manifest last: where it exists, all clips do."""
    unusable = [record["unusable"] for record in records if "unusable" in record]
    if len(unusable) == len(records):
        reason = f"; of the first, {unusable[0]}" if unusable else ""
        raise DataError(f"{wanted.label} has no clip that can be used{reason}; {_INSTEAD}")
    write_json(folder / _SUMMARY, {"dataset": wanted.label, "rows": len(records), "unusable": len(unusable)})
    write_manifest(folder / MANIFEST, [record for record in records if "unusable" not in record])
