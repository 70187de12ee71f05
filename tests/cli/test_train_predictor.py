"""`seqdefer train-predictor`: training, resuming, bad options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import Capture, content, fails_with, run

TINY_TRAINING = ["--cities", "6", "--instances", "32", "--epochs", "1", "--hidden", "8", "--samples", "2"]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of instances to evaluate on, few because their tours are solved."""
    pytest.importorskip("numba", reason="the local search needs numba: pip install 'seqdefer[tsp]'")
    monkeypatch.setattr("seqdefer.tasks.tsp.task.N_EVALUATION", 20)
    return 20


def test_a_predictor_is_trained_and_can_be_used(judged: int, tmp_path: Path, capsys: Capture) -> None:
    from seqdefer.tasks.tsp.data import gaussian_instances
    from seqdefer.tasks.tsp.pointer import load_pointer
    from seqdefer.tasks.tsp.task import greedy_tours

    folder = tmp_path / "pointer"
    assert run("train-predictor", "tsp", *TINY_TRAINING, "--out", folder, "--device", "cpu") == 0
    shown = capsys.readouterr()
    printed = dict(line.split(": ", 1) for line in shown.out.splitlines())
    assert shown.err == ""
    assert printed["predictor"] == str(folder)
    assert printed["use it"] == f"seqdefer run tsp --cities 6 --predictor {folder}"
    gap, words = printed["gap"].split(" ", 1)
    assert words == f"% over the local search, mean of {judged} fresh instances of 6 cities"
    assert float(gap) >= 0
    model, cities = load_pointer(folder, torch.device("cpu")), gaussian_instances(9, 6, 0, "test")
    assert model.hidden == 8
    assert greedy_tours(model, cities, torch.device("cpu")).sort(1).values.tolist() == [list(range(6))] * 9
    notes = json.loads((folder / "config.json").read_text())["notes"]
    assert (notes["options"]["cities"], notes["options"]["hidden"], notes["judged"]) == (6, 8, judged)
    assert notes["gap"] == pytest.approx(float(gap), abs=0.006)


def test_training_again_trains_nothing_and_prints_the_same(judged: int, tmp_path: Path, capsys: Capture) -> None:
    command = ["train-predictor", "tsp", *TINY_TRAINING, "--out", str(tmp_path), "--device", "cpu", "--json"]
    printed = []
    before: dict[str, bytes] = {}
    for _ in range(2):
        assert run(*command) == 0
        printed.append(json.loads(capsys.readouterr().out))
        assert not before or content(tmp_path) == before
        before = content(tmp_path)
    assert printed[0] == printed[1]
    assert set(printed[0]) == {"predictor", "gap", "use it"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tps"], "unknown task 'tps'; available: "),
        (["weather"], "the predictor of weather has no training command; seqdefer run weather makes the predictor"),
        (["--epochs", "3"], "name the task first: seqdefer train-predictor TASK --epochs ..."),
        (["tsp", "--cities", "3"], "--cities is 3; it must be at least 4"),
        (["tsp", "--cities", "six"], "invalid int value: 'six'; see: seqdefer train-predictor tsp --help"),
        (["tsp", "--clip-norm", "0"], "--clip-norm is 0.0; it must be above 0"),
        (["tsp", "--preset", "quick"], "unrecognized arguments: --preset quick"),
        (["tsp", "--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["tsp", "--device", "abacus"], "unknown device 'abacus'"),
    ],
)
def test_bad_training(arguments: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    line = fails_with(
        capsys, "train-predictor", *arguments, *([] if len(arguments) == 1 else ["--out", tmp_path / "o"])
    )
    assert message in line
    assert not (tmp_path / "o").exists()


def test_training_into_the_folder_of_another(judged: int, tmp_path: Path, capsys: Capture) -> None:
    command = ["train-predictor", "tsp", *TINY_TRAINING, "--out", str(tmp_path), "--device", "cpu"]
    assert run(*command) == 0
    capsys.readouterr()
    before = content(tmp_path)
    line = fails_with(capsys, *command, "--seed", "1")
    assert "was made with other options; choose another folder with --out" in line
    assert content(tmp_path) == before
