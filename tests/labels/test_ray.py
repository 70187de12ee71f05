"""Labelling on Ray: the same files; actors, the driver and a whole node are killed for real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from labelling_toy import HAND_OFFS, TREES, Gate, end_of, environment, files_in, is_gone, label_toy, started, until

pytest.importorskip("ray", reason="needs the extra 'ray'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_killed_actor_is_replaced(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    """On a local cluster that the driver starts and ends."""
    gate = Gate.closed(tmp_path / "gate", stop=25)
    with started(tmp_path, "ray", 2, gate) as driver:
        os.kill(gate.waiting()[0], signal.SIGKILL)
        gate.open()
        assert end_of(driver) == (0, "")
    assert files_in(tmp_path / "labels") == toy_labels
    assert gate.attempts().count(25) == 2
    assert len(gate.attempts()) == HAND_OFFS + 1
    until(lambda: all(map(is_gone, gate.processes())))


def test_labelling_resumes_after_the_driver_was_killed(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    gate = Gate.closed(tmp_path / "gate", stop=35)
    with started(tmp_path, "ray", 2, gate) as driver:
        gate.waiting()
        os.kill(driver.pid, signal.SIGKILL)
        end_of(driver)
    until(lambda: all(map(is_gone, gate.processes())))  # the cluster ends with it
    kept = files_in(tmp_path / "labels") if (tmp_path / "labels").exists() else {}
    assert kept.items() < toy_labels.items()
    made = label_toy(tmp_path)
    assert sum(one.made for one in made) == HAND_OFFS + TREES - len(kept)
    assert files_in(tmp_path / "labels") == toy_labels


@contextmanager
def node(*arguments: str, gate: Gate) -> Iterator[None]:
    """Run a node of a cluster on this machine."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(gate), **quiet) as running:
        try:
            until(lambda: raylets_of(running.pid))  # nodes that start at the same time on one machine collide
            yield
        finally:
            running.terminate()


def raylets_of(process: int) -> list[str]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [child for child in children if Path(f"/proc/{child}/comm").read_text() == "raylet\n"]


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _answers(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.cluster
def test_labelling_survives_a_killed_node(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    """The head has no room for actors; one of two nodes with one core each dies."""
    gate = Gate.closed(tmp_path / "gate", stop=25)
    with socket.socket() as free, ExitStack() as cluster:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        home = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
        cluster.enter_context(node(*home, gate=gate))
        until(lambda: _answers(port))
        for _ in range(2):
            cluster.enter_context(node(f"--address=127.0.0.1:{port}", "--num-cpus=1", gate=gate))
        with started(tmp_path, "ray", 2, gate, f"127.0.0.1:{port}") as driver:
            raylet = parent_of(gate.waiting()[0])
            os.kill(raylet, signal.SIGKILL)
            gate.open()
            status, errors = end_of(driver)
    assert status == 0, errors
    assert files_in(tmp_path / "labels") == toy_labels
