"""The command line: what it prints where, its exit statuses, and one line for whatever the user can mend."""

from __future__ import annotations

import errno
import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import field, make_dataclass, replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import temperatures, write_record

import seqdefer
from seqdefer import cli
from seqdefer.cli.common import progress
from seqdefer.evaluation import experiment
from seqdefer.evaluation.results import load_results
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.interfaces import TaskEntry
from seqdefer.tasks.weather.task import ENTRY

SMALL = ["--stride", "12", "--hidden", "2", "--epochs", "1", "--passes", "2", "--seeds", "1", "--instances", "20"]
Capture = pytest.CaptureFixture[str]


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def done(record: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run from end to end: its folder, what it printed and what it said. Nobody may change it."""
    folder, out, talk = tmp_path_factory.mktemp("done") / "run", StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(talk):
        assert run("run", "weather", "--data", record, "--out", folder, *SMALL, "--json") == 0
    return folder, out.getvalue(), talk.getvalue()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- what works ----------------------------------------------------------------------------------------------------


def test_results_go_to_stdout_and_to_the_folder(done: tuple[Path, str, str]) -> None:
    folder, out, talk = done
    assert json.loads(out) == json.loads((folder / "results.json").read_text())
    assert talk.split() == ["report:", str(folder / "report.html"), "results:", str(folder / "results.json")]
    results = load_results(folder)
    assert (results.task, results.preset, len(results.seeds)) == ("weather", "quick", 1)
    assert "TokenwiseModel" in (folder / "report.html").read_text()


def test_options_reach_the_run(record: Path, done: tuple[Path, str, str]) -> None:
    settings = load_results(done[0]).provenance.settings
    assert {name: settings[name] for name in ("seeds", "instances")} == {"seeds": 1, "instances": 20}
    chosen = {"data": str(record), "stride": 12, "hidden": 2, "epochs": 1, "passes": 2}
    assert {name: settings["task"][name] for name in chosen} == chosen
    assert settings["task"]["noise"] == ENTRY.presets["quick"].noise
    assert settings["token"]["epochs"] == experiment_settings(experiment.load_task("weather"), "quick").token.epochs


def test_the_same_command_again_goes_on_and_prints_a_table(
    record: Path, done: tuple[Path, str, str], tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(done[0], folder)
    before = content(folder)
    assert run("run", "weather", "--data", record, "--out", folder, *SMALL, "--quiet") == 0
    out = capsys.readouterr().out
    results = load_results(folder)
    assert results.summary == load_results(done[0]).summary
    for name, one in results.summary.items():
        row = next(line for line in out.splitlines() if line.split()[:1] == [name])
        assert f"{one.audc_mean:.2f}" in row or f"{one.audc_mean:.1f}" in row
    changed = [name for name, value in content(folder).items() if before.get(name) != value]
    assert set(changed) <= {"results.json", "report.html"}  # seconds; nothing was fitted again


def test_plot_draws_a_run_again(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    assert run("plot", done[0], "--out", tmp_path / "drawn") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.parent for path in written} == {tmp_path / "drawn"}
    assert (tmp_path / "drawn" / "report.html").read_bytes() == (done[0] / "report.html").read_bytes()
    assert any(path.suffix == ".svg" and path.stat().st_size > 1000 for path in written)
    assert set(content(tmp_path / "drawn")) == {path.name for path in written}


@pytest.mark.parametrize("is_file", [False, True])
def test_plot_keeps_the_drawings_of_a_run(
    is_file: bool, done: tuple[Path, str, str], tmp_path: Path, capsys: Capture
) -> None:
    """Also into another folder; but not those that could do more than be looked at."""
    shutil.copy(done[0] / "results.json", tmp_path)
    chosen = tmp_path / "results.json" if is_file else tmp_path
    reports = {}
    for name, drawn in {"ours": "<p>a tour</p>", "hostile": '<p onclick="alert(1)">a tour</p>', "none": ""}.items():
        (tmp_path / "examples.html").write_text(drawn)
        assert run("plot", chosen, "--out", tmp_path / name) == 0
        reports[name] = (tmp_path / name / "report.html").read_text()
        assert not (tmp_path / name / "examples.html").exists()
    assert "<p>a tour</p>" in reports["ours"]
    assert reports["hostile"] == reports["none"]
    assert "a tour" not in reports["none"]
    assert capsys.readouterr().err == ""


def test_plot_of_drawings_that_are_no_text(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    """Once a traceback."""
    shutil.copy(done[0] / "results.json", tmp_path)
    (tmp_path / "examples.html").write_bytes(bytes(range(256)))
    assert run("plot", tmp_path) == 0
    assert capsys.readouterr().err == ""


def test_plot_takes_the_file_itself(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    shutil.copy(done[0] / "results.json", tmp_path)
    assert run("plot", tmp_path / "results.json") == 0
    assert (tmp_path / "report.html").is_file()
    assert capsys.readouterr().err == ""


def test_tasks(capsys: Capture) -> None:
    assert run("tasks") == 0
    assert ["weather", ENTRY.summary] in [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert run("tasks", "--json") == 0
    assert json.loads(capsys.readouterr().out)["weather"] == ENTRY.summary


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], ["run", "tasks", "plot", "seqdefer run weather --preset quick", "AUDC"]),
        (["run", "--help"], ["seqdefer run TASK", "weather"]),
        (["run", "weather", "--help"], ["--seeds", "--phi logistic|", "--strategy", "--noise", "--data", "--no-facts"]),
        (["plot", "--help"], ["DIR", "results.json"]),
        (["train-predictor", "--help"], ["usage: seqdefer train-predictor TASK [options]", "tsp"]),
        (
            ["train-predictor", "tsp", "--help"],
            ["--cities", "--epochs", "--learning-rate", "--out", "(predictors/tsp)"],
        ),
        (["--version"], [f"seqdefer {seqdefer.__version__}"]),
    ],
)
def test_help(arguments: list[str], expected: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    shown = capsys.readouterr()
    assert stopped.value.code == 0
    assert shown.err == ""
    for words in expected:
        assert words in shown.out


def test_every_option_of_the_task_has_help(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        run("run", "weather", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    for name, option in type(ENTRY.presets["quick"]).__dataclass_fields__.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert option.metadata["help"][:20] in shown


def test_help_shows_what_is_used_if_nothing_is_given(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        run("run", "weather", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("weights (3)", "a run (100)", "go on (explore)", "windows (3)", "pip (mast)", "states (yes)"):
        assert words in shown


def install(monkeypatch: pytest.MonkeyPatch, **fields: tuple[type, Any]) -> None:
    """Puts the task "made" with these options in the place of every other."""
    kind = make_dataclass("Options", [(name, *rest) for name, rest in fields.items()], frozen=True)
    entry = TaskEntry("made", "a task", {"quick": kind()}, ENTRY.prepare)
    monkeypatch.setattr(experiment, "load_task", lambda name: entry)


def test_help_shows_no_empty_default(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, prefix=(str, field(default="", metadata={"help": "what comes first"})))
    with pytest.raises(SystemExit):
        run("run", "made", "--help")
    assert "what comes first\n" in capsys.readouterr().out


def test_percent_signs_in_the_help_of_a_task(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, share=(str, field(default="5 %", metadata={"help": "100 % of %(prog)s"})))
    with pytest.raises(SystemExit):
        run("run", "made", "--help")
    assert "100 % of %(prog)s (5 %)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["seeds", "hand_offs", "help", "out"])
def test_an_option_that_is_taken(name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{name: (int, field(default=1))})
    line = fails_with(capsys, "run", "made")
    flag = "--" + name.replace("_", "-")
    assert f"the field {name!r} of the options of task 'made' cannot become the option {flag}" in line
    assert f"conflicting option string: {flag}" in line


def captured_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[Any, Any, dict[str, Any]]:
    """The options, the settings and the rest with which a command would run."""
    calls: list[Any] = []

    def note(entry: Any, options: Any, settings: Any, folder: Path, **rest: Any) -> None:
        calls.append((options, settings, rest))
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run_task", note)
    assert run("run", *arguments, "--out", tmp_path / "a b") == 130
    (call,) = calls
    return call  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", ["draft_mlp", "draft_transformer"])
def test_what_scores_drafts_can_be_chosen(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings, _ = captured_run(monkeypatch, tmp_path, "weather", "--draft-architecture", architecture)
    expected = experiment_settings(experiment.load_task("weather"), "quick", architecture)
    assert (settings.once, settings.cost) == (expected.once, expected.cost)
    assert {settings.once.architecture, settings.cost.architecture} == {architecture}
    assert settings.token == expected.token


def test_the_command_is_kept_as_a_shell_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = captured_run(monkeypatch, tmp_path, "weather", "--data", "my file.csv")[2]
    expected = ["seqdefer", "run", "weather", "--data", "my file.csv", "--out", str(tmp_path / "a b")]
    assert shlex.split(rest["command"]) == expected


def test_options_of_the_task_are_not_those_of_the_rejectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --architecture, the predictor's --epochs became those of the token-level rejector as well."""
    options, settings, _ = captured_run(monkeypatch, tmp_path, "weather", "--architecture", "mlp", "--epochs", "7")
    usual = experiment_settings(experiment.load_task("weather"), "quick").token
    assert options.epochs == 7
    assert settings.token == replace(usual, architecture="mlp")


def test_a_terminal_that_knows_ascii_alone(
    record: Path, done: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's degree sign was a UnicodeEncodeError."""
    monkeypatch.setattr(experiment, "run_task", lambda *arguments, **options: load_results(done[0]))
    raw = BytesIO()
    with TextIOWrapper(raw, encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run("run", "weather", "--data", record, "--out", tmp_path, "--quiet") == 0
        stream.flush()
        assert b"TokenwiseModel" in raw.getvalue()
        monkeypatch.undo()


def test_it_is_a_module_too() -> None:
    command = [sys.executable, "-m", "seqdefer", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout == f"seqdefer {seqdefer.__version__}\n"


@pytest.mark.parametrize("quiet", [["--quiet"], []])
def test_ctrl_c(
    quiet: list[str], record: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "fit_once", stop)
    assert run("run", "weather", "--data", record, "--out", tmp_path, *SMALL, *quiet) == 130
    shown = capsys.readouterr()
    assert shown.err == "seqdefer: stopped; the same command goes on from what is finished\n"
    assert shown.out == ""
    check_nothing_half_written(tmp_path)


def test_work_of_another_task_stays(
    record: Path, done: tuple[Path, str, str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results were replaced without a word. What cannot be read is nobody's."""
    tour, model = tmp_path / "tour", tmp_path / "model"
    for folder, file in ((tour, "results.json"), (model, "deferral.json")):
        folder.mkdir()
        (folder / file).write_text('{"task": "tsp"}')
        for command in ("run", "label"):
            assert run(command, "weather", "--data", record, "--out", folder, "--quiet") == 2
            told = f"seqdefer: {folder} holds work of task 'tsp'; choose another folder with --out\n"
            assert capsys.readouterr().err == told
        assert content(folder) == {file: b'{"task": "tsp"}'}
    monkeypatch.setattr(experiment, "run_task", lambda *arguments, **options: load_results(done[0]))
    (tour / "results.json").write_text("no JSON")
    assert run("run", "weather", "--data", record, "--out", tour, "--quiet") == 0


def test_a_log_is_told_of_what_takes_long(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 20.0, 31.0, 45.0, 62.0, 70.0, 100.0, 110.0])
    monkeypatch.setattr("seqdefer.cli.common.time.monotonic", lambda: next(seconds))
    with progress(quiet=False) as meter:
        with meter.stage("long work", 8) as advance:
            for _ in range(4):
                advance(2)
        with meter.stage("short work", 1) as advance:
            advance(1)
    told = ["long work: 4 of 8, 31 s", "long work: 8 of 8, 62 s", "long work: done, 70 s"]
    assert capsys.readouterr().err.splitlines() == told


# -- train-predictor -----------------------------------------------------------------------------------------------

TINY_TRAINING = ["--cities", "6", "--instances", "32", "--epochs", "1", "--hidden", "8", "--samples", "2"]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> int:
    """Few instances to judge with: their tours are solved."""
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
    told = dict(line.split(": ", 1) for line in shown.out.splitlines())
    assert shown.err == ""
    assert told["predictor"] == str(folder)
    assert told["use it"] == f"seqdefer run tsp --cities 6 --predictor {folder}"
    gap, words = told["gap"].split(" ", 1)
    assert words == f"% over the local search, mean of {judged} fresh instances of 6 cities"
    assert float(gap) >= 0
    model, cities = load_pointer(folder, torch.device("cpu")), gaussian_instances(9, 6, 0, "test")
    assert model.hidden == 8
    assert greedy_tours(model, cities, torch.device("cpu")).sort(1).values.tolist() == [list(range(6))] * 9
    assert json.loads((folder / "config.json").read_text())["notes"]["gap"] == pytest.approx(float(gap), abs=0.006)


def test_training_again_trains_nothing_and_says_the_same(judged: int, tmp_path: Path, capsys: Capture) -> None:
    command = ["train-predictor", "tsp", *TINY_TRAINING, "--out", str(tmp_path), "--device", "cpu", "--json"]
    told = []
    before: dict[str, bytes] = {}
    for _ in range(2):
        assert run(*command) == 0
        told.append(json.loads(capsys.readouterr().out))
        assert not before or content(tmp_path) == before
        before = content(tmp_path)
    assert told[0] == told[1]
    assert set(told[0]) == {"predictor", "gap", "use it"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tps"], "unknown task 'tps'; available: "),
        (["weather"], "the predictor of weather has no training of its own: seqdefer run weather makes it"),
        (["--epochs", "3"], "name the task first: seqdefer train-predictor TASK --epochs ..."),
        (["tsp", "--cities", "3"], "--cities is 3; it must be at least 4"),
        (["tsp", "--cities", "six"], "invalid int value: 'six'; see: seqdefer train-predictor tsp --help"),
        (["tsp", "--epochs", "0"], "--epochs is 0; it must be at least 1"),
        (["tsp", "--samples", "1"], "--samples is 1; it must be at least 2"),
        (["tsp", "--batch-size", "-1"], "--batch-size is -1; it must be at least 1"),
        (["tsp", "--learning-rate", "nan"], "--learning-rate is nan; it must be above 0"),
        (["tsp", "--clip-norm", "0"], "--clip-norm is 0.0; it must be above 0"),
        (["tsp", "--seed", "-1"], "--seed is -1"),
        (["tsp", "--seed", str(10**30)], f"--seed is {10**30}"),
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


# -- what the user can mend ----------------------------------------------------------------------------------------


def fails_with(capsys: Capture, *arguments: str | Path) -> str:
    """Runs a command that must fail: status 2, one line on stderr, nothing on stdout. The line."""
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("seqdefer: ")
    assert shown.err.endswith("\n")
    assert shown.err.count("\n") == 1
    return shown.err


def check_nothing_half_written(folder: Path) -> None:
    """No result, nothing written aside, and every checkpoint whole."""
    names = set(content(folder)) if folder.is_dir() else set()
    assert not names & {"results.json", "report.html"}
    assert not [name for name in names if Path(name).name.startswith(".")]
    for name in names:
        assert {str(Path(name).parent / part) for part in ("config.json", "model.safetensors")} <= names


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "unknown preset": (["--preset", "huge"], "unknown preset 'huge'; available: paper, quick"),
    "unknown phi": (["--phi", "hinge"], "unknown loss 'hinge'; available: exponential, logistic"),
    "unknown psi": (["--psi", "logistic"], "unknown loss 'logistic'; available: cross_entropy"),
    "unknown strategy": (["--strategy", "luck"], "unknown training strategy 'luck'; available: explore"),
    "unknown method": (["--methods", "ChowMean,Magic"], "unknown method 'Magic'; available: ChowMean, "),
    "unknown architecture": (
        ["--architecture", "draft_mlp"],
        "unknown token-level architecture 'draft_mlp'; available: lstm, mlp",
    ),
    "unknown architecture by draft": (
        ["--draft-architecture", "lstm"],
        "unknown architecture by draft 'lstm'; available: draft_mlp, draft_transformer",
    ),
    "unknown split": (["--split", "days"], "unknown split 'days'; available: chronological, weeks"),
    "unknown option": (["--sedes", "3"], "unrecognized arguments: --sedes 3; see: seqdefer run weather --help"),
    "abbreviated option": (["--seed", "3"], "unrecognized arguments: --seed 3"),
    "no value": (["--seeds"], "expected one argument"),
    "seeds not a number": (["--seeds", "three"], "invalid int value: 'three'"),
    "no seeds": (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
    "no instances": (["--instances", "0"], "--instances is 0; it must be at least 1"),
    "instances too many": (["--instances", "10000"], "1 seeds x 10000"),
    "hand-offs 0": (["--hand-offs", "0"], "cannot place 0 hand-offs over a length of 6; choose from 2 to 7"),
    "hand-offs 1": (["--hand-offs", "1"], "choose from 2 to 7"),
    "hand-offs 8": (["--hand-offs", "8"], "choose from 2 to 7"),
    "hand-offs negative": (["--hand-offs", "-2"], "choose from 2 to 7"),
    "noise negative": (["--noise", "-0.5"], "--noise is -0.5; it must be between 0 and 1000 degrees"),
    "noise not a number": (["--noise", "nan"], "--noise is nan"),
    "alpha not a number": (["--alpha", "nan"], "--alpha is nan"),
    "alpha infinite": (["--alpha", "inf"], "--alpha is inf"),
    "alpha negative": (["--alpha", "-1"], "--alpha is -1.0"),
    "no epochs": (["--epochs", "0"], "--epochs is 0; it must be at least 1"),
    "one pass": (["--passes", "1"], "--passes is 1; it must be at least 2"),
    "stride 0": (["--stride", "0"], "--stride is 0"),
    "split seed negative": (["--split-seed", "-1"], "--split-seed is -1"),
    "split seed too large": (["--split-seed", str(2**63)], f"it must be at most {2**63 - 1}"),
    "stride too large": (["--stride", str(10**27)], "it must be at most 10080"),
    "hidden too large": (["--hidden", "1000000000"], "--hidden is 1000000000; it must be at most 4096"),
    "passes too many": (["--passes", "2000000000"], "--passes is 2000000000; it must be at most 1000"),
    "epochs too many": (["--epochs", "10001"], "--epochs is 10001; it must be at most 10000"),
    "noise too large": (["--noise", "1e308"], "--noise is 1e+308"),
    "a column of a known record": (["--data", "mast", "--column", "T2m"], "--column is 'T2m', but"),
    "line ends and escapes": (["--split", "a\n\x1b[31m"], r"unknown split 'a\n\x1b[31m'"),
    "line ends in a flag": (["--a\nb"], r"unrecognized arguments: --a\nb"),
    "unknown device": (["--device", "abacus"], "device"),
    "device that is not here": (["--device", "meta"], "device 'meta' is not on this machine"),
    "no such column": (
        ["--column", "dew point"],
        "no temperature column: looked for 'dew point'; the columns are: 'Date",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(options: list[str], message: str, record: Path, tmp_path: Path, capsys: Capture) -> None:
    line = fails_with(capsys, "run", "weather", "--data", record, "--out", tmp_path / "out", *SMALL, *options)
    assert message in line
    check_nothing_half_written(tmp_path / "out")
    assert not (tmp_path / "out").exists() or content(tmp_path / "out")  # a folder that was made for nothing is gone


def test_a_gpu_that_is_not_here(record: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = fails_with(capsys, "run", "weather", "--data", record, "--out", tmp_path, "--device", "cuda")
    assert "device 'cuda' is not on this machine; use --device auto or --device cpu" in line


def rows(values: list[float]) -> Callable[[Path], None]:
    return lambda path: write_record(path, np.array(values)) and None


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


BAD_RECORDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "not there": (lambda path: None, "cannot read"),
    "a folder": (lambda path: path.mkdir(), "cannot read"),
    "empty": (text(""), "no time column"),
    "no temperature column": (text("Date Time,p (mbar)\n2021-01-01 00:00:00,990\n"), "no temperature column"),
    "no time column": (text("when,T (degC)\n2021-01-01 00:00:00,1.0\n"), "no time column"),
    "a time that is none": (text("Date Time,T (degC)\nyesterday,1.0\n"), "line 2: cannot read the time 'yesterday'"),
    "a header alone": (text("Date Time,T (degC)\n"), "at least 2 are needed"),
    "too few rows": (rows(temperatures()[:10].tolist()), "10 rows, 0 gaps and no window"),
    "too few weeks": (rows(temperatures()[:400].tolist()), "a split by weeks needs at least 4"),
    "all missing": (rows([-9999.0] * 500), "only 0 of 500 rows have a temperature"),
    "all NaN": (rows([math.nan] * 500), "only 0 of 500 rows have a temperature"),
    "not text": (lambda path: path.write_bytes(bytes(range(256)) * 40) and None, "column"),
    "a zip archive": (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(50)) and None, "is a zip archive"),
}


@pytest.mark.parametrize(("make", "message"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_bad_records(make: Callable[[Path], None], message: str, tmp_path: Path, capsys: Capture) -> None:
    make(tmp_path / "record.csv")
    line = fails_with(capsys, "run", "weather", "--data", tmp_path / "record.csv", "--out", tmp_path / "out", *SMALL)
    assert message in line
    check_nothing_half_written(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "seqdefer --help"),
        (["walk"], "invalid choice: 'walk'"),
        (["run", "tps"], "unknown task 'tps'; available: "),
        (["run", "--seeds", "3"], "name the task first: seqdefer run TASK --seeds ..."),
        (["tasks", "weather"], "unrecognized arguments: weather"),
        (["plot"], "the following arguments are required: DIR"),
    ],
)
def test_bad_commands(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in fails_with(capsys, *arguments)


def test_out_that_is_a_file(record: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        line = fails_with(capsys, "run", "weather", "--data", record, "--out", out, *SMALL)
        assert f"cannot write into {out}" in line
        assert "choose another folder with --out" in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture(params=["no permission", "vanishes"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that exists and takes no file, also from a user who may do everything."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    folder = tmp_path / "closed"
    if request.param == "no permission":
        folder.mkdir()
    return folder


def test_out_that_takes_no_file(
    unwritable: Path, record: Path, done: tuple[Path, str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found out after minutes of training, in a traceback."""
    existed = unwritable.exists()
    monkeypatch.setattr(experiment, "run_task", lambda *arguments, **options: pytest.fail("it began to work"))
    for command in (["run", "weather", "--data", record], ["plot", done[0]]):
        line = fails_with(capsys, *command, "--out", unwritable)
        assert f"cannot write into {unwritable}: Permission denied; choose another folder with --out" in line
        assert unwritable.exists() == existed


def test_a_run_that_fails_leaves_no_empty_folder(tmp_path: Path, capsys: Capture) -> None:
    fails_with(capsys, "run", "weather", "--data", tmp_path / "nowhere.csv", "--out", tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    fails_with(capsys, "run", "weather", "--data", tmp_path / "nowhere.csv", "--out", tmp_path / "mine")
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"length": 6', '"length": 0', "'length'"),
        ('"length": 6', f'"length": {10**400}', "'length'"),
        ('"audc": ', '"audc": 1e308, "old": ', "audc'"),
        ('"low": ', '"low": -1e308, "old": ', "low'"),
        ('"task": ', f'"task": {"[" * 100_000}, "old": ', "nested too deeply"),
    ],
)
def test_plot_of_hostile_results(
    old: str, new: str, field: str, done: tuple[Path, str, str], tmp_path: Path, capsys: Capture
) -> None:
    whole = (done[0] / "results.json").read_text()
    assert old in whole
    (tmp_path / "results.json").write_text(whole.replace(old, new, 1))
    assert field in fails_with(capsys, "plot", tmp_path)
    assert set(content(tmp_path)) == {"results.json"}


def test_plot_needs_results(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    assert "does not exist" in fails_with(capsys, "plot", tmp_path / "nowhere")
    assert "holds no results.json; make it with: seqdefer run TASK" in fails_with(capsys, "plot", tmp_path)
    whole = (done[0] / "results.json").read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace('"audc"', '"area"', 1), "[]", whole.replace("1", "NaN", 1)):
        (tmp_path / "results.json").write_text(damaged)
        assert "results.json" in fails_with(capsys, "plot", tmp_path)
    assert set(content(tmp_path)) == {"results.json"}
    (tmp_path / "file").write_text("mine")
    assert "cannot write into" in fails_with(capsys, "plot", done[0], "--out", tmp_path / "file")


def test_a_damaged_predictor(record: Path, done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(done[0], folder)
    weights = next(folder.glob("predictor-*")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    line = fails_with(capsys, "run", "weather", "--data", record, "--out", folder, *SMALL)
    assert str(weights) in line


def test_a_disk_that_fails_in_mid_run(
    record: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "model.safetensors"))

    monkeypatch.setattr("seqdefer.storage.made_once.write_tensors", full)
    assert cli.main(["run", "weather", "--data", str(record), "--epochs", "1", "--out", str(tmp_path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No space left on device" in error
