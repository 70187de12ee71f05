"""Every command in the documentation is understood, also those that are not run: options and targets exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from doc_pages import PAGES, ROOT, Block, blocks_of, commands_of, page_name, write_speller

from seqdefer.cli import main
from seqdefer.cli.parser import Parser

COMMANDS = [
    pytest.param(words, id=f"{page_name(page)}: {' '.join(words)[:60]}")
    for page in PAGES
    for block in blocks_of(page)
    if block.kind == "sh"
    for words in commands_of(block)
]
OF_OTHERS = {"cd", "docker", "export", "pipx", "ray", "source", "vllm"}


class Parsed(Exception):
    """The arguments of a command were understood."""


def parse(words: Sequence[str]) -> None:
    """Let a command read its arguments, and stop before it does anything. Raises Parsed."""
    original = Parser.parse_args

    def parse_only(parser: Parser, arguments: Any = None, namespace: Any = None) -> Any:
        raise Parsed(original(parser, arguments, namespace))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_args", parse_only)
        assert main(words) == 0  # --help, and commands without options


def check_module(words: Sequence[str]) -> None:
    """Require the module of `python -m MODULE`, and its options in the source of its package."""
    assert words[0] == "-m"
    spec = find_spec(words[1])
    assert spec is not None, words[1]
    assert spec.origin is not None
    files = [Path(spec.origin)] if Path(spec.origin).name != "__init__.py" else Path(spec.origin).parent.rglob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    for word in words[2:]:
        if word.startswith("--"):
            assert f'"{word}"' in source, word


def check_install(words: Sequence[str]) -> None:
    """Require that extras exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        found = re.fullmatch(r"\.\[([a-z,]+)\]", word)
        assert not set(found[1].split(",") if found else ()) - set(known), word


@pytest.mark.parametrize("words", COMMANDS)
def test_command_is_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, rest = words[0], words[1:]
    match program:
        case "seqdefer":
            monkeypatch.chdir(tmp_path)
            write_speller(tmp_path / "speller.py")
            with pytest.raises(Parsed):
                parse(rest)
            assert not capsys.readouterr().err
        case "python":
            check_module(rest)
        case "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert rest[0] in targets
        case "pip":
            check_install(rest)
        case "pytest":
            assert (ROOT / rest[0]).is_file()
        case "curl":
            path = re.sub(r"^http://[\d.:]+", "", rest[0])
            served = "".join(one.read_text(encoding="utf-8") for one in (ROOT / "seqdefer" / "server").glob("*.py"))
            assert f'"{path}"' in served
        case _:
            assert program in OF_OTHERS, f"check {program} here, or name it in OF_OTHERS"


def test_a_wrong_option_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        parse(["generate", "models/news", "--buget", "0.2"])
    assert "did you mean '--budget'" in capsys.readouterr().err


def test_commands_are_split() -> None:
    code = "A=1 .venv/bin/seqdefer run x \\\n    --a 'b c'   # words\ncd deploy\nseqdefer generate m - < in.txt\n"
    expected = [["seqdefer", "run", "x", "--a", "b c"], ["cd", "deploy"], ["seqdefer", "generate", "m", "-"]]
    assert list(commands_of(Block("sh", code, 0))) == expected
