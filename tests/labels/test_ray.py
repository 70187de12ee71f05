"""Labelling on Ray: the same files as without it; actors, the driver and a whole node are killed for real."""

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
    pytest.mark.skipif(sys.platform != "linux", reason="looks for the processes of Ray as Linux shows them"),
]


def test_an_actor_that_is_killed_is_replaced(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    """On a cluster of two processes that the driver starts and ends."""
    gate = Gate.closed(tmp_path / "gate", stop=25)
    with started(tmp_path, "ray", 2, gate) as driver:
        os.kill(gate.waiting()[0], signal.SIGKILL)
        gate.open()
        assert end_of(driver) == (0, "")
    assert files_in(tmp_path / "labels") == toy_labels
    assert gate.attempts().count(25) == 2
    assert len(gate.attempts()) == HAND_OFFS + 1
    until(lambda: all(map(is_gone, gate.processes())))


def test_a_driver_that_is_killed_goes_on(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
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
    """A node of a cluster on this machine, until the end of the block."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(gate), **quiet) as running:
        try:
            until(lambda: raylets_of(running.pid))  # two that start at once on one machine get in each other's way
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
def test_a_node_that_is_killed_is_not_missed(toy_labels: dict[str, bytes], tmp_path: Path) -> None:
    """The driver joins a cluster whose head has no room for actors; of two nodes with one core each, one dies."""
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
            status, said = end_of(driver)
    assert status == 0, said
    assert files_in(tmp_path / "labels") == toy_labels
