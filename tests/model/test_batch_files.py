"""Files of inputs: every line gets a row in order, and what was stopped resumes to the file of a fresh start."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from toy_pair import LetterCodec, Toy, numbers

from seqdefer.budgets.caps import Cap
from seqdefer.errors import InputError, OptionError
from seqdefer.model.batch_files import FileCounts, write_file
from seqdefer.model.deferring_model import DeferringModel

pytestmark = pytest.mark.usefixtures("one_thread")
N = 11
KILLED_AT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {support!r})
import torch
from toy_pair import Toy
from seqdefer.model import batch_files
from seqdefer.model.deferring_model import DeferringModel

torch.set_num_threads(1)
toy, calls = Toy.of(length=6), []
model = DeferringModel(toy.served, toy.rejector("TokenwiseModel"))
rows = batch_files._rows

def kill_at_third(*arguments, **how):
    calls.append(1)
    if len(calls) == 3:
        with Path({part!r}).open("ab") as file:
            file.write(b'{{"line": 9, "outp')  # half a row of the third batch has reached the disk
        os.kill(os.getpid(), signal.SIGKILL)
    return rows(*arguments, **how)

batch_files._rows = kill_at_third
batch_files.write_file(model, Path({data!r}), Path({out!r}), threshold=0.0, batch_size=4)
"""


def toy_model() -> DeferringModel:
    toy = Toy.of(length=6)
    return DeferringModel(toy.served, toy.rejector("TokenwiseModel"))


def write_inputs(path: Path, inputs: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps({LetterCodec.field: one})}\n" for one in inputs))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generated(model: DeferringModel, inputs: list[Any]) -> list[dict[str, Any]]:
    rows = list(model.generate(inputs, threshold=0.0).rows(model.served.codec))
    for token in (token for row in rows for token in row["tokens"]):
        del token["score"]
    return rows


def test_every_line_gets_its_row_in_order(tmp_path: Path) -> None:
    model, data, out = toy_model(), write_inputs(tmp_path / "in.jsonl", numbers(N)), tmp_path / "new" / "out.jsonl"
    assert write_file(model, data, out, threshold=0.0, batch_size=4) == FileCounts(N, 0, 0)
    rows = generated(model, numbers(N))
    assert read_rows(out) == [{"line": place + 1, **row} for place, row in enumerate(rows)]
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
    with pytest.raises(OptionError, match=r"out\.jsonl exists already"):
        write_file(model, data, out, threshold=0.0)


def test_a_cap_of_a_request_is_refused(tmp_path: Path) -> None:
    """It would hold for each batch, and a file of many could exceed it."""
    data, out = write_inputs(tmp_path / "in.jsonl", numbers(N)), tmp_path / "out.jsonl"
    with pytest.raises(OptionError, match="--cap-per request does not go with --data"):
        write_file(toy_model(), data, out, threshold=0.0, caps=[Cap(tokens=3, per="request")])
    assert not out.exists()


def test_after_kill_9_the_same_call_makes_the_file_of_a_fresh_start(tmp_path: Path) -> None:
    data, out, fresh = write_inputs(tmp_path / "in.jsonl", numbers(N)), tmp_path / "out.jsonl", tmp_path / "fresh.jsonl"
    part = tmp_path / "out.jsonl.part"
    support = str(Path(__file__).parents[1] / "support")
    script = KILLED_AT.format(support=support, part=str(part), data=str(data), out=str(out))
    killed = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    assert len(part.read_bytes().splitlines()) == 9  # two batches and half a line

    with pytest.raises(OptionError, match="was begun with another model, budget, batch size or file of inputs"):
        write_file(toy_model(), data, out, threshold=0.5, batch_size=4)
    assert write_file(toy_model(), data, out, threshold=0.0, batch_size=4) == FileCounts(N, 8, 0)
    write_file(toy_model(), data, fresh, threshold=0.0, batch_size=4)
    assert out.read_bytes() == fresh.read_bytes()
    assert not part.exists()


@pytest.mark.parametrize("kept", range(N + 1))
def test_any_stop_resumes_to_the_same_file(kept: int, tmp_path: Path, fresh: tuple[Path, bytes, str]) -> None:
    """After any number of whole rows, and whatever was half written."""
    data, content, how = fresh
    lines = content.splitlines(keepends=True)
    out = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.part").write_bytes(b"".join(lines[:kept]) + b"".join(lines[kept : kept + 1])[:5])
    (tmp_path / "out.jsonl.part.json").write_text(how)
    assert write_file(toy_model(), data, out, threshold=0.0, batch_size=4).found == (N if kept == N else kept // 4 * 4)
    assert out.read_bytes() == content


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, str]:
    """Inputs, the file that a fresh start makes of them, and what OUT.part.json holds meanwhile."""
    folder = tmp_path_factory.mktemp("fresh")
    data, out = write_inputs(folder / "in.jsonl", numbers(N)), folder / "out.jsonl"
    seen = []

    class Spy:
        def stage(self, name: str, total: int) -> Any:
            seen.append((folder / "out.jsonl.part.json").read_text())
            from seqdefer.progress import Silent

            return Silent().stage(name, total)

    write_file(toy_model(), data, out, threshold=0.0, batch_size=4, meter=Spy())
    return data, out.read_bytes(), seen[0]


def test_a_line_that_cannot_be_read_gets_its_error(tmp_path: Path) -> None:
    data, out = write_inputs(tmp_path / "in.jsonl", [13, "no number", 14]), tmp_path / "out.jsonl"
    data.write_text(data.read_text() + "no JSON\n")
    model = toy_model()
    assert write_file(model, data, out, threshold=0.0) == FileCounts(4, 0, 2)
    rows = read_rows(out)
    expected = generated(model, [13, 14])
    assert [rows[0], rows[2]] == [{"line": 1, **expected[0]}, {"line": 3, **expected[1]}]
    assert set(rows[1]) == {"line", "error"}
    assert rows[3]["error"].startswith("in.jsonl, line 4: not JSON")


def test_warnings_about_inputs_come_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is encoded twice, first to find lines that cannot be read, and warned about cut texts twice."""
    model = toy_model()
    encode = model.served.codec.encode

    def warns(inputs: Any) -> Any:
        warnings.warn("1 of 4 documents were truncated", UserWarning, stacklevel=2)
        return encode(inputs)

    monkeypatch.setattr(model.served.codec, "encode", warns)
    data = write_inputs(tmp_path / "in.jsonl", numbers(4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        write_file(model, data, tmp_path / "out.jsonl", threshold=0.0)
    assert len(said) == 1


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.jsonl: No such file"):
        write_file(toy_model(), tmp_path / "none.jsonl", tmp_path / "out", threshold=0.0)
    with pytest.raises(OptionError, match="--batch-size is 0"):
        write_file(toy_model(), tmp_path / "none.jsonl", tmp_path / "out", threshold=0.0, batch_size=0)


@pytest.mark.parametrize("threshold", [0.0, math.nan])
def test_what_fails_at_once_leaves_nothing(threshold: float, tmp_path: Path) -> None:
    data, out = write_inputs(tmp_path / "in.jsonl", numbers(N)), tmp_path / "new" / "out.jsonl"
    if threshold == 0.0:
        data.write_bytes(data.read_bytes() + b"\xff\n")
    with pytest.raises(InputError, match=r"not UTF-8|threshold is nan"):
        write_file(toy_model(), data, out, threshold=threshold)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("damage", ["5\n", "null\n", "[" * 100_000 + "\n"])
def test_damaged_rows_are_written_again(damage: str, tmp_path: Path, fresh: tuple[Path, bytes, str]) -> None:
    data, content, how = fresh
    (tmp_path / "out.jsonl.part").write_bytes(b"".join(content.splitlines(keepends=True)[:4]) + damage.encode())
    (tmp_path / "out.jsonl.part.json").write_text(how)
    write_file(toy_model(), data, tmp_path / "out.jsonl", threshold=0.0, batch_size=4)
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_two_processes_do_not_write_one_file(tmp_path: Path, fresh: tuple[Path, bytes, str]) -> None:
    fcntl = pytest.importorskip("fcntl")
    data, content, how = fresh
    part = tmp_path / "out.jsonl.part"
    part.touch()
    (tmp_path / "out.jsonl.part.json").write_text(how)
    with part.open("rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OptionError, match=r"out\.jsonl\.part is being written by another process"):
            write_file(toy_model(), data, tmp_path / "out.jsonl", threshold=0.0, batch_size=4)
        assert part.exists()
    write_file(toy_model(), data, tmp_path / "out.jsonl", threshold=0.0, batch_size=4)
    assert (tmp_path / "out.jsonl").read_bytes() == content
