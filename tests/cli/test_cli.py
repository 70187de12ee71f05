"""The command line: help, options from dataclasses, progress, output streams."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import time
from dataclasses import field, fields, make_dataclass, replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from command_line import Capture, fails_with, run

import seqdefer
from seqdefer.evaluation.results import load_results
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.interfaces import TaskEntry
from seqdefer.progress_bars import show_progress
from seqdefer.registry import load_task
from seqdefer.tasks.weather.task import ENTRY


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
        (["run", "weather", "--help"], ["--seeds", "--noise", "--data", "--help-all"]),
        (["run", "weather", "--help-all"], ["--seeds", "--phi logistic|", "--strategy", "--noise", "--no-facts"]),
        (["plot", "--help"], ["DIR", "results.json"]),
        (["train-predictor", "--help"], ["usage: seqdefer train-predictor TASK [options]", "tsp"]),
        (["train-predictor", "tsp", "--help"], ["--cities N", "--epochs N", "--learning-rate X", "(predictors/tsp)"]),
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
        run("run", "weather", "--help-all")
    shown = " ".join(capsys.readouterr().out.split())
    for option in fields(ENTRY.presets["quick"]):
        assert f"--{option.name.replace('_', '-')}" in shown
        assert option.metadata["help"][:20] in shown


def install(monkeypatch: pytest.MonkeyPatch, **fields: tuple[type, Any]) -> None:
    """Replace every task by one with these options."""
    kind = make_dataclass("Options", [(name, *rest) for name, rest in fields.items()], frozen=True)
    entry = TaskEntry("made", "a task", {"quick": kind()}, ENTRY.prepare)
    monkeypatch.setattr("seqdefer.registry.load_task", lambda name: entry)


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
def test_a_field_that_clashes_with_an_option(name: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{name: (int, field(default=1))})
    line = fails_with(capsys, "run", "made")
    flag = "--" + name.replace("_", "-")
    assert f"the field {name!r} of the options of task 'made' cannot become the option {flag}" in line
    assert f"conflicting option string: {flag}" in line


def captured_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the options, settings and other arguments that a command would run with."""
    calls: list[Any] = []

    def note(entry: Any, options: Any, settings: Any, folder: Path, **rest: Any) -> None:
        calls.append((options, settings, rest))
        raise KeyboardInterrupt

    monkeypatch.setattr("seqdefer.report.run.run_task", note)
    assert run("run", *arguments, "--out", tmp_path / "a b") == 130
    (call,) = calls
    return call  # type: ignore[no-any-return]


def test_the_recorded_command_can_be_pasted_into_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = captured_run(monkeypatch, tmp_path, "weather", "--data", "my file.csv")[2]
    expected = ["seqdefer", "run", "weather", "--data", "my file.csv", "--out", str(tmp_path / "a b")]
    assert shlex.split(rest["command"]) == expected


def test_options_of_the_task_do_not_reach_the_rejectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with --architecture, the predictor's --epochs also set those of the token-level rejector."""
    options, settings, _ = captured_run(monkeypatch, tmp_path, "weather", "--architecture", "mlp", "--epochs", "7")
    defaults = experiment_settings(load_task("weather"), "quick").token
    assert options.epochs == 7
    assert settings.token == replace(defaults, architecture="mlp")


def test_an_ascii_terminal(
    record: Path, done: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the degree sign of the table raised UnicodeEncodeError."""
    monkeypatch.setattr("seqdefer.report.run.run_task", lambda *arguments, **options: load_results(done[0]))
    raw = BytesIO()
    with TextIOWrapper(raw, encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run("run", "weather", "--data", record, "--out", tmp_path, "--quiet") == 0
        stream.flush()
        assert b"TokenwiseModel" in raw.getvalue()
        monkeypatch.undo()


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "seqdefer", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout == f"seqdefer {seqdefer.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "seqdefer --help"),
        (["walk"], "unknown command 'walk'; available: cache, "),
        (["calibrat"], "train-predictor (did you mean 'calibrate'?)"),
        (["run", "tps"], "unknown task 'tps'; available: "),
        (["run", "weather", "--sedes", "3"], "unrecognized arguments: --sedes 3 (did you mean '--seeds'?); see: "),
        (["cache", "ls", "runs", "--jsn"], "unrecognized arguments: --jsn (did you mean '--json'?); see: "),
        (
            ["run", "weather", "--preset", "quik"],
            "available: paper, paper-size, quick (did you mean 'quick'?)",
        ),
        (["run", "no_such.py"], "there is no file 'no_such.py'; name an installed task (seqdefer tasks) or a file"),
        (["completion", "tcsh"], "unknown shell 'tcsh'; available: bash, fish, zsh"),
        (["run", "--seeds", "3"], "name the task first: seqdefer run TASK --seeds ..."),
        (["tasks", "weather"], "unrecognized arguments: weather"),
        (["plot"], "the following arguments are required: DIR"),
    ],
)
def test_bad_commands(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in fails_with(capsys, *arguments)


def test_a_log_shows_long_stages_only(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 20.0, 31.0, 45.0, 62.0, 70.0, 100.0, 104.0])
    monkeypatch.setattr("seqdefer.progress_bars.time.monotonic", lambda: next(seconds))
    with show_progress(quiet=False) as meter:
        with meter.stage("long work", 8) as advance:
            for _ in range(4):
                advance(2)
        with meter.stage("short work", 1) as advance:
            advance(1)
    lines = ["long work: 2 of 8, 20 s, about 60 s left", "long work: 8 of 8, 62 s", "long work: done, 70 s"]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_log_shows_a_stage_whose_first_step_takes_long(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: labelling through a pipe printed nothing until the first shard was whole, for minutes."""
    monkeypatch.setattr("seqdefer.progress_bars.FIRST_LINE_SECONDS", 0.01)
    with show_progress(quiet=False) as meter, meter.stage("long work", 8):
        for _ in range(1000):
            time.sleep(0.01)
            if shown := capsys.readouterr().err:
                break
    assert shown == "long work: 0 of 8, 0 s\n"
    assert capsys.readouterr().err == "long work: done, 0 s\n"


def test_log_messages_look_like_warnings(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine logs what is slow, once; the command line shows it."""
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest has some, a command line has none
    assert run("tasks") == 0
    capsys.readouterr()
    logging.getLogger("seqdefer.engine.pace").warning("deferral is slower here than the expert alone")
    logging.getLogger("seqdefer.tasks.text.row_probe").info("rows cannot stand at their own positions")
    assert capsys.readouterr().err == "seqdefer: deferral is slower here than the expert alone\n"


def test_warnings_look_alike_whatever_a_package_does_to_logging() -> None:
    """absl, which rouge-score imports, adds a handler to the root logger where it finds none."""
    code = (
        "from seqdefer import cli; cli.main(['tasks']); import logging; logging.basicConfig(); logging.warning('slow')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "seqdefer: slow\n"
