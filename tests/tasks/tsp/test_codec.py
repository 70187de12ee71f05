"""The codec of tours: inputs read and refused, and a fitted pair used from Python and the command line."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tours import fitted_pair, is_tour

from seqdefer import cli
from seqdefer.errors import InputError, OptionError
from seqdefer.evaluation.settings import experiment_settings
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.fitting import fit_model
from seqdefer.tasks.tsp.codec import TourCodec
from seqdefer.tasks.tsp.data import gaussian_instances, normalise
from seqdefer.tasks.tsp.task import ENTRY
from seqdefer.tasks.tsp.tours import tour_lengths

pytestmark = pytest.mark.usefixtures("one_thread")
SQUARE = [[0, 0], [0, 1], [1, 1], [1, 0], [0.5, 3], [2, 2], [3, 1.5]]


def test_cities_are_normalised_and_tours_are_indices() -> None:
    codec = TourCodec(7)
    examples = codec.encode([SQUARE, json.dumps(SQUARE), torch.tensor(SQUARE)])
    expected = normalise(torch.tensor(SQUARE, dtype=torch.float64))
    assert examples.inputs.shape == (3, 7, 2)
    for row in examples.inputs:
        torch.testing.assert_close(row, expected)
    assert codec.decode([3, 0, 1]) == [3, 0, 1]
    assert codec.pieces([3, 10, 1]) == ["3", " 10", " 1"]


def test_lengths_are_in_the_units_of_the_input() -> None:
    codec, tour = TourCodec(7), [0, 1, 4, 5, 6, 3, 2]
    ring = [SQUARE[place] for place in [*tour, tour[0]]]
    length = sum(math.dist(one, other) for one, other in pairwise(ring))
    for given, scale in ((SQUARE, 1), (json.dumps(SQUARE), 1), ([[5 * x + 9, 5 * y] for x, y in SQUARE], 5)):
        assert codec.facts(given, tour) == {"length": pytest.approx(scale * length)}
    assert codec.facts([[1e308 * x, y] for x, y in SQUARE], tour) == {}  # overflow


@pytest.mark.parametrize(
    ("cities", "message"),
    [
        ("no JSON", "input 2 of 2 is not a list of cities; give"),
        ([[0, 0], [1]], "input 2 of 2 is not a list of cities; give"),
        ([["x", "y"]] * 7, "input 2 of 2 is not a list of cities; give"),
        (None, "input 2 of 2 is not a list of cities; give"),
        ([[0, 0], [0, 1]], r"input 2 of 2 has the shape \(2, 2\); give 7 cities"),
        (7, r"input 2 of 2 has the shape \(\); give 7 cities"),
        ([*SQUARE[:-1], [math.nan, 0]], "not finite or not distinct; give each city once"),
        ([*SQUARE[:-1], [math.inf, 0]], "not finite or not distinct"),
        ([*SQUARE[:-1], SQUARE[0]], "not finite or not distinct"),
        ([*SQUARE[:-1], [1e308, -1e308]], "not finite or not distinct"),
        ([*SQUARE[:-1], [10**400, 0]], "input 2 of 2 is not a list of cities; give"),
    ],
)
def test_cities_that_cannot_be_used(cities: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TourCodec(7).encode([SQUARE, cities])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair fitted by one-time deferral, with an untrained predictor. Do not change it."""
    home = tmp_path_factory.mktemp("tours")
    options, model = fitted_pair(home, 7)
    with pytest.raises(OptionError, match=r"names no next token; available: ChowMean, .*OneTimeModel, OneTimeCost"):
        fit_model(ENTRY, options, experiment_settings(ENTRY, "quick"), home / "other", method="TokenwiseModel")
    return model


def test_a_fitted_pair_writes_tours(folder: Path) -> None:
    model = DeferringModel.from_pretrained(folder, device="cpu")
    assert model.rejector.notes["method"] == "OneTimeCost"
    cities = gaussian_instances(20, 7, seed=5, stream="test")
    lengths = []
    for budget in (0.0, 1.0):
        written = model.generate(cities.tolist(), budget)
        tours = torch.tensor(written.outputs)
        assert is_tour(tours).all()
        assert written.share == budget
        lengths.append(float(tour_lengths(cities, tours).mean()))
    assert lengths[1] < lengths[0]
    pieces = list(model.stream(cities[0].tolist(), 1.0))
    assert [piece.token for piece in pieces] == model.generate(cities[:1].tolist(), 1.0).outputs[0]


def test_tours_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["generate", str(folder), json.dumps(SQUARE), "--budget", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert sorted(row["output"]) == list(range(7))
    data = tmp_path / "own.jsonl"
    instances = gaussian_instances(5, 7, seed=6, stream="test").tolist()
    data.write_text("".join(json.dumps({"cities": cities}) + "\n" for cities in instances))
    assert cli.main(["calibrate", str(folder), "--data", str(data), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"] == 5
