"""Writes what is not written by hand: the command reference, the results, the drawings.

    python tools/generate.py

The files are committed, so that they can be read in the repository too; tests/test_site.py fails when they are stale.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from benchmarks_page import benchmarks_page
from pictures import PICTURES

from seqdefer.cli import main

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 100  # columns of the help texts

COMMANDS = """\
# Commands

What `seqdefer` prints when it is asked for help; this page is generated from that. Results go to stdout, talk goes to
stderr. Exit status: 0 done, 2 something you can mend (one line says what), 130 stopped by Ctrl-C.
"""


def commands_page() -> str:
    """A section a command, and one a task where the options depend on the task."""
    parts = [COMMANDS]
    for words in [[], *_commands()]:
        level = "##" if len(words) < 2 else "###"
        parts.append(f"{level} seqdefer {' '.join(words)}".rstrip() + f"\n\n```text\n{help_of(words)}```\n")
    return "\n".join(parts)


def _commands() -> Iterator[list[str]]:
    """Every command, its actions, and every command of a task, as far as their help names them."""
    for command in _listed(help_of([]), "commands"):
        yield [command]
        yield from ([command, action] for action in _listed(help_of([command]), "actions"))
        tasks = re.search(r"^tasks: (.+)$", help_of([command]), re.MULTILINE)
        yield from ([command, task] for task in tasks[1].split(", ") if help_of([command, task])) if tasks else ()


def _listed(words: str, title: str) -> list[str]:
    """The names that a help text lists under a title."""
    _, _, listed = words.partition(f"\n{title}:\n")
    return re.findall(r"^ {4}([a-z][a-z-]*)", listed.partition("\n\n")[0], re.MULTILINE)


def help_of(words: list[str]) -> str:
    """What a command prints for --help; nothing where it does not apply (a task without a predictor to train)."""
    said, silence = io.StringIO(), contextlib.redirect_stderr(io.StringIO())
    terminal = mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH), "NO_COLOR": "1"})
    with terminal, contextlib.redirect_stdout(said), silence, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return "".join(f"{line.rstrip()}\n" for line in said.getvalue().strip().splitlines())


def stored_results() -> str:
    from seqdefer.paper.render.page import results_page

    return results_page(DOCS / "results")


GENERATED: dict[str, Callable[[], str]] = {
    "benchmarks.md": lambda: benchmarks_page(DOCS / "results"),
    "commands.md": commands_page,
    "results.md": stored_results,
    **{f"images/{name}": draw for name, draw in PICTURES.items()},
}

if __name__ == "__main__":
    for name, make in GENERATED.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
