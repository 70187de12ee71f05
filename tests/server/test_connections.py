"""Connections that send nothing, or too little: probes and other clients must not notice them."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ServerProcess, connections, server_process
from servers import COMPLETIONS, until

from seqdefer.errors import OptionError
from seqdefer.server.connections import reserve_descriptors
from seqdefer.server.http import Limits

pytestmark = pytest.mark.slow

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "
BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{"


@pytest.fixture(scope="module")
def idle_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("idle")) as started:
        yield started


@pytest.mark.parametrize(
    ("n", "sent"), [(1100, b""), (520, b""), (1100, HEAD), (600, BODY)], ids=["1100", "520", "heads", "bodies"]
)
def test_connections_that_wait_lock_nobody_out(idle_server: ServerProcess, n: int, sent: bytes) -> None:
    """1,100 idle connections once exhausted the descriptors: one core spun, with megabytes of tracebacks. 520 left no
    connection to /health and /metrics, and 600 that sent no body none for completions."""
    server = idle_server
    until(lambda: server.descriptors < 100)  # connections of the test before are closed
    with connections(server, n, sent):
        cpu, started = server.cpu_seconds, time.monotonic()
        for _ in range(8):
            for path in ("/health", "/metrics", "/v1/models"):
                assert server.get(path).status_code == 200
            assert server.post(COMPLETIONS, {"model": "toy@0.5", "prompt": "13"}).status_code == 200
            time.sleep(0.05)
        assert server.cpu_seconds - cpu < 0.5 * (time.monotonic() - started)
        assert server.descriptors < 700
        assert "Traceback" not in server.logged
        assert len(server.logged) < 20_000


def test_out_of_descriptors(tmp_path: Path) -> None:
    """asyncio logs a traceback for each failed accept, thousands in a second."""
    held = "held = [open(os.devnull) for _ in range(920)]"
    with server_process(tmp_path, before=held) as server:
        cpu = server.cpu_seconds
        with connections(server, 200):
            until(lambda: server.descriptors >= 1023)
            time.sleep(3)
        assert server.cpu_seconds - cpu < 1.5
        until(lambda: server.get("/health").status_code == 200)
        assert server.logged.count("cannot accept connections: [Errno 24] Too many open files") == 1
        assert "Traceback" not in server.logged


def test_limits_must_fit_into_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    reserve_descriptors(Limits())
    assert allowed == [(800, 4096)]
    with pytest.raises(OptionError, match=r"5000 connections .* 5288 open files, but .* 4096; lower --connections"):
        reserve_descriptors(Limits(connections=5000))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    reserve_descriptors(Limits())
    assert len(allowed) == 1
