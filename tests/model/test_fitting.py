"""`seqdefer fit` on tiny models: a folder that writes what the models alone would, stopped or not, moved or spoilt."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from command_line import content
from small_runs import FITS

from seqdefer import cli
from seqdefer.errors import CheckpointError, InputError, OptionError
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.interfaces import TaskEntry
from seqdefer.labels import exploration, hand_offs
from seqdefer.methods.registry import all_methods
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.fitting import fit_model
from seqdefer.model.learning import QualityRequest, served_of
from seqdefer.registry import load_task
from seqdefer.rejectors.checkpoints import load_rejector

pytest.importorskip("transformers", reason="needs the extra 'text'")

from text_runs import LENGTH, Capture, refused, written_by_itself
from tiny_models import random_documents, tiny, words, write_lines
from tiny_models import tokenizer as tiny_tokenizer

from seqdefer.tasks.text.codec import TruncationWarning
from seqdefer.tasks.text.task import TEXT, TextOptions

pytestmark = pytest.mark.usefixtures("one_thread", "one_timed_budget")
Spy = Callable[[Any, str], list[tuple[Any, ...]]]
METHODS = ("TokenwiseModel", "OneTimeModel", "OneTimeCost")
each_method = pytest.mark.parametrize("method", METHODS)
TEXTS = [one.document for one in random_documents(12, seed=9)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair and documents for it. Nobody may change them."""
    folder = tmp_path_factory.mktemp("fit")
    for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
        tiny("t5", n_layers, seed).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    write_lines(folder / "train.jsonl", random_documents(30))
    return folder


def command(place: Path, out: Path, *more: str) -> list[str]:
    pair = ["--predictor", str(place / "predictor"), "--expert", str(place / "expert")]
    data = ["--train", str(place / "train.jsonl"), "--length", str(LENGTH)]
    return ["fit", "text", *pair, *data, "--device", "cpu", "--quiet", "--out", str(out), *more]


def fitted(place: Path, out: Path, *more: str) -> Path:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert cli.main(command(place, out, *more)) == 0
    return out


@dataclass(frozen=True)
class Fits:
    folders: dict[str, Path]  # by method
    n_labelled: dict[str, int]  # calls that label hand-offs


@pytest.fixture(scope="module")
def fits(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Fits:
    """A model of each kind. Nobody may change them."""
    home, made, branch_out = tmp_path_factory.mktemp("models"), Fits({}, {}), hand_offs.branch_out
    for method in METHODS:
        with mock.patch.object(hand_offs, "branch_out", side_effect=branch_out) as labelled:
            made.folders[method] = fitted(place, home / method, "--method", method)
        made.n_labelled[method] = labelled.call_count
    return made


@pytest.fixture(scope="module")
def folders(fits: Fits) -> dict[str, Path]:
    return fits.folders


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, DeferringModel]:
    return {method: DeferringModel.from_pretrained(folder, device="cpu") for method, folder in folders.items()}


def plain_documents(texts: list[str]) -> Any:
    return [replace(random_documents(1)[0], document=text) for text in texts]


@each_method
def test_the_ends_are_generate_of_the_models_alone(method: str, place: Path, models: dict[str, DeferringModel]) -> None:
    ends = {0.0: "predictor", 1.0: "expert"} if method != "OneTimeModel" else {0.0: "predictor"}
    for budget, name in ends.items():
        found = models[method].generate(TEXTS, budget, batch_size=5)
        assert found.outputs == written_by_itself(place / name, "t5", plain_documents(TEXTS))
        assert found.share == budget


@each_method
def test_batches_streams_and_decisions_agree(method: str, models: dict[str, DeferringModel]) -> None:
    model = models[method]
    threshold = sorted(one.threshold for one in model.calibration.settings)[60]  # type: ignore[union-attr]
    together = model.generate(TEXTS, threshold=threshold)
    for size in (1, 5, 1000):
        assert model.generate(TEXTS, threshold=threshold, batch_size=size).outputs == together.outputs
    for one, output, sources in zip(TEXTS, together.outputs, together.sources, strict=True):
        pieces = list(model.stream(one, threshold=threshold))
        assert "".join(piece.text for piece in pieces) == output
        assert [piece.source for piece in pieces] == sources
    decided, alone = model.decide(TEXTS, threshold=threshold), model.generate(TEXTS, 0.0)
    assert decided.outputs == alone.outputs
    torch.testing.assert_close(decided.scores, alone.scores)


@each_method
def test_calibrated_shares_are_those_of_rollouts(method: str, folders: dict[str, Path]) -> None:
    """Of two models whose batches round differently, too."""
    model = DeferringModel.from_pretrained(folders[method], device="cpu")
    texts = [one.document for one in random_documents(24, seed=4)]
    found = model.calibrate(texts)
    for setting in {one.threshold: one for one in found.settings[::20]}.values():
        written = model.generate(texts, threshold=setting.threshold, batch_size=7)
        assert sum(written.expert_tokens) / int(written.sequences.lengths.sum()) == setting.share


def test_json_has_what_the_table_has(place: Path, fits: Fits, tmp_path: Path, capsys: Capture) -> None:
    """It had no losses."""
    folder = shutil.copytree(fits.folders["OneTimeCost"], tmp_path / "model")
    assert cli.main(command(place, folder, "--method", "OneTimeCost", "--json")) == 0
    found, curve = json.loads(capsys.readouterr().out), DeferringModel.from_pretrained(folder, device="cpu").curve
    assert curve is not None
    assert found["curve"] == json.loads((folder / "curve.json").read_text())
    assert found["curve"]["gap"][0] < curve.points[0].loss - curve.points[-1].loss < found["curve"]["gap"][1]
    for one in found["budgets"]:
        assert (one["loss"], one["random"]) == (curve.loss_at(one["share"]), curve.random_at(one["share"]))


def test_validation_inputs_are_calibrated_on(folders: dict[str, Path], models: dict[str, DeferringModel]) -> None:
    for method, model in models.items():
        assert model.calibration is not None
        assert model.calibration.inputs == 6  # of 30; 24 to learn from
        kept = load_rejector(folders[method] / "work" / "rejectors" / f"{method}-seed0")
        saved = load_rejector(folders[method] / "rejector")
        assert all(torch.equal(value, saved.state_dict()[name]) for name, value in kept.state_dict().items())
        assert saved.notes["method"] == method


def test_the_expert_is_asked_for_what_is_learned_from(place: Path, fits: Fits, tmp_path: Path, spy: Spy) -> None:
    """By token no hand-off at all; else those that are allowed, and what is fitted is what all of them would give."""
    assert fits.n_labelled["TokenwiseModel"] == 0
    assert fits.n_labelled["OneTimeCost"] > 0
    asked = spy(hand_offs, "branch_out")
    few = fitted(place, tmp_path / "few", "--method", "OneTimeCost", "--hand-offs", "3")
    assert {tuple(kept.tolist()) for _, _, _, kept, _ in asked} == {(0, LENGTH // 2)}
    labels = fits.folders["OneTimeCost"] / "work" / "labels"
    shutil.copytree(labels, tmp_path / "all" / "work" / "labels")  # all of them
    before = len(asked)
    same = fitted(place, tmp_path / "all", "--method", "OneTimeCost", "--hand-offs", "3")
    assert len(asked) == before
    for name in ("rejector/model.safetensors", "calibration.json", "curve.json"):
        assert (few / name).read_bytes() == (same / name).read_bytes()


def test_nothing_is_kept_to_report_on(place: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever was asked for: of 30 documents, 12 once went into a test split that nobody read."""
    asked = ["--test-documents", "500", "--test", str(place / "train.jsonl")]
    shutil.copytree(folders["OneTimeCost"] / "work", tmp_path / "model" / "work")  # other splits add files to it
    folder = fitted(place, tmp_path / "model", "--method", "OneTimeCost", *asked)
    assert content(folder) == content(folders["OneTimeCost"])
    tours = load_task("tsp").presets["paper"]
    assert tours.without_test() == replace(tours, test=1)


@each_method
def test_the_same_command_again_fits_and_labels_nothing(
    method: str, place: Path, folders: dict[str, Path], tmp_path: Path, spy: Spy
) -> None:
    shutil.copytree(folders[method], tmp_path / "model")
    fits = [spy(module, name) for name, module in FITS.items()]
    labelled, explored = spy(hand_offs, "branch_out"), spy(exploration, "_explore_batch")
    fitted(place, tmp_path / "model", "--method", method)
    assert (labelled, explored, fits) == ([], [], [[]] * 4)
    assert content(tmp_path / "model") == content(folders[method])


KILLED = """
import os, signal, sys
from seqdefer import cli
from seqdefer.storage import files
left, replace = int(sys.argv[1]), os.replace
def killed(aside, path):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(aside, path)
files.os.replace = killed
cli.main(sys.argv[2:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are not there")
@pytest.mark.parametrize("left", [2, -1])
def test_a_killed_fit_resumes(left: int, place: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """Amid the labels, and right before the last file."""
    n_files = len(content(folders["TokenwiseModel"]))
    which, folder = left if left > 0 else n_files, tmp_path / "model"
    start = [sys.executable, "-c", KILLED, str(which), *command(place, folder)]
    assert subprocess.run(start, capture_output=True, check=False).returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="the same seqdefer fit resumes it"):
        DeferringModel.from_pretrained(folder)
    fitted(place, folder)
    left_over = {name for name in content(folder) if Path(name).name.startswith(".")}  # half of a file, aside
    assert len(left_over) == 1
    whole = {name: value for name, value in content(folder).items() if name not in left_over}
    assert whole == content(folders["TokenwiseModel"])


def test_a_method_by_token_is_the_default(place: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    options = TextOptions(**json.loads((folders["OneTimeCost"] / "deferral.json").read_text())["options"])
    shutil.copytree(folders["TokenwiseModel"] / "work", tmp_path / "work")
    model = fit_model(TEXT, options, experiment_settings(TEXT, "quick"), tmp_path, device="cpu")
    assert model.rejector.notes["method"] == "TokenwiseModel"
    assert model.generate(TEXTS[:2], 1.0).share == 1
    assert json.loads((tmp_path / "deferral.json").read_text())["recipe"] == "ours"


# -- what is refused -----------------------------------------------------------------------------------------------


def test_another_pair_in_the_same_place_is_refused(place: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    for role, sizes in {"predictor": (1, 3), "expert": (2, 7)}.items():
        home = tmp_path / role
        shutil.copytree(folders["TokenwiseModel"], home / "model")
        for name in ("predictor", "expert"):
            shutil.copytree(place / name, home / name)
        tiny("t5", *sizes).save_pretrained(home / role)
        path = home / "model" / "deferral.json"
        record = json.loads(path.read_text())
        record["options"] |= {name: str(home / name) for name in ("predictor", "expert")}
        path.write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match=f"was fitted with {role} .*, and what it names is now .*; put that"):
            DeferringModel.from_pretrained(home / "model", device="cpu")


def test_a_pair_that_is_gone(place: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["TokenwiseModel"], tmp_path / "model")
    path = tmp_path / "model" / "deferral.json"
    path.write_text(path.read_text().replace(str(place / "expert"), str(tmp_path / "gone")))
    with pytest.raises(InputError, match="gone"):
        DeferringModel.from_pretrained(tmp_path / "model", device="cpu")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["w5", ""], "input 2 of 2 is empty; give a text"),
        ([" \n"], "input 1 of 1 is empty; give a text"),
        ([5], "input 1 of 1 is a int; give a text"),
        (["w5", None], "input 2 of 2 is a NoneType; give a text"),
    ],
)
def test_inputs_that_are_no_texts(inputs: list[Any], message: str, models: dict[str, DeferringModel]) -> None:
    for call in (models["TokenwiseModel"].generate, models["TokenwiseModel"].decide):
        with pytest.raises(InputError, match=message):
            call(inputs)


def test_long_inputs_are_cut_and_it_is_said(place: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["TokenwiseModel"], tmp_path / "model")
    path = tmp_path / "model" / "deferral.json"
    path.write_text(path.read_text().replace('"input_tokens": 448', '"input_tokens": 3'))
    model = DeferringModel.from_pretrained(tmp_path / "model", device="cpu")
    with pytest.warns(TruncationWarning, match="1 of 2 documents are longer than 3 tokens and were truncated"):
        written = model.generate(["w5 w6 w7 w8", "w5"], 0.0)
    assert written.outputs[0] == model.generate(["w5 w6 w7"], 0.0).outputs[0]


def test_tasks_and_methods_that_cannot_be(place: Path, tmp_path: Path, capsys: Capture) -> None:
    said = refused(capsys, "fit", "weather", "--out", tmp_path / "model")
    assert said == "task 'weather' takes no inputs of your own, so there is nothing to fit a rejector for"
    said = refused(capsys, *command(place, tmp_path / "model", "--method", "Luck"))
    assert said == f"unknown method 'Luck'; available: {', '.join(sorted(all_methods()))}"
    assert "unknown preset 'huge'" in refused(capsys, *command(place, tmp_path / "model", "--preset", "huge"))
    assert "unrecognized arguments: --seeds 3" in refused(capsys, *command(place, tmp_path / "model", "--seeds", "3"))
    assert not (tmp_path / "model").exists()
    task = load_task("weather")
    with pytest.raises(OptionError, match="takes no inputs of your own"):
        fit_model(task, None, experiment_settings(task, "quick"), tmp_path)


def test_a_task_without_a_codec_serves_nothing(tmp_path: Path) -> None:
    """Bug: `fit` said so only after it had labelled and fitted."""
    from seqdefer.testing import ToyTask

    words = "task 'toy' cannot read inputs of your own: it has no codec"
    with pytest.raises(OptionError, match=words):
        served_of(ToyTask())
    options = TextOptions()  # any options do
    entry = TaskEntry("toy", "", {"quick": options}, lambda *_: ToyTask(), serve=lambda *_: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(OptionError, match=words):
        fit_model(entry, options, None, tmp_path / "model")
    assert not list((tmp_path / "model").rglob("*.safetensors"))  # neither labels nor a rejector


# -- data ----------------------------------------------------------------------------------------------------------


def test_gzip_and_other_fields(place: Path, tmp_path: Path) -> None:
    import random

    generator = random.Random(0)
    rows = [{"article": words(generator, 9), "gist": words(generator, 5)} for _ in range(12)]
    with gzip.open(tmp_path / "own.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    more = ["--train", str(tmp_path / "own.jsonl.gz"), "--document-field", "article", "--summary-field", "gist"]
    folder = fitted(place, tmp_path / "model", *more, "--length", "4", "--method", "OneTimeCost")
    with redirect_stdout(StringIO()):  # the field is known from fit
        assert cli.main(["calibrate", str(folder), "--data", str(tmp_path / "own.jsonl.gz"), "--quiet"]) == 0
    model = DeferringModel.from_pretrained(folder, device="cpu")
    assert model.calibration is not None
    assert model.calibration.inputs == 12


def test_a_quality_is_promised_on_documents_kept_apart(place: Path, tmp_path: Path) -> None:
    folder = fitted(place, tmp_path / "model", "--method", "TokenwiseScore", "--within", "90", "--confidence", "0.6")
    model = DeferringModel.from_pretrained(folder, device="cpu")
    found = model.quality
    assert found is not None
    assert (found.within, found.confidence, found.unit) == (90.0, 0.6, "100 x (1 - ROUGE-1 on token ids)")
    assert found.loss <= found.expert_loss + 90
    assert model.calibration is not None
    assert model.calibration.promise is None
    assert model.learned_from is not None
    assert found.inputs < len(model.learned_from.inputs)
    written = model.generate(TEXTS, threshold=found.threshold)
    assert 0 <= written.share < 1
    with pytest.raises(OptionError, match=r"within is 0\.0"):
        QualityRequest(0.0)


def test_a_promise_that_cannot_be_made_leaves_the_fitted_model(place: Path, tmp_path: Path) -> None:
    """Regression: nothing was written, after a whole fit."""
    folder, errors = tmp_path / "model", StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(errors):
        assert cli.main(command(place, folder, "--method", "TokenwiseScore", "--within", "0.001")) == 2
    assert "no setting but the expert alone can be promised" in errors.getvalue()
    assert DeferringModel.from_pretrained(folder, device="cpu").quality is None
