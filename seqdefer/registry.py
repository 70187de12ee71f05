"""Plug-ins of this and other packages, found by entry points.

A package offers a plug-in with a line in its own pyproject.toml:

    [project.entry-points."seqdefer.tasks"]
    mine = "my_package.task:ENTRY"

    group                     name             value
    seqdefer.tasks            NAME             a TaskEntry
    seqdefer.networks         KIND             a class: TokenNetwork or DraftNetwork
    seqdefer.methods          NAME             a Method
    seqdefer.experts          text.NAME        a callable (options, predictor, device) -> Expert
    seqdefer.experts          tsp.NAME         a callable () -> Expert
    seqdefer.tsp.predictors   PREFIX           a callable (folder, device, facts) -> Predictor

A task may also be read from a file, without a package: `load_task("./my_task.py")` takes its `ENTRY`.

`--expert NAME` and `--predictor PREFIX:FOLDER` find the last three. A task is imported when it is asked for by name,
networks and methods when one is listed or looked up. A name that two packages use is refused, built-ins included.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from seqdefer.errors import ContractError, OptionError, look_up

if TYPE_CHECKING:
    from seqdefer.interfaces import TaskEntry

TASKS = "seqdefer.tasks"
EXPERTS = "seqdefer.experts"
FILE_SUFFIX = ".py"  # of a task that is a file
OWN = "seqdefer"  # the package of the built-ins
Plugin = TypeVar("Plugin")


def by_name(kind: str, offered: Iterable[tuple[str, str, Plugin]]) -> dict[str, Plugin]:
    """Return what packages offer, given as (name, package, value), by name. Raise ContractError where two packages
    offer the same name; within one package the last definition counts."""
    owners: dict[str, str] = {}
    found: dict[str, Plugin] = {}
    for name, package, value in offered:
        if owners.setdefault(name, package) != package:
            raise ContractError(
                f"two packages, {owners[name]} and {package}, define the {kind} {name!r}; uninstall one of them, or "
                "rename what it defines"
            )
        found[name] = value
    return found


def package_of(point: EntryPoint | None) -> str:
    """Return the name of the package that an entry point belongs to."""
    return "?" if point is None or point.dist is None else point.dist.name


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. Read once: the metadata of all packages takes a tenth of a second."""
    return tuple(entry_points(group=group))


def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without importing them."""
    return by_name(f"plug-in of {group}", ((point.name, package_of(point), point) for point in installed(group)))


def load_plugins(group: str) -> dict[str, Any]:
    """Import every plug-in of a group."""
    return {name: _load(point) for name, point in find_plugins(group).items()}


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever the other package raises
        raise ContractError(
            f"the plug-in {point.name!r} of package {package_of(point)} cannot be loaded: {error!r}"
        ) from error


def find_tasks() -> dict[str, EntryPoint]:
    """Return the entry points of all installed tasks by name, without importing them."""
    return find_plugins(TASKS)


def load_task(name: str) -> TaskEntry:
    """Import the entry of an installed task, or that of a file: `load_task("./my_task.py")`."""
    if name.endswith(FILE_SUFFIX):
        return load_task_file(Path(name))
    if name not in find_tasks() and os.path.isdir(name):
        file = Path(name) / f"{Path(name).resolve().name}{FILE_SUFFIX}"
        if file.is_file():
            raise OptionError(f"{name!r:.200} is a folder; name the file in it that has the task: {file}")
    entry: TaskEntry = look_up("task", name, find_tasks()).load()
    return entry


def load_task_file(path: Path) -> TaskEntry:
    """Import a file and return its `ENTRY`. Its folder becomes importable, as that of a script: the file may import its
    neighbours, and labelling processes find it."""
    from seqdefer.interfaces import TaskEntry  # imports PyTorch

    if not os.path.isfile(path):  # Path.is_file fails where a name is too long
        raise OptionError(
            f"there is no file {str(path)!r:.200}; name an installed task (seqdefer tasks) or a file with one"
        )
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        module = import_module(path.stem)
    except (Exception, SystemExit) as error:  # whatever the file raises
        places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line, what = places[-1].lineno if places else None, repr(error)
        if isinstance(error, SyntaxError):  # whose representation repeats path and line
            line, what = error.lineno if error.filename == str(path) else line, f"{type(error).__name__}: {error.msg}"
        place = "" if line is None else f", line {line}"
        raise ContractError(f"{path}{place} cannot be loaded: {what:.300}") from error
    if Path(module.__file__ or "").resolve() != path:
        raise OptionError(f"{path} has the name of another module, {module.__file__}; rename the file")
    entry = getattr(module, "ENTRY", None)
    if not isinstance(entry, TaskEntry):
        what = "no ENTRY" if entry is None else f"an ENTRY that is {entry!r:.60}"
        raise ContractError(f"{path} has {what}; add one: ENTRY = seqdefer.TaskEntry(name=...)")
    if not entry.presets or not all(is_dataclass(options) for options in entry.presets.values()):
        raise ContractError(
            f"{path}: the presets of ENTRY are {entry.presets!r:.60}; give a dataclass of options by name"
        )
    _require_own_name(entry.name, path)
    return replace(entry, file=str(path))


def _require_own_name(name: str, path: Path) -> None:
    """Refuse a task of a file with the name of an installed one, unless it is that very file: they would share runs."""
    point = find_tasks().get(name)
    spec = None if point is None else find_spec(point.module)
    if point is not None and (spec is None or Path(spec.origin or "").resolve() != path):
        raise OptionError(
            f"the task of {path} is named {name!r}, as that of the package {package_of(point)} is, and would share its "
            "folders; change the name in its ENTRY"
        )
