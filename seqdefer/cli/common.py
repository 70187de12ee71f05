"""What commands share: the parser, options from dataclasses, bars of progress."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import typing
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from seqdefer.errors import CheckpointError, ContractError, OptionError, unknown

if TYPE_CHECKING:
    from seqdefer.evaluation.settings import ExperimentSettings
    from seqdefer.interfaces import TaskEntry


USUAL = "quick"  # the preset where none is named


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see: {self.prog} --help")


def one_line(message: str) -> str:
    """Names of files and options may hold line ends and escape sequences, which are not for the terminal to obey."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in message)


def task_of(command: str, arguments: list[str], *, needs: str | None = None) -> TaskEntry:
    """The task named first among the arguments of a command. `needs`: a part of its entry, which not all tasks have."""
    from seqdefer.registry import find_tasks, load_task

    if not arguments or arguments[0] in ("-h", "--help"):
        fitting = [name for name in sorted(find_tasks()) if needs is None or getattr(load_task(name), needs)]
        names = ", ".join(fitting)
        usage = f"seqdefer {command} TASK"
        print(f"usage: {usage} [options]\n\ntasks: {names}\n\noptions of a task: {usage} --help")
        raise SystemExit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise OptionError(f"name the task first: seqdefer {command} TASK {arguments[0]} ...; see: seqdefer tasks")
    return load_task(arguments[0])


def chosen_settings(entry: TaskEntry, chosen: argparse.Namespace) -> tuple[Any, ExperimentSettings]:
    """The preset's options of the task and settings of the experiment, with what was chosen on the command line."""
    from seqdefer.evaluation.settings import experiment_settings

    if chosen.preset not in entry.presets:
        raise unknown("preset", chosen.preset, entry.presets)
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    defaults = entry.presets[chosen.preset]
    # A task's option is nobody else's, even where the experiment has a setting of that name.
    own = {field.name: given.pop(field.name) for field in dataclasses.fields(defaults) if field.name in given}
    usual = experiment_settings(entry, chosen.preset, chosen.draft_architecture, chosen.architecture)
    settings: ExperimentSettings = override(usual, given)
    return dataclasses.replace(defaults, **own), settings


def task_parser(command: str, entry: TaskEntry, does: str, *, folder: str, printed: str) -> Parser:
    """What all commands have that learn something on a task."""
    presets = sorted(entry.presets, reverse=True)
    parser = Parser(
        prog=f"seqdefer {command} {entry.name}",
        description=f"{entry.summary[:1].upper()}{entry.summary[1:]}. {does}",
        epilog=f"In parentheses: what is used if an option is not given. Other presets than {USUAL} change it.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default=USUAL, metavar="|".join(presets), help=f"sizes to start from ({USUAL})")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where to write ({folder})")
    add_common(parser, printed)
    return parser


def add_common(parser: argparse.ArgumentParser, printed: str) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU where there is one (auto)")
    parser.add_argument("--json", action="store_true", help=f"print {printed}")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def add_learning(parser: Parser, usual: ExperimentSettings) -> None:
    from seqdefer.rejectors.checkpoints import draft_networks, token_networks
    from seqdefer.rejectors.losses import PHIS, PSIS
    from seqdefer.rejectors.token_training import STRATEGIES

    group = parser.add_argument_group("learning")
    group.add_argument(
        "--architecture", metavar="|".join(token_networks()), help=f"token-level network ({usual.token.architecture})"
    )
    words = f"network that scores whole drafts ({usual.once.architecture})"
    group.add_argument("--draft-architecture", metavar="|".join(draft_networks()), help=words)
    group.add_argument("--phi", metavar="|".join(PHIS), help=f"token-level surrogate ({usual.phi})")
    group.add_argument("--psi", metavar="|".join(PSIS), help=f"one-time surrogate ({usual.psi})")
    words = f"how token-level training rollouts go on ({usual.strategy})"
    group.add_argument("--strategy", metavar="|".join(STRATEGIES), help=words)
    words = f"of each example to learn from by token, where sequences are long ({usual.rollouts})"
    group.add_argument("--rollouts", type=int, metavar="N", help=words)
    group.add_argument("--hand-offs", type=int, metavar="N", help="how many hand-off points are allowed (all)")
    group.add_argument("--alpha", type=float, metavar="X", help="cost of deferring a whole sequence (rule of thumb)")
    group.add_argument(
        "--price",
        type=float,
        metavar="X",
        help="cost added to each expert token (0, or a little where losses are flat)",
    )


def usual_options(entry: TaskEntry) -> Any:
    return entry.presets.get(USUAL) or next(iter(entry.presets.values()))


def add_options(parser: Parser, title: str, task: str, defaults: Any) -> None:
    """An option for each field of a task's dataclass."""
    group, hints = parser.add_argument_group(title), typing.get_type_hints(type(defaults))
    for field in dataclasses.fields(defaults):
        flag, words = "--" + field.name.replace("_", "-"), _help_of(field, getattr(defaults, field.name))
        try:
            group.add_argument(flag, help=words, **_kind_of_option(hints[field.name]))
        except argparse.ArgumentError as error:  # it names the option that is there already
            raise ContractError(
                f"the field {field.name!r} of the options of task {task!r} cannot become the option {flag}: "
                f"{error.message}; rename the field"
            ) from error


def _help_of(field: dataclasses.Field[Any], default: Any) -> str:
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    words = f"{field.metadata.get('help', '')}{'' if default in (None, '') else f' ({shown})'}"
    return words.strip().replace("%", "%%")  # argparse would fill in what follows a single one


def _kind_of_option(hint: Any) -> dict[str, Any]:
    """What argparse is told of an option whose field has this type."""
    kinds = [kind for kind in (typing.get_args(hint) or [hint]) if kind is not type(None)]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if typing.get_origin(hint) is typing.Literal:
        return {"metavar": "|".join(kinds)}
    return {"type": kinds[0], "metavar": kinds[0].__name__.upper()}


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def override(defaults: Any, given: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(defaults)}
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if name in known})


@contextmanager
def work_in(folder: Path, task: str) -> Iterator[None]:
    """A folder for the work of a task. What another one left there would be replaced without a word."""
    from seqdefer.storage.files import read_json, writable_folder

    for file in ("results.json", "deferral.json"):
        with suppress(CheckpointError):  # there is none, or it is damaged and will be written again
            found = read_json(folder / file)
            other = found.get("task", task) if isinstance(found, dict) else task
            if other != task:
                raise OptionError(f"{folder} holds work of task {other!r:.80}; choose another folder with --out")
    with writable_folder(folder):
        yield


@contextmanager
def progress(*, quiet: bool) -> Iterator[Any]:
    """Bars on stderr, one a stage; in a log, a line now and then."""
    from seqdefer.progress import Silent

    if quiet:
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if not console.is_interactive:
        yield _Lines()
        return
    # What is printed meanwhile goes above the bars on a terminal, and nowhere but to stdout where that is a file.
    with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as bars:
        yield _Bars(bars)


class _Bars:
    SHOWN = 10  # finished stages: more than a terminal has lines would hide the one that runs

    def __init__(self, bars: Any) -> None:
        self.bars, self.finished = bars, deque[Any]()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        bar = self.bars.add_task(name, total=total)
        yield lambda steps: self.bars.advance(bar, steps)
        self.bars.update(bar, completed=total)  # early stopping leaves epochs unused
        self.bars.stop_task(bar)
        self.finished.append(bar)
        if len(self.finished) > self.SHOWN:
            self.bars.update(self.finished.popleft(), visible=False)


class _Lines:
    """For logs and pipes: what takes long is told, what does not would only hide the one line of an error."""

    SECONDS = 30.0  # between two lines of a stage

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        done, begun = 0, time.monotonic()
        told = begun

        def advance(steps: int) -> None:
            nonlocal done, told
            done, now = done + steps, time.monotonic()
            if now - told >= self.SECONDS:
                told = now
                say(f"{done} of {total}", now)

        def say(how_far: str, now: float) -> None:
            print(f"{name}: {how_far}, {now - begun:.0f} s", file=sys.stderr, flush=True)

        yield advance
        if told > begun:
            say("done", time.monotonic())
