"""The command line of `seqdefer reproduce`: mistakes in one line, before any work; and what is printed for whom."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError

from seqdefer import cli
from seqdefer.methods import one_time_cost
from seqdefer.methods.registry import all_methods
from seqdefer.paper import reproduce
from seqdefer.paper.plan import STUDIES
from seqdefer.paper.records import load_origins, load_study
from tests.paper.test_lab import ENTRIES, ToyOptions, cells_of
from tests.paper.test_plan import (  # noqa: F401, four are fixtures
    Finished,
    copied_fixture,
    final_files,
    finished_fixture,
    installed_fixture,
    work_fixture,
)

Capture = pytest.CaptureFixture[str]


def run(*arguments: str | Path) -> int:
    return cli.main(["reproduce", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table2"], "unknown study 'table2'; available: all, figure-alpha, figure-curves, table-ablation, "),
        (["all", "--preset", "huge"], "unknown preset 'huge'; available: paper, quick, tiny"),
        (["all", "--tasks", "spell,sing"], "unknown task of the preset tiny 'sing'; available: solve, spell"),
        (["all", "--set", "sing.n=4"], "unknown task of the preset tiny 'sing'; available: solve, spell"),
        (["all", "--set", "solve.m=4"], "unknown option of solve 'm'; available: blind, by_token, length, n, seed, "),
        (["all", "--set", "spell.n=many"], "--set spell.n=many: it must be of type int"),
        (["all", "--set", "spell.blind=maybe"], "--set spell.blind=maybe: it must be yes or no"),
        (["all", "--set", "spell.n"], "--set spell.n: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--set", "n=4"], "--set n=4: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--set", ".n=4"], "--set .n=4: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--set", "spell.=4"], "--set spell.=4: it must be TASK.OPTION=VALUE, such as "),
        (
            ["all", "--seeds", "4"],
            "the test split has 40 examples, 4 seeds x 12 instances need more; lower ",
        ),
        (["all", "--instances", "21"], "the test split has 40 examples, 2 seeds x 21 instances need more; lower "),
        (["all", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["all", "--seeds", "-1"], "--seeds is -1; it must be at least 1"),
        (["all", "--instances", "0"], "--instances is 0; it must be at least 1"),
        (["all", "--seeds", "two"], "argument --seeds: invalid int value: 'two'; see: seqdefer reproduce --help"),
        (["table-ablation", "--tasks", "solve"], "table-ablation has no part on solve; its tasks: spell"),
        (["all", "--device", "tpu"], "unknown device 'tpu'; available: auto, cpu, cuda"),
        (["all", "--what"], "unrecognized arguments: --what; see: seqdefer --help"),
        ([], "the following arguments are required: NAME; see: seqdefer reproduce --help"),
    ],
)
def test_mistakes_are_told_in_one_line_before_any_labelling(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: Capture,
    work: dict[str, list[tuple[Any, ...]]],
) -> None:
    preset = [] if "--preset" in arguments else ["--preset", "tiny"]
    assert run(*arguments, *preset, "--out", tmp_path / "out", "--no-figures") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith(f"seqdefer: {words}")
    assert not any(work.values())
    assert not (tmp_path / "out").exists()


def test_options_of_all_tasks_are_read_before_the_first_is_prepared(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor that took an hour to train was trained before a misspelt option of the next task was refused."""
    prepared = []
    noting = {
        name: replace(entry, prepare=lambda *given, entry=entry: prepared.append(1) or entry.prepare(*given))
        for name, entry in ENTRIES.items()
    }
    monkeypatch.setattr(reproduce, "load_task", noting.__getitem__)
    assert run("all", "--preset", "tiny", "--set", "solve.lenght=4", "--out", tmp_path, "--no-figures") == 2
    assert "unknown option of solve 'lenght'" in capsys.readouterr().err
    assert prepared == []


def test_without_matplotlib_figures_are_refused_before_any_work(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, work: dict[str, list[tuple[Any, ...]]]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("table1", "--preset", "tiny", "--out", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install 'seqdefer[figures]'" in told
    assert not any(work.values())
    assert not (tmp_path / "out").exists()
    assert run("table1", "--preset", "tiny", "--tasks", "solve", "--out", tmp_path / "out", "--no-figures") == 0


def test_json_is_a_document_for_each_study(copied: Path, finished: Finished, capsys: Capture) -> None:
    assert run("all", "--preset", "tiny", "--out", copied, "--json", "--quiet", "--no-figures") == 0
    told = capsys.readouterr()
    printed = [json.loads(line) for line in told.out.splitlines()]
    files = [copied / f"{name}.json" for name in (*STUDIES, "verdicts")]
    assert printed == [json.loads(path.read_text()) for path in files]
    assert final_files(copied) == final_files(finished.folder)
    said = [line.split() for line in told.err.splitlines()]
    assert [words[0] for words in said] == ["written:"] * 6
    for path, words in zip(files, said, strict=True):
        assert str(path) in words
        assert all(Path(word).is_file() for word in words[1:])


def test_tables_are_printed_for_people(copied: Path, finished: Finished, capsys: Capture) -> None:
    assert run("table-ablation", "--preset", "tiny", "--out", copied, "--quiet", "--no-figures") == 0
    told = capsys.readouterr()
    for row in finished.made["table-ablation"].rows:
        assert f"{abs(row.improvement_mean):.2f}" in told.out
    assert all(words in told.out for words in ("LSTM", "MLP", "recurrent", "eacher forcing"))  # verdicts come last
    assert load_origins(copied / "origins.json").command.startswith("seqdefer reproduce table-ablation --preset tiny")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are drawn: stderr is taken for a terminal."""
    for name, value in {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("watched")
def test_json_goes_into_a_file_while_bars_are_drawn(copied: Path, capsys: Capture) -> None:
    """rich took what was printed while its bars stood for theirs: `--json > studies.json` left an empty file."""
    assert run("table1", "--preset", "tiny", "--out", copied, "--json", "--no-figures") == 0
    told = capsys.readouterr()
    assert "bootstrap" in told.err
    files = [copied / "table1.json", copied / "verdicts.json"]
    assert [json.loads(line) for line in told.out.splitlines()] == [json.loads(path.read_text()) for path in files]


@pytest.mark.usefixtures("watched")
def test_bars_are_not_drawn_over_tables(copied: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one terminal for both, a table was written past the bars, and its last rows were gone when they moved."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("table1", "--preset", "tiny", "--out", copied, "--no-figures") == 0
    told = capsys.readouterr()
    assert told.out == ""  # all went through the console that knows of the bars
    assert all(method in told.err for method in all_methods())


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes tensors has an error of its own for it, which nobody expected."""

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    assert run("table1", "--preset", "tiny", "--out", tmp_path, "--quiet", "--no-figures") == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "No space left on device; mend that and run again" in told.err


def test_what_is_set_reaches_the_task_as_its_own_type(tmp_path: Path, capsys: Capture) -> None:
    given = ["--set", "solve.n=30", "--set", "solve.by-token=yes", "--set", "solve.length=2"]
    options = ["--tasks", "solve", "--seeds", "1", "--instances", "5", "--json", "--quiet", "--no-figures"]
    assert run("table1", "--preset", "tiny", "--out", tmp_path, *given, *options) == 0
    study = load_study(tmp_path / "table1.json")
    assert (study.seeds, dict(study.instances), study.tasks["solve"].length) == (1, {"solve": 5}, 2)
    assert {row.method for row in study.rows} >= {"TokenwiseModel", "OptimalToken"}
    chosen = reproduce.with_options(ToyOptions(), {"n": "30", "by-token": "no", "seed": "7"}, "solve")
    assert chosen == ToyOptions(n=30, by_token=False, seed=7)


def test_ctrl_c_says_that_the_same_command_goes_on(
    finished: Finished, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    arguments = ["table1", "--preset", "tiny", "--out", tmp_path, "--quiet", "--no-figures"]
    with monkeypatch.context() as patch:
        patch.setattr(one_time_cost, "fit_cost", stop)
        assert run(*arguments) == 130
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "seqdefer: stopped; the same command goes on from what is finished\n")
    assert cells_of(tmp_path)
    assert not (tmp_path / "table1.json").exists()
    assert run(*arguments) == 0
    assert load_study(tmp_path / "table1.json") == finished.made["table1"]


def test_help_names_the_studies(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    told = capsys.readouterr()
    assert stopped.value.code == 0
    for words in (*STUDIES, "--set TASK.OPTION=VALUE", "--preset paper|quick", "--no-figures", "goes on"):
        assert words in told.out
