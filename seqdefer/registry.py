"""Plug-ins of this and other packages, found by entry points.

A package offers a plug-in with a line in its own pyproject.toml:

    [project.entry-points."seqdefer.tasks"]
    mine = "my_package.task:ENTRY"

Nothing is imported before a plug-in is asked for by name.

Experts of other packages use the group "seqdefer.experts" and names TASK.NAME, which `--expert NAME` finds. For text
tasks, `text.NAME` is a callable `(options, predictor, device) -> Expert`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from seqdefer.errors import unknown

if TYPE_CHECKING:
    from seqdefer.interfaces import TaskEntry

TASKS = "seqdefer.tasks"
EXPERTS = "seqdefer.experts"


def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, without importing them."""
    return {point.name: point for point in entry_points(group=group)}


def load_plugins(group: str) -> dict[str, Any]:
    """Import every plug-in of a group."""
    return {name: point.load() for name, point in find_plugins(group).items()}


def find_tasks() -> dict[str, EntryPoint]:
    """Return the entry points of all installed tasks by name, without importing them."""
    return find_plugins(TASKS)


def load_task(name: str) -> TaskEntry:
    """Import the entry of an installed task."""
    points = find_tasks()
    if name not in points:
        raise unknown("task", name, points)
    entry: TaskEntry = points[name].load()
    return entry
