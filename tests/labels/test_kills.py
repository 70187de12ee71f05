"""Killing workers and drivers for real, at several moments: the files stay the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import killed_runs
import pytest
from labelling_toy import HAND_OFFS, TREES, Gate, end_of, files_in, is_gone, label_toy, started, until
from records import record_result

from seqdefer.labels.executors.processes import LostWorkerWarning

KILLS = int(os.environ.get("SEQDEFER_TEST_KILLS", "20"))

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")]


def test_a_killed_worker_is_replaced(
    toy_labels: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate.closed(tmp_path / "gate", stop=25)  # in the hand-offs of the validation split
    monkeypatch.setenv("SEQDEFER_TEST_GATE", str(gate.folder))

    def kill() -> None:
        os.kill(gate.waiting()[0], signal.SIGKILL)
        gate.open()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.warns(
        LostWorkerWarning, match=r"a worker \(signal 9\) died on shard .*; it is replaced, and the shard"
    ):
        label_toy(tmp_path, engine="local", workers=2)
    killer.join()
    assert files_in(tmp_path / "labels") == toy_labels
    assert len(gate.attempts()) == HAND_OFFS + 1  # only the lost shard was made again
    assert gate.attempts().count(25) == 2
    assert len(gate.processes()) == 3


@pytest.mark.parametrize("stop", [0, 35])
def test_labelling_resumes_after_the_driver_was_killed(stop: int, toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    """At the first shard, and late. Its workers end with it, and another executor may finish."""
    gate = Gate.closed(tmp_path / "gate", stop)
    with started(tmp_path, "local", 2, gate) as driver:
        gate.waiting()
        os.kill(driver.pid, signal.SIGKILL)
        end_of(driver)
    until(lambda: all(map(is_gone, gate.processes())))
    kept = files_in(tmp_path / "labels") if (tmp_path / "labels").exists() else {}
    assert kept.items() < toy_labels.items()
    begun = len(gate.attempts())
    made = label_toy(tmp_path)
    assert sum(one.made for one in made) == HAND_OFFS + TREES - len([name for name in kept if "safetensors" in name])
    # Made again: the shards of two workers, and the one that the driver was writing.
    assert sum(one.made for one in made if one.manifest.kind == "hand-offs") <= HAND_OFFS - begun + 2 + 1
    assert files_in(tmp_path / "labels") == toy_labels


def test_ctrl_c_ends_the_driver_and_all_workers(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    gate = Gate.closed(tmp_path / "gate", stop=10)
    with started(tmp_path, "local", 2, gate) as driver:
        gate.waiting()
        os.killpg(driver.pid, signal.SIGINT)  # like a terminal: to the driver and its workers
        status, errors = end_of(driver)
    assert status != 0
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt\n") == 1  # the driver's alone
    until(lambda: all(map(is_gone, gate.processes())))
    assert files_in(tmp_path / "labels").items() < toy_labels.items()


def test_workers_ignore_ctrl_c(tmp_path: Path) -> None:
    """The driver ends them: a worker that a terminal's Ctrl-C reached would print a traceback of its own."""
    gate = Gate.closed(tmp_path / "gate", stop=0)
    with started(tmp_path, "local", 2, gate) as driver:
        gate.waiting()
        for worker in until(lambda: [one for one in [gate.processes()] if len(one) == 2])[0]:
            os.kill(worker, signal.SIGINT)
        gate.open()
        status, errors = end_of(driver)
    assert (status, errors.count("Traceback")) == (0, 0)


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """Runs are killed and resumed until they are finished; `SEQDEFER_TEST_KILLS=1000` kills more."""
    assert isinstance(killed_runs.__file__, str)
    command = [sys.executable, killed_runs.__file__, str(KILLS), str(tmp_path)]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own}, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    record_result("service-kills", found)
    assert found["kills"] == KILLS
    assert found["finished"] > 0
