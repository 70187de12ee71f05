"""`seqdefer new-task`, and tasks that are files: what is written passes its own test and runs without a package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from command_line import Capture, fails_with, run

from seqdefer.errors import CheckpointError, ContractError, OptionError
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.paper.labs import with_options
from seqdefer.paper.records import load_study
from seqdefer.registry import load_task, load_task_file
from seqdefer.storage.files import read_json, write_json

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "scanned_digits"
ONE = "111 222 343 444 555 666 779 888"


@dataclass(frozen=True)
class WithChoices:
    choices: ClassVar = {"day_time": ("day", "night")}
    day_time: str = "day"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that new-task writes; afterwards its modules are forgotten."""
    before, folder = list(sys.path), tmp_path_factory.mktemp("new") / NAME
    assert run("new-task", NAME, "--out", folder) == 0
    yield folder
    sys.path[:] = before
    for module in (NAME, f"test_{NAME}"):
        sys.modules.pop(module, None)


def test_the_skeleton_passes_its_own_test(home: Path) -> None:
    assert load_task(f"{home}/{NAME}.py").file == str(home / f"{NAME}.py")
    tests = importlib.import_module(f"test_{NAME}")
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        getattr(tests, name)()


def test_a_file_with_the_name_of_an_installed_task_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It worked in the folder of that task, and replaced its results. The installed file itself may be named."""
    own = tmp_path / "own_weather.py"
    own.write_text((home / f"{NAME}.py").read_text().replace(f'name="{NAME}"', 'name="weather"'))
    with pytest.raises(OptionError, match=r"own_weather.py is named 'weather', as that of the package seqdefer is"):
        load_task_file(own)
    installed = {NAME: EntryPoint(NAME, f"{NAME}:ENTRY", "seqdefer.tasks")}
    monkeypatch.setattr("seqdefer.registry.find_tasks", lambda: installed)
    assert load_task_file(home / f"{NAME}.py").name == NAME


def test_a_file_is_reproduced_by_its_name(home: Path, tmp_path: Path) -> None:
    """Its path was taken for its name: the command took the file for a folder, or failed at the end."""
    few = ["--preset", "quick", "--seeds", 1, "--instances", 10, "--recipe", "ours", "--set", f"{NAME}.examples=40"]
    assert run("reproduce", "table1", "--tasks", f"{home}/{NAME}.py", *few, "--no-figures", "--out", tmp_path) == 0
    assert list(load_study(tmp_path / "ours" / "table1.json").tasks) == [NAME]
    assert (tmp_path / NAME / "cells").is_dir()


def test_a_file_runs_without_a_package(home: Path, tmp_path: Path, capsys: Capture) -> None:
    small = ["--examples", 40, "--seeds", 1, "--instances", 20, "--methods", "TokenwiseScore", "--no-timing", "--quiet"]
    out = tmp_path / "run"
    assert run("run", home / f"{NAME}.py", *small, "--out", out, "--engine", "local", "--workers", 1) == 0
    assert "TokenwiseScore" in capsys.readouterr().out
    assert read_json(out / "results.json")["task"] == NAME


@pytest.mark.slow
def test_a_learned_rejector_has_something_to_learn(home: Path, tmp_path: Path) -> None:
    """On the first skeleton, the predictor's own doubt was better than any rejector."""
    methods = ["--methods", "TokenwiseModel,TokenwiseScore", "--no-timing", "--quiet"]
    assert run("run", home / f"{NAME}.py", *methods, "--out", tmp_path / "run", "--engine", "local") == 0
    summary = read_json(tmp_path / "run" / "results.json")["summary"]
    assert summary["TokenwiseModel"]["improvement_mean"] > summary["TokenwiseScore"]["improvement_mean"] + 1


def test_a_fitted_file_is_found_again_and_code_of_a_model_is_not_run(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "model"
    small = ["--examples", 40, "--method", "TokenwiseScore", "--quiet"]
    assert run("fit", home / f"{NAME}.py", *small, "--out", folder) == 0
    assert run("fit", home / f"{NAME}.py", *small, "--out", folder) == 0  # its own work is not another task's
    capsys.readouterr()
    assert run("generate", folder, ONE, "--budget", 1, "--quiet") == 0
    assert capsys.readouterr().out.startswith("[1234567")

    (folder / "evil.py").write_text("raise SystemExit('this code must not run')")
    for path in (str(folder / "evil.py"), "evil.py"):
        write_json(folder / "deferral.json", {**read_json(folder / "deferral.json"), "task": path})
        with pytest.raises(CheckpointError, match="code is not run from there"):
            DeferringModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Task", "'My-Task' cannot be the name of a module; use small letters, digits and _, such as my_task"),
        ("class", "'class' cannot be the name of a module; use small letters, digits and _, such as my_class"),
        ("1abc", "'1abc' cannot be the name of a module; use small letters, digits and _, such as abc"),
        ("weather", "there is a task 'weather' already"),
        ("json", "there is a module 'json' already; choose another name, such as my_json"),
    ],
)
def test_names_that_cannot_be(name: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    assert message in fails_with(capsys, "new-task", name, "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_is_no_task(tmp_path: Path, capsys: Capture) -> None:
    """Bug: the installed tasks were listed, and for a folder of the name `sums` 'xsum' was meant."""
    file = tmp_path / "mine" / "mine.py"
    file.parent.mkdir()
    assert "unknown task" in fails_with(capsys, "run", file.parent)
    file.touch()
    words = f"'{file.parent}' is a folder; name the file in it that has the task: {file}"
    assert fails_with(capsys, "run", file.parent) == words


def test_values_of_an_option_are_the_listed_ones(tmp_path: Path, capsys: Capture) -> None:
    """Bug: `choices` were listed in the help, and any other value ran."""
    text = f"from dataclasses import replace\nfrom {__name__} import WithChoices\nfrom seqdefer import TaskEntry\n"
    text += "ENTRY = TaskEntry('mine', '', {'quick': WithChoices()}, lambda *_: None)\n"
    (tmp_path / "listed_choices.py").write_text(text)
    said = fails_with(capsys, "run", tmp_path / "listed_choices.py", "--day-time", "noon", "--out", tmp_path / "run")
    assert said == "unknown --day-time 'noon'; available: day, night"
    assert not (tmp_path / "run").exists()
    with pytest.raises(OptionError, match="unknown --day-time 'noon'"):
        with_options(WithChoices(), {"day-time": "noon"}, "mine")


def test_nothing_is_overwritten(home: Path, capsys: Capture) -> None:
    assert "is not empty; choose another folder with --out" in fails_with(capsys, "new-task", NAME, "--out", home)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("x = 1\ny = z\n", ContractError, r"line 2 cannot be loaded: NameError"),
        ("def f(:\n", ContractError, r"line 1 cannot be loaded: SyntaxError: invalid syntax$"),
        ("x = 1\n", ContractError, r"has no ENTRY; add one"),
        ("ENTRY = 5\n", ContractError, r"has an ENTRY that is 5; add one"),
        ("from seqdefer import TaskEntry as ENTRY\n", ContractError, r"has an ENTRY that is <class"),
        ("import sys\nsys.exit(0)\n", ContractError, r"line 2 cannot be loaded: SystemExit\(0\)"),
        ("from seqdefer import TaskEntry\nENTRY = TaskEntry('a', 'b', {}, None)\n", ContractError, r"the presets of"),
    ],
)
def test_files_that_are_no_task(
    text: str, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "broken_task_file.py"
    path.write_text(text)
    with pytest.raises(kind, match=message):
        load_task_file(path)
    sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()


def test_a_file_with_the_name_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("")
    with pytest.raises(OptionError, match=r"has the name of another module, .*; rename the file"):
        load_task_file(tmp_path / "json.py")
