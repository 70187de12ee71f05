"""`seqdefer reproduce` on toys: its files, its error messages before any work, its output."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_studies import DRAWN, ENTRIES, PLAN, RECIPES, SEEDS, TIMED, Finished, ToyOptions, final_files

from seqdefer import cli
from seqdefer.methods.registry import usual_methods
from seqdefer.paper import labs
from seqdefer.paper.claims import CLAIMS, judge
from seqdefer.paper.plan import PLANS, STUDIES
from seqdefer.paper.records import Judgements, Study, load_judgements, load_origins, load_study

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("installed")]

Capture = pytest.CaptureFixture[str]


def test_files_of_a_reproduction(finished: Finished) -> None:
    of_both = {f"{name}{ending}" for name in STUDIES for ending in [".tex", *DRAWN]}
    of_each = {f"{recipe}/{name}{ending}" for recipe in RECIPES for name in STUDIES for ending in (".json", ".csv")}
    verdicts = {f"verdicts{ending}" for ending in (".json", ".csv", ".tex", ".md")}
    assert set(final_files(finished.folder)) == of_both | of_each | verdicts
    assert {path.name for path in finished.folder.iterdir() if path.is_dir()} == {*PLAN.tasks, *RECIPES}
    assert {path.parent.name for name in TIMED for path in finished.folder.glob(f"*/{name}")} == set(RECIPES)
    assert not list(finished.folder.rglob(".*"))  # no temporary files
    assert all(data for data in final_files(finished.folder).values())


def all_made(finished: Finished) -> list[Study]:
    return [study for by_recipe in finished.made.values() for study in by_recipe.values()]


def test_records_load_again(finished: Finished) -> None:
    assert list(finished.made) == list(STUDIES)
    for name, by_recipe in finished.made.items():
        assert list(by_recipe) == ["published", "ours"]
        for recipe, study in by_recipe.items():
            assert (study.name, study.recipe) == (name, recipe)
            assert load_study(finished.folder / recipe / f"{name}.json") == study
    judgements = Judgements("tiny", SEEDS, tuple(judge(all_made(finished))))
    assert load_judgements(finished.folder / "verdicts.json") == judgements


def test_studies_cover_the_tasks_of_the_plan(finished: Finished) -> None:
    both = ["spell", "solve"]
    expected = {**dict.fromkeys(STUDIES, both), "table-ablation": ["spell"]}
    for study in all_made(finished):
        assert list(study.tasks) == expected[study.name]
        assert (study.preset, study.seeds) == ("tiny", SEEDS)
        assert set(study.instances.values()) == {12}
        assert {row.task for row in study.rows} == set(study.tasks)
        assert all(row.paper is None for row in study.rows)  # the paper has no toys
        assert all(len(row.improvements) == SEEDS for row in study.rows)


def test_origins_hold_the_provenance(finished: Finished) -> None:
    for recipe in RECIPES:
        origins = load_origins(finished.folder / recipe / "origins.json")
        assert origins.command == "seqdefer ..."
        assert set(origins.tasks) == {"spell", "solve"}
        for one in origins.tasks.values():
            assert one.seeds == tuple(range(SEEDS))
            assert (one.settings["instances"], one.settings["recipe"]) == (12, recipe)
            assert one.settings["hand_offs"] == RECIPES[recipe].hand_offs
            assert one.data
            assert one.models
            assert one.machine["device"].startswith("cpu")
        methods = [name for name in usual_methods() if recipe == "ours" or name != "OneTimeCost"]
        by_token = [name for name in methods if name.startswith("Tokenwise")]
        for task, fitted in {"spell": {*methods}, "solve": {*methods} - {*by_token}}.items():
            assert set(origins.tasks[task].seconds) - {"label", "oracles"} == fitted


def test_every_claim_is_judged_where_it_applies(finished: Finished) -> None:
    judgements = judge(all_made(finished))
    judged = {(one.claim, one.task, one.recipe) for one in judgements}
    by_token = {claim.name for claim in CLAIMS if "token" in claim.name} | {
        "recurrent-beats-mlp",
        "teacher-forcing-hurts",
    }
    assert judged == {
        (claim.name, task, recipe)
        for claim in CLAIMS
        for task in PLAN.tasks
        for recipe in RECIPES
        if task == "spell" or claim.name not in by_token
    }
    for judgement in judgements:
        known = {one for study in all_made(finished) if study.recipe == judgement.recipe for one in study.contrasts}
        assert known.issuperset(judgement.contrasts)


# -- the command line ----------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> int:
    return cli.main(["reproduce", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table2"], "unknown study 'table2'; available: all, figure-alpha, figure-curves, table-ablation, "),
        (["all", "--preset", "huge"], "unknown preset 'huge'; available: paper, quick, tiny"),
        (["all", "--tasks", "spell,sing"], "unknown task 'sing'; available: solve, spell"),
        (["all", "--recipe", "ours,theirs"], "unknown recipe 'theirs'; available: ours, published"),
        (["all", "--recipe", ""], "--recipe is empty; available: published, ours"),
        (["all", "--set", "sing.n=4"], "unknown task of --set 'sing'; available: solve, spell"),
        (["all", "--set", "solve.m=4"], "unknown option of solve 'm'; available: blind, by_token, expert, length, n, "),
        (["all", "--set", "spell.n=many"], "--set spell.n=many: it must be of type int"),
        (["all", "--set", "spell.blind=maybe"], "--set spell.blind=maybe: it must be yes or no"),
        (["all", "--set", "spell.n"], "--set spell.n: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--set", ".n=4"], "--set .n=4: it must be TASK.OPTION=VALUE, such as "),
        (["all", "--instances", "21"], "the test split has 40 examples, 2 seeds x 21 instances need more; lower "),
        (["all", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["all", "--jobs", "0"], "--jobs is 0; it must be at least 1"),
        (["all", "--instances", "0"], "--instances is 0; it must be at least 1"),
        (
            ["all", "--tasks", "spell", "--set", "solve.n=4"],
            "--set solve: this command does not run the task solve, only ",
        ),
        (["table-ablation", "--tasks", "solve"], "table-ablation does not use the task solve; its tasks: spell"),
        (["all", "--device", "tpu"], "unknown device 'tpu'; available: auto, cpu, cuda"),
    ],
)
def test_mistakes_fail_in_one_line_before_any_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: Capture,
    work: dict[str, list[tuple[Any, ...]]],
) -> None:
    preset = [] if "--preset" in arguments else ["--preset", "tiny"]
    assert run(*arguments, *preset, "--out", tmp_path / "out", "--no-figures") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith(f"seqdefer: {message}")
    assert not any(work.values())
    assert not (tmp_path / "out").exists()


def test_options_of_all_tasks_are_checked_before_the_first_is_prepared(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor was trained for an hour before a misspelt option of the next task was rejected."""
    prepared = []
    counting = {
        name: replace(entry, prepare=lambda *given, entry=entry: prepared.append(1) or entry.prepare(*given))
        for name, entry in ENTRIES.items()
    }
    monkeypatch.setattr(labs, "load_task", counting.__getitem__)
    assert run("all", "--preset", "tiny", "--set", "solve.lenght=4", "--out", tmp_path, "--no-figures") == 2
    assert "unknown option of solve 'lenght'" in capsys.readouterr().err
    assert prepared == []


def test_missing_matplotlib_fails_before_any_work(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, work: dict[str, list[tuple[Any, ...]]]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("table1", "--preset", "tiny", "--out", tmp_path / "out") == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "pip install 'seqdefer[figures]'" in output
    assert not any(work.values())
    assert not (tmp_path / "out").exists()
    assert run("table1", "--preset", "tiny", "--tasks", "solve", "--out", tmp_path / "out", "--no-figures") == 0


def test_another_task_that_is_named_is_studied_too(
    tmp_path: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLANS, "tiny", replace(PLAN, tasks={"spell": PLAN.tasks["spell"]}))
    options = ["--tasks", "solve", "--instances", "12", "--recipe", "ours", "--no-figures"]
    assert run("table1", "--preset", "tiny", *options, "--out", tmp_path) == 0
    rows = [row for row in load_study(finished.folder / "ours" / "table1.json").rows if row.task == "solve"]
    assert list(load_study(tmp_path / "ours" / "table1.json").rows) == rows
    options[1] = "spell"
    assert run("table1", "--preset", "tiny", *options, "--out", tmp_path) == 0
    both = load_study(tmp_path / "ours" / "table1.json")  # it was dropped where a later command named another task
    assert [row for row in both.rows if row.task == "solve"] == rows
    assert list(both.tasks) == ["spell", "solve"]


def test_json_is_one_document_per_study(copied: Path, finished: Finished, capsys: Capture) -> None:
    assert run("all", "--preset", "tiny", "--out", copied, "--json", "--quiet", "--no-figures") == 0
    output = capsys.readouterr()
    printed = [json.loads(line) for line in output.out.splitlines()]
    files = [*(f"{recipe}/{name}" for name in STUDIES for recipe in ("published", "ours")), "verdicts"]
    assert printed == [json.loads((copied / f"{file}.json").read_text()) for file in files]
    assert final_files(copied) == final_files(finished.folder)
    lines = [line.split() for line in output.err.splitlines()]
    assert [words[0] for words in lines] == ["written:"] * (len(STUDIES) + 1)
    words = [word for line in lines for word in line[1:]]
    assert {str(copied / f"{file}.json") for file in files} <= set(words)
    assert all(Path(word).is_file() for word in words)


def test_tables_and_verdicts_are_printed(copied: Path, finished: Finished, capsys: Capture) -> None:
    assert run("table-ablation", "--preset", "tiny", "--out", copied, "--quiet", "--no-figures") == 0
    output = capsys.readouterr()
    for study in finished.made["table-ablation"].values():
        assert all(f"{abs(row.improvement_mean):.2f}" in output.out for row in study.rows)
    assert all(words in output.out for words in ("LSTM", "MLP", "recurrent", "eacher forcing"))
    for recipe in RECIPES:
        command = load_origins(copied / recipe / "origins.json").command
        assert command.startswith("seqdefer reproduce table-ablation --preset tiny")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw progress bars, as on a terminal."""
    for name, value in {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("watched")
def test_json_goes_to_stdout_while_bars_are_drawn(copied: Path, capsys: Capture) -> None:
    """rich captured what was printed beside its bars: `--json > studies.json` left an empty file."""
    assert run("table1", "--preset", "tiny", "--out", copied, "--json", "--no-figures") == 0
    output = capsys.readouterr()
    assert "bootstrap" in output.err
    files = [copied / name for name in ("published/table1.json", "ours/table1.json", "verdicts.json")]
    assert [json.loads(line) for line in output.out.splitlines()] == [json.loads(path.read_text()) for path in files]


@pytest.mark.usefixtures("watched")
def test_bars_are_not_drawn_over_tables(copied: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stdout and stderr on one terminal, the bars overwrote the last rows of a table."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run("table1", "--preset", "tiny", "--out", copied, "--no-figures") == 0
    output = capsys.readouterr()
    assert output.out == ""  # all went through the console of the bars
    assert all(method in output.err for method in usual_methods())


def test_set_options_reach_the_task_with_their_types(tmp_path: Path, capsys: Capture) -> None:
    given = ["--set", "solve.n=30", "--set", "solve.by-token=yes", "--set", "solve.length=2"]
    options = ["--tasks", "solve", "--recipe", "ours", "--seeds", "1", "--instances", "5"]
    options += ["--json", "--quiet", "--no-figures"]
    assert run("table1", "--preset", "tiny", "--out", tmp_path, *given, *options) == 0
    study = load_study(tmp_path / "ours" / "table1.json")
    assert (study.seeds, dict(study.instances), study.tasks["solve"].length) == (1, {"solve": 5}, 2)
    assert {row.method for row in study.rows} >= {"TokenwiseModel", "OptimalToken"}
    assert not (tmp_path / "published").exists()
    chosen = labs.with_options(ToyOptions(), {"n": "30", "by-token": "no", "seed": "7"}, "solve")
    assert chosen == ToyOptions(n=30, by_token=False, seed=7)
