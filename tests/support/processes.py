"""Servers in processes of their own: limits of descriptors, signals, what is logged."""

from __future__ import annotations

import atexit
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from forks import ForkedProcess, fork_server
from servers import until

SUPPORT = str(Path(__file__).parent)
SCRIPT = """
import os, resource, sys, threading, time
from pathlib import Path
sys.path.insert(0, {support!r})
resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))
from servers import toy_model
from seqdefer.server.http import Limits
from seqdefer.server.serve import address_of, listen, serve

{before}
listening = listen("127.0.0.1", 0)
ready = lambda: print(address_of(listening), flush=True)
serve(toy_model(), "toy", listening, limits=Limits({limits}), ready=ready, {options})
print("ended", flush=True)
"""


@dataclass
class ServerProcess:
    """A toy server in a process, and what /proc says about it."""

    process: ForkedProcess
    address: str
    log: Path

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", int(self.address.rsplit(":", 1)[1])), timeout=60)
        connection.sendall(sent)
        return connection

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", timeout=60, **options)

    def post(self, path: str, content: Any) -> httpx.Response:
        return httpx.post(f"{self.address}{path}", json=content, timeout=60)

    def status(self, name: str) -> int:
        """Return a number of /proc/PID/status, such as VmRSS (kB) or Threads."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8")


@contextmanager
def server_process(
    folder: Path, *, files: int = 1024, limits: str = "", before: str = "", options: str = ""
) -> Iterator[ServerProcess]:
    """Serve a toy pair in a process that may open `files` files; it runs the code `before` first."""
    script = SCRIPT.format(support=SUPPORT, files=files, limits=limits, before=before, options=options)
    log, program = folder / "server.log", folder / "server.py"
    program.write_text(script, encoding="utf-8")
    with log.open("w") as errors:
        process = ForkedProcess(_forks(), [str(program)], stderr=errors.fileno())
    try:
        address = process.stdout.readline().strip()
        assert address, log.read_text(encoding="utf-8")
        until(lambda: is_ready(address))
        yield ServerProcess(process, address, log)
    finally:
        process.kill()
        process.communicate()


@cache
def _forks() -> str:
    """Return the address of a server of forks, which ends with this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(fork_server(["torch._dynamo", "servers", "seqdefer.server.serve"], os.environ))


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def connections(server: ServerProcess, n: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open `n` connections that send no more than `sent`."""
    with ExitStack() as stack:
        yield [stack.enter_context(server.connect(sent)) for _ in range(n)]
