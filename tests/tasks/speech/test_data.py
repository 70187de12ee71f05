"""Manifests of clips are read with errors by line, and split without a sentence in two parts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdefer.errors import DataError, OptionError
from seqdefer.tasks.speech.audio import write_clip
from seqdefer.tasks.speech.data import MANIFEST, Clip, SpeechCorpus, read_manifest, split_clips, write_manifest
from seqdefer.tasks.speech.normalization import normalizer

pytest.importorskip("soundfile")
pytest.importorskip("transformers")

COUNTS = {"train": 6, "validation": 2, "test": 3}


def write_noise(path: Path, seconds: float = 0.5, seed: int = 0) -> Path:
    samples = np.random.default_rng(seed).uniform(-0.3, 0.3, round(seconds * 16_000))
    return write_clip(path, samples.astype(np.float32))


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes records as a manifest beside the clip `a.flac`."""
    write_noise(tmp_path / "clips" / "a.flac")

    def write(*records: Any, name: str = "corpus.jsonl") -> Path:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
        return tmp_path / name

    return write


def clips(n: int, start: int = 0) -> list[Clip]:
    return [Clip(str(one), Path(f"{one}.flac"), f"sentence {one}", 6.0) for one in range(start, start + n)]


# -- manifests -----------------------------------------------------------------------------------------------------


def test_a_manifest_is_read(manifest: Callable[..., Path], tmp_path: Path) -> None:
    other = write_noise(tmp_path / "elsewhere" / "b.flac", 1.25)
    records = [
        {"audio_filepath": "clips/a.flac", "text": "Hello there.", "duration": 99},
        {"audio_filepath": str(other), "text": "Où ?", "id": "b", "synthetic": False},
    ]
    path = manifest(*records)
    corpus = read_manifest(path)
    assert corpus.clips == [
        Clip("1", tmp_path / "clips" / "a.flac", "Hello there.", 0.5),  # the header knows its length
        Clip("b", other, "Où ?", 1.25),
    ]
    assert len(corpus.clips[1].read()) == 20_000
    assert not corpus.synthetic
    assert corpus.describe() == f"2 clips (0.0 minutes) of corpus.jsonl ({corpus.fingerprint})"
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_manifest(packed).clips == corpus.clips


@pytest.mark.parametrize("audio", ["audio_filepath", "audio", "file", "path", "file_name"])
@pytest.mark.parametrize("text", ["text", "sentence", "transcript", "transcription"])
def test_other_names_of_fields(audio: str, text: str, manifest: Callable[..., Path]) -> None:
    corpus = read_manifest(manifest({audio: "clips/a.flac", text: "hello"}))
    assert [one.text for one in corpus.clips] == ["hello"]


def test_a_folder_that_we_wrote(tmp_path: Path) -> None:
    write_noise(tmp_path / "a.flac")
    write_manifest(tmp_path / MANIFEST, [{"audio_filepath": "a.flac", "text": "Größe", "synthetic": True}])
    corpus = read_manifest(tmp_path)
    assert corpus.synthetic
    assert corpus.describe().startswith("1 synthetic clip (0.0 minutes) of manifest.jsonl (")
    with pytest.raises(DataError, match=r"cannot read .*manifest.jsonl: No such file.*; give a manifest: one JSON"):
        read_manifest(tmp_path / "..")


def test_repeated_texts_are_left_out(manifest: Callable[..., Path]) -> None:
    corpus = read_manifest(
        manifest(*({"audio": "clips/a.flac", "text": text} for text in ("Hi you", "hi  YOU", "Bye")))
    )
    assert [one.text for one in corpus.clips] == ["Hi you", "Bye"]
    assert corpus.repeated == 1
    assert corpus.describe().endswith(", left out: 1 with a repeated text")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, "there is no 'audio_filepath', nor 'audio' or .*; the fields are: 'text'"),
        ({"audio_filepath": "clips/a.flac"}, "there is no 'text', nor 'sentence' or "),
        ({"audio_filepath": "clips/a.flac", "text": " \n"}, "'text' is empty; fill it in, or remove the line"),
        ({"audio_filepath": "clips/a.flac", "text": None}, "'text' is null, not a text"),
        ({"audio_filepath": "", "text": "x"}, "'audio_filepath' is empty"),
        ({"audio_filepath": 5, "text": "x"}, "'audio_filepath' is a number, not a text"),
        ({"audio": {"path": "a", "bytes": None}, "text": "x"}, "'audio' is an object, not a text"),
        ({"audio_filepath": "clips/a.flac", "text": "\ud800"}, r"'text' holds \\ud800"),
        ({"audio_filepath": "no.flac", "text": "x"}, "cannot read .*no.flac: No such file"),
        ({"audio_filepath": "clips", "text": "x"}, "cannot read .*clips: Is a directory"),
        ({"audio_filepath": "corpus.jsonl", "text": "x"}, "corpus.jsonl is not a WAV or FLAC file"),
        ({"audio_filepath": "clips/a.flac", "text": "x", "offset": 2.5}, "the clip begins at an offset of '2.5' s"),
        ({"audio_filepath": "clips/a.flac", "text": "x", "id": 1.5}, "the id is a number"),
        ("[1]", "a list, not a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_a_bad_line_is_named(record: Any, message: str, manifest: Callable[..., Path]) -> None:
    path = manifest({"audio_filepath": "clips/a.flac", "text": "good", "offset": 0}, record)
    with pytest.raises(DataError, match=rf"^corpus\.jsonl, line 2: .*{message}") as raised:
        read_manifest(path)
    assert "\n" not in str(raised.value)


def test_a_long_clip_is_refused(manifest: Callable[..., Path], tmp_path: Path) -> None:
    write_noise(tmp_path / "long.flac", 31.0)
    with pytest.raises(DataError, match=r"line 1: .*long.flac lasts 31 s; cut it into clips of at most 30 s"):
        read_manifest(manifest({"audio_filepath": "long.flac", "text": "x"}))


def test_all_texts_without_words_are_named(manifest: Callable[..., Path]) -> None:
    """Regression: the first was named, by its id alone, once the models were loaded."""
    texts = ["hello", "um", "...", "well", *["[noise]"] * 12]
    path = manifest(*({"audio_filepath": "clips/a.flac", "text": text} for text in texts))
    lines = "2, 3, 5, 6, 7, 8, 9, 10, 11, 12 and 4 more"
    with pytest.raises(
        DataError, match=rf"^corpus.jsonl, lines {lines}: no words in the text \('um'\); correct it, or"
    ):
        read_manifest(path, normalizer("en"))
    assert len(read_manifest(manifest({"audio_filepath": "clips/a.flac", "text": "um"}))) == 1, "a word of its own"
    with pytest.raises(DataError, match=r"line 1: no words in the text \('\?'\)"):
        read_manifest(manifest({"audio_filepath": "clips/a.flac", "text": "?"}), normalizer("fr"))


def test_an_empty_manifest(manifest: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"corpus.jsonl is empty; give a manifest"):
        read_manifest(manifest(""))


# -- splits --------------------------------------------------------------------------------------------------------


def test_clips_are_split_without_overlap() -> None:
    corpus = SpeechCorpus("c", clips(20), synthetic=True)
    splits = split_clips(corpus, None, COUNTS, seed=0)
    assert {name: len(part) for name, part in splits.parts.items()} == COUNTS
    assert len({one.text for part in splits.parts.values() for one in part}) == sum(COUNTS.values())
    assert splits.source == f"20 synthetic clips (2.0 minutes) of c ({corpus.fingerprint}); dealt by seed 0"
    assert split_clips(SpeechCorpus("c", clips(20)[::-1]), None, COUNTS, seed=0).parts == splits.parts
    assert split_clips(corpus, None, COUNTS, seed=1).parts != splits.parts


def test_sentences_of_the_test_are_not_trained_on() -> None:
    test = SpeechCorpus("t", clips(3, start=7))
    spoken_again = [Clip("x", Path("other.flac"), one.text.upper(), 2.0) for one in test.clips]
    splits = split_clips(SpeechCorpus("c", [*clips(7), *spoken_again]), test, COUNTS, seed=0)
    assert splits.parts["test"] == test.clips
    assert "x" not in {one.id for name in ("train", "validation") for one in splits.parts[name]}  # type: ignore[index]
    assert "3 left out because the test has them" in splits.source


def test_errors_speak_of_clips() -> None:
    with pytest.raises(DataError, match="c leaves 2 clips; at least 3 are needed"):
        split_clips(SpeechCorpus("c", clips(2)), None, COUNTS, seed=0)
    with pytest.raises(OptionError, match="--test-clips is -1"):
        split_clips(SpeechCorpus("c", clips(9)), None, {**COUNTS, "test": -1}, seed=0)


def test_the_fingerprint_names_files_lengths_and_texts() -> None:
    one, same, *others = (
        SpeechCorpus("c", [Clip(id, Path(audio), text, seconds)]).fingerprint
        for id, audio, text, seconds in (
            ("1", "a/x", "s", 1.0), ("2", "b/x", "s", 1.0), ("1", "a/y", "s", 1.0), ("1", "a/x", "t", 1.0),
            ("1", "a/x", "s", 1.1),
        )
    )  # fmt: skip
    assert one == same
    assert one not in others
