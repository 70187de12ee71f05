"""Fitting with test data, which type checkers refuse: without an error, mypy --strict reports an unused ignore.

Part of `make check`; nothing imports this.
"""

from __future__ import annotations

from seqdefer.evaluation.experiment import Experiment
from seqdefer.methods.base import FitContext


def choose(experiment: Experiment) -> None:
    splits = experiment.splits
    experiment.fit(splits.train, splits.validation, 0)
    experiment.fit(splits.train, splits.test, 0)  # type: ignore[arg-type]
    experiment.fit(splits.test, splits.validation, 0)  # type: ignore[arg-type]
    FitContext(experiment.task, experiment.settings, experiment.grid, splits.train, splits.validation)
    FitContext(experiment.task, experiment.settings, experiment.grid, splits.train, splits.test)  # type: ignore[arg-type]
