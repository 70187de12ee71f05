"""`seqdefer generate` and `seqdefer calibrate`: output, colours or brackets, one line for every error."""

from __future__ import annotations

import errno
import gzip
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from command_line import Capture, fails_with, run
from rich.console import Console
from toy_pair import LetterCodec, Toy, numbers

from seqdefer.budgets.prices import read_prices
from seqdefer.budgets.served import ServedInput
from seqdefer.interfaces import Served, TaskEntry
from seqdefer.model import folders
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.folders import Pairing
from seqdefer.model.served_log import ServedLog
from seqdefer.report.terminal import written_lines

pytestmark = pytest.mark.usefixtures("one_thread")


PRICED, INPUTS = "PRICES", "INPUTS"  # stand for files


class TypedCodec(LetterCodec):
    """Accepts numbers as text."""

    def encode(self, inputs: Any) -> Any:
        return super().encode([int(one) if isinstance(one, str) and one.strip().isdigit() else one for one in inputs])


@dataclass(frozen=True)
class Options:
    length: int = 6


def serve(options: Options, *_: Any) -> Served:
    return replace(Toy.of(length=options.length).served, codec=TypedCodec())


@pytest.fixture(autouse=True)
def toy_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry = TaskEntry("toy", "a toy", {"quick": Options()}, lambda *_: None, serve=serve)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(folders, "load_task", {"toy": entry}.__getitem__)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return


@pytest.fixture(params=["TokenwiseModel"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    toy = Toy.of(length=6)
    model = DeferringModel(toy.served, toy.rejector(request.param), None, Pairing("toy", {}, "toy-5-6-0", ""))
    model.calibrate(numbers(80))
    return model.save_pretrained(tmp_path / "model")


# -- generate ------------------------------------------------------------------------------------------------------


def assert_same(rows: list[Any], others: list[Any]) -> None:
    """Compare rows, and the scores of their tokens up to rounding: how many rows are scored together follows from
    measured times, and the last bits of a score from that."""
    scores, other_scores = ([token.pop("score") for row in some for token in row["tokens"]] for some in (rows, others))
    assert rows == others
    assert scores == pytest.approx(other_scores, abs=1e-5)


def test_json_is_one_object_a_line_and_nothing_else(folder: Path, capsys: Capture) -> None:
    assert run("generate", folder, 13, 7932, "--budget", 0.4, "--json") == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    model = DeferringModel.from_pretrained(folder)
    written = model.generate([13, 7932], 0.4)
    shown = {name for row in rows for token in row["tokens"] for name in token}
    assert_same(rows, list(written.rows(model.served.codec)))
    assert set(rows[0]) == {"output", "tokens", "expert_tokens", "predictor_tokens", "switches", "cost"}
    assert shown == {"token", "text", "source", "score"}
    assert err == ""


def test_inputs_may_follow_options(folder: Path, capsys: Capture) -> None:
    """`generate DIR --budget 0.4 INPUT` was refused: argparse had ended the list of inputs before the option."""
    shown = []
    for words in ([13, 7932, "--budget", 0.4], ["--budget", 0.4, 13, 7932], [13, "--budget", 0.4, 7932]):
        assert run("generate", folder, *words, "--json") == 0
        shown.append(capsys.readouterr().out.splitlines())
    for lines in shown:
        assert len(lines) == 2
        assert_same([json.loads(line) for line in lines], [json.loads(line) for line in shown[0]])


def test_a_file_of_inputs(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    data, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    data.write_text("13\n\n7932\nword\n")
    assert run("generate", folder, "--data", data, "--out", out, "--budget", 0.4, "--quiet") == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"written: {out}, 3 inputs; 1 could not be read, see their field 'error'\n"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["line"] for row in rows] == [1, 3, 4]
    written = DeferringModel.from_pretrained(folder).generate([13, 7932], 0.4)
    assert [row.get("output") for row in rows] == [*written.outputs, None]
    assert "exists already; remove it" in fails_with(capsys, "generate", folder, "--data", data, "--out", out)
    (rows := tmp_path / "in.jsonl").write_text('{"number": "13"}\n{"number": "14"}\n')
    command = ["generate", folder, "--data", rows, "--out", tmp_path / "none.jsonl", "--field", "nubmer"]
    assert "none of the 2 inputs of" in fails_with(capsys, *command, "--quiet")  # was a success


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no input; give one or several, or a file with --data FILE --out FILE"),
        (["--data", "in.jsonl"], "--data FILE and --out FILE go together"),
        (["13", "--data", "in.jsonl", "--out", "out"], "give inputs or --data, not both: 13"),
    ],
)
def test_inputs_come_from_one_place(arguments: list[str], message: str, folder: Path, capsys: Capture) -> None:
    assert message in fails_with(capsys, "generate", folder, *arguments)


def test_a_budget_and_a_threshold_exclude_each_other(folder: Path, capsys: Capture) -> None:
    error = fails_with(capsys, "generate", folder, 13, "--budget", 0.4, "--threshold", 0.1)
    assert error == "--budget and --threshold exclude each other; give one of them"


def test_an_input_that_is_the_name_of_a_file(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("13").write_text("7932")
    assert run("generate", folder, 13, 14, "0" * 300, "--json") == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"13 is a file, but its name is used as the input; to use its content: seqdefer generate {folder} - < 13"
    ]
    assert run("generate", folder, 13, 14, "0" * 300, "--json", "--budget", 0.2) == 0
    assert capsys.readouterr().out == out


def test_without_a_terminal_brackets_show_authors(folder: Path, capsys: Capture) -> None:
    assert run("generate", folder, *numbers(6), "--budget", 0.4) == 0
    out, err = capsys.readouterr()
    model = DeferringModel.from_pretrained(folder)
    written = model.generate(numbers(6), 0.4)
    expected = []
    for row in written.rows(model.served.codec):
        text, before = "", "predictor"
        for token in [*row["tokens"], {"source": "predictor", "text": ""}]:
            text += {("predictor", "expert"): "[", ("expert", "predictor"): "]"}.get((before, token["source"]), "")
            text, before = text + token["text"], token["source"]
        expected.append(text)
    assert out.splitlines()[::2] == expected
    assert any("[" in text for text in expected)
    first = written.switches[0]
    start = (
        f"{written.expert_tokens[0]} of {len(written.sources[0])} tokens by the expert (in brackets), {first} switch"
    )
    assert out.splitlines()[1].startswith(start)
    assert "\x1b" not in out
    assert err == ""


def shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path | int) -> str:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        assert run(*arguments, "--quiet") == 0
    return screen.getvalue()


def test_a_terminal_gets_colours_and_no_brackets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_on_a_terminal(monkeypatch, "generate", folder, *numbers(6), "--budget", 0.4)
    assert "\x1b[1;35m" in shown
    assert "[" not in shown.replace("\x1b[", "")
    assert "(coloured)" in shown


def test_no_color_is_respected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = shown_on_a_terminal(monkeypatch, "generate", folder, *numbers(6), "--budget", 0.4)
    assert "\x1b" not in shown
    assert "(in brackets)" in shown
    assert "[" in shown


def test_long_texts_are_not_broken_and_escapes_are_shown() -> None:
    tokens = [{"text": "word " * 100, "source": "predictor"}, {"text": "\x1b[31mred\x07", "source": "expert"}]
    row = {"tokens": tokens, "expert_tokens": 1, "predictor_tokens": 1, "switches": 1}
    console = Console(width=40, soft_wrap=True, file=StringIO(), highlight=False)
    with console.capture() as shown:
        for line in written_lines(row, colours=False):
            console.print(line)
    assert shown.get() == ("word " * 100 + "[\\x1b[31mred\\x07]\n1 of 2 tokens by the expert (in brackets), 1 switch\n")


def test_a_dash_reads_standard_input(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("7932\n"))
    assert run("generate", folder, "-", "--json") == 0
    typed = capsys.readouterr().out
    assert run("generate", folder, 7932, "--json") == 0
    assert typed == capsys.readouterr().out


def test_a_threshold_instead_of_a_budget(folder: Path, capsys: Capture) -> None:
    (folder / "calibration.json").unlink()
    assert "were not measured; do that with inputs like yours" in fails_with(capsys, "generate", folder, 13)
    assert run("generate", folder, 13, "--threshold", "inf", "--json") == 0
    assert json.loads(capsys.readouterr().out)["expert_tokens"] == 0
    assert run("generate", folder, 13, "--threshold=-inf", "--json") == 0
    assert json.loads(capsys.readouterr().out)["predictor_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([13, "--budget", 1.5], "budget is 1.5; it is the share of tokens the expert writes, from 0 to 1"),
        ([13, "--budget", "nan"], "budget is nan; it is the share"),
        ([13, "--budget", "much"], "argument --budget: invalid float value: 'much'"),
        ([13, "--threshold", "nan"], "threshold is nan; it is a score"),
        (["abc"], "'abc' is no number; give one"),
        ([13, "--device", "abacus"], "abacus"),
        ([13, "--bugdet", 0.2], "unrecognized arguments: --bugdet 0.2 (did you mean '--budget'?)"),
    ],
)
def test_bad_options(arguments: list[Any], message: str, folder: Path, capsys: Capture) -> None:
    assert message in fails_with(capsys, "generate", folder, *arguments)


def test_folders_without_a_model(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    nowhere = tmp_path / "nowhere"
    assert fails_with(capsys, "generate", nowhere, 13) == (
        f"no deferring model in {nowhere}: there is no such folder; make one: seqdefer fit TASK"
    )
    (tmp_path / "data.txt").write_text("13\n14\n")
    assert "no deferring model in" in fails_with(capsys, "calibrate", nowhere, "--data", tmp_path / "data.txt")
    assert not nowhere.exists()


# -- calibrate -----------------------------------------------------------------------------------------------------


def write_numbers(path: Path, n: int) -> Path:
    lines = "".join(json.dumps({"number": number}) + "\n\n" for number in numbers(n))  # empty lines are skipped
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def test_inputs_that_unpack_to_more_than_the_limit(tmp_path: Path, capsys: Capture) -> None:
    """A quarter of a megabyte of JSON once took six gigabytes: lists take twenty times their text."""
    line = b'{"number": [' + b"[]," * 300_000 + b"[]]}\n"
    (tmp_path / "own.jsonl.gz").write_bytes(gzip.compress(line * 40))
    error = fails_with(capsys, "calibrate", tmp_path, "--data", tmp_path / "own.jsonl.gz")
    assert "own.jsonl.gz is larger than 32 MiB; give fewer lines, or allow more with SEQDEFER_MAX_DATA_MIB=N" in error


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz", "own.ndjson"])
def test_budgets_are_measured_printed_and_stored(name: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    data = write_numbers(tmp_path / name, 50)
    assert run("calibrate", folder, "--data", data, "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    kept = DeferringModel.from_pretrained(folder).calibration
    assert kept is not None
    assert found["inputs"] == kept.inputs == 50
    assert [one["budget"] for one in found["budgets"]] == [step / 20 for step in range(21)]
    for one in found["budgets"]:
        assert kept.for_budget(one["budget"]).share == one["share"]
        assert one["met"] == (abs(one["share"] - one["budget"]) <= 0.02)
    model = Toy.of(length=6).model("TokenwiseModel")
    assert model.calibrate(numbers(50)) == kept
    replaced, rough = err.splitlines()
    assert replaced == f"this replaces the budgets of {folder}, which were measured on 80 inputs"
    assert rough == kept.roughness()


def log_of(folder: Path, path: Path, n: int, budget: float) -> Path:
    """Write what a server would log for n inputs."""
    model, log = DeferringModel.from_pretrained(folder), ServedLog(path, 1)
    rollout = model.generate(numbers(n), budget).rollout
    lengths, deferred = rollout.sequences.lengths.tolist(), rollout.deferred.tolist()
    at = model.setting(budget).threshold
    for length, by_expert, scores in zip(lengths, deferred, rollout.scores.tolist(), strict=True):
        row = ServedInput("", model.rejector.fingerprint, budget, at, length, by_expert, tuple(scores[:length]))
        log.write(row)
    log.close()
    return path


def test_budgets_are_measured_on_a_log(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    log = log_of(folder, tmp_path / "served.jsonl", 60, 0.4)
    with log.open("a") as file:
        file.write('{"format": 1, "ti')  # a server was killed
    assert run("calibrate", folder, "--from-log", log, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["inputs"] == 60
    assert "calibrated on 60 inputs that were served; 1 incomplete lines were skipped; shares at other" in err
    kept = DeferringModel.from_pretrained(folder).calibration
    assert kept is not None
    assert kept.inputs == 60
    assert kept.for_budget(0.4).share == pytest.approx(0.4, abs=0.05)
    assert run("calibrate", folder, "--from-log", log, "--inputs", 20, "--json") == 0
    assert json.loads(capsys.readouterr().out)["inputs"] == 20
    error = fails_with(capsys, "calibrate", folder, "--from-log", log, "--guarantee", "expected")
    assert error.endswith("decisions change the text that follows; a guarantee needs inputs: --data FILE")
    error = fails_with(capsys, "calibrate", folder, "--from-log", log, "--data", log)
    assert error == "--data and --from-log both calibrate; give one of them"
    assert "there is no log" in fails_with(capsys, "calibrate", folder, "--from-log", tmp_path / "none.jsonl")
    error = fails_with(capsys, "calibrate", "some/repository", "--from-log", log)
    assert error.startswith("no deferring model in some/repository")


def test_budgets_are_checked_on_other_inputs(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    before, others = (folder / "calibration.json").read_bytes(), numbers(70, first=500)
    lines = "".join(json.dumps({"number": number}) + "\n" for number in others)
    (tmp_path / "others.jsonl").write_text(lines, encoding="utf-8")
    assert run("calibrate", folder, "--check", tmp_path / "others.jsonl", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    model = DeferringModel.from_pretrained(folder)
    assert found["inputs"] == 70
    assert [one["budget"] for one in found["checked"]] == [0.05, 0.1, 0.2, 0.3, 0.5, 0.8]
    for one in found["checked"]:
        assert one["share"] == pytest.approx(model.generate(others, one["budget"]).share)
        assert one["low"] <= one["share"] <= one["high"]
        assert one["expected"] == model.setting(one["budget"]).share
    assert (folder / "calibration.json").read_bytes() == before
    assert run("calibrate", folder, "--check", tmp_path / "others.jsonl", "--quiet") == 0
    assert "of 70 other inputs" in capsys.readouterr().out
    error = fails_with(capsys, "calibrate", folder)
    assert "nothing to do; give --data FILE to calibrate with, or --check FILE" in error


def test_budgets_are_measured_and_checked_together(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    data = write_numbers(tmp_path / "own.jsonl", 50)
    assert run("calibrate", folder, "--data", data, "--check", data, "--quiet") == 0
    out = capsys.readouterr().out
    assert "budgets and what they spend" in out
    assert "off by" not in out  # on the inputs of the calibration


def test_plain_text_has_one_input_per_line(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "own.txt").write_text("\ufeff13\r\n\r\n14\n15\n", encoding="utf-8")
    before = (folder / "rejector" / "model.safetensors").stat().st_mtime_ns
    assert run("calibrate", folder, "--data", tmp_path / "own.txt", "--inputs", 2) == 0
    shown = capsys.readouterr().out
    assert "of 2 inputs" in " ".join(shown.split())
    assert "never" in shown
    assert (folder / "rejector" / "model.safetensors").stat().st_mtime_ns == before  # the weights are not written


def test_another_field(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    data = write_numbers(tmp_path / "own.jsonl", 5)
    data.write_text(data.read_text().replace("number", "n"))
    error = fails_with(capsys, "calibrate", folder, "--data", data)
    assert error == f"{data.name}, line 1: there is no 'number'; the fields are: 'n'; choose one with --field"
    assert run("calibrate", folder, "--data", data, "--field", "n", "--quiet") == 0


def test_a_calibration_of_another_rejector_is_refused(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    path = folder / "calibration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rejector": "0123"}))
    error = fails_with(capsys, "generate", folder, 13)
    assert error == f"{path} belongs to another rejector; measure it again: seqdefer calibrate {folder} --data FILE"
    assert run("calibrate", folder, "--data", write_numbers(tmp_path / "own.jsonl", 9), "--quiet") == 0
    capsys.readouterr()
    assert run("generate", folder, 13) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"number": 3}\n\n{no', "own.jsonl, line 3: not JSON ("),
        (b"[3]\n", "own.jsonl, line 1: a list, not a JSON object"),
        (b'{"number": 3}\n{"number": "x"}\n', "'x' is no number; give one"),
        (b"[" * 100_000, "not JSON ("),
    ],
)
def test_data_that_cannot_be_used(content: bytes, message: str, folder: Path, tmp_path: Path, capsys: Capture) -> None:
    before = (folder / "calibration.json").read_bytes()
    (tmp_path / "own.jsonl").write_bytes(content)
    assert message in fails_with(capsys, "calibrate", folder, "--data", tmp_path / "own.jsonl")
    assert (folder / "calibration.json").read_bytes() == before


def test_files_that_cannot_be_read(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"number": 3}\n' * 1000)[:40])
    for path in (tmp_path / "nowhere.jsonl", tmp_path, cut):
        error = fails_with(capsys, "calibrate", folder, "--data", path)
        assert error.startswith(f"cannot read {path}")
        assert error.endswith("; give JSONL or one input a line, plain or gzip")
    error = fails_with(capsys, "calibrate", folder, "--data", cut, "--inputs", 1)
    assert error == "--inputs is 1; it must be at least 2"


# -- help ----------------------------------------------------------------------------------------------------------


def test_the_examples_of_serve_can_be_copied(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("serve", "--help")
    shown = capsys.readouterr().out
    (body,) = re.findall(r"-d '(.*)'", shown)
    assert json.loads(body) == {"model": "pronounce@0.20", "prompt": "onomatopoeia"}
    code = shown.split("(pip install openai):\n")[1].split("\nThe number")[0]
    assert "client.completions.create(" in code
    compile(textwrap.dedent(code), "help", "exec")


def test_a_folder_may_be_moved(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run("generate", folder, 13) == 0
    before = capsys.readouterr().out
    shutil.move(folder, tmp_path / "elsewhere")
    assert run("generate", tmp_path / "elsewhere", 13) == 0
    assert capsys.readouterr().out == before


# -- caps and money ------------------------------------------------------------------------------------------------

PRICES = "currency = 'EUR'\n[predictor]\noutput = 100000\n[expert]\ninput = 100000\noutput = 1000000\ncall = 0.5\n"


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


def test_a_cap_holds_and_is_told(folder: Path, capsys: Capture) -> None:
    always = ("generate", folder, 13, 7932, "--threshold=-inf")
    assert run(*always, "--cap-tokens", 3, "--cap-per", "request", "--cap-policy", "cut-off", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["expert_tokens"] for row in rows] == [2, 1]
    assert all(row["capped"] == row["predictor_tokens"] for row in rows)
    assert run(*always, "--cap-passes", 2) == 0
    assert "; the cap kept " in capsys.readouterr().out


def test_a_pair_that_belongs_to_its_task_cannot_be_elsewhere(folder: Path, capsys: Capture) -> None:
    error = fails_with(capsys, "generate", folder, 13, "--expert", "other/model")
    assert error == "task 'toy' has no option expert: its pair belongs to it; leave expert out"


def test_what_was_spent_and_saved_is_shown(folder: Path, prices: Path, capsys: Capture) -> None:
    assert run("generate", folder, 13, "--threshold=-inf", "--prices", prices) == 0
    assert " EUR: lost " in capsys.readouterr().out  # the expert alone needs one call
    assert run("generate", folder, 13, "--threshold=inf", "--prices", prices) == 0
    assert " EUR: saved " in capsys.readouterr().out
    assert run("generate", folder, 13, "--threshold=inf", "--prices", prices, "--json") == 0
    money = json.loads(capsys.readouterr().out)["money"]
    assert money["expert"] == 0
    assert money["saved"] == money["expert_alone"] - money["spent"] > 0


def test_a_budget_in_money_buys_a_share(folder: Path, prices: Path, capsys: Capture) -> None:
    model = DeferringModel.from_pretrained(folder)
    model.use_prices(read_prices(prices))
    budget = model.budget_for_money(3.0, [1])
    assert 0 < budget < 1
    assert model.expected_money(1, model.setting(budget).share) <= 3.0
    assert run("generate", folder, 13, 14, "--prices", prices, "--budget-money", 3, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["tokens"] for row in rows] == [
        row["tokens"] for row in model.generate([13, 14], budget).rows(model.served.codec)
    ]


def test_calibrate_shows_what_budgets_cost(folder: Path, prices: Path, tmp_path: Path, capsys: Capture) -> None:
    data = write_numbers(tmp_path / "own.jsonl", 40)
    assert run("calibrate", folder, "--data", data, "--prices", prices, "--json") == 0
    budgets = json.loads(capsys.readouterr().out)["budgets"]
    assert [one["money"] for one in budgets] == sorted(one["money"] for one in budgets)
    assert run("calibrate", folder, "--data", data, "--prices", prices, "--quiet") == 0
    assert "budgets in money" in capsys.readouterr().out
    error = fails_with(capsys, "calibrate", folder, "--check", data, "--prices", prices)
    assert error == "--prices needs --data FILE: what a budget costs depends on the length of inputs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cap-money", 1], "a cap in money needs prices; give --prices FILE"),
        (["--cap-tokens", -1], "a cap of -1 tokens; give a number from 0 to 1e+12"),
        (["--cap-per", "request"], "--cap-per and --cap-policy say how to cap; give --cap-tokens, --cap-passes"),
        (["--cap-tokens", 1, "--cap-per", "day"], "unknown scope of a cap 'day'; available: request, sequence"),
        (["--budget-money", 1], "a budget in money needs prices; give --prices FILE"),
        (["--budget-money", 1, "--budget", 0.2], "--budget and --budget-money exclude each other; give one of them"),
        (["--prices", "nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_bad_caps_and_prices(arguments: list[Any], message: str, folder: Path, capsys: Capture) -> None:
    assert message in fails_with(capsys, "generate", folder, 13, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", 13, "--budget", 1.5], "budget is 1.5; it is the share of tokens"),
        (["generate", 13, "--threshold", "nan"], "threshold is nan"),
        (["generate", 13, "--budget-money", 1], "a budget in money needs prices"),
        (["generate", 13, "--budget-money=-1", "--prices", PRICED], "budget in money is -1.0; give an amount from 0"),
        (["generate", 13, "--cap-money", 1], "a cap in money needs prices"),
        (["generate", "--data", "no.jsonl", "--out", "out"], "cannot read no.jsonl"),
        (["generate", "--data", INPUTS, "--out", "out", "--batch-size", 0], "--batch-size is 0"),
        (
            ["generate", "--data", INPUTS, "--out", "out", "--cap-tokens", 1, "--cap-per", "request"],
            "--cap-per request",
        ),
        (["calibrate", "--data", INPUTS], "cannot write into"),
        (["calibrate", "--from-log", INPUTS], "cannot write into"),
    ],
)
def test_what_needs_no_models_is_checked_before_they_are_loaded(
    arguments: list[Any],
    message: str,
    folder: Path,
    prices: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading takes minutes. A calibration of a read-only folder was lost in the end."""

    def full(**_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("models are loaded")

    given = {PRICED: prices, INPUTS: write_numbers(tmp_path / "own.jsonl", 4)}
    monkeypatch.setattr(DeferringModel, "from_pretrained", load)
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    command, *rest = (given.get(one, one) for one in arguments)
    assert message in fails_with(capsys, command, folder, *rest)


def test_ctrl_c_while_a_server_loads_its_models(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`the same command resumes`, said a server that had not begun."""

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(DeferringModel, "from_pretrained", stop)
    assert run("serve", folder, "--port", 0) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "seqdefer: stopped"


def test_prices_that_cannot_be_used(folder: Path, prices: Path, capsys: Capture) -> None:
    prices.write_text(PRICES.replace("call = 0.5", "call = -0.5"))
    error = fails_with(capsys, "generate", folder, 13, "--prices", prices)
    assert error == f"call in [expert] of {prices} is -0.5; give a number from 0 to 1e+12"
    prices.write_text(PRICES.replace("output = 100000\n", "hour = 2\n"))
    error = fails_with(capsys, "generate", folder, 13, "--prices", prices)
    assert "the predictor has a price per hour or minute, but how long it takes was not measured" in error
    prices.write_text(PRICES)
    assert "is too small: the predictor alone costs about" in fails_with(
        capsys, "generate", folder, 13, "--prices", prices, "--budget-money", 0.001
    )


def test_a_folder_with_a_dot_is_never_a_repository(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """argparse made ./me/mine the repository me/mine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "no deferring model in " in fails_with(capsys, "generate", "./me/mine", 13)


def test_calibrate_writes_into_a_folder_alone(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the Hub was loaded, and its calibration written into a new folder of the same name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("seqdefer.model.deferring_model.local_folder", lambda *_, **__: folder)
    data = write_numbers(tmp_path / "own.jsonl", 40)
    assert "no deferring model in me/mine" in fails_with(capsys, "calibrate", "me/mine", "--data", data)
    assert not (tmp_path / "me").exists()


@pytest.mark.parametrize("digests", [[], 5, None])
def test_digests_that_are_no_table(digests: Any, folder: Path, capsys: Capture) -> None:
    found = json.loads((folder / "deferral.json").read_text())
    (folder / "deferral.json").write_text(json.dumps({**found, "digests": digests}))
    assert "its digest is not the one in deferral.json" in fails_with(capsys, "generate", folder, 13)
