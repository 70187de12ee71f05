"""Bad input and faults: a proper status, an error body in OpenAI's form, nothing left behind, others unharmed."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from seqdefer import cli
from seqdefer.errors import OptionError
from seqdefer.interfaces import NextTokenExpert
from seqdefer.server.faults import TYPES
from seqdefer.server.guarding import Caller, ExpertTimeout
from seqdefer.server.limits import Limits
from seqdefer.testing.fakes import ToyState
from seqdefer.types import Examples, Sequences, SequenceSpec

pytest.importorskip("fastapi", reason="needs the extra 'server'")
pytest.importorskip("uvicorn", reason="needs the extra 'server'")
pytest.importorskip("httpx", reason="needs httpx: pip install httpx")
pytest.importorskip("openai", reason="needs the official client: pip install openai")

import httpx
import openai

from seqdefer.server import connections, working
from seqdefer.server.app import create_app
from seqdefer.server.running import listen, trusted_host
from tests.server.test_app import (
    LENGTH,
    Running,
    inputs_of,
    metric,
    running,
    slow_model,
    text_model,
    toy_model,
    until,
    with_parts,
)
from tests.server.test_waiting import ask, elsewhere

pytestmark = pytest.mark.usefixtures("one_thread")
Capture = pytest.CaptureFixture[str]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(toy_model()) as server:
        yield server


def check_refused(answer: Any, status: int, words: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert "Traceback" not in answer.text
    return error


def check_well(server: Running) -> None:
    """It still writes what it should, and nothing is left of what was before."""
    server.wait_until_idle()
    assert not server.scheduler._open
    answer = server.client.completions.create(model="toy@0.5", prompt="13")
    assert answer.choices[0].text == toy_model().generate(["13"], 0.5).outputs[0]
    assert server.get("/health").json() == {"status": "ok"}


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"model": "toy", "prompt": "\xff"}',
        b'{"model": "toy", "prompt": "1", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/deferral/score"])
def test_what_is_no_json_is_refused(served: Running, path: str, body: bytes) -> None:
    check_refused(served.post(path, body), 400)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2, 3]}, "prompt.0"),
        ({"prompt": ["1"] * 17}, None),
        ({"prompt": None}, "prompt"),
        ({"model": 5}, "model"),
        ({"model": "toy@2"}, "model"),
        ({"model": "toy@-0.1"}, "model"),
        ({"model": "toy@nan"}, "model"),
        ({"model": "toy@"}, "model"),
        ({"model": "toy@x"}, "model"),
        ({"model": "toy@0.2", "deferral": {"budget": 0.3}}, "deferral"),
        ({"deferral": {"budget": 1.5}}, "deferral.budget"),
        ({"deferral": {"budget": -1}}, "deferral.budget"),
        ({"deferral": {"budget": float("nan")}}, "deferral.budget"),
        ({"deferral": {"budget": float("inf")}}, "deferral.budget"),
        ({"deferral": {"budget": "0.2"}}, "deferral.budget"),
        ({"deferral": {"budget": True}}, "deferral.budget"),
        ({"deferral": {}}, "deferral.budget"),
        ({"deferral": {"budget": 0.2, "burden": 1}}, "deferral.burden"),
        ({"deferal": {"budget": 0.2}}, "deferal"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": -(10**30)}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"stop": ["."]}, "stop"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),  # OpenAI answers with those of the tokens that it wrote
        ({"temperature": -1}, "temperature"),
        ({"\ud800": 1}, None),
    ],
)
def test_bad_fields_are_named(served: Running, changes: dict[str, Any], param: str | None) -> None:
    body = json.dumps({"model": "toy", "prompt": "13", **changes}).encode()
    error = check_refused(served.post(COMPLETIONS, body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        (COMPLETIONS, {"prompt": [1] * 1000}, "prompt.0: Input should be a valid string"),
        (CHAT, {"messages": [5] * 1000}, "messages.0: Input should be "),
        (CHAT, {"messages": [{}] * 1000}, "messages.0.role: Field required; messages.0.content: Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [5] * 1000}]}, "messages.0.content.0: Input should be "),
        ("/v1/deferral/complete", {"inputs": ["\ud800"] * 1000}, "inputs: half a surrogate pair is no text"),
        (COMPLETIONS, {str(place): 0 for place in range(1000)}, "1001 fields are more than the 100 that may be given"),
    ],
)
def test_what_is_wrong_a_thousand_times_is_named_once(
    served: Running, path: str, given: dict[str, Any], words: str
) -> None:
    """All were: a million in one request kept the server from everybody else for ten seconds, and took a gigabyte."""
    body = json.dumps({"model": "toy", **given}).encode()
    message = check_refused(served.post(path, body), 400, words)["message"]
    assert len(message) < 150


def test_an_input_may_be_nested_as_deep_as_it_likes(served: Running) -> None:
    """Where the parser gave up it was refused; a little before that, what checked it failed."""
    for depth in range(900, 1000):
        body = b'{"model": "toy", "input": ' + b"[" * depth + b"]" * depth + b"}"
        check_refused(served.post("/v1/deferral/complete", body), 400)


def test_a_field_that_nobody_knows_is_to_be_left_out(served: Running) -> None:
    answer = served.post(COMPLETIONS, {"model": "toy", "prompt": "13", "top_k": 1})
    assert check_refused(answer, 400)["message"] == "top_k: not known here; leave it out"


@pytest.mark.parametrize(
    "messages",
    [[], "13", [{"role": "user"}], [{"role": "pope", "content": "13"}], [{"role": "user", "content": 13}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]],
)  # fmt: skip
def test_bad_messages_are_refused(served: Running, messages: Any) -> None:
    check_refused(served.post("/v1/chat/completions", {"model": "toy", "messages": messages}), 400, "messages")


def test_a_message_without_words_is_told_what_to_do(served: Running) -> None:
    """OpenAI's clients send null where a tool was called."""
    said = [{"role": "user", "content": "13"}, {"role": "assistant", "content": None}]
    answer = served.post("/v1/chat/completions", {"model": "toy", "messages": said})
    error = check_refused(answer, 400, "null is no text: give what was said, or leave the message out")
    assert error["param"] == "messages.1.content"


def test_what_changes_nothing_may_be_said(served: Running) -> None:
    usual = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "n": 1, "stop": None, "user": "me", "frequency_penalty": 0}
    answer = served.client.completions.create(model="toy@0.5", prompt="13", **usual)
    assert answer.choices[0].text == toy_model().generate(["13"], 0.5).outputs[0]
    said, usual = [{"role": "user", "content": "13"}], {"metadata": {"turn": 1}, "store": False, "logprobs": False}
    chat = served.client.chat.completions.create(model="toy@0.5", messages=said, **usual)
    assert chat.choices[0].message.content == answer.choices[0].text


def test_unknown_models_and_paths(served: Running) -> None:
    for name in ("gpt-4", "toy2", "Toy", "", "other@0.2", "\ud800"):
        error = check_refused(served.post(COMPLETIONS, json.dumps({"model": name, "prompt": "1"}).encode()), 404)
        assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=r"toy@0\.20"):
        served.client.completions.create(model="gpt-4", prompt="13")
    check_refused(served.get("/v1/nothing"), 404, "there is nothing at /v1/nothing; /openapi.json says what there is")
    check_refused(served.get(COMPLETIONS), 405, "GET is not possible at /v1/completions; possible: POST")


@pytest.mark.parametrize(
    ("body", "media_type", "words"),
    [
        (b'{"model": ', "application/json", "the body is no JSON: Expecting value, character 10"),
        (b'{"model": "toy", "prompt": "13"}', "text/plain", "send one, with the header content-type: application/json"),
        (b'{"model": "toy", "prompt": "13"}', "application/x-www-form-urlencoded", "content-type: application/json"),
        (b'"toy"', "application/json", "the body is no JSON object"),
        (b"", "application/json", "the body is no JSON object"),
        (gzip.compress(b'{"model": "toy", "prompt": "13"}', mtime=0), "application/json", "not compressed"),
        (b'{"model": "toy", "prompt": "\xff"}', "application/json", "the body cannot be read: send a JSON object"),
        (b"[" * 100_000, "application/json", "without hundreds of lists within lists"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_a_body_is_told_what_it_should_be(served: Running, body: bytes, media_type: str, words: str) -> None:
    answer = served.http.post(f"{served.address}{COMPLETIONS}", content=body, headers={"content-type": media_type})
    assert check_refused(answer, 400, words)["param"] is None


def test_bad_inputs_are_refused_and_their_neighbours_are_not() -> None:
    model, _ = slow_model(0.02)
    good = inputs_of(8)
    with running(model) as server, ThreadPoolExecutor(16) as pool:
        answers = pool.map(
            lambda one: server.post(COMPLETIONS, {"model": "toy@0.5", "prompt": one}), [*good, *"abcdefgh"]
        )
        given = list(answers)
        for answer in given[8:]:
            check_refused(answer, 400, "give a number")
        assert [one.json()["choices"][0]["text"] for one in given[:8]] == toy_model().generate(good, 0.5).outputs
        check_well(server)


def test_large_bodies_are_refused(served: Running) -> None:
    large = json.dumps({"model": "toy", "prompt": "1" * 2**20}).encode()
    assert check_refused(served.post(COMPLETIONS, large), 413)["code"] == "body_too_large"

    def chunks() -> Iterator[bytes]:  # no content-length
        yield from (large[start : start + 2**16] for start in range(0, len(large), 2**16))

    check_refused(httpx.post(f"{served.address}{COMPLETIONS}", content=chunks()), 413)
    check_well(served)


# -- slow and crooked clients --------------------------------------------------------------------------------------


def connected(server: Running) -> socket.socket:
    host, port = server.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def drip(slow: socket.socket, head: bytes) -> bytes:
    """Sends a head, and then a byte from time to time, until the server has had enough; what it says."""
    slow.sendall(head)
    slow.settimeout(0.02)
    said = b""
    for _ in range(500):
        with suppress(TimeoutError, ConnectionError):
            part = slow.recv(1000)
            said += part
            if not part:  # it hung up
                return said
        with suppress(ConnectionError):
            slow.sendall(b" ")
    raise AssertionError("it listens for ever")


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/deferral/complete", "/nowhere"])
def test_a_body_that_comes_byte_by_byte_is_cut_off(path: str) -> None:
    with running(toy_model(), limits=Limits(request_seconds=0.4)) as server:
        with connected(server) as slow:
            said = drip(slow, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{{".encode())
        assert said.startswith(b"HTTP/1.1 408")
        assert b'"code":"timeout"' in said
        check_well(server)


def test_a_head_that_comes_byte_by_byte_is_cut_off() -> None:
    """Of a first request and of a second, and where the answer came before the body."""
    with running(toy_model(), limits=Limits(request_seconds=0.4), api_key="secret") as server:
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            with connected(server) as slow:
                said = drip(slow, before + b"GET /health HTTP/1.1\r\nX-Slow: ")
            assert said.count(b"HTTP/1.1 200") == bool(before)
        with connected(server) as slow:
            said = drip(slow, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
        assert said.startswith(b"HTTP/1.1 401")


def test_who_asks_and_asks_and_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers, too, were once kept for ever for those who do not read them."""
    monkeypatch.setattr(connections, "LAST_WORDS", 0.1)
    with running(toy_model(), limits=Limits(request_seconds=0.4)) as server:
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 2000  # more than all buffers between hold
        with connected(server) as deaf:
            deaf.sendall(asked)
            until(lambda: server.server.server_state.total_requests > 9)
            until(lambda: not server.server.server_state.connections)
        check_well(server)


def test_what_is_no_http_is_refused(served: Running) -> None:
    with connected(served) as client:
        client.sendall(b"\x16\x03\x01 what\r\n\r\n")
        head, body = b"".join(iter(lambda: client.recv(1000), b"")).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    check_well(served)


def test_more_connections_than_may_be_open() -> None:
    with running(toy_model(), limits=Limits(connections=2, grace_seconds=0.5)) as server:
        with connected(server), connected(server):
            until(lambda: len(server.server.server_state.connections) == 2)
            body = {"model": "toy", "prompt": "13"}
            for answer in (server.get("/health"), server.post(COMPLETIONS, body), server.get("/v1/models")):
                assert check_refused(answer, 503, "more than 2 connections")["code"] == "too_crowded"
                assert answer.headers["retry-after"] == "1"
                assert answer.headers["connection"] == "close"
        until(lambda: server.get("/health").status_code == 200)
        assert metric(server, 'seqdefer_requests_total{path="/v1/models",status="503"}') == 1
        check_well(server)


# -- names, methods and paths --------------------------------------------------------------------------------------


def test_every_answer_names_its_request(served: Running) -> None:
    answers = [
        served.get("/health"),
        served.get("/v1/nothing"),
        served.post(COMPLETIONS, b"{"),
        served.post(COMPLETIONS, {"model": "toy", "prompt": "13", "stream": True}),
        served.get("/health", headers={"x-request-id": "two words"}),
        served.get("/health", headers={"x-request-id": "x" * 129}),
    ]
    names = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(names)) == len(names)
    assert all(len(name) == 32 for name in names)
    given = served.get("/health", headers={"x-request-id": "trace-7:a.b_c"})
    assert given.headers["x-request-id"] == "trace-7:a.b_c"


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/openapi.json", "/v1/models", "/v1/models/toy", "/v1/deferral", "/"]
)
def test_a_head_is_a_get_without_a_body(served: Running, path: str) -> None:
    whole, head = served.get(path), served.http.head(f"{served.address}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405), ("HEAD", COMPLETIONS, 405), ("OPTIONS", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405), ("POST", "/v1/deferral", 405), ("PUT", "/v1/deferral/complete", 405),
        ("OPTIONS", "/health", 405), ("TRACE", "/metrics", 405), ("WHAT", "/v1/models/toy", 405), ("POST", "/", 405),
        ("GET", "/v1", 404), ("GET", "/v1/models/", 404), ("POST", "/v1/completions/", 404), ("OPTIONS", "/x", 404),
        ("GET", "/v1/completions%00", 404), ("GET", "//health", 404), ("GET", "/page/../gate.py", 404),
    ],
)  # fmt: skip
def test_methods_and_paths_that_are_not_there(served: Running, method: str, path: str, status: int) -> None:
    answer = served.http.request(method, f"{served.address}{path}")
    if method == "HEAD":
        assert (answer.status_code, answer.content) == (status, b"")
    else:
        assert check_refused(answer, status)["type"] == TYPES.get(status, "invalid_request_error")
    assert ("allow" in answer.headers) == (status == 405)


# -- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for() -> None:
    with running(toy_model(), api_key="s3cr~t") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                answer = server.get(path, headers=headers)
                assert check_refused(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            server.client.completions.create(model="toy", prompt="13")
        assert server.get("/health").status_code == 200
        for scheme in ("Bearer", "bearer", "BEARER", "Bearer "):  # case and spaces mean nothing there
            assert server.get("/v1/models", headers={"authorization": f"{scheme} s3cr~t"}).status_code == 200
        for wrong in ("Basic s3cr~t", "Bearer S3cr~t", "Bearers3cr~t", "Bearer s3cr~t s3cr~t"):
            check_refused(server.get("/v1/models", headers={"authorization": wrong}), 401)


@pytest.mark.parametrize("key", ["", "s3crét", "ключ", "two words", "line\n", "\x7f"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(OptionError, match="the API key is empty, or holds a space or a letter"):
        create_app(toy_model(), "toy", api_key=key)


# -- names of the server -------------------------------------------------------------------------------------------


def test_a_foreign_page_cannot_use_a_server_without_a_key() -> None:
    """Its name may be made to lead here (DNS rebinding); but the browser still says that name."""
    with running(toy_model(), only_host="Box.example") as server:
        own = [
            "localhost",
            "LOCALHOST:8000",
            "a.localhost",
            "localhost.",
            "127.0.0.1",
            "127.8.9.1:1",
            "[::1]",
            "[::1]:80",
        ]
        for host in (*own, "box.example", "box.example:8000", "BOX.EXAMPLE."):
            assert server.get("/v1/models", headers={"host": host}).status_code == 200, host
        wrong = ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::2]:80", "",
                 "127.0.0.1.evil.example", "notlocalhost", "evil:[::1]", "[127.0.0.1]:80:80"]  # fmt: skip
        for host in wrong:
            for path in ("/v1/models", "/", "/health"):
                answer = server.get(path, headers={"host": host})
                assert check_refused(answer, 403, "called localhost or Box.example")["code"] == "wrong_host", host
        with connected(server) as old:
            old.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # no browser speaks that
            assert old.recv(100).startswith(b"HTTP/1.1 200")


def test_only_who_listens_on_this_machine_alone_minds_names() -> None:
    with listen("127.0.0.1", 0) as here, listen("0.0.0.0", 0) as anywhere:
        assert trusted_host(here) == "127.0.0.1"
        assert trusted_host(here, "box.example") == "box.example"
        assert trusted_host(anywhere) is None


# -- too much ------------------------------------------------------------------------------------------------------


def test_a_full_queue_sends_away() -> None:
    model, _ = slow_model(0.1)
    limits = Limits(queue=2, inputs=1, batch=1, running=1, grace_seconds=0.5)
    with running(model, limits=limits) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: server.post(COMPLETIONS, {"model": "toy", "prompt": one}), inputs_of(8)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        for answer in answers:
            if answer.status_code == 429:
                assert check_refused(answer, 429)["code"] == "queue_full"
                assert answer.headers["retry-after"] == "1"
        check_well(server)


def test_what_takes_too_long_is_given_up() -> None:
    model, _ = slow_model(0.2)
    with running(model, limits=Limits(request_seconds=0.8, grace_seconds=0.5)) as server:
        error = check_refused(server.post(COMPLETIONS, {"model": "toy@0", "prompt": "13"}), 504)
        assert error["code"] == "timeout"
        stream = server.client.completions.create(model="toy@0", prompt="13", stream=True)
        chunks = iter(stream)
        assert next(chunks).choices[0].text
        with pytest.raises(openai.APIError, match=r"0\.8 seconds"):
            list(chunks)
        until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="timeout"}') == 1)
        server.wait_until_idle()
        assert not server.scheduler._open


def test_what_fails_after_a_long_silence_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it is a status."""
    model, slow = slow_model(0)
    slow.may_go.clear()
    body = {"model": "toy@0", "prompt": "13", "stream": True}
    with running(model, limits=Limits(request_seconds=0.4, grace_seconds=0.5)) as server:
        try:
            assert check_refused(server.post(COMPLETIONS, body), 504)["code"] == "timeout"
            monkeypatch.setattr(working, "QUIET", 0.02)
            answer = server.post(COMPLETIONS, body)
            *waiting, error, done, rest = answer.text.split("\n\n")
            assert answer.status_code == 200
            assert set(waiting) == {": waiting"}
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
            assert (done, rest) == ("data: [DONE]", "")
            with pytest.raises(openai.APIError, match=r"0\.4 seconds"):
                list(server.client.completions.create(**body))
            until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="timeout"}') == 2)
            assert not server.scheduler._open
        finally:
            slow.may_go.set()


# -- clients that leave --------------------------------------------------------------------------------------------


def test_who_leaves_frees_what_he_used() -> None:
    model, _ = slow_model(0.05)
    with running(model) as server:
        other = iter(server.client.completions.create(model="toy@0.5", prompt="14", stream=True))
        texts = [next(other).choices[0].text]
        for _ in range(3):
            stream = server.client.completions.create(model="toy@0.5", prompt="13", stream=True)
            next(iter(stream))
            stream.response.close()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.address}{COMPLETIONS}", json={"model": "toy", "prompt": "13"}, timeout=0.1)
        texts += [chunk.choices[0].text for chunk in other]
        assert "".join(texts) == toy_model().generate(["14"], 0.5).outputs[0]
        server.wait_until_idle()
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is ToyState]
        until(lambda: metric(server, 'seqdefer_requests_total{path="/v1/completions",status="499"}') == 1)
        until(lambda: metric(server, 'seqdefer_streams_failed_total{reason="client_left"}') == 3)
        check_well(server)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_written_for_nobody(stream: bool) -> None:
    model, slow = slow_model(0.1)
    n = toy_model().generate(["13"], 0.0).predictor_tokens[0]
    with running(model) as server:
        body = {"model": "toy@0", "prompt": "13", "stream": stream}
        url = f"{server.address}{COMPLETIONS}"
        with suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.25) as answer:
            next(answer.iter_lines())
        until(lambda: not server.scheduler._open)
        steps = len(slow.sizes)
        server.wait_until_idle()
        assert steps < n - 2
        assert len(slow.sizes) <= steps + 1  # the one that was under way


def test_who_does_not_read_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that keeps its connection and reads nothing once held its request open."""
    monkeypatch.setattr(working, "UNREAD", 0.1)
    closed: list[str] = []

    class Work:
        deadline, outcome = 0.0, ""

        def headers(self) -> dict[str, str]:
            return {}

        def close_stream(self) -> None:
            closed.append(self.outcome)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    async def stream() -> AsyncIterator[bytes]:
        yield b""

    async def answer() -> None:
        work: Any = Work()
        work.deadline = asyncio.get_running_loop().time()
        await working.EventStream(stream(), work)({"type": "http"}, never, never)

    asyncio.run(asyncio.wait_for(answer(), 5))
    assert closed == ["unread"]


# -- experts that fail ---------------------------------------------------------------------------------------------


class Faulty(NextTokenExpert[Any]):
    """Works until `fault` is set; then every call does that first."""

    def __init__(self, inner: Any, fault: Callable[[], None] | None = None, after: int = 0) -> None:
        self.inner, self.fault, self.after, self.calls = inner, fault, after, 0
        self.fingerprint = inner.fingerprint

    def start(self, examples: Examples) -> Any:
        return self.inner.start(examples)

    def next(self, state: Any, rows: Tensor) -> tuple[Tensor, Any]:
        self._maybe()
        return self.inner.next(state, rows)  # type: ignore[no-any-return]

    def append(self, state: Any, tokens: Tensor) -> Any:
        return self.inner.append(state, tokens)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self.inner.select(state, rows)

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        self._maybe()
        return self.inner.complete(examples, prefixes, spec)  # type: ignore[no-any-return]

    def _maybe(self) -> None:
        self.calls += 1
        if self.fault is not None and self.calls > self.after:
            self.fault()


def dies() -> None:
    raise ConnectionError("secret address 10.0.0.1")


def completion(server: Running, one: str, budget: float, **options: Any) -> Any:
    return server.client.completions.create(model=f"toy@{budget}", prompt=one, **options)


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])
def test_an_expert_that_dies_leaves_the_rest_to_the_predictor(method: str) -> None:
    expert = Faulty(toy_model(method).served.expert, dies)
    with running(with_parts(toy_model(method), expert=expert)) as server:
        answer = completion(server, "13", 1.0)
        assert answer.choices[0].text == toy_model(method).generate(["13"], 0.0).outputs[0]
        assert answer.deferral["degraded"] is True
        assert answer.deferral["reason"] == "the expert failed (ConnectionError)"
        assert answer.usage.expert_tokens == 0
        *_, last = completion(server, "13", 1.0, stream=True)
        assert last.deferral["degraded"] is True
        never = completion(server, "13", 0.0)
        assert never.deferral["degraded"] is False
        until(lambda: metric(server, 'seqdefer_expert_failures_total{reason="error"}') == 2)
        expert.fault = None
        again = completion(server, "13", 1.0)
        assert again.choices[0].text == toy_model(method).generate(["13"], 1.0).outputs[0]
        assert again.deferral["degraded"] is False


def test_an_expert_that_dies_later_keeps_what_it_wrote() -> None:
    expert = Faulty(toy_model().served.expert, dies, after=3)
    with running(with_parts(toy_model(), expert=expert)) as server:
        chunks = list(completion(server, "13", 1.0, stream=True))
    authors = [chunk.deferral["author"] for chunk in chunks]
    assert authors == ["expert"] * 3 + ["predictor"] * (len(authors) - 3)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text[:3] == toy_model().generate(["13"], 1.0).outputs[0][:3]
    assert [chunk.deferral.get("degraded") for chunk in chunks][-1] is True
    assert expert.calls == 4


@pytest.mark.parametrize("after", [0, 1], ids=["dies", "works"])
def test_a_one_time_expert_is_asked_once_for_all_inputs(after: int) -> None:
    model, inputs = toy_model("OneTimeCost"), inputs_of(16)
    both = model.generate(inputs, 0.3)
    kept = [row.index("expert") if "expert" in row else LENGTH for row in both.sources]
    assert len({*kept} - {LENGTH}) > 1  # at different places
    expert = Faulty(model.served.expert, dies, after=after)
    with running(with_parts(model, expert=expert)) as server:
        answer = server.client.completions.create(model="toy@0.3", prompt=inputs)
    expected = both if after else model.generate(inputs, 0.0)
    assert expert.calls == 1
    assert [choice.text for choice in answer.choices] == expected.outputs
    assert answer.usage.expert_tokens == sum(expected.expert_tokens)
    assert answer.deferral["degraded"] is not bool(after)


def test_who_asked_for_no_expert_is_not_degraded_by_its_death() -> None:
    expert = Faulty(toy_model().served.expert, dies)
    model, _ = slow_model(0.02)
    inputs = inputs_of(10)
    with running(with_parts(model, expert=expert)) as server, ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda place: completion(server, inputs[place], float(place % 2)), range(10)))
    assert [answer.deferral["degraded"] for answer in answers] == [False, True] * 5
    assert [answer.choices[0].text for answer in answers] == toy_model().generate(inputs, 0.0).outputs


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])
def test_an_expert_that_hangs_is_waited_for_once(method: str) -> None:
    hang = threading.Event()
    expert = Faulty(toy_model(method).served.expert, lambda: hang.wait(20) and None)
    limits = Limits(expert_seconds=0.6, grace_seconds=0.5)
    with running(with_parts(toy_model(method), expert=expert), limits=limits) as server:
        answer = completion(server, "13", 1.0)
        assert "within 0.6 seconds" in answer.deferral["reason"]
        assert answer.choices[0].text == toy_model(method).generate(["13"], 0.0).outputs[0]
        begun = time.monotonic()
        answer = completion(server, "14", 1.0)
        assert time.monotonic() - begun < 0.6
        assert "still busy" in answer.deferral["reason"]
        until(lambda: metric(server, 'seqdefer_expert_failures_total{reason="timeout"}') == 2)
        hang.set()
        until(lambda: completion(server, "13", 1.0).deferral["degraded"] is False)
        again = completion(server, "13", 1.0)
        assert again.choices[0].text == toy_model(method).generate(["13"], 1.0).outputs[0]


def test_a_time_limit_changes_no_token() -> None:
    inputs = inputs_of(8)
    with running(toy_model(), limits=Limits(expert_seconds=20, grace_seconds=0.5)) as server:
        answer = server.client.completions.create(model="toy@0.5", prompt=inputs)
    assert [choice.text for choice in answer.choices] == toy_model().generate(inputs, 0.5).outputs


def test_calls_of_an_expert_elsewhere_are_counted_while_they_last() -> None:
    with elsewhere() as (server, expert), ThreadPoolExecutor(1) as pool:
        assert metric(server, "seqdefer_expert_calls") == 0
        answer = pool.submit(ask, server, "13", 1.0)
        until(lambda: metric(server, "seqdefer_expert_calls") == 1)
        expert.door.set()
        answer.result(20)
        until(lambda: metric(server, "seqdefer_expert_calls") == 0)
        assert "# TYPE seqdefer_expert_calls gauge\n" in server.get("/metrics").text


def test_a_time_out_of_the_experts_own_is_an_error_of_its() -> None:
    def fails() -> None:
        raise TimeoutError("of a socket")

    with pytest.raises(TimeoutError, match="socket"):
        Caller(5.0)(fails)
    busy = Caller(0.05)
    with pytest.raises(ExpertTimeout):
        busy(lambda: time.sleep(0.3))


# -- predictors that fail ------------------------------------------------------------------------------------------


class Allergic:
    """A predictor that cannot bear one input."""

    def __init__(self, inner: Any, number: int) -> None:
        self.inner, self.number = inner, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, inputs: Tensor) -> Any:
        if self.number in inputs:
            raise RuntimeError("secret: out of memory at /home/me")
        return self.inner.start(inputs)


def test_one_who_breaks_the_predictor_breaks_it_for_himself() -> None:
    slow, _ = slow_model(0.02)
    model = with_parts(slow, predictor=Allergic(slow.served.predictor, 99))
    inputs = [*inputs_of(7), "99"]
    with running(model) as server, ThreadPoolExecutor(8) as pool:
        ask = lambda one: server.post(COMPLETIONS, {"model": "toy@0.5", "prompt": one})  # noqa: E731
        *well, broken = pool.map(ask, inputs)
        error = check_refused(broken, 500)
        assert "secret" not in error["message"]
        assert [one.json()["choices"][0]["text"] for one in well] == toy_model().generate(inputs[:7], 0.5).outputs
        check_well(server)


# -- the end -------------------------------------------------------------------------------------------------------


def test_a_stream_is_told_that_the_server_ends() -> None:
    model, _ = slow_model(0.2)
    with running(model, limits=Limits(grace_seconds=0.3)) as server:
        chunks = iter(server.client.completions.create(model="toy@0", prompt="13", stream=True))
        next(chunks)
        server.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)


def test_what_is_nearly_finished_gets_finished() -> None:
    model, _ = slow_model(0.05)
    with running(model, limits=Limits(grace_seconds=20)) as server:
        chunks = iter(server.client.completions.create(model="toy@0", prompt="13", stream=True))
        texts = [next(chunks).choices[0].text]
        server.server.should_exit = True
        texts += [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == toy_model().generate(["13"], 0.0).outputs[0]


SERVER = """
import sys, threading, time
sys.path.insert(0, {tests!r})
from toy_pair import LetterCodec, Toy, numbers
from seqdefer.server.limits import Limits
from seqdefer.server.running import address_of, listen, serve

class NumberCodec(LetterCodec):
    def encode(self, inputs):
        return super().encode([int(one) for one in inputs])

toy = Toy.of(length=12)
model = toy.model("TokenwiseModel")
model.calibrate(numbers(8))
object.__setattr__(model.served, "codec", NumberCodec())
asked = type(toy.task.expert).next
pause = threading.Event().wait if {hangs} else lambda: time.sleep(1)
type(toy.task.expert).next = lambda self, state, rows: (pause(), asked(self, state, rows))[1]
listening = listen("127.0.0.1", 0)
say = lambda: print(address_of(listening), flush=True)
serve(model, "toy", listening, limits=Limits(grace_seconds={grace}), ready=say)
print("ended", flush=True)
"""


@contextmanager
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.mark.parametrize("hangs", [False, True])
def test_ctrl_c_with_requests_in_flight(hangs: bool) -> None:
    script = SERVER.format(tests=str(Path(__file__).parent), hangs=hangs, grace=0.5)
    with process([sys.executable, "-c", script]) as server, ThreadPoolExecutor(4) as pool:
        assert server.stdout is not None
        url = server.stdout.readline().strip() + COMPLETIONS
        body = {"model": "toy@1", "prompt": "13"}
        until(lambda: is_listening(url))
        whole = [pool.submit(httpx.post, url, json=body, timeout=20) for _ in range(2)]
        time.sleep(0.5)
        begun = time.monotonic()
        server.send_signal(signal.SIGINT)
        for answer in whole:
            assert check_refused(answer.result(), 503)["code"] == "shutting_down"
        printed, errors = server.communicate(timeout=15)
        assert time.monotonic() - begun < 8
    assert server.returncode == 0
    assert "Traceback" not in errors
    assert hangs or printed == "ended\n"


def test_a_second_ctrl_c_ends_the_grace_and_everybody_is_told() -> None:
    """uvicorn's own way cut all off, with tracebacks; and who never sends his whole request was cut off so, too."""
    script = SERVER.format(tests=str(Path(__file__).parent), hangs=False, grace=100)
    body = {"model": "toy@1", "prompt": "13"}
    with process([sys.executable, "-c", script]) as server, ThreadPoolExecutor(1) as pool:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        url = address + COMPLETIONS
        until(lambda: is_listening(url))
        slow = socket.create_connection((address.split("/")[-1].split(":")[0], int(address.rsplit(":", 1)[1])))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        with slow, httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith('data: {"id"')
            whole = pool.submit(httpx.post, url, json=body, timeout=60)
            until(lambda: "seqdefer_cohorts_running 2\n" in httpx.get(f"{address}/metrics").text)
            server.send_signal(signal.SIGINT)
            until(lambda: not is_listening(url))
            server.send_signal(signal.SIGINT)
            events = [line for line in lines if line]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert events[-1] == "data: [DONE]"
            assert check_refused(whole.result(), 503)["code"] == "shutting_down"
            printed, errors = server.communicate(timeout=30)
    assert (server.returncode, printed, errors) == (0, "ended\n", "")


def is_listening(url: str) -> bool:
    try:
        return bool(httpx.get(url.replace(COMPLETIONS, "/health"), timeout=1).status_code == 200)
    except httpx.HTTPError:
        return False


# -- the command ---------------------------------------------------------------------------------------------------


def save_text_model(folder: Path) -> Path:
    from tiny_models import tiny, tokenizer

    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.model.folders import pairing_of
    from seqdefer.tasks.text.task import TextOptions

    for name, (n_layers, seed) in {"predictor": (1, 1), "expert": (2, 6)}.items():
        tiny("t5", n_layers, seed).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    made = text_model()
    options = TextOptions(
        str(folder / "predictor"), str(folder / "expert"), length=12, input_tokens=16, shown="states"
    )  # as text_model reads it
    pairing = pairing_of("text", options, made.served)
    return DeferringModel(made.served, made.rejector, made.calibration, pairing).save_pretrained(folder / "news")


def test_the_command_serves_a_folder(tmp_path: Path, one_thread: None) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'text'")
    folder = save_text_model(tmp_path)
    command = [sys.executable, "-m", "seqdefer", "serve", str(folder), "--port", "0", "--device", "cpu", "--quiet"]
    with process(command) as server:
        assert server.stderr is not None
        told = server.stderr.readline()
        assert told.startswith("serving news at http://127.0.0.1:"), told + server.stderr.read()
        address = told.split()[3].removesuffix(";")
        until(lambda: is_listening(address.removesuffix("/v1") + COMPLETIONS))
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        answer = client.completions.create(model="news@0.5", prompt="w5 w6 w7")
        assert answer.choices[0].text == text_model().generate(["w5 w6 w7"], 0.5).outputs[0]
        foreign = httpx.get(f"{address}/models", headers={"host": "evil.example"})
        assert check_refused(foreign, 403, "localhost or 127.0.0.1")["code"] == "wrong_host"
        client.close()
        server.send_signal(signal.SIGINT)
        printed, errors = server.communicate(timeout=10)
    assert (server.returncode, printed, errors) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key", ""], "API key is empty"),
        (["--queue", "0"], "queue is 0"),
        (["--request-seconds", "nan"], "request seconds is nan"),
        (["--request-seconds", "inf"], "request seconds is inf; give more than 0 and at most "),
        (["--expert-seconds", "1e300"], "expert seconds is 1e+300"),
        (["--inputs", "64"], "must fit into a batch"),
        (["--port", "99999"], "from 0 to 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--host", "ä..b"], "cannot listen"),
        (["--port", "x"], "invalid int value"),
        (["--port", "0"], "no deferring model"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: Capture, arguments: list[str], words: str) -> None:
    assert cli.main(["serve", str(tmp_path), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_server_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `>&-`, of whoever starts it in the background: what set up its log wanted one."""
    monkeypatch.setattr(sys, "stdout", None)
    with running(toy_model()) as server:
        assert server.get("/health").status_code == 200


def test_a_port_that_is_taken(served: Running, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["serve", str(tmp_path), "--port", served.address.rsplit(":", 1)[1]]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "pip install 'seqdefer[server]'" in capsys.readouterr().err


def test_the_key_may_be_in_the_environment(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SEQDEFER_API_KEY", "")
    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "API key is empty" in capsys.readouterr().err
