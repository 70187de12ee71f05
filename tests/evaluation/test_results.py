"""The record of a run: what goes in comes out, what is wrong is named, and the averages are the schoolbook ones."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_report import fake_results

from seqdefer.errors import DataError, MissingExtraError
from seqdefer.evaluation.results import (
    Comparison,
    CostCurve,
    ExpertCalls,
    MethodResult,
    PaperFigure,
    Provenance,
    Results,
    SeedResult,
    Units,
    load_results,
    save_results,
    summarise,
)

LINE = ((0.0, 2.0), (1.0, 1.0), (2.0, 0.0))


def method(audc: float, improvement: float) -> MethodResult:
    return MethodResult("token", audc, improvement, LINE)


@pytest.fixture
def results() -> Results:
    seeds = (
        SeedResult(0, {"Random": MethodResult("reference", 2.0, 0.0, LINE), "TokenwiseModel": method(1.0, 50.0)}),
        SeedResult(7, {"Random": MethodResult("reference", 4.0, 0.0, LINE), "TokenwiseModel": method(3.0, 25.0)}),
    )
    return Results(
        task="weather",
        preset="quick",
        length=2,
        seeds=seeds,
        summary=summarise(seeds),
        comparisons=(Comparison("TokenwiseModel", "Random", 37.5, 20.0, 55.0),),
        paper={"TokenwiseModel": PaperFigure(None, None, 25.78, 1.33)},
        units=Units(loss="squared error (°C²)"),
        notes=("a note",),
        provenance=Provenance(
            "0.1.0", "seqdefer run weather", expert_calls=ExpertCalls(3, 4), settings={"rate": [0.1]}
        ),
    )


def test_round_trip_through_a_directory(results: Results, tmp_path: Path) -> None:
    path = save_results(results, tmp_path)
    assert path == tmp_path / "results.json"
    assert load_results(tmp_path) == load_results(str(path)) == results


def test_json_has_the_documented_shape(results: Results) -> None:
    value = results.to_json()
    assert value["format"] == 1
    assert value["seeds"][1]["methods"]["TokenwiseModel"] == {
        "granularity": "token",
        "audc": 3.0,
        "improvement": 25.0,
        "curve": [[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]],
        "against": {},
    }
    assert value["paper"]["TokenwiseModel"]["audc"] is None
    assert value["provenance"]["expert_calls"] == {"made": 3, "saved": 4}


def test_optional_fields_may_be_absent(results: Results) -> None:
    value = results.to_json()
    for name in ("comparisons", "paper", "units", "notes", "provenance"):
        del value[name]
    assert Results.from_json(value) == Results("weather", "quick", 2, results.seeds, results.summary)


def test_the_repr_is_a_line(results: Results) -> None:
    assert repr(results) == (
        "Results(weather, preset quick, 2 seeds, 2 methods, best: TokenwiseModel, 37.50 % over Random; to_frame() "
        "lists all)"
    )
    assert "best" not in repr(replace(results, summary={"Random": results.summary["Random"]}))


def test_one_seed_has_no_spread(results: Results) -> None:
    row = summarise(results.seeds[:1])["TokenwiseModel"]
    assert (row.audc_mean, row.audc_std, row.improvement_std) == (1.0, 0.0, 0.0)


def test_a_method_that_one_seed_lacks_is_averaged_over_the_others(results: Results) -> None:
    seeds = (results.seeds[0], SeedResult(7, {"Plugin": method(5.0, 1.0)}))
    assert summarise(seeds)["Plugin"].audc_mean == 5.0


def test_numpy_scalars_become_plain_numbers(results: Results) -> None:
    odd: Any = np.float32(0.5)
    value = replace(results, length=np.int64(2), comparisons=(Comparison("a", "b", odd, odd, odd),)).to_json()  # type: ignore[arg-type]
    assert type(value["length"]) is int
    assert type(value["comparisons"][0]["low"]) is float


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_reaches_the_file(results: Results, bad: float, tmp_path: Path) -> None:
    seeds = (SeedResult(0, {"ChowMean": MethodResult("whole", 1.0, 0.0, ((0.0, bad),))}),)
    with pytest.raises(DataError, match=r"seeds\[0\].methods.ChowMean.curve\[0\]\[1\]"):
        save_results(replace(results, seeds=seeds), tmp_path)
    assert not list(tmp_path.iterdir())


def test_values_json_cannot_hold_are_named(results: Results) -> None:
    provenance = replace(results.provenance, settings={"device": object()})
    with pytest.raises(DataError, match=r"provenance\.settings\.device"):
        replace(results, provenance=provenance).to_json()


def damage(value: Any, path: list[Any], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    if new is ...:
        del value[path[-1]]
    else:
        value[path[-1]] = new


def nested(levels: int) -> Any:
    value: Any = []
    for level in range(levels):
        value = [value] if level % 2 else {"inner": value}
    return value


@pytest.mark.parametrize(
    ("path", "new", "words"),
    [
        (["format"], 2, "field 'format' is 2; this version of seqdefer reads format 1"),
        (["format"], ..., "field 'format' is 'absent'"),
        (["task"], ..., "field 'task' is missing"),
        (["length"], "six", "field 'length' must be a whole number, not 'six'"),
        (["seeds"], {}, "field 'seeds' must be a list, not {}"),
        (["seeds", 0, "methods", "Random", "audc"], ..., "field 'seeds[0].methods.Random.audc' is missing"),
        (["seeds", 0, "methods", "Random", "curve", 1], [1], "'seeds[0].methods.Random.curve[1]' must have 2 values"),
        (["summary", "Random", "granularity"], "half", "is 'half'; available: whole, once, token, reference"),
        (["paper", "TokenwiseModel", "improvement"], None, "'paper.TokenwiseModel.improvement' must be a number"),
        (["provenance", "expert_calls"], 3, "field 'provenance.expert_calls' must be an object, not 3"),
        (["notes"], [1], "field 'notes[0]' must be a string, not 1"),
        (["length"], 0, "field 'length' is 0; it must be at least 1"),
        (["seeds", 0, "methods", "Random", "audc"], 10**400, "field 'seeds[0].methods.Random.audc' is 1000"),
        (["seeds", 0, "methods", "Random", "curve", 1, 1], -1e100, "curve[1][1]' is -1e+100; every number must be"),
        (["provenance", "settings", "rate"], nested(20), "is nested more than 20 levels deep"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(
    results: Results, tmp_path: Path, path: list[Any], new: Any, words: str
) -> None:
    value = results.to_json()
    damage(value, path, new)
    (tmp_path / "results.json").write_text(json.dumps(value))
    with pytest.raises(DataError) as caught:
        load_results(tmp_path)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path) in message
    assert "\n" not in message


def test_settings_may_have_twenty_levels(results: Results, tmp_path: Path) -> None:
    value = results.to_json()
    damage(value, ["provenance", "settings", "rate"], nested(19))
    (tmp_path / "results.json").write_text(json.dumps(value))
    assert load_results(tmp_path).provenance.settings["rate"] == nested(19)


@pytest.mark.parametrize("text", ["{", "", "\x00", '{"format": NaN}'])
def test_broken_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(DataError, match="is not valid JSON"):
        load_results(tmp_path)


def test_results_by_another_cost_are_results(results: Results, tmp_path: Path) -> None:
    """With its curves, areas, unit and comparisons in the place of those of deferred tokens."""
    assert results.by_cost("passes") is None
    faster = CostCurve(0.5, 75.0, ((0.0, 2.0), (1.0, 0.5), (2.0, 0.0)))
    known = {"Random": CostCurve(2.0, 0.0, LINE), "TokenwiseModel": faster}
    seeds = tuple(
        replace(
            seed, methods={name: replace(row, against={"passes": known[name]}) for name, row in seed.methods.items()}
        )
        for seed in results.seeds
    )
    seeds = (seeds[0], replace(seeds[1], methods={**seeds[1].methods, "OptimalToken": method(0.1, 90.0)}))
    contrast = Comparison("TokenwiseModel", "Random", 70.0, 60.0, 80.0)
    counted = replace(
        results, seeds=seeds, units=replace(results.units, costs={"passes": "passes"}),
        cost_comparisons={"passes": (contrast,)},
    )  # fmt: skip
    save_results(counted, tmp_path)
    found = load_results(tmp_path).by_cost("passes")
    assert found is not None
    assert set(found.summary) == {"Random", "TokenwiseModel"}  # nobody counted the oracle's
    assert found.summary["TokenwiseModel"].improvement_mean == 75.0
    assert found.seeds[0].methods["TokenwiseModel"].curve == faster.curve
    assert found.comparisons == (contrast,)
    assert found.units.deferred == "passes"
    assert counted.summary == results.summary


def test_frames_hold_every_seed_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="needs the extra 'frame'")
    results = fake_results(n_seeds=2)
    frame, points = results.to_frame(), results.curves_to_frame()
    assert list(frame.columns) == ["seed", "method", "granularity", "audc", "improvement"]
    for seed in results.seeds:
        for name, row in seed.methods.items():
            found = frame[(frame.seed == seed.seed) & (frame.method == name)]
            assert found[["granularity", "audc", "improvement"]].values.tolist() == [
                [row.granularity, row.audc, row.improvement]
            ]
            curve = points[(points.seed == seed.seed) & (points.method == name)]
            assert curve[["deferred", "loss"]].values.tolist() == [list(point) for point in row.curve]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"a table of results needs the package 'pandas'.*seqdefer\[frame\]"):
        results.to_frame()
