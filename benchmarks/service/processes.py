"""Processes of the benchmark: the server, the clients, an expert that can be killed; and what /proc says about one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.service.clients import Group
from benchmarks.service.pair import NAME

START_SECONDS, SETTLE_SECONDS, SAMPLE_SECONDS = 120.0, 30.0, 0.25


def free_port() -> int:
    """Return a port that nobody uses, nor gets by chance before it is used: the system gives out higher ones."""
    for port in random.sample(range(10_000, 30_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port of this machine is free")


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something holds. Raises RuntimeError after some seconds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} took longer than {seconds:g} seconds")
        time.sleep(0.02)


@dataclass(frozen=True)
class Figures:
    """Memory in MB, threads and open descriptors of a process."""

    memory: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, process: int) -> Figures:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        memory, threads = (int(re.findall(rf"^{name}:\s+(\d+)", status, re.M)[0]) for name in ("VmRSS", "Threads"))
        return cls(round(memory / 1000, 1), threads, len(os.listdir(f"/proc/{process}/fd")))

    def most(self, other: Figures) -> Figures:
        """Return the larger of each number."""
        return Figures(*(max(both) for both in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class ServeProcess:
    """A running `seqdefer serve`."""

    process: subprocess.Popen[bytes]
    address: str

    def figures(self) -> Figures:
        return Figures.of(self.process.pid)

    def load(self, seconds: float, groups: Sequence[Group]) -> dict[str, Any]:
        """Run clients in a process of their own. Return what they saw, and the figures before, at most, and after."""
        job = {"address": self.address, "model": NAME, "seconds": seconds, "groups": [asdict(one) for one in groups]}
        before = peak = self.figures()
        clients = subprocess.Popen([sys.executable, "-m", "benchmarks.service.clients"], stdin=-1, stdout=-1, text=True)
        with _samples(self.figures) as samples:
            output, _ = clients.communicate(json.dumps(job))
        if clients.returncode or self.process.poll() is not None:
            raise RuntimeError(f"the clients ended with {clients.returncode}, the server with {self.process.poll()}")
        with suppress(RuntimeError):  # then the figures tell
            until(lambda: self.figures().descriptors <= before.descriptors, SETTLE_SECONDS, "closing connections")
        for one in samples:
            peak = peak.most(one)
        figures = {"before": before, "most": peak, "after": self.figures()}
        return json.loads(output) | {"figures": {name: asdict(one) for name, one in figures.items()}}


@contextmanager
def _in_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread until the context is over, which the event tells it."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _samples(take: Callable[[], Figures]) -> Iterator[list[Figures]]:
    """Take figures now and then, in a thread."""
    taken = list[Figures]()

    def work(is_over: threading.Event) -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            taken.append(take())

    with _in_thread(work):
        yield taken


@contextmanager
def serve(folder: Path, device: str, *options: str) -> Iterator[ServeProcess]:
    """Run `seqdefer serve FOLDER`."""
    port = free_port()
    command = [sys.executable, "-m", "seqdefer", "serve", str(folder), "--port", str(port), "--device", device]
    with (folder.parent / "server.log").open("wb") as log:
        process = subprocess.Popen([*command, "--log-level", "warning", "--quiet", *options], stderr=log)
    try:
        until(lambda: _is_ready(port) or process.poll() is not None, START_SECONDS, "the start of the server")
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {(folder.parent / 'server.log').read_text()[-500:]}")
        yield ServeProcess(process, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class ExpertProcess:
    """A stand-in expert on a port that it keeps, in a process that can be killed and started again."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.service.expert", str(self.port)])
        until(lambda: is_listening(self.port), START_SECONDS, "the start of the expert")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    @contextmanager
    def dying(self, every: float, down: float) -> Iterator[list[float]]:
        """Kill it every so many seconds, and start it again some seconds later. The context is the times of deaths."""
        deaths, begun = list[float](), time.perf_counter()

        def work(is_over: threading.Event) -> None:
            while not is_over.wait(every - down):
                self.kill()
                deaths.append(time.perf_counter() - begun)
                is_over.wait(down)
                self.start()

        with _in_thread(work):
            yield deaths
