"""Random bytes, heads, headers and bodies: no response is a 5xx, nothing hangs, nothing is left behind."""

from __future__ import annotations

import json
import random
import re
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import COMPLETIONS, RunningServer, running, toy_model

from seqdefer.server.http import Limits
from seqdefer.server.keys import add_key

pytestmark = pytest.mark.slow

N = 5000
STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d)")  # not that of 100 Continue
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/deferral/complete", "/v1/deferral/score", "/v1/deferral",
    "/v1/models", "/v1/models/toy@0.2", "/v1/usage", "/v1/audio/transcriptions", "/live", "/ready", "/health",
    "/metrics", "/openapi.json", "/", "/page/page.js", "/x%00%ff", "//", "/v1/models/%0a", "*", "http://h/health",
)  # fmt: skip
METHODS = ("GET", "GET", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "X" * 40)
VALUES = (
    None, True, 0, -1, 1e308, "", "13", "7932", "\ud800", [], ["13"], ["13"] * 17, {}, {"budget": 0.5},
    {"budget": "x"}, "toy", "toy@0.5", "toy@", [[0.1, 0.2]], [{"role": "user", "content": "13"}], "x" * 3000, 2**70,
)  # fmt: skip
FIELDS = (
    "model",
    "prompt",
    "input",
    "inputs",
    "messages",
    "stream",
    "max_tokens",
    "deferral",
    "temperature",
    "n",
    "seed",
)
HEADERS = (
    "x-request-id: a b", "x-request-id: ok-1", "x-request-id: " + "i" * 300, "content-encoding: gzip",
    "expect: 100-continue",
    "connection: close", "connection: upgrade\r\nupgrade: websocket", "transfer-encoding: chunked", "content-length: 5",
    "authorization: Bearer wrong", "authorization: Basic \xff", "cookie: " + "c" * 2000, "sec-fetch-site: cross-site",
    "content-length: -1", "transfer-encoding: gzip, chunked", "host: evil.example", "accept: */*", "range: bytes=0-1",
)  # fmt: skip


def random_body(chance: random.Random) -> bytes:
    fields = {"model": "toy@0.5", "prompt": "13"} if chance.random() < 0.7 else {}
    content = {
        **fields,
        **{chance.choice(FIELDS): chance.choice(VALUES) for _ in range(chance.choice((0, 0, 1, 2, 3)))},
    }
    body = json.dumps(content).encode()
    kind = chance.random()
    if kind < 0.15:
        place = chance.randrange(len(body) + 1)
        return body[:place] + chance.randbytes(chance.randint(0, 9)) + body[place:]
    return b"[" * 5000 if kind < 0.17 else chance.randbytes(50) if kind < 0.2 else body


def random_request(chance: random.Random, key: str) -> bytes:
    """Return the bytes of a request, often valid; some end early."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.randint(1, 400))
    body, headers = random_body(chance), ["host: localhost", "content-type: application/json"]
    headers += [f"authorization: Bearer {key}"] if chance.random() < 0.8 else []
    headers += [f"content-length: {len(body)}"] if chance.random() < 0.9 else []
    headers += chance.sample(HEADERS, chance.choice((0, 0, 0, 1, 2)))
    path = chance.choice(PATHS) if chance.random() < 0.6 else COMPLETIONS
    method = "POST" if chance.random() < 0.7 else chance.choice(METHODS)
    version = "HTTP/1.1" if chance.random() < 0.97 else chance.choice(("HTTP/1.0", "HTTP/2.0", "HTTP/9"))
    head = "\r\n".join([f"{method} {path} {version}", *headers, "", ""]).encode("latin-1")
    whole = head + body
    return whole[: chance.randrange(len(whole))] if chance.random() < 0.03 else whole


def send(server: RunningServer, sent: bytes) -> str:
    """Return the status of the first response; "none" if the connection ends without one."""
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1])), timeout=20) as client:
        received = b""
        try:
            client.sendall(sent)
            while (found := STATUS.search(received)) is None and (part := client.recv(65536)):
                received += part
        except ConnectionError:
            return "none"
    return found[1].decode() if found else "none"


def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "fuzz")
    limits = Limits(head_seconds=0.5, request_seconds=2, grace_seconds=0.5)
    with running(toy_model(), keys=path, limits=limits) as server, ThreadPoolExecutor(8) as pool:
        requests = (random_request(random.Random(seed), key) for seed in range(N))
        statuses = Counter(pool.map(lambda sent: send(server, sent), requests))
        server.wait_until_idle()
        assert not server.scheduler._open
        assert server.app.state.ledger.accounts["fuzz"].reserved == 0
        assert server.get("/health").json() == {"status": "ok"}
    assert sum(statuses.values()) == N
    assert not [status for status in statuses if status.startswith("5")], statuses
    assert statuses["200"] > N / 20  # many requests reach the models
    assert statuses["none"] < N / 5
