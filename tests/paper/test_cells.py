"""Cells measured by several processes are those of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqdefer import cli

pytestmark = pytest.mark.slow

SMALL = ["stride=12", "train_windows=60", "hidden=2", "epochs=1", "passes=2"]


def arguments(record: Path, folder: Path, jobs: int, seeds: int = 2, instances: int = 20) -> list[str]:
    options = [word for option in [f"data={record}", *SMALL] for word in ("--set", f"weather.{option}")]
    sizes = ["--preset", "quick", "--tasks", "weather", "--recipe", "published"]
    sizes += ["--instances", str(instances), "--seeds", str(seeds)]
    return ["table-psi", *sizes, *options, "--jobs", str(jobs), "--out", str(folder), "--no-figures", "--quiet"]


def test_processes_measure_what_one_would(record: Path, tmp_path: Path) -> None:
    for jobs in (1, 2):
        given = arguments(record, tmp_path / str(jobs), jobs, seeds=1)  # two cells
        assert cli.main(["reproduce", *given]) == 0
    one, two = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("published/table*")}
        for folder in (tmp_path / "1", tmp_path / "2")
    )
    assert one == two
    assert len(json.loads(one[Path("published/table-psi.json")])["rows"]) == 2
    names = [{path.name for path in (tmp_path / jobs / "weather" / "cells").iterdir()} for jobs in ("1", "2")]
    assert names[0] == names[1]


def has_ended(group: int) -> bool:
    """Wait until nobody of a process group is left."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_ctrl_c_ends_all_processes_and_keeps_cells(record: Path, tmp_path: Path) -> None:
    """A terminal signals all processes at once."""
    command = [sys.executable, "-m", "seqdefer", "reproduce", *arguments(record, tmp_path, 2, seeds=8, instances=5)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    cells = tmp_path / "weather" / "cells"
    while process.poll() is None and len(list(cells.glob("*.safetensors"))) < 2:  # facts, and a first cell
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "stopped; the same command resumes" in error
    assert has_ended(process.pid)
    assert len(list(cells.glob("*.safetensors"))) >= 2
