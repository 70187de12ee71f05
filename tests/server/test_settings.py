"""Settings: the command line wins over the environment, the environment over the file; unknown names raise."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'server'")

from seqdefer import cli
from seqdefer.errors import OptionError
from seqdefer.server.http import Limits
from seqdefer.server.settings import ServerSettings, all_settings, read_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(
        'port = 1\nqueue = 1\nbatch = 20\nrequest_seconds = 7\nname = "news"\nkeys = "a.json"\nquiet = true\n'
    )
    return path


def test_defaults() -> None:
    assert read_settings({}, {"HOME": "/", "SEQDEFER_CACHE": "x"}) == (ServerSettings(), Limits())


def test_which_wins(file: Path) -> None:
    variables = {"SEQDEFER_PORT": "2", "SEQDEFER_QUEUE": "2", "SEQDEFER_EXPERT_SECONDS": "0.5"}
    settings, limits = read_settings({"config": file, "port": 3, "folder": "DIR"}, variables)
    assert (settings.port, limits.queue, limits.batch) == (3, 2, 20)
    assert (settings.name, settings.keys, settings.quiet) == ("news", Path("a.json"), True)
    assert (limits.request_seconds, limits.expert_seconds) == (7.0, 0.5)
    assert isinstance(limits.request_seconds, float)
    settings, _ = read_settings({}, {"SEQDEFER_CONFIG": str(file), "SEQDEFER_QUIET": "no"})
    assert (settings.port, settings.quiet) == (1, False)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SEQDEFER_PROT": "1"}, "unknown environment variable 'SEQDEFER_PROT'; available: .*SEQDEFER_PORT"),
        ({"SEQDEFER_Port": "1"}, "unknown environment variable 'SEQDEFER_Port'"),
        ({"SEQDEFER_PORT": "x"}, "SEQDEFER_PORT is 'x'; give a whole number"),
        ({"SEQDEFER_BUDGET": ""}, "SEQDEFER_BUDGET is ''; give a number"),
        ({"SEQDEFER_QUIET": "maybe"}, "SEQDEFER_QUIET is 'maybe'; give true or false"),
        ({"SEQDEFER_QUEUE": "0"}, "queue is 0"),
        ({"SEQDEFER_CONFIG": "/no/such.toml"}, "cannot read /no/such.toml"),
    ],
)
def test_invalid_variables(variables: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_settings({}, variables)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown setting in .*: 'prot'; available: .*port"),
        ("port = '1'", "port in .* is '1'; give a whole number"),
        ("port = true", "port in .* is True; give a whole number"),
        ("port = 1.5", "port in .* is 1.5; give a whole number"),
        ("quiet = 1", "quiet in .* is 1; give true or false"),
        ("name = 1", "name in .* is 1; give a text"),
        ("[server]\nport = 1", "unknown setting in .*: 'server'"),
        ("port = ", "cannot read .*; --config takes a TOML file"),
        ("config = 'x'", "unknown setting"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match=message):
        read_settings({"config": path}, {})


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    listed = capsys.readouterr().out
    named = [field.name for field, _ in all_settings()]
    assert named == [field.name for group in (ServerSettings, Limits) for field in fields(group)]
    assert len(set(named)) == len(named)
    for name in named:
        assert f"  --{name.replace('_', '-')}" in listed
    assert all(field.metadata["help"] for field, _ in all_settings())


def test_command_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQDEFER_QUEUE", "0")
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "queue is 0" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path), "--queue", "5", "--port", "0"]) == 2
    assert "no deferring model" in capsys.readouterr().err
