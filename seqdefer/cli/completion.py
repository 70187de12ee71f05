"""`seqdefer completion`: a script that teaches a shell the commands, tasks and options.

The script is written once by `shtab` from all parsers; completing a word then starts no Python. Tasks that are
installed later need a new script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seqdefer.cli.common import Command, Parser, model_folder
from seqdefer.cli.parser import ASK_FOR_PARSER, ParserFound, with_actions
from seqdefer.errors import SeqdeferError, require_known

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
install it:
  bash   seqdefer completion bash > ~/.local/share/bash-completion/completions/seqdefer
  zsh    seqdefer completion zsh > ~/.zfunc/_seqdefer, with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
  fish   seqdefer completion fish > ~/.config/fish/completions/seqdefer.fish

Make the script again when a package with tasks was installed.
"""


def completion_script(shell: str, commands: Iterable[Command]) -> str:
    """Return the script of a shell for these commands, with the options of every task that is installed."""
    import shtab

    root = argparse.ArgumentParser(prog="seqdefer", description="Partial deferral of sequences.")
    listed = root.add_subparsers()
    for command in commands:
        _add(listed, command.name, command.help, parser_of(command, []) or _tasks_of(command))
    for parser in with_actions(root):
        for option in parser._actions:
            _complete(option, shtab.FILE)
    return shtab.complete(root, shell=shell)


def parser_of(command: Command, words: list[str]) -> Parser | None:
    """Return the parser that reads what follows these words; None where there is none."""
    try:
        command.main([*words, ASK_FOR_PARSER])
    except ParserFound as found:
        return found.parser
    except SeqdeferError:  # a task that cannot be fitted, say, or a command that wants a task first
        return None
    return None


def _tasks_of(command: Command) -> Parser:
    from seqdefer.registry import find_tasks

    parser = Parser(prog=f"seqdefer {command.name}")
    listed = parser.add_subparsers()
    for task in sorted(find_tasks()):
        if (inner := parser_of(command, [task])) is not None:
            _add(listed, task, "", inner)
    return parser


def _add(listed: Any, name: str, help: str, parser: argparse.ArgumentParser) -> None:
    """Add a parser that exists already."""
    listed.add_parser(name, help=help)
    listed._name_parser_map[name] = parser


def _complete(option: argparse.Action, file: Any) -> None:
    """Complete the values of an option: those that its help names (auto|cpu|cuda), or files."""
    values = option.metavar.split("|") if isinstance(option.metavar, str) else []
    if option.choices is None and len(values) > 1:
        option.choices = values
    elif option.type in (Path, model_folder) or option.metavar == "PATH":
        option.complete = file  # type: ignore[attr-defined]


def complete(commands: Iterable[Command], arguments: list[str]) -> int:
    """Print the script for all these commands."""
    words = "Print the script that completes commands, tasks and options in a shell."
    parser = Parser(prog="seqdefer completion", description=words, epilog=EXAMPLES)
    parser.add_argument("shell", metavar="|".join(SHELLS), help="the shell")
    chosen = parser.parse_args(arguments)
    require_known("shell", chosen.shell, SHELLS)
    print(completion_script(chosen.shell, commands))
    return 0
