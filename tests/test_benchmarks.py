"""The benchmarks run, compare what they time, and write what they print; at sizes that measure nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from seqdefer.tasks.weather_data import parse_series

ROOT = Path(__file__).resolve().parents[1]
HAS_TRANSFORMERS = find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs the extra 'text'")


@pytest.fixture(scope="module")
def weather() -> Iterator[ModuleType]:
    """benchmarks.weather: the folder is part of the repository, not of the package that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import benchmarks.weather

        yield benchmarks.weather


@pytest.fixture(scope="module")
def run(weather: ModuleType) -> Callable[..., int]:
    from benchmarks import text
    from benchmarks.__main__ import main

    sizes = weather.Sizes(
        weeks=8, paper_weeks=8, predictor_epochs=1, repeats=3, least_seconds=0.0, n_training=48, training_epochs=2,
        n_labels=32, n_enumerate=8, n_sweep=10, n_thresholds=5, n_curve=40, n_engine=6, n_paper=64, paper_epochs=2,
        n_tours=3, n_cold_tours=2, n_tour_cities=8, n_labelled=4, n_memory=2, ray=False,
    )  # fmt: skip
    text_sizes = text.Sizes(
        {1: 1, 2: 3}, {1: 2, 3: 3}, longest=12, length=5, n_layers=(1, 2), more_layers=(3,), width=32, n_heads=2,
        n_words=99,
    )  # fmt: skip
    return lambda *arguments: main(arguments, sizes, text_sizes)


@pytest.fixture(scope="module")
def written(run: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all benchmarks write."""
    out = tmp_path_factory.mktemp("bench") / "new" / "bench.json"
    assert run("--out", str(out)) == 0
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


def test_every_benchmark_has_rows(written: dict[str, Any], weather: ModuleType) -> None:
    from benchmarks.__main__ import BENCHMARKS, OURS

    expected = [name for name in BENCHMARKS if name not in ("text", "rejector", "server") or HAS_TRANSFORMERS]
    assert list(dict.fromkeys(row["benchmark"] for row in written["rows"])) == expected
    assert set(OURS) == set(BENCHMARKS)


def test_rows_hold_the_spread_of_their_ratios(written: dict[str, Any]) -> None:
    ratios = [row for row in written["rows"] if row["benchmark"] != "paper_scale" and row["unit"] not in ("MB", "ms")]
    for row in ratios:
        ours, theirs = (np.array(row["seconds"][name]) for name in ("ours", "theirs"))
        values = ours / theirs if row["unit"] == "times its cost" else theirs / ours
        assert len(values) == 3
        assert [row["low"], row["median"], row["high"]] == pytest.approx(np.sort(values))
        assert " equal" in row["same"]


def test_labels_tell_the_calls(written: dict[str, Any]) -> None:
    notes = [row["note"] for row in written["rows"] if row["benchmark"] == "labels"]
    assert notes[0] == "expert calls: 32 made, 160 saved; without short-cuts 192"


def test_paper_scale_is_called_a_projection(written: dict[str, Any]) -> None:
    making, epoch, total, memory = (row for row in written["rows"] if row["benchmark"] == "paper_scale")
    assert total["what"].startswith("PROJECTION")
    assert total["median"] == pytest.approx(making["median"] + 100 * epoch["median"])
    assert "does not compare" in total["note"]
    assert memory["unit"] == "GB"


def test_labelling_tells_the_memory_of_more_examples(written: dict[str, Any]) -> None:
    rows = [row for row in written["rows"] if row["benchmark"] == "labelling"]
    assert [row["unit"] for row in rows] == ["times as fast", "MB", "MB"]
    assert rows[0]["same"] == "5 files equal"
    for row in rows[1:]:
        assert re.fullmatch(r"1x: \d+ MB, 4x: \d+ MB, 16x: \d+ MB; 16x is \d\.\d\d times 1x", row["note"])


@needs_transformers
def test_text_has_the_same_rows_for_every_batch_size(written: dict[str, Any]) -> None:
    rows = [row for row in written["rows"] if row["benchmark"] == "text"]
    *decoding, hand_offs = rows
    assert [row["what"].split(":")[0] for row in decoding] == ["batches of 1"] * 6 + ["batches of 2"] * 6
    assert hand_offs["what"] == "all hand-offs of 3 documents, one run of the expert for each"
    assert hand_offs["same"].endswith("tokens of all hand-offs equal")
    assert "3 documents, " in rows[6]["what"]
    assert rows[6]["same"] == "45 tokens of either model alone equal"
    assert rows[9]["same"].endswith("tokens of the expert equal")
    assert "THE BOUND" in rows[10]["what"]
    assert re.fullmatch(r"ms a document: interleaved .*, predictor .*, encoding .*, expert .*", rows[10]["note"])


@needs_transformers
def test_the_rejector_is_measured_beside_deeper_predictors(written: dict[str, Any]) -> None:
    rows = [row for row in written["rows"] if row["benchmark"] == "rejector"]
    deeper = "a predictor of 3 + 3 layers"
    assert [row["what"] for row in rows] == [
        f"{name} without it, batches of {batch}" for name in ("the predictor", deeper) for batch in (1, 3)
    ]
    assert [row["same"] for row in rows] == [f"{5 * n} tokens of the predictor equal" for n in (1, 3, 1, 3)]


@needs_transformers
def test_the_server_is_measured_against_the_engine_and_either_model(written: dict[str, Any]) -> None:
    rows = [row for row in written["rows"] if row["benchmark"] == "server"]
    assert [row["unit"] for row in rows[:4]] == ["ms"] * 2 + ["times its cost"] * 2
    assert rows[0]["same"] == "10 texts equal"  # of a round: 4 whole answers and 1 stream, 2 documents each
    assert rows[0]["note"] == "8 requests a round"
    assert [row["what"].split(":")[0] for row in rows[4:]] == ["1 client"] * 3 + ["3 clients"] * 3
    assert all(row["same"] == f"{n} texts equal" for row, n in zip(rows[4:], [2] * 3 + [3] * 3, strict=True))


def test_text_is_left_out_without_transformers(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = tmp_path / "bench.json"
    assert run("--only", "text", "--out", str(out)) == 0
    assert "text: left out: " in (told := capsys.readouterr().err)
    assert "pip install 'seqdefer[text]'" in told
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == []
    assert run("--only", "text", "--pair", "small", "large", "--out", str(out)) == 2


@needs_transformers
def test_text_takes_a_pair_and_documents(run: Callable[..., int], tmp_path: Path) -> None:
    from tiny_models import tiny, tokenizer

    for name, n_layers in (("predictor", 1), ("expert", 2)):
        tiny("gpt2", n_layers, seed=n_layers).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    documents = tmp_path / "documents.jsonl"
    texts = ["w5 w6 w7", "w8 w9", "w10 w11 w12 w13"]
    documents.write_text("".join(json.dumps({"document": each, "summary": "w3"}) + "\n" for each in texts))
    pair, out = [str(tmp_path / name) for name in ("predictor", "expert")], tmp_path / "bench.json"
    assert run("--only", "text", "--pair", *pair, "--documents", str(documents), "--out", str(out)) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["text"]["pair"] == ["predictor", "expert"]
    assert written["text"]["documents"] == "documents.jsonl"
    assert len(written["rows"]) == 13
    assert run("--only", "text", "--pair", *pair, "--dtype", "bfloat16", "--out", str(out)) == 0


@needs_transformers
def test_text_that_differs_is_not_timed(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import text

    right = text.generate
    monkeypatch.setattr(text, "generate", lambda *given, **options: right(*given, **options) + 1)
    assert run("--only", "text", "--out", str(tmp_path / "bench.json")) == 1
    assert "benchmarks: tokens of either model alone: " in capsys.readouterr().err


def test_provenance(written: dict[str, Any]) -> None:
    assert {"version", "command", "machine", "repeats", "sizes", "tasks", "seconds"} < set(written)
    assert written["command"] == "python -m benchmarks"  # without --out, which changes nothing
    assert set(written["tasks"]) == {"task", "paper_task"}


def test_only_runs_one_and_prints_it(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--only", "curve", "--out", str(tmp_path / "bench.json")) == 0
    printed = capsys.readouterr()
    assert "a sort and a cumulative sum" in printed.out
    assert "engine" not in printed.out
    assert "curve: round 3 of 3" in printed.err


def test_full_trains_to_the_end(weather: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weather, "PAPER", replace(weather.PAPER, epochs=3))
    sizes = replace(weather.QUICK, paper_weeks=4, predictor_epochs=1, n_paper=32, paper_epochs=1)
    rows = weather.paper_scale(weather.Bench(sizes, tmp_path, full=True))
    assert "to the end, measured (3 epochs" in rows[2].what


def test_different_results_are_not_timed(
    run: Callable[..., int],
    weather: ModuleType,
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
    ("arguments", "says"),
    [
        (["--only", "cruve"], "unknown benchmark 'cruve'; available: curve, engine"),
        (["--nope"], "unrecognized arguments: --nope; see: python -m benchmarks --help"),
        (["--out", "."], "is a folder"),
        (["--only", "curve", "--data", "no-such-record.csv"], "cannot read no-such-record.csv"),
        (["--documents", "news.jsonl"], "--documents needs --pair"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_mistakes_cost_one_line(
    run: Callable[..., int],
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("benchmarks: ")
    assert says in line
    assert not list(tmp_path.iterdir())


def test_comparing(weather: ModuleType) -> None:
    from benchmarks.measure import ResultsDifferError, require_same

    assert require_same("x", ([1, 2], [1, 2])) == "2 x equal"
    assert require_same("x", ([1.0, 200.0], [1.0, 200.1]), tolerance=1e-3) == "2 x equal to 0.0005 (allowed: 0.001)"
    turned = require_same("x", (np.arange(100), np.arange(100)), (np.zeros(100), np.eye(100)[0]), rounding=0.01)
    assert turned.startswith("99 of 100 x equal")
    for ours in ([1.0, 2.1], [1.0, float("nan")], [1.0]):
        with pytest.raises(ResultsDifferError):
            require_same("x", (ours, [1.0, 2.0]), tolerance=1e-3)


def test_synthetic_record(weather: ModuleType) -> None:
    text = weather.synthetic_record(2)
    assert text == weather.synthetic_record(2)
    series = parse_series(text.encode(), "synthetic")
    assert len(series) == series.cleaning.rows == 2 * 7 * 24 * 6
    assert series.cleaning.gaps == 0
