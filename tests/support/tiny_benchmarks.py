"""The benchmarks at tiny sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Benchmarks are part of the repository, not of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import text, weather
from benchmarks.__main__ import main

TEXT_BENCHMARKS = ("text", "speculation", "rejector", "server")
SIZES = weather.Sizes(
    weeks=8, paper_weeks=8, predictor_epochs=1, repeats=3, least_seconds=0.0, n_training=48, training_epochs=2,
    n_labels=32, n_enumerate=8, n_sweep=10, n_thresholds=5, n_curve=40, n_engine=6, n_paper=64, paper_epochs=2,
    n_tours=3, n_cold_tours=2, n_tour_cities=8, n_labelled=4, n_memory=2, ray=False,
)  # fmt: skip
TEXT_SIZES = text.Sizes(
    {1: 1, 2: 3},
    {1: 2, 3: 3},
    longest=12,
    length=5,
    n_layers=(1, 2),
    width=32,
    n_heads=2,
    n_words=99,
    is_quick=True,
)


def run(*arguments: str) -> int:
    return main(arguments, SIZES, TEXT_SIZES)


def check_spread(rows: list[dict[str, Any]]) -> None:
    """Check that each ratio is that of the seconds, with minimum and maximum. Labelling is timed once."""
    ratios = [row for row in rows if row["benchmark"] != "paper_scale" and row["unit"] not in ("MB", "ms")]
    assert ratios
    for row in ratios:
        ours, theirs = (np.array(row["seconds"][name]) for name in ("ours", "theirs"))
        values = ours / theirs if row["unit"] == "times its cost" else theirs / ours
        assert len(values) == (1 if row["benchmark"] == "labelling" else 3)
        spread = [values.min(), np.median(values), values.max()]
        assert [row["low"], row["median"], row["high"]] == pytest.approx(spread)
        assert " equal" in row["same"]
