"""`seqdefer plot`: reports and figures from results.json."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import Capture, content, fails_with, run


@pytest.mark.slow
def test_plot_draws_a_run_again(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    assert run("plot", done[0], "--out", tmp_path / "drawn") == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.parent for path in written} == {tmp_path / "drawn"}
    assert (tmp_path / "drawn" / "report.html").read_bytes() == (done[0] / "report.html").read_bytes()
    assert any(path.suffix == ".svg" and path.stat().st_size > 1000 for path in written)
    assert set(content(tmp_path / "drawn")) == {path.name for path in written}


@pytest.mark.parametrize("is_file", [False, True])
def test_plot_keeps_the_examples_of_a_run(
    is_file: bool, done: tuple[Path, str, str], tmp_path: Path, capsys: Capture
) -> None:
    """Even into another folder; but not those with active content."""
    shutil.copy(done[0] / "results.json", tmp_path)
    chosen = tmp_path / "results.json" if is_file else tmp_path
    reports = {}
    for name, drawn in {"ours": "<p>a tour</p>", "hostile": '<p onclick="alert(1)">a tour</p>', "none": ""}.items():
        (tmp_path / "examples.html").write_text(drawn)
        assert run("plot", chosen, "--out", tmp_path / name) == 0
        reports[name] = (tmp_path / name / "report.html").read_text()
        assert not (tmp_path / name / "examples.html").exists()
    assert "<p>a tour</p>" in reports["ours"]
    assert reports["hostile"] == reports["none"]
    assert "a tour" not in reports["none"]
    assert capsys.readouterr().err == ""


def test_plot_of_examples_that_are_not_text(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    """Regression: a traceback."""
    shutil.copy(done[0] / "results.json", tmp_path)
    (tmp_path / "examples.html").write_bytes(bytes(range(256)))
    assert run("plot", tmp_path) == 0
    assert capsys.readouterr().err == ""


def test_plot_accepts_the_file(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    shutil.copy(done[0] / "results.json", tmp_path)
    assert run("plot", tmp_path / "results.json") == 0
    assert (tmp_path / "report.html").is_file()
    assert capsys.readouterr().err == ""


def test_plot_needs_results(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    assert "does not exist" in fails_with(capsys, "plot", tmp_path / "nowhere")
    assert "holds no results.json; make it with: seqdefer run TASK" in fails_with(capsys, "plot", tmp_path)
    whole = (done[0] / "results.json").read_text()
    for damaged in (whole[: len(whole) // 2], whole.replace('"audc"', '"area"', 1), "[]", whole.replace("1", "NaN", 1)):
        (tmp_path / "results.json").write_text(damaged)
        assert "results.json" in fails_with(capsys, "plot", tmp_path)
    assert set(content(tmp_path)) == {"results.json"}
    (tmp_path / "file").write_text("mine")
    assert "cannot write into" in fails_with(capsys, "plot", done[0], "--out", tmp_path / "file")


def test_prices_add_a_section(done: tuple[Path, str, str], tmp_path: Path, capsys: Capture) -> None:
    shutil.copy(done[0] / "results.json", tmp_path)
    prices = tmp_path / "prices.toml"
    prices.write_text("[predictor]\noutput = 1\n[expert]\noutput = 10\ncall = 1\n")
    assert run("plot", tmp_path, "--prices", prices) == 0
    report = (tmp_path / "report.html").read_text()
    assert "USD per sequence" in report
    assert "\N{MINUS SIGN}" in report[report.index("USD per sequence") :]  # a call for each token loses money
    assert run("plot", tmp_path) == 0
    assert "USD per sequence" not in (tmp_path / "report.html").read_text()
