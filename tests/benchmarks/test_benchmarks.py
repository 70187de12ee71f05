"""The benchmarks run, compare results before timing them, and write their table; at tiny sizes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_benchmarks import TEXT_BENCHMARKS, check_spread, run, weather

from benchmarks import labelling
from seqdefer.tasks.weather.data import parse_series

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of all benchmarks that need no text models."""
    out = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        patch.setattr(labelling, "REPEATS", 1)  # each starts three workers
        patch.setattr(labelling, "MEMORY_FACTORS", (1, 16))  # each starts a driver and a worker
        assert run("--out", str(out)) == 0
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


def test_every_benchmark_has_rows(written: dict[str, Any]) -> None:
    from benchmarks.__main__ import BENCHMARKS, OURS

    expected = [name for name in BENCHMARKS if name not in TEXT_BENCHMARKS]
    assert list(dict.fromkeys(row["benchmark"] for row in written["rows"])) == expected
    assert set(OURS) == set(BENCHMARKS)


def test_rows_hold_the_spread_of_their_ratios(written: dict[str, Any]) -> None:
    check_spread(written["rows"])


def test_labels_report_expert_calls(written: dict[str, Any]) -> None:
    notes = [row["note"] for row in written["rows"] if row["benchmark"] == "labels"]
    assert notes[0] == "expert calls: 32 made, 160 saved; without short-cuts 192"


def test_paper_scale_is_marked_as_a_projection(written: dict[str, Any]) -> None:
    making, epoch, total, memory = (row for row in written["rows"] if row["benchmark"] == "paper_scale")
    assert total["what"].startswith("PROJECTION")
    assert total["median"] == pytest.approx(making["median"] + 100 * epoch["median"])
    assert "not comparable" in total["note"]
    assert memory["unit"] == "GB"


def test_labelling_reports_memory(written: dict[str, Any]) -> None:
    rows = [row for row in written["rows"] if row["benchmark"] == "labelling"]
    assert [row["unit"] for row in rows] == ["times as fast", "MB", "MB"]
    assert rows[0]["same"] == "5 files equal"
    for row in rows[1:]:
        assert re.fullmatch(r"1x: \d+ MB, 16x: \d+ MB; 16x is \d\.\d\d times 1x", row["note"])


def test_text_is_skipped_without_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = tmp_path / "bench.json"
    assert run("--only", "text", "--out", str(out)) == 0
    assert "text: skipped: " in (errors := capsys.readouterr().err)
    assert "pip install 'seqdefer[text]'" in errors
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == []
    assert run("--only", "text", "--pair", "small", "large", "--out", str(out)) == 2


def test_provenance(written: dict[str, Any]) -> None:
    assert {"version", "command", "machine", "repeats", "sizes", "tasks", "seconds"} < set(written)
    assert written["command"] == "python -m benchmarks"  # without --out
    assert set(written["tasks"]) == {"task", "paper_task"}


def test_only_runs_one_and_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "curve", "--out", str(tmp_path / "bench.json")) == 0
    printed = capsys.readouterr()
    assert "a sort and a cumulative sum" in printed.out
    assert "engine" not in printed.out
    assert "curve: round 3 of 3" in printed.err


def test_full_trains_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weather, "PAPER", replace(weather.PAPER, epochs=3))
    sizes = replace(weather.QUICK, paper_weeks=4, predictor_epochs=1, n_paper=32, paper_epochs=1)
    rows = weather.paper_scale(weather.Bench(sizes, tmp_path, full=True))
    assert "to the end, measured (3 epochs" in rows[2].what


def test_different_results_are_not_timed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = weather.curve_by_loop
    monkeypatch.setattr(weather, "curve_by_loop", lambda swept: right(swept) + 1e-6)
    out = tmp_path / "bench.json"
    assert run("--only", "curve", "--out", str(out)) == 1
    assert re.search(r"\nbenchmarks: coordinates of points: \d+ of \d+ differ.*\n$", capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "cruve"], "unknown benchmark 'cruve'; available: curve, engine"),
        (["--nope"], "unrecognized arguments: --nope; see: python -m benchmarks --help"),
        (["--out", "."], "is a folder"),
        (["--only", "curve", "--data", "no-such-record.csv"], "cannot read no-such-record.csv"),
        (["--documents", "news.jsonl"], "--documents needs --pair"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_require_same() -> None:
    from benchmarks.measure import ResultsDifferError, require_same

    assert require_same("x", ([1, 2], [1, 2])) == "2 x equal"
    assert require_same("x", ([1.0, 200.0], [1.0, 200.1]), tolerance=1e-3) == "2 x equal to 0.0005 (allowed: 0.001)"
    turned = require_same("x", (np.arange(100), np.arange(100)), (np.zeros(100), np.eye(100)[0]), rounding=0.01)
    assert turned.startswith("99 of 100 x equal")
    for ours in ([1.0, 2.1], [1.0, float("nan")], [1.0]):
        with pytest.raises(ResultsDifferError):
            require_same("x", (ours, [1.0, 2.0]), tolerance=1e-3)


def test_synthetic_record() -> None:
    text = weather.synthetic_record(2)
    assert text == weather.synthetic_record(2)
    series = parse_series(text.encode(), "synthetic")
    assert len(series) == series.cleaning.rows == 2 * 7 * 24 * 6
    assert series.cleaning.gaps == 0
