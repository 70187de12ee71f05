"""`seqdefer doctor` and `seqdefer completion`: what they say, and that neither needs a network."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch
from command_line import Capture, run

from seqdefer.cli import COMMANDS
from seqdefer.cli.completion import SHELLS, completion_script, parser_of


def test_doctor_says_what_is_there_and_what_is_missing(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = metadata.version

    def absent(name: str) -> str:
        if name == "gurobipy":
            raise metadata.PackageNotFoundError(name)
        return usual(name)

    def no_network(*_: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setenv("SEQDEFER_CACHE", str(tmp_path))
    (tmp_path / "x").write_bytes(b"0" * 2_000_000)
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert "missing gurobipy" in found["extras"]["tsp"]
    assert found["extras"]["tsp"].endswith("-m pip install 'seqdefer[tsp]'")
    assert "dev" not in found["extras"]
    assert found["caches"]["data of tasks"].startswith(f"{tmp_path}, 2 MB")
    assert found["tasks"]["weather"] == "seqdefer"
    assert run("doctor") == 0
    assert "  gpu " in capsys.readouterr().out


def test_doctor_names_a_plugin_that_cannot_be_loaded(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = metadata.EntryPoint("broken", "no_such_package:ENTRY", "seqdefer.tasks")
    monkeypatch.setattr("seqdefer.registry.installed", lambda group: (broken,))
    assert run("doctor", "--json") == 0
    assert "cannot be loaded: ModuleNotFoundError" in json.loads(capsys.readouterr().out)["tasks"]["broken"]


def test_every_command_has_a_parser_to_complete() -> None:
    for command in COMMANDS:
        assert parser_of(command, []) or parser_of(command, ["tsp"]), command.name
    (fit,) = (command for command in COMMANDS if command.name == "fit")
    assert parser_of(fit, ["weather"]) is None  # it takes no inputs of users' own


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts_are_whole(shell: str, tmp_path: Path) -> None:
    script = completion_script(shell, COMMANDS)
    assert "train-predictor" in script
    assert "bfloat16" in script
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"no {shell} to read the script with")
    (tmp_path / "script").write_text(script)
    subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("seqdefer calib", "calibrate"),
        ("seqdefer run wea", "weather"),
        ("seqdefer run weather --see", "--seeds"),
        ("seqdefer run weather --device c", "cpu cuda"),
        ("seqdefer cache v", "verify"),
    ],
)
def test_bash_completes(words: str, expected: str, bash_script: Path) -> None:
    n = len(words.split())
    line = f"source {bash_script}; COMP_WORDS=({words}); COMP_CWORD={n - 1}; _shtab_seqdefer; echo ${{COMPREPLY[@]}}"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == expected.split()


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "seqdefer.bash"
    path.write_text(completion_script("bash", COMMANDS))
    return path
