"""`seqdefer run text` rejects bad options, documents and an unreachable Hub with one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from seqdefer.evaluation.results import load_results

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_runs import Capture, command, documents_in, finished, models, refused, save_place, unknown_host

from seqdefer.tasks.text.codec import TruncationWarning

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of tiny pairs and documents for them. Shared: do not modify."""
    return save_place(tmp_path_factory.mktemp("text"))


def test_required_options(place: Path, tmp_path: Path, capsys: Capture) -> None:
    out, data, pair = ["--out", str(tmp_path / "run")], ["--train", str(place / "train.jsonl")], models(place)
    assert refused(capsys, "run", "text", *data, *out) == "--predictor is missing; give a model"
    assert refused(capsys, "run", "text", *data, *pair[:2], *out) == "--expert is missing; give a model"
    assert refused(capsys, "run", "text", *pair, *out) == "--train is missing; give documents"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--rouge", "2"], "unknown --rouge '2'; available: ids, words"),
        (["--shown", "all"], "unknown --shown 'all'; available: both, facts, states"),
        (
            ["--token-loss", "0/1"],
            "unknown --token-loss '0/1'; available: alignment, auto, clipped, first_error, paper, to_go",
        ),
        (["--dtype", "int4"], "unknown --dtype 'int4'; available: bfloat16, float16, float32"),
        (["--max-words", "0"], "--max-words is 0; it must be at least 1"),
        (["--train", "./nowhere.jsonl"], "cannot read nowhere.jsonl: No such file or directory; give a JSONL file"),
        (
            ["--instances", "7"],
            "the test split has 12 examples, 2 seeds x 7 instances need more; lower --seeds or --instances, or give "
            "more documents (--test, --test-documents)",
        ),
    ],
)
def test_bad_options(more: list[str], message: str, place: Path, tmp_path: Path, capsys: Capture) -> None:
    assert message in refused(capsys, *command(place, tmp_path / "run", *more))


def test_long_documents_are_truncated_with_one_warning(place: Path, tmp_path: Path, recwarn: Any) -> None:
    finished(place, tmp_path / "run", "--input-tokens", "5", "--length", "2", "--methods", "ChowMean")
    messages = [str(one.message) for one in recwarn if issubclass(one.category, TruncationWarning)]
    longer = sum(
        len(one.document.split()) > 5 for name in ("train", "test") for one in documents_in(place / f"{name}.jsonl")
    )
    assert messages == [f"{longer} of 32 documents are longer than 5 tokens and were truncated"]
    assert f"{longer} cut at 5 tokens" in load_results(tmp_path / "run").provenance.data["data"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.getaddrinfo", unknown_host)
    monkeypatch.setattr("seqdefer.tasks.text.hub.getproxies", dict)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.usefixtures("offline")
def test_models_of_the_hub_without_a_network(place: Path, tmp_path: Path, capsys: Capture) -> None:
    data = ["--train", str(place / "train.jsonl"), "--test", str(place / "test.jsonl")]
    error = refused(capsys, "run", "xsum", *data, "--out", tmp_path / "run")
    assert error.startswith(
        "google/flan-t5-small is not a folder and not in the Hub's cache, and there is no network; give a folder"
    )
    assert "config.json, model.safetensors, and tokenizer.json" in error


@pytest.mark.usefixtures("offline")
def test_documents_of_the_hub_without_a_network(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub's client once retried for half a minute and logged each attempt."""
    from huggingface_hub import constants

    class Datasets:
        __version__ = "4.0.0"

        @staticmethod
        def load_dataset(name: str, config: str | None, *, split: str) -> Any:
            assert constants.HF_HUB_OFFLINE, "the client would retry"
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    error = refused(capsys, "run", "xsum", "--out", tmp_path / "run")
    assert error.startswith("cannot load the dataset EdinburghNLP/xsum/train: it is not in the Hub's cache, and ther")
    assert error.endswith(
        "give files instead: JSONL, plain or gzip, one object a line with the fields 'document' and 'summary'"
    )
    assert not constants.HF_HUB_OFFLINE
