"""Every method, fitted once on a toy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import TINY

from seqdefer.evaluation.experiment import Experiment
from seqdefer.methods.registry import all_methods
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.testing import ToyTask


@pytest.fixture(scope="package")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    settings = replace(TINY, methods=tuple(all_methods()))
    return Experiment(ToyTask(n=30, length=4), settings, tmp_path_factory.mktemp("methods"))


@pytest.fixture(scope="package")
def rejectors(experiment: Experiment) -> dict[str, Rejector]:
    return experiment.fit(experiment.splits.train, experiment.splits.validation, 0)
