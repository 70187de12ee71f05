"""The client of endpoints against a real server that misbehaves on purpose. Sleeping is noted, not done."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from seqdefer.errors import MissingExtraError, OptionError
from seqdefer.remote import cancellation as patience_of
from seqdefer.remote.client import (
    KEY,
    LARGEST,
    LAST_WAIT,
    LONGEST_WAIT,
    Ask,
    Completion,
    Completions,
    Endpoint,
    EndpointError,
)

pytest.importorskip("httpx", reason="needs the extra 'remote'")

SECRET = "sk-very-secret-0123456789"
Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Misbehaving

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(Request(self.path, dict(self.headers.items()), body))
        behave = self.server.behaviours.pop(0) if self.server.behaviours else completion("fine")
        behave(self)

    def answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output is not for it."""


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Misbehaving(ThreadingHTTPServer):
    """Each request meets the next of `behaviours`; when they are used up, all is fine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours: list[Behaviour] = []
        self.asked: list[Request] = []
        self.released = threading.Event()  # for those who hang

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is what some tests are about."""


def completion(text: str, reason: str | None = "stop") -> Behaviour:
    body = {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"text": text, "index": 0, "finish_reason": reason}],
    }
    return lambda handler: handler.answer(200, json.dumps(body).encode(), content_type="application/json")


def status(number: int, message: str = "sorry", **headers: str) -> Behaviour:
    body = json.dumps({"error": {"message": message, "type": "x"}}).encode()
    return lambda handler: handler.answer(number, body, **headers)


def content(text: bytes, **headers: str) -> Behaviour:
    return lambda handler: handler.answer(200, text, **headers)


def close_within_body(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def close_at_once(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def hang(handler: Handler) -> None:
    handler.server.released.wait(30)
    handler.close_connection = True


def drip(handler: Handler) -> None:
    """Never silent for long, and never done."""
    handler.send_response(200)
    handler.send_header("content-length", "100000")
    handler.end_headers()
    while not handler.server.released.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Misbehaving]:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Misbehaving() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.released.set()
        running.shutdown()
        thread.join()


@dataclass
class Patience:
    """Notes how long it should have slept."""

    slept: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


def client(server: Misbehaving, patience: Patience | None = None, jitter: float = 1.0, **options: Any) -> Completions:
    patience = patience or Patience()
    endpoint = Endpoint(server.url, "large", **options)
    return Completions(endpoint, sleep=patience.sleep, jitter=lambda: jitter, now=lambda: 1_000_000_000.0)


def ask(asked: Completions, prompt: str = "Once") -> Completion:
    return asked.ask_all([Ask(prompt, 5)])[0]


def refused(server: Misbehaving, *behaviours: Behaviour, **options: Any) -> str:
    server.behaviours[:] = behaviours
    with pytest.raises(EndpointError) as raised:
        ask(client(server, **options))
    message = str(raised.value)
    assert message.startswith(server.url)
    assert message.isprintable()
    assert len(message) < 600
    return message


# -- what is sent and what comes back --------------------------------------------------------------------------------


def test_a_call_is_what_servers_document(server: Misbehaving) -> None:
    server.behaviours = [completion(" upon a time", "length")]
    assert ask(client(server)) == Completion(" upon a time", is_finished=False)
    (request,) = server.asked
    assert request.path == "/v1/completions"
    assert request.body == {"model": "large", "prompt": "Once", "max_tokens": 5, "temperature": 0}
    names = {name.lower(): value for name, value in request.headers.items()}
    assert names["content-type"] == "application/json"
    assert names["accept-encoding"] == "identity"
    assert "authorization" not in names


@pytest.mark.parametrize(
    ("reason", "is_finished"), [("stop", True), ("length", False), ("content_filter", False), (None, False)]
)
def test_only_a_stop_is_an_end(server: Misbehaving, reason: str | None, is_finished: bool) -> None:
    server.behaviours = [completion("x", reason)]
    assert ask(client(server)).is_finished is is_finished


def test_answers_come_in_the_order_of_what_was_asked(server: Misbehaving) -> None:
    asked = client(server, at_once=1)
    server.behaviours = [completion(str(number)) for number in range(20)]
    assert [one.text for one in asked.ask_all([Ask(str(n), 1) for n in range(20)])] == [str(n) for n in range(20)]
    assert [request.body["prompt"] for request in server.asked] == [str(n) for n in range(20)]
    assert asked.ask_all([]) == []


def test_no_more_calls_are_under_way_than_allowed(server: Misbehaving) -> None:
    lock, now, most = threading.Lock(), [0], [0]
    three = threading.Barrier(3)  # breaks unless three are there together

    def count(handler: Handler) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        three.wait(10)
        with lock:
            now[0] -= 1
        completion("ok")(handler)

    server.behaviours = [count] * 12
    assert len(client(server, at_once=3).ask_all([Ask("x", 1)] * 12)) == 12
    assert most[0] == 3


def test_who_waits_keeps_his_turn(server: Misbehaving) -> None:
    """A server that has too much to do is not asked by others meanwhile, and their time does not run."""
    server.behaviours = [status(429)]
    client(server, at_once=1).ask_all([Ask(prompt, 1) for prompt in "abc"])
    assert [request.body["prompt"] for request in server.asked] == ["a", "a", "b", "c"]


def test_calls_that_nobody_waits_for_any_more_end_and_leave_room(server: Misbehaving) -> None:
    server.behaviours = [hang] * 2
    asked, patience, raised = client(server, at_once=2), patience_of.Patience(), list[BaseException]()

    def give_up() -> None:
        with pytest.raises(CancelledError) as caught:
            patience.run(lambda: asked.ask_all([Ask(prompt, 1) for prompt in "abcdef"]))
        raised.append(caught.value)

    waiting = threading.Thread(target=give_up)
    waiting.start()
    until(lambda: len(server.asked) == 2)
    patience.end()
    waiting.join(10)
    assert len(raised) == 1
    assert ask(asked).text == "fine"  # though both that hang still do
    *both, last = [request.body["prompt"] for request in server.asked]
    assert (sorted(both), last) == (["a", "b"], "Once")  # who is under way together arrives in any order
    with pytest.raises(CancelledError):  # what comes too late does not begin
        patience.run(lambda: ask(asked))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def test_connections_are_kept_and_threads_share_a_client(server: Misbehaving) -> None:
    asked, ports = client(server, at_once=2), list[int]()

    def note(handler: Handler) -> None:
        ports.append(handler.client_address[1])
        completion("ok")(handler)

    server.behaviours = [note] * 8
    for _ in range(4):
        thread = threading.Thread(target=ask, args=(asked,))
        thread.start()
        ask(asked)
        thread.join()
    assert len(ports) == 8
    assert len(set(ports)) <= 2


def test_a_notebook_has_a_loop_already(server: Misbehaving) -> None:
    asked = client(server)

    async def cell() -> Completion:
        return ask(asked)

    assert asyncio.run(cell()).text == "fine"


def test_the_thread_ends_with_the_client(server: Misbehaving) -> None:
    before, asked = set(threading.enumerate()), client(server)
    ask(asked)
    (thread,) = (one for one in threading.enumerate() if one.name == "seqdefer-remote" and one not in before)
    del asked
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


# -- what may pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [*(status(number) for number in (500, 502, 503, 529, 408, 409, 429)), close_within_body, close_at_once],
)
def test_what_may_pass_is_tried_again(server: Misbehaving, trouble: Behaviour) -> None:
    patience = Patience()
    server.behaviours = [trouble, trouble]
    assert ask(client(server, patience)).text == "fine"
    assert len(server.asked) == 3
    assert patience.slept == [0.5, 1.0]


def test_waits_grow_to_a_limit_and_differ(server: Misbehaving) -> None:
    for jitter, share in ((1.0, 1.0), (0.0, 0.5)):
        patience, server.behaviours = Patience(), [status(503)] * 8
        assert ask(client(server, patience, jitter, retries=8)).text == "fine"
        assert patience.slept == [share * wait for wait in (0.5, 1, 2, 4, 8, 8, 8, 8)]
        assert max(patience.slept) <= LAST_WAIT


def test_tries_are_counted(server: Misbehaving) -> None:
    patience, server.behaviours = Patience(), [status(503, "over\nloaded \x1b[31m")] * 9
    with pytest.raises(
        EndpointError, match=r"gave no answer in 3 tries: status 503, 'over loaded \\x1b\[31m'; ask again"
    ):
        ask(client(server, patience, retries=2))
    assert len(server.asked) == 3
    assert len(patience.slept) == 2
    assert "in 1 try: status 500" in refused(server, status(500), retries=0)


@pytest.mark.parametrize(
    ("header", "waited"),
    [("7", 7.0), ("0", 0.0), ("1.5", 1.5), ("-3", 0.0), ("soon", 0.5), ("nan", 0.5),
     (formatdate(1_000_000_003, usegmt=True), 3.0), (formatdate(0, usegmt=True), 0.0)],
)  # fmt: skip
def test_a_server_may_say_how_long_to_wait(server: Misbehaving, header: str, waited: float) -> None:
    patience, server.behaviours = Patience(), [status(429, retry_after=header)]
    assert ask(client(server, patience)).text == "fine"
    assert patience.slept == [waited]


def test_nobody_waits_for_an_hour(server: Misbehaving) -> None:
    patience, server.behaviours = Patience(), [status(429, "quota", retry_after=str(int(LONGEST_WAIT) + 1))]
    with pytest.raises(EndpointError, match="'quota'; it asks to wait 61 seconds; ask again then"):
        ask(client(server, patience))
    assert patience.slept == []


@pytest.mark.parametrize("trouble", [hang, drip])
def test_who_takes_too_long_is_left(server: Misbehaving, trouble: Behaviour) -> None:
    server.behaviours = [trouble]
    assert ask(client(server, seconds=0.5, retries=50)).text == "fine"  # a busy machine takes a few more
    assert "in 2 tries: no answer within 0.1 seconds" in refused(server, trouble, trouble, seconds=0.1, retries=1)


def test_nobody_is_there(server: Misbehaving) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    patience = Patience()
    asked = Completions(Endpoint(f"http://127.0.0.1:{port}/v1", "large", retries=2), sleep=patience.sleep)
    with pytest.raises(EndpointError, match=r"gave no answer in 3 tries: '.*onnect"):
        ask(asked)
    assert len(patience.slept) == 2


# -- what will not pass ----------------------------------------------------------------------------------------------


def test_a_refusal_is_final_and_says_why(server: Misbehaving) -> None:
    said = refused(server, status(400, "max_tokens is too large: 900"))
    assert "refused the call for 'large' (status 400, 'max_tokens is too large: 900'); check the address" in said
    assert len(server.asked) == 1
    assert f"set the key: {KEY}" in refused(server, status(401, "no key"))
    assert "status 404, 'x y'" in refused(server, content_of_status(404, b"x\ny"))
    assert "'not here'" in refused(server, content_of_status(404, b'{"detail": "not here"}'))
    assert "'gone'" in refused(server, content_of_status(410, b'{"object": "error", "message": "gone"}'))
    assert "…'" in refused(server, status(422, "long " * 1000))


def content_of_status(number: int, text: bytes) -> Behaviour:
    return lambda handler: handler.answer(number, text)


def test_the_first_refusal_ends_all(server: Misbehaving) -> None:
    server.behaviours = [status(400), *[hang] * 3]
    with pytest.raises(EndpointError, match="status 400"):
        client(server, at_once=4).ask_all([Ask("x", 1)] * 40)
    assert len(server.asked) <= 8


def test_redirects_are_not_followed(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)
    said = refused(server, status(307, location=f"{server.url}/elsewhere"))
    assert "sends calls on to" in said
    assert "/elsewhere" in said
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "text",
    [b"", b"<html>", b"[]", b"{}", b"null", b'{"choices": []}', b'{"choices": [{"text": 3}]}', b'{"choices": {"0": 1}}',
     b'{"choices": [{"message": {"content": "a chat"}}]}', b"\xff\xfe", b"[" * 100_000, b'{"choices": ["x"]}'],
)  # fmt: skip
def test_what_is_no_completion_is_said(server: Misbehaving, text: bytes) -> None:
    assert "gave an answer that is no completion" in refused(server, content(text))
    assert len(server.asked) == 1


def test_half_a_surrogate_pair_is_no_text(server: Misbehaving) -> None:
    server.behaviours = [content(b'{"choices": [{"text": "a\\ud800b", "finish_reason": "stop"}]}')]
    assert ask(client(server)).text == "a?b"


def test_a_huge_answer_is_not_read(server: Misbehaving) -> None:
    sent = list[int]()

    def flood(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(2**40))
        handler.end_headers()
        for _ in range(2**40 // 2**16):
            handler.wfile.write(b" " * 2**16)  # fails when the client has left
            sent.append(2**16)

    assert "answers with more than 4 MiB" in refused(server, flood)
    assert sum(sent) < 100 * LARGEST


def test_packed_answers_are_not_unpacked(server: Misbehaving) -> None:
    assert "packed bytes" in refused(server, content(b"x", content_encoding="gzip"))


def test_whoever_cannot_prove_who_he_is_gets_nothing(server: Misbehaving, tmp_path: Path) -> None:
    openssl = shutil.which("openssl") or pytest.skip("needs openssl to make a certificate")
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    what = ["-newkey", "rsa:2048", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([openssl, "req", "-x509", "-nodes", *what, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    patience, url = Patience(), server.url.replace("http", "https")
    with pytest.raises(EndpointError, match=r"cannot be trusted: .*CERTIFICATE_VERIFY_FAILED"):
        ask(Completions(Endpoint(url, "large"), sleep=patience.sleep))
    assert (server.asked, patience.slept) == ([], [])


# -- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_nowhere_else(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(KEY, SECRET)
    asked = client(server, retries=1)
    assert ask(asked).text == "fine"
    assert server.asked[0].headers["authorization"] == f"Bearer {SECRET}"
    told = [repr(asked), repr(asked.endpoint), repr(vars(asked))]
    for trouble in (status(401, f"wrong key {SECRET}"), status(500, SECRET), close_at_once, content(SECRET.encode())):
        server.behaviours = [trouble] * 2
        with pytest.raises(EndpointError) as raised:
            ask(asked)
        told.append("".join(traceback.format_exception(raised.value)))
        assert raised.value.__cause__ is None
    assert "is not taken" in told[3]
    assert SECRET not in caplog.text + "".join(told)
    server.behaviours.clear()
    monkeypatch.setenv(KEY, "another")
    ask(asked)
    assert server.asked[-1].headers["authorization"] == "Bearer another"


@pytest.mark.parametrize("key", ["two words", "new\nline", "schlüssel", "tab\t"])
def test_what_is_no_key_is_not_sent_and_not_said(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(KEY, key)
    with pytest.raises(OptionError, match=KEY) as raised:
        ask(client(server))
    assert key not in str(raised.value)
    assert server.asked == []


# -- addresses -------------------------------------------------------------------------------------------------------


def test_an_address_may_end_in_several_ways() -> None:
    for url in ("https://host/v1", "https://host/v1/", "https://host/v1/completions"):
        assert Endpoint(url, "m").address == "https://host/v1/completions"


@pytest.mark.parametrize(
    "url",
    ["", "host/v1", "ftp://host/v1", "https://", "https://:80/v1", "https://host:port/v1", "http://[::1/v1",
     "https://ho st/v1", "https://host/v1\n"],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(OptionError, match="is no address of an endpoint; give one like https://host/v1"):
        Endpoint(url, "m")


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hush@host/v1",
        "https://me:hush@/v1",
        "https://me:hush@host:port",
        "https://host?key=hush",
        "https://host#hush",
    ],
)
def test_no_secrets_in_addresses(url: str) -> None:
    with pytest.raises(OptionError, match=f"give a key in {KEY} alone") as raised:
        Endpoint(url, "m")
    assert "hush" not in str(raised.value)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="is for chats"):
        Endpoint("https://host/v1/chat/completions", "m")
    with pytest.raises(OptionError, match="no model is named at https://host/v1"):
        Endpoint("https://host/v1", "")
    for bad in ({"seconds": 0}, {"seconds": float("nan")}, {"retries": -1}, {"at_once": 0}):
        with pytest.raises(OptionError, match=r"more than 0|at least 0 and 1"):
            Endpoint("https://host/v1", "m", **bad)


def test_without_httpx_the_extra_is_named(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client(server)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "httpx", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'seqdefer\[remote\]'"):
            ask(asked)
    assert ask(asked).text == "fine"


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt(_: Handler | None = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_call(server: Misbehaving) -> None:
    gone = threading.Event()

    def interrupted(handler: Handler) -> None:
        interrupt()
        handler.connection.settimeout(30)
        if handler.connection.recv(1) == b"":  # the client has closed
            gone.set()
        handler.close_connection = True

    server.behaviours = [interrupted]
    asked = client(server)
    with pytest.raises(KeyboardInterrupt):
        ask(asked)
    assert gone.wait(30)
    assert ask(asked).text == "fine"


def test_ctrl_c_ends_a_wait(server: Misbehaving) -> None:
    ended = threading.Event()

    async def sleep(_: float) -> None:
        interrupt()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    server.behaviours = [status(503)]
    with pytest.raises(KeyboardInterrupt):
        ask(Completions(Endpoint(server.url, "large"), sleep=sleep))
    assert ended.wait(30)
    assert len(server.asked) == 1
