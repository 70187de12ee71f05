"""`seqdefer run`: results, resuming, and one line for every error that a user can correct."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import SMALL, Capture, content, fails_with, run
from oracles import temperatures, write_record

from seqdefer.evaluation.results import load_results
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.methods import one_time_model
from seqdefer.registry import load_task
from seqdefer.tasks.weather.task import ENTRY


def test_results_go_to_stdout_and_to_the_folder(done: tuple[Path, str, str]) -> None:
    folder, out, err = done
    assert json.loads(out) == json.loads((folder / "results.json").read_text())
    # A stage that takes more than half a minute says so first: machines differ.
    assert err.split()[-4:] == ["report:", str(folder / "report.html"), "results:", str(folder / "results.json")]
    results = load_results(folder)
    assert (results.task, results.preset, len(results.seeds)) == ("weather", "quick", 1)
    assert "TokenwiseModel" in (folder / "report.html").read_text()


def test_options_reach_the_run(record: Path, done: tuple[Path, str, str]) -> None:
    settings = load_results(done[0]).provenance.settings
    assert {name: settings[name] for name in ("seeds", "instances")} == {"seeds": 1, "instances": 20}
    chosen = {"data": str(record), "stride": 12, "hidden": 2, "epochs": 1, "passes": 2}
    assert {name: settings["task"][name] for name in chosen} == chosen
    assert settings["task"]["noise"] == ENTRY.presets["quick"].noise
    assert settings["token"]["epochs"] == experiment_settings(load_task("weather"), "quick").token.epochs


def test_the_same_command_resumes_and_prints_a_table(
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
        assert any(f"{one.audc_mean:.{digits}f}" in row for digits in (2, 1, 0))
    changed = [name for name, value in content(folder).items() if before.get(name) != value]
    assert set(changed) <= {"results.json", "report.html"}  # their seconds; nothing was fitted again


@pytest.mark.parametrize("quiet", [["--quiet"], []])
def test_ctrl_c(
    quiet: list[str], record: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(one_time_model, "fit_once", stop)
    assert run("run", "weather", "--data", record, "--out", tmp_path, *SMALL, *quiet) == 130
    shown = capsys.readouterr()
    # Stages that take long say so first: machines differ.
    assert shown.err.splitlines()[-1] == "seqdefer: stopped; the same command resumes from what is finished"
    assert shown.out == ""
    check_no_partial_output(tmp_path)


def test_a_folder_of_another_task_is_refused(
    record: Path, done: tuple[Path, str, str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its results were replaced silently. An unreadable file belongs to no task."""
    tour, model = tmp_path / "tour", tmp_path / "model"
    for folder, file in ((tour, "results.json"), (model, "deferral.json")):
        folder.mkdir()
        (folder / file).write_text('{"task": "tsp"}')
        for command in ("run", "label"):
            assert run(command, "weather", "--data", record, "--out", folder, "--quiet") == 2
            error = f"seqdefer: {folder} holds work of task 'tsp'; choose another folder with --out\n"
            assert capsys.readouterr().err == error
        assert content(folder) == {file: b'{"task": "tsp"}'}
    monkeypatch.setattr("seqdefer.report.run.run_task", lambda *arguments, **options: load_results(done[0]))
    (tour / "results.json").write_text("no JSON")
    assert run("run", "weather", "--data", record, "--out", tour, "--quiet") == 0


def check_no_partial_output(folder: Path) -> None:
    """Check that there is no result, no temporary file, and that every checkpoint is whole."""
    names = set(content(folder)) if folder.is_dir() else set()
    assert not names & {"results.json", "report.html"}
    assert not [name for name in names if Path(name).name.startswith(".")]
    for name in names:
        assert {str(Path(name).parent / part) for part in ("config.json", "model.safetensors")} <= names


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "unknown preset": (["--preset", "huge"], "unknown preset 'huge'; available: paper, paper-size, quick"),
    "unknown method": (["--methods", "ChowMean,Magic"], "unknown method 'Magic'; available: BiLD, Chow, ChowMean, "),
    "unknown split": (["--split", "days"], "unknown split 'days'; available: chronological, weeks"),
    "unknown option": (
        ["--sedes", "3"],
        "unrecognized arguments: --sedes 3 (did you mean '--seeds'?); see: ",
    ),
    "abbreviated option": (["--seed", "3"], "unrecognized arguments: --seed 3"),
    "no value": (["--seeds"], "expected one argument"),
    "seeds not a number": (["--seeds", "three"], "invalid int value: 'three'"),
    "no seeds": (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
    "instances too many": (["--instances", "10000"], "1 seeds x 10000"),
    "hand-offs 0": (
        ["--hand-offs", "0"],
        "cannot choose from 0 hand-offs: a sequence of 6 tokens has 7; give from 2 to 7 (--hand-offs)",
    ),
    "noise negative": (["--noise", "-0.5"], "--noise is -0.5; it must be between 0 and 1000 degrees"),
    "split seed too large": (["--split-seed", str(2**63)], f"it must be at most {2**63 - 1}"),
    "stride too large": (["--stride", str(10**27)], "it must be at most 10080"),
    "hidden too large": (["--hidden", "1000000000"], "--hidden is 1000000000; it must be at most 4096"),
    "passes too many": (["--passes", "2000000000"], "--passes is 2000000000; it must be at most 1000"),
    "epochs too many": (["--epochs", "10001"], "--epochs is 10001; it must be at most 10000"),
    "noise too large": (["--noise", "1e308"], "--noise is 1e+308"),
    "column of a known record": (["--data", "mast", "--column", "T2m"], "--column is 'T2m', but"),
    "line ends and escapes": (["--split", "a\n\x1b[31m"], r"unknown split 'a\n\x1b[31m'"),
    "line ends in a flag": (["--a\nb"], r"unrecognized arguments: --a\nb"),
    "missing device": (["--device", "meta"], "device 'meta' is not on this machine"),
    "no such column": (
        ["--column", "dew point"],
        "no temperature column: looked for 'dew point'; the columns are: 'Date",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options(options: list[str], message: str, record: Path, tmp_path: Path, capsys: Capture) -> None:
    line = fails_with(capsys, "run", "weather", "--data", record, "--out", tmp_path / "out", *SMALL, *options)
    assert message in line
    check_no_partial_output(tmp_path / "out")
    assert not (tmp_path / "out").exists() or content(tmp_path / "out")  # an empty new folder is removed


BAD_RECORDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a folder": (lambda path: path.mkdir(), "cannot read"),
    "too few weeks": (
        lambda path: write_record(path, temperatures()[:400]) and None,
        "a split by weeks needs at least 4",
    ),
    "not text": (lambda path: path.write_bytes(bytes(range(256)) * 40) and None, "column"),
}


@pytest.mark.parametrize(("make", "message"), BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_bad_records(make: Callable[[Path], None], message: str, tmp_path: Path, capsys: Capture) -> None:
    make(tmp_path / "record.csv")
    line = fails_with(capsys, "run", "weather", "--data", tmp_path / "record.csv", "--out", tmp_path / "out", *SMALL)
    assert message in line
    check_no_partial_output(tmp_path / "out")


@pytest.fixture(params=["no permission", "vanishes"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that takes no file, even from root."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    folder = tmp_path / "closed"
    if request.param == "no permission":
        folder.mkdir()
    return folder


def test_out_that_is_not_writable(
    unwritable: Path, record: Path, done: tuple[Path, str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it failed with a traceback, after minutes of training."""
    existed = unwritable.exists()
    monkeypatch.setattr("seqdefer.report.run.run_task", lambda *arguments, **options: pytest.fail("it started"))
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


def test_a_disk_that_fills_up_during_a_run(
    record: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "model.safetensors"))

    monkeypatch.setattr("seqdefer.storage.made_once.write_tensors", full)
    assert run("run", "weather", "--data", record, "--epochs", "1", "--out", tmp_path, "--quiet") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No space left on device" in error
