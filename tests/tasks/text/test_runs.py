"""Runs of the task `text` from end to end on tiny models: what is in the results, and that a killed run goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from seqdefer import cli
from seqdefer.evaluation import experiment
from seqdefer.evaluation.experiment import REFERENCES, granularity_of
from seqdefer.evaluation.results import load_results
from seqdefer.labels import exploration, hand_offs
from seqdefer.methods.registry import all_methods
from seqdefer.progress import Silent

pytest.importorskip("transformers", reason="needs the extra 'text'")

from tiny_models import generated, random_documents, tiny, write_lines
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text.codec import END_SIGN
from seqdefer.tasks.text.data import Document, encode
from seqdefer.tasks.text.models import text_model
from seqdefer.tasks.text.pairs import TextExpert
from seqdefer.tasks.text.task import XSUM, TextOptions
from tests.tasks.text.test_losses import id_score, package_scores

pytestmark = pytest.mark.usefixtures("one_thread")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
LENGTH = 14  # more than trees are enumerated for


N_TEST, N_TRAIN = 12, 20


def save_place(folder: Path) -> Path:
    """Checkpoints of tiny pairs, and documents for them."""
    for family in ("t5", "gpt2"):
        for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
            tiny(family, n_layers, seed).save_pretrained(folder / family / name)
            tiny_tokenizer().save_pretrained(folder / family / name)
    documents = random_documents(N_TEST + N_TRAIN)
    write_lines(folder / "test.jsonl", documents[:N_TEST])
    write_lines(folder / "train.jsonl", documents[N_TEST:])
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody may change it."""
    return save_place(tmp_path_factory.mktemp("text"))


def models(place: Path, family: str = "t5") -> list[str]:
    return ["--predictor", str(place / family / "predictor"), "--expert", str(place / family / "expert")]


def command(place: Path, out: Path, *more: str, family: str = "t5") -> list[str]:
    data = ["--train", str(place / "train.jsonl"), "--test", str(place / "test.jsonl"), "--device", "cpu", "--quiet"]
    sizes = ["--seeds", "2", "--instances", str(N_TEST // 2), "--length", str(LENGTH), "--rouge", "words"]
    return ["run", "text", *models(place, family), *data, *sizes, "--out", str(out), *more]


def finished(place: Path, out: Path, *more: str, family: str = "t5") -> Path:
    with redirect_stdout(StringIO()):
        assert cli.main(command(place, out, *more, family=family)) == 0
    return out


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from end to end. Nobody may change it."""
    return finished(place, tmp_path_factory.mktemp("done") / "run")


def results_in(folder: Path) -> dict[str, Any]:
    """All but seconds and the folder's name."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    del found["provenance"]["seconds"], found["provenance"]["command"]
    return found


def labels_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "labels").glob("*.safetensors"))}


def documents_in(path: Path) -> list[Document]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Document(str(number), row["document"], row["summary"]) for number, row in enumerate(rows)]


def written_by_itself(folder: Path, family: str, documents: Sequence[Document], suffix: str = "") -> list[str]:
    """What `generate` of the checkpoint writes, one document at a time."""
    import transformers as hf

    kind = hf.AutoModelForSeq2SeqLM if family == "t5" else hf.AutoModelForCausalLM
    network, reader = kind.from_pretrained(folder).eval(), hf.AutoTokenizer.from_pretrained(folder)
    texts = []
    for one in documents:
        ids = reader(one.document + suffix, return_tensors="pt")["input_ids"]
        ids = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        texts.append(reader.decode(ids[0, 0 if family == "t5" else -LENGTH :], skip_special_tokens=True))
    return texts


def test_every_method_is_in_the_results_and_in_the_report(done: Path) -> None:
    results, names = load_results(done), {*all_methods(), *REFERENCES}
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


def test_the_ends_of_the_curves_are_the_models_alone(done: Path, place: Path) -> None:
    """As `generate` of transformers writes and rouge-score counts; both seeds together see all documents."""
    documents = documents_in(place / "test.jsonl")
    for end, name in enumerate(("predictor", "expert")):
        texts = written_by_itself(place / "t5" / name, "t5", documents)
        expected = package_scores(texts, [one.summary for one in documents])
        for method in ("Random", "ChowMean", "OneTimeModel", "TokenwiseModel", "TokenwiseEntropy"):
            found = [seed.methods[method].curve[-end][1] for seed in load_results(done).seeds]
            assert sum(found) / 2 == pytest.approx(sum(expected) / N_TEST, abs=1e-4)
    assert all(seed.methods["Random"].curve[0][0] == 0 for seed in load_results(done).seeds)


def test_the_oracles_are_at_least_as_good_as_everything(done: Path) -> None:
    for seed in load_results(done).seeds:
        best = seed.methods["OptimalToken"]
        assert best.audc <= min(one.audc for one in seed.methods.values())
        assert seed.methods["OptimalOneTime"].audc <= min(
            one.audc for name, one in seed.methods.items() if granularity_of(name) != "token"
        )
        for one in seed.methods.values():
            for deferred, loss in one.curve:
                assert at(best.curve, deferred) <= loss + 1e-4


def at(curve: Sequence[tuple[float, float]], deferred: float) -> float:
    """The loss of a curve there."""
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


def test_the_same_command_again_asks_only_what_is_not_stored(done: Path, place: Path, tmp_path: Path, spy: Spy) -> None:
    shutil.copytree(done, tmp_path / "run")
    fits = [spy(experiment, f"fit_{name}") for name in ("whole", "once", "cost", "token")]
    labelled, explored = spy(hand_offs, "branch_out"), spy(exploration, "_explored")
    asked = spy(TextExpert, "start")
    finished(place, tmp_path / "run")
    assert (labelled, explored, fits) == ([], [], [[], [], [], []])
    documents = {one for _, examples in asked for one in examples.ids.tolist()}
    assert documents <= set(range(16))  # the expert is not asked about what rejectors learn from
    assert results_in(tmp_path / "run") == results_in(done)
    assert labels_in(tmp_path / "run") == labels_in(done)


KILLED = """
import os, signal, sys
from seqdefer import cli, store
left, replace = 3, os.replace
def killed(aside, path):
    global left
    left -= "labels" in str(path)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(aside, path)
store.os.replace = killed
cli.main(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are not there")
def test_a_killed_run_goes_on(done: Path, place: Path, tmp_path: Path, spy: Spy) -> None:
    """No warning, no clean-up: what was finished is whole, and the rest is made as if nothing had been."""
    folder = tmp_path / "run"
    start = [sys.executable, "-c", KILLED, *command(place, folder)]
    assert subprocess.run(start, capture_output=True, check=False).returncode == -signal.SIGKILL
    kept = labels_in(folder)
    assert 0 < len(kept) < len(labels_in(done))
    assert not (folder / "results.json").exists()
    explored = spy(exploration, "_explored")
    finished(place, folder)
    assert len(explored) == 2
    assert labels_in(folder) == labels_in(done)
    assert kept.items() <= labels_in(folder).items()
    assert results_in(folder) == results_in(done)


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
    """Enumerated: the oracle is exact."""
    methods = ["--methods", "ChowMean,TokenwiseScore"]
    results = load_results(finished(place, tmp_path / "run", *more, *methods))
    assert not any("a bound" in note for note in results.notes)
    for seed in results.seeds:
        assert seed.methods["OptimalToken"].audc <= min(one.audc for one in seed.methods.values())


def test_one_file_is_dealt_into_three_parts(place: Path, tmp_path: Path) -> None:
    arguments = command(place, tmp_path / "run", "--methods", "ChowMean", "--instances", "2", "--length", "3")
    where = arguments.index("--test")
    with redirect_stdout(StringIO()):
        assert cli.main([*arguments[:where], *arguments[where + 2 :]]) == 0
    parts = load_results(tmp_path / "run").provenance.data["documents"]
    assert parts == "train 10, validation 2, test 8"


def test_own_documents_for_xsum_are_reported_on_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the Hub, which are the default."""
    asked: list[TextOptions] = []
    monkeypatch.setattr("seqdefer.tasks.text.task.prepare", lambda _, options, *rest: asked.append(options))
    usual = XSUM.presets["paper"]
    for options in (usual, replace(usual, train="own.jsonl"), replace(usual, train="own.jsonl", test="later.jsonl")):
        XSUM.prepare(options, place, torch.device("cpu"), Silent())
    assert [one.test for one in asked] == [usual.test, None, "later.jsonl"]
