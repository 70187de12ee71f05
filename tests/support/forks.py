"""Python programs as forks of a process that has imported PyTorch and the rest once, which takes seconds every time.

    with fork_server(["torch"], os.environ) as address:
        process = ForkedProcess(address, ["program.py", "argument"], stdout=..., stderr=...)

The server imports before there is any thread, and forks for each program. It has the arguments, folder, environment and
standard streams that are sent with it, and ends as any program does. From a shell, with the address in FORK_SERVER:
`python forks.py PROGRAM ARGUMENTS` waits for the program and has its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import IO, Any, NoReturn

ADDRESS = "FORK_SERVER"
NUMBER = struct.Struct("i")  # the process id, and then the status


class ForkedProcess:
    """A program that runs, with the part of subprocess.Popen that tests use."""

    def __init__(self, address: str, arguments: Sequence[str], *, stderr: int = 2) -> None:
        reading, writing = os.pipe()
        self.stdout: IO[str] = os.fdopen(reading, encoding="utf-8")
        self._answers = send(address, arguments, (0, writing, stderr))
        os.close(writing)
        self.pid: int = receive(self._answers)  # type: ignore[assignment]
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = receive(self._answers)
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self._answers.close()
        return self.returncode  # type: ignore[return-value]

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; return what is left of the output, the first time."""
        self.wait(timeout)
        if self.stdout.closed:
            return "", None
        with self.stdout:
            return self.stdout.read(), None

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)


@contextmanager
def fork_server(modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Start a server that has imported `modules`, which may read its environment; yield its address."""
    with tempfile.TemporaryDirectory(prefix="forks") as folder:  # names of sockets must be short
        command = [sys.executable, __file__, "--serve", f"{folder}/socket", *modules]
        server = subprocess.Popen(command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield f"{folder}/socket"
        finally:
            server.kill()
            server.communicate()


def send(address: str, arguments: Sequence[str], streams: Sequence[int]) -> socket.socket:
    """Let a server run a program; return the connection that tells how it goes."""
    program = {"arguments": arguments, "folder": str(Path.cwd()), "environment": dict(os.environ)}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [b"x"], streams)
    connection.sendall(json.dumps(program).encode())
    connection.shutdown(socket.SHUT_WR)
    return connection


def receive(connection: socket.socket) -> int | None:
    answer = connection.recv(NUMBER.size)
    return int(NUMBER.unpack(answer)[0]) if answer else None


# -- in the server -------------------------------------------------------------------------------------------------


def serve(address: str, modules: Sequence[str]) -> None:
    """Fork for each program, and return in the forks that run one."""
    import importlib

    for name in modules:
        importlib.import_module(name)
    threads = Path("/proc/self/task")  # not on every system
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "a fork of several threads can hang"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(16)
        os.write(1, b"ready\n")
        while True:
            if 0 in select([0, listening], [], [])[0]:
                os._exit(0)  # whoever started this has ended
            connection, _ = listening.accept()
            if not os.fork():
                break
            connection.close()
    with connection:
        watch(connection)


def watch(connection: socket.socket) -> None:
    """Fork, return in the child, and tell how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    program: dict[str, Any] = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))
    if child := os.fork():
        os.closerange(0, 3)
        for stream in streams:
            os.close(stream)
        connection.sendall(NUMBER.pack(child))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(OSError):  # nobody wants to know
            connection.sendall(NUMBER.pack(status))
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(program["environment"])
    os.chdir(program["folder"])
    sys.argv = program["arguments"]


def main() -> NoReturn:
    if sys.argv[1] == "--serve":
        import runpy

        serve(sys.argv[2], sys.argv[3:])
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    with send(os.environ[ADDRESS], sys.argv[1:], (0, 1, 2)) as answers:
        receive(answers)
        status = receive(answers)
    sys.exit(1 if status is None else status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
