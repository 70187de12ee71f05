"""Running commands in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqdefer import cli

Capture = pytest.CaptureFixture[str]
SMALL = ["--stride", "12", "--train-windows", "60", "--hidden", "2", "--epochs", "1", "--passes", "2"]
SMALL += ["--seeds", "1", "--instances", "20"]


def run(*arguments: str | Path | int) -> int:
    return cli.main([str(argument) for argument in arguments])


def fails_with(capsys: Capture, *arguments: str | Path | int) -> str:
    """Run a command that must fail: status 2, nothing on stdout, one line on stderr. Return that line's message."""
    capsys.readouterr()
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("seqdefer: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err.removeprefix("seqdefer: ").removesuffix("\n")


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, but for times, which differ from run to run."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "timing.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
