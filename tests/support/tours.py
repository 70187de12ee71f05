"""A small pair for tours, fitted with an untrained predictor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from seqdefer.evaluation.settings import experiment_settings
from seqdefer.model.fitting import fit_model
from seqdefer.tasks.tsp.pointer import PointerNet, save_pointer
from seqdefer.tasks.tsp.task import ENTRY, TSPOptions


def fitted_pair(home: Path, n_cities: int) -> tuple[TSPOptions, Path]:
    """Fit a rejector, or skip the test; return the options and the folder of the pair."""
    pytest.importorskip("numba", reason="needs the extra tsp")
    torch.manual_seed(0)
    save_pointer(PointerNet(6), home / "pointer", {})
    sizes = {"train": 24, "validation": 12, "test": 1}
    options = TSPOptions(cities=n_cities, expert="search", predictor=str(home / "pointer"), **sizes)
    fit_model(ENTRY, options, experiment_settings(ENTRY, "quick"), home / "model", device="cpu")
    return options, home / "model"


def is_tour(tours: Tensor) -> Tensor:
    """Return which rows (B, N) visit every city once. bool (B,)"""
    return (tours.sort(1).values == torch.arange(tours.shape[1], device=tours.device)).all(1)
