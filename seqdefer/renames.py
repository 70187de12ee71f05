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
    "seqdefer.calibration": "seqdefer.budgets.calibration, .rules",
    "seqdefer.cores": "seqdefer.environment",
    "seqdefer.curves": "seqdefer.evaluation.curves, seqdefer.budgets.sweeps",
    "seqdefer.deferring": "seqdefer.model.deferring_model, .folders, .generation",
    "seqdefer.engine": "seqdefer.engine.interleaved, .drafts",
    "seqdefer.experiment": "seqdefer.evaluation.experiment, seqdefer.report.run, seqdefer.registry",
    "seqdefer.exploration": "seqdefer.labels.exploration",
    "seqdefer.fitting": "seqdefer.model.fitting",
    "seqdefer.hulls": "seqdefer.budgets.convex_hull",
    "seqdefer.labelling": "seqdefer.labels",
    "seqdefer.labels": "seqdefer.labels.hand_offs",
    "seqdefer.losses": "seqdefer.rejectors.losses",
    "seqdefer.markup": "seqdefer.report.markup",
    "seqdefer.oracle": "seqdefer.evaluation.oracle",
    "seqdefer.paper": "seqdefer.evaluation.published",
    "seqdefer.patience": "seqdefer.remote.client",
    "seqdefer.remote.cancellation": "seqdefer.remote.client",
    "seqdefer.plots": "seqdefer.report.svg, .drawn_curves",
    "seqdefer.policies": "seqdefer.budgets.policies, .rules, .token_sweeps, .hand_off_rules",
    "seqdefer.rejectors": "seqdefer.rejectors.base, .token, .draft, .checkpoints",
    "seqdefer.remote": "seqdefer.remote.client",
    "seqdefer.report": "seqdefer.report.html",
    "seqdefer.reproduction": "seqdefer.paper",
    "seqdefer.results": "seqdefer.evaluation.results, seqdefer.storage.records",
    "seqdefer.roofline": "benchmarks.scaling.roofline (in the repository)",
    "seqdefer.scaling": "benchmarks.scaling.label_cost (in the repository)",
    "seqdefer.sections": "seqdefer.report.comparisons",
    "seqdefer.server.answers": "seqdefer.server.responses",
    "seqdefer.server.describing": "seqdefer.server.openapi",
    "seqdefer.server.faults": "seqdefer.server.http",
    "seqdefer.server.gate": "seqdefer.server.http",
    "seqdefer.server.guarding": "seqdefer.server.fallback",
    "seqdefer.server.limits": "seqdefer.server.http",
    "seqdefer.server.pages": "seqdefer.server.app",
    "seqdefer.server.running": "seqdefer.server.serve",
    "seqdefer.server.schemas": "seqdefer.server.shapes",
    "seqdefer.server.turns": "seqdefer.server.fallback",
    "seqdefer.server.working": "seqdefer.server.request",
    "seqdefer.settings": "seqdefer.evaluation.settings",
    "seqdefer.shards": "seqdefer.storage.shards",
    "seqdefer.showing": "seqdefer.evaluation.examples",
    "seqdefer.splits": "seqdefer.evaluation.splits, seqdefer.labels.labelled",
    "seqdefer.store": "seqdefer.storage.files, .user_files",
    "seqdefer.tables": "seqdefer.report.terminal",
    "seqdefer.tasks.tsp.rl4co": "seqdefer_rl4co (the package in examples/seqdefer-rl4co)",
    "seqdefer.theory": "seqdefer.paper.theory",
    "seqdefer.training": "seqdefer.rejectors.training, .token_training, .draft_training, seqdefer.hyperparameters",
    "seqdefer.trees": "seqdefer.labels.trees, .enumeration",
    "seqdefer.tasks.wheels": "seqdefer.tasks.common.download",
    "seqdefer.tasks.colours": "seqdefer.tasks.common.token_drawing",
    "seqdefer.tasks.options": "seqdefer.tasks.common.options",
    "seqdefer.tasks.forecaster": "seqdefer.tasks.weather.forecaster",
    "seqdefer.tasks.weather_data": "seqdefer.tasks.weather.data",
    "seqdefer.tasks.weather_sources": "seqdefer.tasks.weather.sources",
}
NEW_NAMES = {  # of modules that stayed
    "seqdefer.environment.Clock": "seqdefer.progress.Clock",
    "seqdefer.interfaces.Silent": "seqdefer.progress.Silent",
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
    """Return the `__getattr__` of a room that was a module, or of a module that names have left: it names their new
    place."""

    def refuse(name: str) -> NoReturn:
        old = f"{room}.{name}"
        if old in NEW_NAMES:
            raise ImportError(f"{old} is now {NEW_NAMES[old]}", name=room)
        # A room's own modules are imported as usual.
        if room not in NEW_PLACES or name.startswith("__") or find_spec(old) is not None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        raise ImportError(f"{name} is not in {room} itself; what was there is now in {NEW_PLACES[room]}", name=room)

    return refuse
