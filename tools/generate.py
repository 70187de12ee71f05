"""Write the generated pages and drawings: the commands, the results, the benchmarks, fidelity to the paper.

    python tools/generate.py

The files are committed so that they can be read in the repository; tests/test_site.py fails if they are stale.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from unittest import mock

from benchmarks_page import benchmarks_page
from drift_page import drift_figure, drift_page
from fidelity_page import fidelity_page
from guarantees_page import coverage_figure, guarantees_page
from moving_picture import moving_picture
from pictures import PICTURES
from recipes_page import recipes_page
from results_page import results_page
from service_page import service_page
from settings_page import settings_page
from speech_results_page import speech_results_page
from speed_page import speed_page
from tsp_as_published_page import tsp_as_published_page

from seqdefer.cli import main
from seqdefer.cli.parser import HELP_ALL

DOCS = Path(__file__).parents[1] / "docs"
HELP_COLUMNS = 100

COMMANDS = """\
# Commands

This page is generated from the help of `seqdefer`: all options, which `--help-all` lists where `--help` has the usual
ones. Results go to stdout, messages to stderr. Exit status: 0 success,
2 an error that you can fix (one line says how), 130 stopped by Ctrl-C.
"""


def commands_page() -> str:
    """Return a section for each command, and one for each task if the options depend on the task."""
    parts = [COMMANDS]
    for words in [[], *_commands()]:
        level = "##" if len(words) < 2 else "###"
        parts.append(f"{level} seqdefer {' '.join(words)}".rstrip() + f"\n\n```text\n{help_of(words)}```\n")
    return "\n".join(parts)


def _commands() -> Iterator[list[str]]:
    """Yield every command, its actions, and its tasks, as listed in the help."""
    for command in _listed(help_of([]), "commands"):
        yield [command]
        yield from ([command, action] for action in _listed(help_of([command]), "actions"))
        tasks = re.search(r"^tasks: (.+)$", help_of([command]), re.MULTILINE)
        yield from ([command, task] for task in tasks[1].split(", ") if help_of([command, task])) if tasks else ()


def _listed(text: str, title: str) -> list[str]:
    """Return the names that a help text lists under a title."""
    _, _, listed = text.partition(f"\n{title}:\n")
    return re.findall(r"^ {4}([a-z][a-z-]*)", listed.partition("\n\n")[0], re.MULTILINE)


def help_of(words: list[str]) -> str:
    """Return all help of a command, or "" if it does not apply, as for a task without a predictor to train."""
    text = _printed([*words, "--help"])
    return _printed([*words, HELP_ALL]) if HELP_ALL in text else text


def _printed(arguments: list[str]) -> str:
    printed, errors = io.StringIO(), contextlib.redirect_stderr(io.StringIO())
    terminal = mock.patch.dict(os.environ, {"COLUMNS": str(HELP_COLUMNS), "NO_COLOR": "1"})
    plugins = mock.patch("seqdefer.registry.installed", _own_entry_points)
    with terminal, plugins, contextlib.redirect_stdout(printed), errors, contextlib.suppress(SystemExit):
        main(arguments)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().strip().splitlines())


def _own_entry_points(group: str) -> list[EntryPoint]:
    """Return the plug-ins of this package: the page must not depend on what else is installed."""
    return [point for point in entry_points(group=group) if point.dist is not None and point.dist.name == "seqdefer"]


GENERATED: dict[str, Callable[[], str]] = {
    "benchmarks.md": lambda: benchmarks_page(DOCS / "results"),
    "commands.md": commands_page,
    "drift.md": lambda: drift_page(DOCS / "results"),
    "fidelity.md": fidelity_page,
    "guarantees.md": lambda: guarantees_page(DOCS / "results"),
    "recipes.md": recipes_page,
    "results.md": lambda: results_page(DOCS / "results"),
    "service.md": lambda: service_page(DOCS / "results"),
    "settings.md": settings_page,
    "speech-results.md": lambda: speech_results_page(DOCS / "results" / "speech"),
    "speed.md": lambda: speed_page(DOCS / "results"),
    "tsp-as-published.md": lambda: tsp_as_published_page(DOCS / "results"),
    "images/drift.svg": lambda: drift_figure(DOCS / "results"),
    "images/coverage.svg": lambda: coverage_figure(DOCS / "results"),
    "images/writing.svg": lambda: moving_picture(DOCS / "results"),
    **{f"images/{name}": draw for name, draw in PICTURES.items()},
}

if __name__ == "__main__":
    for name, make in GENERATED.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
