"""Every error seqdefer raises on purpose.

    SeqdeferError
    ├── InputError        the user gave something we cannot use (exit status 2)
    │   ├── DataError         a file or record that cannot be read
    │   │   ├── FormatError       a file of a format that is not read
    │   │   └── TooLongError      an input that is longer than the models read
    │   ├── OptionError       an unknown name, or a value out of range
    │   └── CheckpointError   a checkpoint that is damaged or belongs to another predictor
    ├── MissingExtraError optional software is absent; the message has the command that installs it
    ├── EndpointError     an expert behind an address does not answer as it should (seqdefer.remote.client)
    ├── LostWorkerError   a labelling worker died repeatedly
    └── ContractError     a task, expert, policy or loss breaks its interface (see seqdefer.testing)

A message says what happened, the value, what to do, and what exists.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

Value = TypeVar("Value")


class SeqdeferError(Exception):
    """Root of the tree: catch this to catch everything seqdefer raises on purpose."""


class InputError(SeqdeferError):
    """The user gave something that cannot be used."""


class DataError(InputError):
    """A file or record that cannot be read."""


class FormatError(DataError):
    """A file of a format that is not read."""


class TooLongError(DataError):
    """An input that is longer than the models read."""


class OptionError(InputError):
    """An unknown name, or a value out of range."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, or was fitted for another predictor."""


class MissingExtraError(SeqdeferError):
    """Optional software is absent."""


class LostWorkerError(SeqdeferError):
    """A labelling worker died repeatedly."""


class ContractError(SeqdeferError):
    """A task, expert, policy or loss breaks its interface."""


def unknown(kind: str, value: object, available: Iterable[str]) -> OptionError:
    """Return the error for a name that is not known; the one wording for all of them."""
    known = sorted(available)
    return OptionError(f"unknown {kind} {str(value)!r}; available: {', '.join(known)}{suggestion(str(value), known)}")


def require_known(kind: str, value: object, available: Collection[str]) -> None:
    """Raise `unknown` for a name that is not available."""
    if value not in available:
        raise unknown(kind, value, available)


def require_one(prefix: str = "", **given: object) -> None:
    """Raise where several are given of what excludes each other. `prefix`: -- for options of the command line."""
    names = [
        prefix + (name.replace("_", "-") if prefix else name) for name, value in given.items() if value is not None
    ]
    if len(names) > 1:
        raise OptionError(f"{names[0]} and {names[1]} exclude each other; give one of them")


def look_up(kind: str, name: str, known: Mapping[str, Value]) -> Value:
    """Return the value of a name; raise `unknown` for a name that is not known."""
    require_known(kind, name, known)
    return known[name]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'tsp'?)" for a name that is nearly a known one, else nothing."""
    from difflib import get_close_matches  # only needed after a mistake

    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def one_line(text: str) -> str:
    """Escape line ends and control sequences, which names of files and options may hold."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Return the error for an absent package, with the command that installs it into this very Python."""
    return MissingExtraError(f"{purpose} needs the package {package!r}; install it with: {install_command(extra)}")


def import_extra(module: str, extra: str, purpose: str, instead: str = "") -> Any:
    """Import a module that comes with an extra; where it is missing, say how to install it, and what else to do."""
    try:
        return import_module(module)
    except ImportError as error:
        missing = missing_extra((error.name or module).partition(".")[0], extra, purpose)
        raise MissingExtraError(f"{missing}; or {instead}" if instead else str(missing)) from error


def install_command(extra: str) -> str:
    """Return the command that installs an extra into this very Python."""
    return f"{shlex.quote(sys.executable or 'python')} -m pip install 'seqdefer[{extra}]'"
