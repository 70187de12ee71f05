"""The endpoint client against a real server that misbehaves on purpose. Sleeps are recorded, not slept."""

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
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from labelling_toy import until

from seqdefer.errors import MissingExtraError, OptionError
from seqdefer.remote.client import (
    MAX_DELAY,
    MAX_LETTERS_PER_TOKEN,
    MAX_RESPONSE_BYTES,
    MAX_RETRY_AFTER,
    Endpoint,
    EndpointClient,
    EndpointCompletion,
    EndpointError,
    EndpointRequest,
)
from seqdefer.remote.keys import HOST_VARIABLE, KEY_VARIABLE, read_key

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
        """Print nothing."""


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Misbehaving(ThreadingHTTPServer):
    """Answers each request with the next of `behaviours`, and then with "fine"."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours: list[Behaviour] = []
        self.asked: list[Request] = []
        self.released = threading.Event()  # ends `hang` and `drip`

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that left, which some tests are about."""


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
    handler.server.released.wait(120)
    handler.close_connection = True


def drip(handler: Handler) -> None:
    """Send a byte now and then, forever."""
    handler.send_response(200)
    handler.send_header("content-length", "100000")
    handler.end_headers()
    while not handler.server.released.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Misbehaving]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Misbehaving() as running:
        monkeypatch.setenv(HOST_VARIABLE, f"127.0.0.1:{running.server_address[1]}")
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.released.set()
        running.shutdown()
        thread.join()


@dataclass
class Sleeper:
    """Records how long it should have slept."""

    slept: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


def client(server: Misbehaving, sleeper: Sleeper | None = None, jitter: float = 1.0, **options: Any) -> EndpointClient:
    sleeper = sleeper or Sleeper()
    endpoint = Endpoint(server.url, "large", **options)
    return EndpointClient(endpoint, sleep=sleeper.sleep, jitter=lambda: jitter, now=lambda: 1_000_000_000.0)


def ask(asked: EndpointClient, prompt: str = "Once") -> EndpointCompletion:
    return asked.complete_all([EndpointRequest(prompt, 5)])[0]


def refused(server: Misbehaving, *behaviours: Behaviour, **options: Any) -> str:
    server.behaviours[:] = behaviours
    with pytest.raises(EndpointError) as raised:
        ask(client(server, **options))
    message = str(raised.value)
    assert message.startswith(server.url)
    assert message.isprintable()
    assert len(message) < 600
    return message


# -- requests and responses ------------------------------------------------------------------------------------------


def test_a_request_follows_the_protocol(server: Misbehaving) -> None:
    server.behaviours = [completion(" upon a time", "length")]
    assert ask(client(server)) == EndpointCompletion(" upon a time", is_finished=False)
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
def test_only_stop_means_finished(server: Misbehaving, reason: str | None, is_finished: bool) -> None:
    server.behaviours = [completion("x", reason)]
    assert ask(client(server)).is_finished is is_finished


def test_a_text_is_cut_by_max_tokens(server: Misbehaving) -> None:
    server.behaviours = [completion("word " * 10_000)]
    assert ask(client(server)) == EndpointCompletion(("word " * 10_000)[: 5 * MAX_LETTERS_PER_TOKEN], is_finished=False)


def test_completions_keep_the_order_of_requests(server: Misbehaving) -> None:
    asked = client(server, at_once=1)
    texts = [str(number) for number in range(20)]
    server.behaviours = [completion(text) for text in texts]
    assert [one.text for one in asked.complete_all([EndpointRequest(text, 1) for text in texts])] == texts
    assert [request.body["prompt"] for request in server.asked] == texts
    assert asked.complete_all([]) == []


def test_concurrent_calls_are_limited(server: Misbehaving) -> None:
    lock, now, most = threading.Lock(), [0], [0]
    three = threading.Barrier(3)  # breaks unless three calls are concurrent

    def count(handler: Handler) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        three.wait(60)
        with lock:
            now[0] -= 1
        completion("ok")(handler)

    server.behaviours = [count] * 12
    assert len(client(server, at_once=3).complete_all([EndpointRequest("x", 1)] * 12)) == 12
    assert most[0] == 3


def test_a_call_that_waits_to_retry_keeps_its_slot(server: Misbehaving) -> None:
    """An overloaded server gets no other calls meanwhile, and their time does not run."""
    server.behaviours = [status(429)]
    client(server, at_once=1).complete_all([EndpointRequest(prompt, 1) for prompt in "abc"])
    assert [request.body["prompt"] for request in server.asked] == ["a", "a", "b", "c"]


def test_cancelled_calls_free_their_slots(server: Misbehaving) -> None:
    server.behaviours = [hang] * 2
    asked = client(server, at_once=2)
    waiting = asked.submit(asked.complete([EndpointRequest(prompt, 1) for prompt in "abcdef"]))
    until(lambda: len(server.asked) == 2)
    assert waiting.cancel()
    assert ask(asked).text == "fine"  # while both others still hang
    *both, last = [request.body["prompt"] for request in server.asked]
    assert (sorted(both), last) == (["a", "b"], "Once")  # concurrent calls arrive in any order


def test_a_call_that_is_given_up_logs_its_reason(server: Misbehaving, caplog: pytest.LogCaptureFixture) -> None:
    """A caller whose time is over while the call waits to retry heard of a timeout only, never of status 500."""
    begun = threading.Event()

    async def sleep(_: float) -> None:
        begun.set()
        await asyncio.sleep(60)

    server.behaviours = [status(500, "out of memory")]
    asked = EndpointClient(Endpoint(server.url, "large"), sleep=sleep)
    waiting = asked.submit(asked.complete([EndpointRequest("Once", 1)]))
    until(begun.is_set)
    waiting.cancel()
    until(lambda: caplog.messages == [f"{server.url} was not asked again in time: status 500, 'out of memory'"])


def test_connections_are_reused_and_threads_share_a_client(server: Misbehaving) -> None:
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


def test_a_caller_may_have_an_event_loop(server: Misbehaving) -> None:
    asked = client(server)

    async def cell() -> EndpointCompletion:
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


# -- transient failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [*(status(number) for number in (500, 502, 503, 529, 408, 409, 429)), close_within_body, close_at_once],
)
def test_transient_failures_are_retried(server: Misbehaving, trouble: Behaviour) -> None:
    sleeper = Sleeper()
    server.behaviours = [trouble, trouble]
    assert ask(client(server, sleeper)).text == "fine"
    assert len(server.asked) == 3
    assert sleeper.slept == [0.5, 1.0]


def test_delays_grow_to_a_limit_with_jitter(server: Misbehaving) -> None:
    for jitter, share in ((1.0, 1.0), (0.0, 0.5)):
        sleeper, server.behaviours = Sleeper(), [status(503)] * 8
        assert ask(client(server, sleeper, jitter, retries=8)).text == "fine"
        assert sleeper.slept == [share * wait for wait in (0.5, 1, 2, 4, 8, 8, 8, 8)]
        assert max(sleeper.slept) <= MAX_DELAY


def test_attempts_are_counted(server: Misbehaving) -> None:
    sleeper, server.behaviours = Sleeper(), [status(503, "over\nloaded \x1b[31m")] * 9
    with pytest.raises(
        EndpointError, match=r"gave no answer in 3 attempts: status 503, 'over loaded \\x1b\[31m'; try again"
    ):
        ask(client(server, sleeper, retries=2))
    assert len(server.asked) == 3
    assert len(sleeper.slept) == 2
    assert "in 1 attempt: status 500" in refused(server, status(500), retries=0)


@pytest.mark.parametrize(
    ("header", "waited"),
    [("7", 7.0), ("0", 0.0), ("1.5", 1.5), ("-3", 0.0), ("soon", 0.5), ("nan", 0.5),
     (formatdate(1_000_000_003, usegmt=True), 3.0), (formatdate(0, usegmt=True), 0.0)],
)  # fmt: skip
def test_retry_after_is_respected(server: Misbehaving, header: str, waited: float) -> None:
    sleeper, server.behaviours = Sleeper(), [status(429, retry_after=header)]
    assert ask(client(server, sleeper)).text == "fine"
    assert sleeper.slept == [waited]


def test_a_long_retry_after_is_an_error(server: Misbehaving) -> None:
    sleeper, server.behaviours = Sleeper(), [status(429, "quota", retry_after=str(int(MAX_RETRY_AFTER) + 1))]
    with pytest.raises(EndpointError, match="'quota'; it asks to wait 61 seconds; try again then"):
        ask(client(server, sleeper))
    assert sleeper.slept == []


@pytest.mark.parametrize("trouble", [hang, drip])
def test_slow_responses_time_out(server: Misbehaving, trouble: Behaviour) -> None:
    server.behaviours = [trouble]
    assert ask(client(server, seconds=0.5, retries=50)).text == "fine"  # a busy machine needs a few more
    assert "in 2 attempts: no answer within 0.1 seconds" in refused(server, trouble, trouble, seconds=0.1, retries=1)


def test_no_server(server: Misbehaving) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        url, sleeper = f"http://127.0.0.1:{taken.getsockname()[1]}/v1", Sleeper()
        asked = EndpointClient(Endpoint(url, "large", retries=2), sleep=sleeper.sleep)
        with pytest.raises(EndpointError, match=r"gave no answer in 3 attempts: '.*onnect"):
            ask(asked)
    assert len(sleeper.slept) == 2
    with pytest.raises(EndpointError, match="gave no answer in 2 attempts") as raised:  # someone waits: no delay
        asked.submit(asked.complete([EndpointRequest("Once", 5)])).result()
    assert raised.value.is_unreachable
    assert len(sleeper.slept) == 2


def test_a_stale_connection_is_tried_again_at_once(server: Misbehaving) -> None:
    sleeper, server.behaviours = Sleeper(), [close_at_once, status(503)]
    asked = client(server, sleeper)
    assert asked.submit(asked.complete([EndpointRequest("Once", 5)])).result()[0].text == "fine"
    assert sleeper.slept == [1.0]  # for the status alone


# -- permanent failures ----------------------------------------------------------------------------------------------


def test_a_refusal_is_not_retried_and_says_why(server: Misbehaving) -> None:
    message = refused(server, status(400, "max_tokens is too large: 900"))
    assert "refused the call for 'large' (status 400, 'max_tokens is too large: 900'); check the address" in message
    assert len(server.asked) == 1
    assert f"set the key: {KEY_VARIABLE}" in refused(server, status(401, "no key"))
    assert "status 404, 'x y'" in refused(server, content_of_status(404, b"x\ny"))
    assert "'not here'" in refused(server, content_of_status(404, b'{"detail": "not here"}'))
    assert "'gone'" in refused(server, content_of_status(410, b'{"object": "error", "message": "gone"}'))
    assert "…'" in refused(server, status(422, "long " * 1000))


def content_of_status(number: int, text: bytes) -> Behaviour:
    return lambda handler: handler.answer(number, text)


def test_the_first_refusal_cancels_the_rest(server: Misbehaving) -> None:
    server.behaviours = [status(400), *[hang] * 3]
    with pytest.raises(EndpointError, match="status 400"):
        client(server, at_once=4).complete_all([EndpointRequest("x", 1)] * 40)
    assert len(server.asked) <= 8


def test_redirects_are_not_followed(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    message = refused(server, status(307, location=f"{server.url}/elsewhere"))
    assert "redirects to" in message
    assert "/elsewhere" in message
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "text",
    [b"", b"<html>", b"[]", b"{}", b"null", b'{"choices": []}', b'{"choices": [{"text": 3}]}', b'{"choices": {"0": 1}}',
     b'{"choices": [{"message": {"content": "a chat"}}]}', b"\xff\xfe", b"[" * 50_000, b'{"choices": ["x"]}'],
)  # fmt: skip
def test_a_response_that_is_not_a_completion(server: Misbehaving, text: bytes) -> None:
    assert "sent a response that is not a completion" in refused(server, content(text))
    assert len(server.asked) == 1


def test_half_a_surrogate_pair_is_replaced(server: Misbehaving) -> None:
    server.behaviours = [content(b'{"choices": [{"text": "a\\ud800b", "finish_reason": "stop"}]}')]
    assert ask(client(server)).text == "a?b"


def test_a_huge_response_is_not_read(server: Misbehaving) -> None:
    sent = list[int]()

    def flood(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(2**40))
        handler.end_headers()
        for _ in range(2**40 // 2**16):
            handler.wfile.write(b" " * 2**16)  # fails when the client has left
            sent.append(2**16)

    assert "sends more than 70656 bytes for 5 tokens; check that it respects max_tokens" in refused(server, flood)
    assert sum(sent) < 10 * MAX_RESPONSE_BYTES  # the system buffers some


def test_compressed_responses_are_refused(server: Misbehaving) -> None:
    assert "compressed response" in refused(server, content(b"x", content_encoding="gzip"))


def test_an_untrusted_certificate_is_refused(server: Misbehaving, tmp_path: Path) -> None:
    openssl = shutil.which("openssl") or pytest.skip("needs openssl to make a certificate")
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")]
    what = ["-newkey", "rsa:2048", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([openssl, "req", "-x509", "-nodes", *what, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    sleeper, url = Sleeper(), server.url.replace("http", "https")
    with pytest.raises(EndpointError, match=r"cannot be trusted: .*CERTIFICATE_VERIFY_FAILED"):
        ask(EndpointClient(Endpoint(url, "large"), sleep=sleeper.sleep))
    assert (server.asked, sleeper.slept) == ([], [])


# -- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_shown(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    asked = client(server, retries=1)
    assert ask(asked).text == "fine"
    assert server.asked[0].headers["authorization"] == f"Bearer {SECRET}"
    shown = [repr(asked), repr(asked.endpoint), repr(vars(asked))]
    for trouble in (status(401, f"wrong key {SECRET}"), status(500, SECRET), close_at_once, content(SECRET.encode())):
        server.behaviours = [trouble] * 2
        with pytest.raises(EndpointError) as raised:
            ask(asked)
        shown.append("".join(traceback.format_exception(raised.value)))
        assert raised.value.__cause__ is None
    assert "is not accepted" in shown[3]
    assert SECRET not in caplog.text + "".join(shown)
    server.behaviours.clear()
    monkeypatch.setenv(KEY_VARIABLE, "another")
    ask(asked)
    assert server.asked[-1].headers["authorization"] == "Bearer another"


@pytest.mark.parametrize("key", ["two words", "new\nline", "schlüssel", "tab\t"])
def test_a_malformed_key_is_neither_sent_nor_shown(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(OptionError, match=KEY_VARIABLE) as raised:
        ask(client(server))
    assert key not in str(raised.value)
    assert server.asked == []


@pytest.mark.parametrize(
    ("host", "url", "is_sent"),
    [
        ("api.example.com", "https://api.example.com/v1", True),
        ("https://API.example.com/", "https://api.example.com/v1", True),
        ("api.example.com:8443", "https://api.example.com:8443/v1", True),
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000/v1", True),
        ("localhost:8000", "http://localhost:8000/v1", True),
        ("", "https://api.example.com/v1", False),
        ("api.example.com", "https://evil.example.com/v1", False),
        ("api.example.com", "https://api.example.com.evil.com/v1", False),
        ("api.example.com", "https://api.example.com:8443/v1", False),
        ("api.example.com", "http://api.example.com/v1", False),  # anyone on the way could read it
    ],
)
def test_a_key_belongs_to_a_host(monkeypatch: pytest.MonkeyPatch, host: str, url: str, is_sent: bool) -> None:
    """Regression: whoever wrote the address of the expert into a model's folder got the key."""
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    monkeypatch.setenv(HOST_VARIABLE, host)
    if is_sent:
        assert read_key(url) == SECRET
        EndpointClient(Endpoint(url, "m"))
        return
    with pytest.raises(OptionError, match=f"if the key belongs there, set {HOST_VARIABLE}=") as raised:
        EndpointClient(Endpoint(url, "m"))
    assert SECRET not in str(raised.value)
    assert str(raised.value).isprintable()


def test_without_a_key_no_host_is_needed(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE)
    assert ask(client(server)).text == "fine"


def test_a_key_that_is_bound_elsewhere_later_is_not_sent(server: Misbehaving, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client(server)
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    monkeypatch.setenv(HOST_VARIABLE, "api.example.com")
    with pytest.raises(OptionError, match=HOST_VARIABLE):
        ask(asked)
    assert server.asked == []


# -- addresses -------------------------------------------------------------------------------------------------------


def test_forms_of_an_address() -> None:
    for url in ("https://host/v1", "https://host/v1/", "https://host/v1/completions"):
        assert Endpoint(url, "m").address == "https://host/v1/completions"


@pytest.mark.parametrize(
    "url",
    ["", "host/v1", "ftp://host/v1", "https://", "https://:80/v1", "https://host:port/v1", "http://[::1/v1",
     "https://ho st/v1", "https://host/v1\n"],
)  # fmt: skip
def test_bad_addresses(url: str) -> None:
    with pytest.raises(OptionError, match="is not the address of an endpoint; give one like https://host/v1"):
        Endpoint(url, "m")


@pytest.mark.parametrize(
    "url",
    ["https://me:hush@host/v1", "https://me:hush@/v1", "https://me:hush@host:port", "https://host?key=hush",
     "https://host#hush"],
)  # fmt: skip
def test_no_secrets_in_addresses(url: str) -> None:
    with pytest.raises(OptionError, match=f"pass a key in {KEY_VARIABLE} only") as raised:
        Endpoint(url, "m")
    assert "hush" not in str(raised.value)


def test_bad_settings() -> None:
    with pytest.raises(OptionError, match="is a chat endpoint"):
        Endpoint("https://host/v1/chat/completions", "m")
    with pytest.raises(OptionError, match="no model is named for https://host/v1"):
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


def test_ctrl_c_ends_a_delay(server: Misbehaving) -> None:
    ended = threading.Event()

    async def sleep(_: float) -> None:
        interrupt()
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    server.behaviours = [status(503)]
    with pytest.raises(KeyboardInterrupt):
        ask(EndpointClient(Endpoint(server.url, "large"), sleep=sleep))
    assert ended.wait(30)
    assert len(server.asked) == 1
