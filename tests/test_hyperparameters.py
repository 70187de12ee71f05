"""Hyperparameters: the record's bounds, and the paper's table in the records of the tasks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from seqdefer.errors import OptionError
from seqdefer.hyperparameters import COST_PERCEPTRON, Hyperparameters, Settings
from seqdefer.registry import load_task

PAPER_TABLE: dict[str, tuple[Any, ...]] = {
    "learning_rate": (5e-4, 1e-3, 5e-4, 5e-4, 5e-4),
    "patience": (20, 7, 20, 7, 20),
    "delta": (1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
    "architecture": ("draft_mlp", "lstm", "draft_mlp", "lstm", "draft_mlp"),
    "layers": (1, 3, 1, 2, 1),
    "units": (8, 128, 8, 64, 8),
    "dropout": (0.2, 0.4, 0.2, 0.4, 0.2),
    "epochs": (200, 100, 200, 100, 200),
    "samples": (2400, 800, 2400, 70080, 70080),
    "clip_norm": (1.0, 1.0, 1.0, 1.0, 1.0),
    "weight_decay": (0.005, 0.001, 0.005, 0.001, 0.005),
}


def record_of(task: str) -> Hyperparameters:
    record = load_task(task).hyperparameters
    assert isinstance(record, Hyperparameters)
    return record


def test_tasks_hold_the_papers_table() -> None:
    tsp, xsum, weather = (record_of(name) for name in ("tsp", "xsum", "weather"))
    columns = (tsp.published_once, xsum.published_token, xsum.published_once, weather.published_token)
    for name, row in PAPER_TABLE.items():
        assert tuple(getattr(column, name) for column in (*columns, weather.published_once)) == row, name
    assert (weather.token, weather.once) == (weather.published_token, weather.published_once)
    assert record_of("text") == xsum


@pytest.mark.parametrize(
    "wrong",
    [{"learning_rate": 0.0}, {"learning_rate": math.nan}, {"epochs": 0}, {"batch_size": 0}, {"layers": 0},
     {"units": -1}, {"patience": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": math.nan}, {"least_steps": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        replace(COST_PERCEPTRON, **wrong)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        Settings(5e-4, 20, "draft_mlp", 1, 8, 0.2, 200, 0.005, 2400)  # type: ignore[misc]
