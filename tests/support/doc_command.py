"""Stands for `seqdefer` where tests run the shell blocks of a page: `serve` goes on in the background, on a free port.

    python forks.py doc_command.py ARGUMENTS

DOC_SERVER_PORT is the port. A server that runs from before is ended first; `server.pid` names the new one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PID_FILE, LOG_FILE = Path("server.pid"), Path("server.log")
START_SECONDS = 120


def stop_server() -> None:
    """End the server of this folder, if there is one, and wait until it has ended."""
    if PID_FILE.is_file():
        pid = int(PID_FILE.read_text())
        PID_FILE.unlink()
        with suppress(ProcessLookupError):  # it has failed
            os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + START_SECONDS
        while _answers("/live") and time.monotonic() < end:
            time.sleep(0.05)


def start_server(arguments: list[str]) -> int:
    """Start a server and return 0 when it accepts requests, else 1."""
    stop_server()
    if "--port" in arguments:
        place = arguments.index("--port")
        arguments = arguments[:place] + arguments[place + 2 :]
    server = os.fork()
    if not server:
        _serve([*arguments, "--port", os.environ["DOC_SERVER_PORT"]])
    PID_FILE.write_text(str(server))
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and os.waitpid(server, os.WNOHANG) == (0, 0):
        if _answers("/ready"):
            return 0
        time.sleep(0.02)
    sys.stderr.write(LOG_FILE.read_text())
    return 1


def _serve(arguments: list[str]) -> NoReturn:
    """Serve in this process, which nobody waits for, and log into a file."""
    from seqdefer.cli import main

    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with LOG_FILE.open("a") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
    os.closerange(3, 1024)  # else the shell would wait for this process
    status = main(["serve", *arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _answers(path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{os.environ['DOC_SERVER_PORT']}{path}", timeout=5):
            return True
    except OSError:
        return False


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        return start_server(sys.argv[2:])
    from seqdefer.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
