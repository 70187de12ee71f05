"""Runs of the task `text` from end to end on tiny models: results, report, and resuming after a kill."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seqdefer.evaluation.areas import REFERENCES, granularity_of
from seqdefer.evaluation.results import load_results
from seqdefer.labels import exploration, hand_offs
from seqdefer.methods.registry import usual_methods
from seqdefer.progress import Silent

pytest.importorskip("transformers", reason="needs the extra 'text'")

from small_runs import FITS, found_in
from text_runs import (
    LENGTH,
    N_TEST,
    N_TRAIN,
    command,
    documents_in,
    finished,
    id_score,
    package_scores,
    save_place,
    written_by_itself,
)
from tiny_models import generated, tiny
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text.codec import END_SIGN, encode
from seqdefer.tasks.text.models import text_model
from seqdefer.tasks.text.pairs import TextExpert
from seqdefer.tasks.text.task import XSUM, TextOptions

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: do not modify."""
    return save_place(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Shared: do not modify."""
    return finished(place, tmp_path_factory.mktemp("done") / "run")


def labels_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "labels").glob("*.safetensors"))}


def test_every_method_is_in_the_results_and_in_the_report(done: Path) -> None:
    results, names = load_results(done), {*usual_methods(), *REFERENCES}
    names.remove("RandomSpeculative")  # it is compared by passes or seconds alone
    assert set(results.summary) == names
    assert [set(seed.methods) for seed in results.seeds] == [names] * 2
    assert results.task == "text"
    assert results.units.loss == "100 x (1 - ROUGE-1)"
    report = (done / "report.html").read_text()
    for name in names:
        assert name in report


def test_the_report_shows_coloured_tokens_and_the_reference(done: Path, place: Path) -> None:
    report = (done / "report.html").read_text()
    first = torch.randperm(N_TEST, generator=torch.Generator().manual_seed(0))[:3].tolist()
    for row in first:
        one = documents_in(place / "test.jsonl")[row]
        assert one.document in report
        assert f">{one.summary}<" in report
    assert report.count('class="tokens-example"') == 3
    assert 'class="tokens-expert">' in report
    assert 'class="tokens-predictor">' in report
    assert f"{END_SIGN} the end of a text" in report
    assert "by the expert" in report


def test_the_ends_of_curves_are_predictor_and_expert_alone(done: Path, place: Path) -> None:
    """Compared with `generate` of transformers and rouge-score; the two seeds together see all documents."""
    documents = documents_in(place / "test.jsonl")
    for end, name in enumerate(("predictor", "expert")):
        texts = written_by_itself(place / "t5" / name, "t5", documents)
        expected = package_scores(texts, [one.summary for one in documents])
        for method in ("Random", "ChowMean", "OneTimeModel", "TokenwiseModel", "TokenwiseEntropy"):
            found = [seed.methods[method].curve[-end][1] for seed in load_results(done).seeds]
            assert sum(found) / 2 == pytest.approx(sum(expected) / N_TEST, abs=1e-4)
    assert all(seed.methods["Random"].curve[0][0] == 0 for seed in load_results(done).seeds)


def test_no_method_beats_the_oracles(done: Path) -> None:
    for seed in load_results(done).seeds:
        reached = {name: one for name, one in seed.methods.items() if name != "OptimalFree"}  # which no policy reaches
        best = reached["OptimalToken"]
        assert best.audc <= min(one.audc for one in reached.values())
        assert reached["OptimalOneTime"].audc <= min(
            one.audc for name, one in reached.items() if granularity_of(name) != "token"
        )
        for one in reached.values():
            for deferred, loss in one.curve:
                assert at(best.curve, deferred) <= loss + 1e-4


def at(curve: Sequence[tuple[float, float]], deferred: float) -> float:
    """Return the loss of a curve, interpolated."""
    left = max((point for point in curve if point[0] <= deferred), default=curve[0])
    right = min((point for point in curve if point[0] >= deferred), default=curve[-1])
    if right[0] == left[0]:
        return min(left[1], right[1])
    return left[1] + (right[1] - left[1]) * (deferred - left[0]) / (right[0] - left[0])


def test_notes_and_provenance(done: Path, place: Path) -> None:
    results = load_results(done)
    assert any("OptimalToken is the best found by a beam" in note and "a bound" in note for note in results.notes)
    provenance = results.provenance
    assert provenance.expert_calls.made > N_TRAIN
    assert provenance.expert_calls.saved > 0
    assert provenance.models["predictor"].startswith(f"{place / 't5' / 'predictor'} (")
    assert "20 documents of train.jsonl" in provenance.data["data"]
    assert provenance.data["documents"] == "train 16, validation 4, test 12"
    assert provenance.settings["task"]["shown"] == "facts"
    assert provenance.settings["rollouts"] == 8


def test_the_same_command_again_reuses_what_is_stored(done: Path, place: Path, tmp_path: Path, spy: Spy) -> None:
    shutil.copytree(done, tmp_path / "run")
    fits = [spy(module, name) for name, module in FITS.items()]
    labelled, explored = spy(hand_offs, "branch_out"), spy(exploration, "_explore_batch")
    asked = spy(TextExpert, "start")
    finished(place, tmp_path / "run")
    assert (labelled, explored, fits) == ([], [], [[], [], [], []])
    documents = {one for _, examples in asked for one in examples.ids.tolist()}
    assert documents <= set(range(16))  # the expert is not called for training documents
    assert found_in(tmp_path / "run") == found_in(done)
    assert labels_in(tmp_path / "run") == labels_in(done)


KILLED = """
import os, signal, sys
from seqdefer import cli
from seqdefer.storage import files
left, replace = 3, os.replace
def killed(aside, path):
    global left
    left -= "labels" in str(path)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(aside, path)
files.os.replace = killed
cli.main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_killed_run_resumes(done: Path, place: Path, tmp_path: Path, spy: Spy) -> None:
    """What was finished is complete, and the rest is made as in a run without a kill."""
    folder = tmp_path / "run"
    start = [sys.executable, "-c", KILLED, *command(place, folder)]
    assert subprocess.run(start, capture_output=True, check=False).returncode == -signal.SIGKILL
    kept = labels_in(folder)
    assert 0 < len(kept) < len(labels_in(done))
    assert not (folder / "results.json").exists()
    explored = spy(exploration, "_explore_batch")
    finished(place, folder)
    assert len(explored) == 2
    assert labels_in(folder) == labels_in(done)
    assert kept.items() <= labels_in(folder).items()
    assert found_in(folder) == found_in(done)


def test_decoder_only_models_from_end_to_end(place: Path, tmp_path: Path) -> None:
    more = ["--suffix", " w7 w8", "--methods", "ChowMean,TokenwiseScore", "--rouge", "ids", "--token-loss", "paper"]
    results = load_results(finished(place, tmp_path / "run", *more, "--shown", "states", family="gpt2"))
    documents = documents_in(place / "test.jsonl")
    assert results.units.loss == "100 x (1 - ROUGE-1 on token ids)"
    for end, name in enumerate(("predictor", "expert")):
        model = text_model(tiny("gpt2", *((1, 1) if name == "predictor" else (2, 6))), tiny_tokenizer())
        inputs, _ = encode(tiny_tokenizer(), [one.document for one in documents], "", 40, suffix=" w7 w8")
        wanted = [tiny_tokenizer()(one.summary)["input_ids"] for one in documents]
        losses = map(id_score, generated(model, inputs, LENGTH), wanted)
        found = [seed.methods["Random"].curve[-end][1] for seed in results.seeds]
        assert sum(found) / 2 == pytest.approx(sum(losses) / N_TEST, abs=1e-4)


@pytest.mark.parametrize("more", [["--length", "1"], ["--length", "4", "--dtype", "bfloat16", "--shown", "both"]])
def test_short_sequences_from_end_to_end(more: list[str], place: Path, tmp_path: Path) -> None:
    """Trees are enumerated, so the oracle is exact."""
    methods = ["--methods", "ChowMean,TokenwiseScore"]
    results = load_results(finished(place, tmp_path / "run", *more, *methods))
    assert not any("a bound" in note for note in results.notes)
    for seed in results.seeds:
        assert seed.methods["OptimalToken"].audc <= min(one.audc for one in seed.methods.values())


def test_xsum_reports_on_the_users_own_documents(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the default test documents of the Hub."""
    asked: list[TextOptions] = []
    monkeypatch.setattr("seqdefer.tasks.text.task.prepare", lambda _, options, *rest: asked.append(options))
    default = XSUM.presets["paper"]
    for options in (
        default,
        replace(default, train="own.jsonl"),
        replace(default, train="own.jsonl", test="later.jsonl"),
    ):
        XSUM.prepare(options, place, torch.device("cpu"), Silent())
    assert [one.test for one in asked] == [default.test, None, "later.jsonl"]
