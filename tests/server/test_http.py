"""The gateway and the connections: sizes, slow and broken clients, request IDs, methods, API keys, host names."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from servers import (
    COMPLETE,
    COMPLETIONS,
    RunningServer,
    check_error,
    check_healthy,
    metric,
    running,
    slow_model,
    toy_model,
    until,
)

from seqdefer.errors import OptionError
from seqdefer.server import connections, serve
from seqdefer.server.app import create_app
from seqdefer.server.connections import RESERVED_CONNECTIONS
from seqdefer.server.http import ERROR_TYPES, Limits

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
openai = pytest.importorskip("openai", reason="needs openai: pip install openai")


def test_large_bodies_are_refused(server: RunningServer) -> None:
    large = json.dumps({"model": "toy", "prompt": "1" * 2**20}).encode()
    assert check_error(server.post(COMPLETIONS, large), 413)["code"] == "body_too_large"

    def chunks() -> Iterator[bytes]:  # no content-length
        yield from (large[start : start + 2**16] for start in range(0, len(large), 2**16))

    check_error(httpx.post(f"{server.address}{COMPLETIONS}", content=chunks()), 413)
    check_healthy(server)


# -- slow and broken clients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_answered", [False, True])
def test_broken_chunks_log_no_traceback(is_answered: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: two answers to one request, the second on a connection that had been given up."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    with running(toy_model(), api_key="secret") as server, server.connect() as client:
        client.sendall(head if is_answered else head + b"no chunk\r\n")
        received = client.recv(65536)
        if is_answered:  # that the key is missing
            client.sendall(b"no chunk\r\n")
        while part := client.recv(65536):
            received += part
        assert received.count(b"HTTP/1.1 ") == 1
        assert received.startswith(b"HTTP/1.1 401" if is_answered else b"HTTP/1.1 400")
        assert server.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def drip(client: socket.socket, head: bytes) -> bytes:
    """Send a head and then single bytes until the server closes the connection; return what it sent."""
    client.sendall(head)
    client.settimeout(0.02)
    received, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(TimeoutError, ConnectionError):
            part = client.recv(1000)
            received += part
            if not part:
                return received
        with suppress(ConnectionError):
            client.sendall(b" ")
    raise AssertionError("the server did not close the connection in time")


@pytest.mark.parametrize("path", [COMPLETIONS, COMPLETE, "/nowhere"])
def test_slow_body_is_cut_off(path: str) -> None:
    with running(toy_model(), limits=Limits(request_seconds=0.4)) as server:
        with server.connect() as client:
            received = drip(client, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{{".encode())
        assert received.startswith(b"HTTP/1.1 408")
        assert b'"code":"timeout"' in received
        server.scheduler.limits = Limits()
        check_healthy(server)


def test_slow_head_is_cut_off() -> None:
    """Also that of a second request, and after a response that came before the body."""
    with running(toy_model(), limits=Limits(head_seconds=0.4), api_key="secret") as server:
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            with server.connect() as client:
                received = drip(client, before + b"GET /health HTTP/1.1\r\nX-Slow: ")
            assert received.count(b"HTTP/1.1 200") == bool(before)
        with server.connect() as client:
            received = drip(client, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
        assert received.startswith(b"HTTP/1.1 401")


def test_connections_are_kept_for_the_next_request() -> None:
    """uvicorn closed them after 5 seconds, as long as httpx keeps them: requests that were on their way were reset."""
    asked = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"

    def check_live(client: socket.socket) -> None:
        client.sendall(asked)
        received = b""
        while not received.endswith(b'{"status":"ok"}'):
            received += (part := client.recv(1000))
            assert part

    with running(toy_model(), limits=Limits(head_seconds=0.3, keep_alive_seconds=2.0)) as server:
        with server.connect() as client:
            for _ in range(2):
                check_live(client)
                time.sleep(1.0)  # more than a head may take
            client.sendall(asked[:9])
            started = time.monotonic()
            assert client.recv(1000) == b""  # the next head has its own time
            assert time.monotonic() - started < 1.7
        with server.connect() as client:
            check_live(client)
            started = time.monotonic()
            assert client.recv(1000) == b""
            assert time.monotonic() - started > 1.7
        assert server.server.config.timeout_keep_alive > 2.0
    assert Limits().keep_alive_seconds > 60  # as long as load balancers keep them


def test_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses were once kept forever for clients that send requests and do not read."""
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.1)
    with running(toy_model(), limits=Limits(request_seconds=0.4, keep_alive_seconds=1.0)) as server:
        server.get("/openapi.json")  # made at the first request, which may take longer than the limit
        requests = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 2000  # the responses exceed all buffers
        with server.connect() as client:
            client.sendall(requests)
            until(lambda: server.server.server_state.total_requests > 9)
            until(lambda: not server.server.server_state.connections)
        server.scheduler.limits = Limits()
        check_healthy(server)


def test_invalid_http_is_refused(server: RunningServer) -> None:
    with server.connect() as client:
        client.sendall(b"\x16\x03\x01 what\r\n\r\n")
        head, body = b"".join(iter(lambda: client.recv(1000), b"")).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    check_healthy(server)


def test_requests_beyond_the_limit_are_told_so() -> None:
    """Two requests take both places; probes still get in, and others get a response."""
    model, slow = slow_model()
    slow.gate.clear()
    with running(model, limits=Limits(connections=2, grace_seconds=0.5)) as server, ThreadPoolExecutor(2) as pool:
        try:
            for count in (1, 2):
                pool.submit(server.complete, "13", 0)
                until(lambda count=count: len(server.scheduler._open) == count)
            body = {"model": "toy", "prompt": "13"}
            for response in (server.post(COMPLETIONS, body), server.get("/v1/models")):
                assert check_error(response, 503, "2 requests are running")["code"] == "too_crowded"
                assert response.headers["retry-after"] == "1"
                assert response.headers["connection"] == "close"
            for path in ("/health", "/ready", "/live", "/metrics"):
                assert server.get(path).status_code == 200
        finally:
            slow.gate.set()
        until(lambda: server.get("/v1/models").status_code == 200)
        assert metric(server, 'seqdefer_requests_total{path="/v1/models",status="503"}') >= 1
        check_healthy(server)


def test_bodies_that_arrive_have_bounded_memory() -> None:
    """One that holds most of it keeps out large ones, not small ones."""
    limits = Limits(arriving_bytes=1000, connections=10, grace_seconds=0.5)
    with running(toy_model(), limits=limits) as server, server.connect() as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n" + b" " * 990)
        until(lambda: server.gateway.n_arriving == 990)
        body = json.dumps({"model": "toy", "prompt": "13"}).encode()
        assert server.post(COMPLETIONS, body).status_code == 200
        error = check_error(server.post(COMPLETIONS, body + b" " * 300), 503, "too many large requests are arriving")
        assert error["code"] == "too_crowded"
        client.close()
        until(lambda: server.gateway.n_arriving == 0)
        assert server.post(COMPLETIONS, body + b" " * 300).status_code == 200


def test_oldest_idle_connection_gives_way() -> None:
    """The one beyond the limit is not the one that is closed: it may be a client, which the oldest is not."""
    n = 2 + RESERVED_CONNECTIONS
    with running(toy_model(), limits=Limits(connections=2, grace_seconds=0.5)) as server, ExitStack() as stack:
        idle = []
        for count in range(1, n + 1):
            idle.append(stack.enter_context(server.connect()))
            until(lambda count=count: len(server.server.server_state.connections) == count)
        new = stack.enter_context(server.connect())
        assert idle[0].recv(1) == b""
        for client in (idle[1], new):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_connections_that_wait_amid_a_second_request_give_way() -> None:
    """Regression: one whose second request was sent along with the first, without its body, was kept for two minutes,
    so that a few hundred of them locked out everyone."""
    asked = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
    n = 2 + RESERVED_CONNECTIONS
    with running(toy_model(), limits=Limits(connections=2, grace_seconds=0.5)) as server, ExitStack() as stack:
        for _ in range(n):
            client = stack.enter_context(server.connect())
            client.sendall(asked + b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{")
        until(lambda: server.server.server_state.total_requests == n)
        new = stack.enter_context(server.connect())
        new.sendall(asked)
        assert new.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "first", [b"Content-Length: 4\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 4"]
)
def test_two_lengths_are_refused(server: RunningServer, first: bytes) -> None:
    """A proxy that believes the other one would take a part of the body for another client's request."""
    with server.connect() as client:
        inner = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        client.sendall(b"POST /v1/models HTTP/1.1\r\nHost: x\r\n" + first + b"\r\n\r\n0\r\n\r\n" + inner)
        received = b"".join(iter(lambda: client.recv(1000), b""))
    assert received.startswith(b"HTTP/1.1 400")
    assert b"both Content-Length and Transfer-Encoding" in received
    assert received.count(b"HTTP/1.1 ") == 1


# -- request IDs, methods and paths --------------------------------------------------------------------------------


def test_every_response_has_a_request_id(server: RunningServer) -> None:
    responses = [
        server.get("/health"),
        server.get("/v1/nothing"),
        server.post(COMPLETIONS, b"{"),
        server.post(COMPLETIONS, {"model": "toy", "prompt": "13", "stream": True}),
        server.get("/health", headers={"x-request-id": "two words"}),
        server.get("/health", headers={"x-request-id": "x" * 129}),
    ]
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 32 for one in ids)
    given = server.get("/health", headers={"x-request-id": "trace-7:a.b_c"})
    assert given.headers["x-request-id"] == "trace-7:a.b_c"


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/openapi.json", "/v1/models", "/v1/models/toy", "/v1/deferral", "/"]
)
def test_head_is_get_without_body(server: RunningServer, path: str) -> None:
    whole, head = server.get(path), server.http.head(f"{server.address}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405), ("HEAD", COMPLETIONS, 405), ("OPTIONS", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405), ("POST", "/v1/deferral", 405), ("PUT", COMPLETE, 405),
        ("OPTIONS", "/health", 405), ("TRACE", "/metrics", 405), ("WHAT", "/v1/models/toy", 405), ("POST", "/", 405),
        ("GET", "/v1", 404), ("GET", "/v1/models/", 404), ("POST", "/v1/completions/", 404), ("OPTIONS", "/x", 404),
        ("GET", "/v1/completions%00", 404), ("GET", "//health", 404), ("GET", "/page/../http.py", 404),
    ],
)  # fmt: skip
def test_unknown_methods_and_paths(server: RunningServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, f"{server.address}{path}")
    if method == "HEAD":
        assert (response.status_code, response.content) == (status, b"")
    else:
        assert check_error(response, status)["type"] == ERROR_TYPES.get(status, "invalid_request_error")
    assert ("allow" in response.headers) == (status == 405)


def test_errors_name_the_path_and_the_methods(server: RunningServer) -> None:
    check_error(server.get("/v1/nothing"), 404, "nothing at /v1/nothing; /openapi.json lists all paths")
    check_error(server.get(COMPLETIONS), 405, "GET is not allowed at /v1/completions; allowed: POST")


# -- API keys and host names ---------------------------------------------------------------------------------------


def test_api_key() -> None:
    with running(toy_model(), api_key="s3cr~t") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            for path in ("/v1/models", "/v1/deferral", "/metrics", "/openapi.json", "/nowhere"):
                response = server.get(path, headers=headers)
                assert check_error(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            server.client.completions.create(model="toy", prompt="13")
        for scheme in ("Bearer", "bearer", "BEARER", "Bearer "):  # case and spaces do not matter
            assert server.get("/v1/models", headers={"authorization": f"{scheme} s3cr~t"}).status_code == 200
        for wrong in ("Basic s3cr~t", "Bearer S3cr~t", "Bearers3cr~t", "Bearer s3cr~t s3cr~t"):
            check_error(server.get("/v1/models", headers={"authorization": wrong}), 401)
        assert server.get("/health").status_code == 200
        for page in ("/", "/docs"):
            assert server.get(page).headers["content-type"].startswith("text/html")
        check_error(server.get("/page/nothing"), 404)


@pytest.mark.parametrize("key", ["", "s3crét", "ключ", "two words", "line\n", "\x7f"])
def test_api_key_must_fit_into_a_header(key: str) -> None:
    with pytest.raises(OptionError, match="the API key is empty, or contains a space or a non-ASCII"):
        create_app(toy_model(), "toy", api_key=key)


def test_other_sites_cannot_use_a_server_without_a_key() -> None:
    """In DNS rebinding a foreign name resolves to this machine, but the browser still sends that name as Host."""
    with running(toy_model(), only_host="Box.example") as server:
        allowed = ["localhost", "LOCALHOST:8000", "a.localhost", "localhost.", "127.0.0.1", "127.8.9.1:1", "[::1]",
                   "[::1]:80", "box.example", "box.example:8000", "BOX.EXAMPLE."]  # fmt: skip
        for host in allowed:
            assert server.get("/v1/models", headers={"host": host}).status_code == 200, host
        refused = ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::2]:80", "",
                   "127.0.0.1.evil.example", "notlocalhost", "evil:[::1]", "[127.0.0.1]:80:80"]  # fmt: skip
        for host in refused:
            for path in ("/v1/models", "/", "/health"):
                response = server.get(path, headers={"host": host})
                assert check_error(response, 403, "localhost or Box.example")["code"] == "wrong_host", host
        with server.connect() as client:
            client.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # no browser sends HTTP/1.0
            assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_only_local_servers_check_the_host() -> None:
    with serve.listen("127.0.0.1", 0) as local, serve.listen("0.0.0.0", 0) as public:
        assert serve.trusted_host(local) == "127.0.0.1"
        assert serve.trusted_host(local, "box.example") == "box.example"
        assert serve.trusted_host(public) is None
