"""A dataset of the Hub becomes files with a manifest, once; what is unusable is counted."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdefer.errors import DataError, MissingExtraError
from seqdefer.progress import Silent
from seqdefer.tasks.speech.data import MANIFEST
from seqdefer.tasks.speech.normalization import normalizer
from seqdefer.tasks.speech.sources import fetch_clips, read_speech
from seqdefer.tasks.text.hub import parse_dataset_name

soundfile = pytest.importorskip("soundfile")
datasets = pytest.importorskip("datasets")

NAME = "owner/speech:clean/validation"


def encoded(seconds: float, kind: str = "FLAC", seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(seed).uniform(-0.3, 0.3, round(16_000 * seconds))
    soundfile.write(buffer, noise, 16_000, format=kind)
    return buffer.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Returns a function that puts rows on a hub, which is a file of this machine, and the list of calls to it."""
    real, calls = datasets.load_dataset, []
    monkeypatch.setattr("seqdefer.tasks.text.hub.is_hub_reachable", lambda: True)
    datasets.disable_progress_bars()

    def publish(columns: dict[str, list[Any]], *, audio: str | None = "audio") -> list[Any]:
        rows = datasets.Dataset.from_dict(columns)
        rows = rows.cast_column(audio, datasets.Audio(sampling_rate=16_000)) if audio else rows
        rows.to_parquet(str(tmp_path / "hub.parquet"))

        def load_dataset(*names: Any, split: str, streaming: bool) -> Any:
            calls.append((*names, split, streaming))
            return real("parquet", data_files=str(tmp_path / "hub.parquet"), split="train", streaming=streaming)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return publish


def columns() -> dict[str, list[Any]]:
    contents = [encoded(0.5), encoded(0.75, "WAV"), encoded(31.0), encoded(0.5), b"ID3 an MP3", b""]
    contents += [encoded(0.5), encoded(0.5, "WAV").replace(b"data", bytes(4)), encoded(0.5)[:5_000]]
    return {
        "id": ["a", "b", "c", "d", "e", "f", "g", "h", "i"],
        "audio": [{"bytes": content, "path": "x.flac"} for content in contents],
        "text": ["HELLO THERE", "GOOD BYE", "LONG", " ", "MP3", "NOTHING", "... [noise]", "NO DATA", "CUT"],
        "speaker_id": list(range(9)),
    }


def test_a_dataset_is_fetched_once(hub: Any, tmp_path: Path) -> None:
    calls = hub(columns())
    corpus = read_speech(NAME, normalize=normalizer("en"), cache=tmp_path)
    assert calls == [("owner/speech", "clean", "validation", True)]  # one split, and without running code of a dataset
    assert [(one.id, one.text, one.duration) for one in corpus.clips] == [
        ("a", "HELLO THERE", 0.5),
        ("b", "GOOD BYE", 0.75),
    ]
    assert [one.audio.suffix for one in corpus.clips] == [".flac", ".wav"]
    assert len(corpus.clips[0].read()) == 8000
    assert corpus.describe() == f"2 clips (0.0 minutes) of {NAME} ({corpus.fingerprint}), left out: 7 unusable"
    assert read_speech(NAME, normalize=normalizer("en"), cache=tmp_path) == corpus
    assert len(calls) == 1


def test_only_the_first_rows_are_stored(hub: Any, tmp_path: Path) -> None:
    hub(columns())
    corpus = fetch_clips(parse_dataset_name(NAME), tmp_path / "cache", Silent(), max_rows=1)
    assert (len(corpus), corpus.unusable) == (1, 0)


def test_an_interrupted_fetch_leaves_no_manifest(hub: Any, tmp_path: Path) -> None:
    hub(columns())

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    class Impatient(Silent):
        def stage(self, name: str, total: int) -> Any:
            return nullcontext(stop)

    with pytest.raises(KeyboardInterrupt):
        read_speech(NAME, cache=tmp_path, meter=Impatient())
    assert list(tmp_path.rglob("*.flac"))
    assert not list(tmp_path.rglob(MANIFEST))
    assert len(read_speech(NAME, normalize=normalizer("en"), cache=tmp_path)) == 2


def test_datasets_without_clips(hub: Any, tmp_path: Path) -> None:
    rows = columns()
    hub({name: values[2:6] for name, values in rows.items()})
    with pytest.raises(DataError, match=rf"{NAME} has no clip that can be used; of the first, row 0 lasts 31 s; .*; "
                       "give a manifest instead"):  # fmt: skip
        read_speech(NAME, cache=tmp_path)
    hub({"audio": rows["audio"], "words": rows["text"]})
    with pytest.raises(DataError, match=r"has no column for texts, such as 'text'; the columns are: 'audio', 'words'"):
        read_speech(NAME, cache=tmp_path)
    hub({"sound": rows["audio"], "text": rows["text"]}, audio=None)
    with pytest.raises(DataError, match=r"has no 'audio'; the columns are: 'sound', 'text'"):
        read_speech(NAME, cache=tmp_path)


def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("seqdefer.tasks.text.hub.is_hub_reachable", lambda: False)
    with pytest.raises(DataError, match=r"cannot load the dataset owner/speech:clean/validation: it is not in the Hub's"
                       r" cache, and there is no network; give a manifest instead"):  # fmt: skip
        read_speech(NAME, cache=tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'seqdefer\[speech\]'; or give a manifest"):
        read_speech(NAME, cache=tmp_path)


def test_manifests_by_name(tmp_path: Path) -> None:
    (tmp_path / "clip.wav").write_bytes(encoded(0.5, "WAV"))
    (tmp_path / MANIFEST).write_text('{"audio": "clip.wav", "text": "hello"}', encoding="utf-8")
    assert len(read_speech(str(tmp_path))) == len(read_speech(str(tmp_path / MANIFEST))) == 1
    with pytest.raises(DataError, match=r"cannot read missing.jsonl"):
        read_speech("missing.jsonl")
    with pytest.raises(DataError, match="the name of the data is empty"):
        read_speech("")
