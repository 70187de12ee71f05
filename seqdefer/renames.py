"""Modules of version 0.1 that have moved: importing one fails with a line that names its new place.

The public names (`from seqdefer import ...`) did not move. CHANGELOG.md shows the table for people.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

NEW_PLACES = {
    "seqdefer.baselines": "seqdefer.rejectors.confidence",
    "seqdefer.branches": "seqdefer.labels.branches",
    "seqdefer.calibration": "seqdefer.budgets.calibration",
    "seqdefer.cores": "seqdefer.environment",
    "seqdefer.curves": "seqdefer.evaluation.curves",
    "seqdefer.deferring": "seqdefer.model.deferring_model",
    "seqdefer.engine": "seqdefer.engine.interleaved",
    "seqdefer.experiment": "seqdefer.evaluation.experiment",
    "seqdefer.exploration": "seqdefer.labels.exploration",
    "seqdefer.fitting": "seqdefer.model.fitting",
    "seqdefer.hulls": "seqdefer.budgets.convex_hull",
    "seqdefer.labelling": "seqdefer.labels",
    "seqdefer.labels": "seqdefer.labels.hand_offs",
    "seqdefer.losses": "seqdefer.rejectors.losses",
    "seqdefer.markup": "seqdefer.report.markup",
    "seqdefer.oracle": "seqdefer.evaluation.oracle",
    "seqdefer.paper": "seqdefer.evaluation.published",
    "seqdefer.patience": "seqdefer.remote.cancellation",
    "seqdefer.plots": "seqdefer.report.svg",
    "seqdefer.policies": "seqdefer.budgets.policies",
    "seqdefer.rejectors": "seqdefer.rejectors.base",
    "seqdefer.remote": "seqdefer.remote.client",
    "seqdefer.report": "seqdefer.report.html",
    "seqdefer.reproduction": "seqdefer.paper",
    "seqdefer.results": "seqdefer.evaluation.results",
    "seqdefer.roofline": "benchmarks.scaling.roofline (in the repository)",
    "seqdefer.scaling": "benchmarks.scaling.label_cost (in the repository)",
    "seqdefer.sections": "seqdefer.report.comparisons",
    "seqdefer.settings": "seqdefer.evaluation.settings",
    "seqdefer.shards": "seqdefer.storage.shards",
    "seqdefer.showing": "seqdefer.evaluation.examples",
    "seqdefer.splits": "seqdefer.evaluation.splits",
    "seqdefer.store": "seqdefer.storage.files",
    "seqdefer.tables": "seqdefer.report.terminal",
    "seqdefer.tasks.tsp.rl4co": "seqdefer_rl4co (the package in examples/seqdefer-rl4co)",
    "seqdefer.theory": "seqdefer.paper.theory",
    "seqdefer.training": "seqdefer.rejectors.training",
    "seqdefer.trees": "seqdefer.labels.trees",
}


class _OldModules(MetaPathFinder):
    """Asked last, when no other finder knows the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NEW_PLACES:
            raise ModuleNotFoundError(f"{fullname} is now {NEW_PLACES[fullname]}", name=fullname)
        return None


def refuse_old_modules() -> None:
    """Install the finder that names the new places."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())


def names_moved(room: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a room that was a module: names are imported from its modules now."""

    def refuse(name: str) -> NoReturn:
        if name.startswith("__") or find_spec(f"{room}.{name}") is not None:  # its own modules are imported as usual
            raise AttributeError(name)
        raise ImportError(f"{name} is not in {room} itself; what was there is now in {NEW_PLACES[room]}", name=room)

    return refuse
