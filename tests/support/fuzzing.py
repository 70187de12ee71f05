"""Random requests, most of them close to valid ones, as bytes for a socket.

A request begins as a valid one of some endpoint. Then, with some chance each, its fields, its bytes, its headers, its
method or its end are changed. `Fuzz(seed)` always gives the same one.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d)")  # not that of 100 Continue
HANG_SECONDS = 30.0
WRITING = ("/v1/completions", "/v1/chat/completions", "/v1/deferral/complete", "/v1/deferral/score")
OTHERS = (
    "/v1/deferral", "/v1/models", "/v1/models/toy@0.2", "/v1/usage", "/live", "/ready", "/health", "/metrics",
    "/openapi.json", "/docs", "/", "/page/page.js", "/x%00%ff", "//", "/v1/models/%0a", "*", "http://h/health",
    "/v1/audio/transcriptions",
)  # fmt: skip
METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "X" * 40)
VALUES = (
    None, True, False, 0, -1, 2, 0.5, 1e308, "", "13", "7932", "\ud800", [], ["13"], ["13"] * 17, [1, 2], [[3], [4]],
    {}, {"budget": 0.5}, {"budget": "x"}, {"include_usage": True}, "toy", "toy@0.5", "toy@", [[0.1, 0.2]],
    [{"role": "user", "content": "13"}], [{"role": "tool", "content": []}], "x" * 3000, 2**70, "é\u2028😀",
)  # fmt: skip
FIELDS = (
    "model", "prompt", "input", "inputs", "messages", "stream", "stream_options", "max_tokens", "deferral", "stop",
    "temperature", "top_p", "n", "best_of", "seed", "logprobs", "top_logprobs", "echo", "user", "metadata", "tools",
    "max_completion_tokens", "response_format", "budgets",
)  # fmt: skip
HEADERS = (
    "x-request-id: a b", "x-request-id: ok-1", "x-request-id: " + "i" * 300, "content-encoding: gzip",
    "expect: 100-continue", "connection: close", "connection: upgrade\r\nupgrade: websocket",
    "transfer-encoding: chunked", "content-length: 5", "content-length: -1", "transfer-encoding: gzip, chunked",
    "authorization: Bearer wrong", "authorization: Basic \xff", "cookie: " + "c" * 2000, "sec-fetch-site: cross-site",
    "host: evil.example", "accept: */*", "range: bytes=0-1", "content-type: text/plain",
)  # fmt: skip
BOUNDARY = "fuzzed-boundary"


@dataclass(frozen=True)
class Sent:
    """The bytes of a request. `reads`: bytes of the response to wait for before leaving; None: its status."""

    content: bytes
    reads: int | None = None

    def send(self, port: int) -> str:
        """Return the status of the first response; "none" if the connection ends without one, "left" if the client
        left first. Raises TimeoutError if nothing comes."""
        received = b""
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as client:
            try:
                client.sendall(self.content)
                while not (STATUS.search(received) if self.reads is None else len(received) >= self.reads):
                    if not (part := client.recv(65536 if self.reads is None else 64)):
                        break
                    received += part
            except ConnectionError:
                pass
        found = STATUS.search(received)
        return found[1].decode() if found else "none" if self.reads is None else "left"


class Fuzz:
    """Makes one request. `keys`: those that it may send."""

    def __init__(self, seed: int, keys: Sequence[str], clips: Sequence[bytes] = ()) -> None:
        self.chance, self.keys, self.clips = random.Random(seed), keys, clips

    def request(self) -> Sent:
        chance = self.chance
        if chance.random() < 0.03:
            return Sent(chance.randbytes(chance.randint(1, 400)))
        if self.clips:
            path, kind, body = "/v1/audio/transcriptions", f"multipart/form-data; boundary={BOUNDARY}", self._form()
        else:
            path = chance.choice(WRITING) if chance.random() < 0.85 else chance.choice(OTHERS)
            kind, body = "application/json", self._json(path)
        content = self._http(path, kind, self._damaged(body))
        if chance.random() < 0.03:
            return Sent(content[: chance.randrange(len(content))])
        # Some clients leave at once, or in the middle of a response.
        return Sent(content, chance.choice((0, 1, 300, 900)) if chance.random() < 0.1 else None)

    # -- bodies ----------------------------------------------------------------------------------------------------

    def _json(self, path: str) -> bytes:
        fields = self._valid(path)
        for _ in range(self.chance.choice((0, 0, 0, 0, 0, 1, 2))):
            if self.chance.random() < 0.2 and fields:
                del fields[self.chance.choice(list(fields))]
            else:
                fields[self.chance.choice(FIELDS)] = self.chance.choice(VALUES)
        return json.dumps(fields).encode()

    def _valid(self, path: str) -> dict[str, Any]:
        chance = self.chance
        one, budget = str(chance.randrange(10**6)), round(chance.random(), chance.randint(0, 3))
        fields: dict[str, Any] = {"model": f"toy@{budget}"}
        if chance.random() < 0.2:
            fields = {"model": "toy", "deferral": {"budget": budget}}
        if path.startswith("/v1/deferral"):
            fields |= {"input": one} if chance.random() < 0.7 else {"inputs": [one, "13"]}
        elif "chat" in path:
            fields["messages"] = [{"role": "user", "content": one}]
        else:
            fields["prompt"] = one if chance.random() < 0.7 else [one, "13"]
        if path.endswith("completions"):
            options = {"stop": ["a", "bc"], "max_tokens": chance.randint(1, 12), "seed": 7, "top_p": 0.5, "n": 1}
            fields |= {name: options[name] for name in chance.sample(list(options), chance.choice((0, 0, 1, 2)))}
        if path != "/v1/deferral/score" and chance.random() < 0.35:
            fields["stream"] = True
        return fields

    def _form(self) -> bytes:
        chance = self.chance
        fields = {"model": f"toy@{round(chance.random(), 2)}"}
        fields |= {"stream": "true"} if chance.random() < 0.3 else {}
        if chance.random() < 0.2:
            fields[chance.choice(("language", "temperature", "response_format", "prompt", "model", "x"))] = (
                str(chance.choice(VALUES)).encode(errors="replace")[:100].decode()
            )
        parts = [
            f'content-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()
        ]
        clip = chance.choice(self.clips)
        clip = self._damaged(clip) if chance.random() < 0.2 else clip
        parts.append(b'content-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + clip)
        mark = b"--" + BOUNDARY.encode()
        return b"".join(mark + b"\r\n" + part + b"\r\n" for part in parts) + mark + b"--\r\n"

    def _damaged(self, body: bytes) -> bytes:
        chance, kind = self.chance, self.chance.random()
        place = chance.randrange(len(body) + 1)
        if kind < 0.05:
            return body[:place] + chance.randbytes(chance.randint(0, 9)) + body[place:]
        if kind < 0.08:
            return body[:place] + body[place + chance.randint(1, 9) :]
        return b"[" * 5000 if kind < 0.085 else chance.randbytes(50) if kind < 0.09 else body

    # -- HTTP ------------------------------------------------------------------------------------------------------

    def _http(self, path: str, kind: str, body: bytes) -> bytes:
        chance = self.chance
        headers = ["host: localhost", f"content-type: {kind}"]
        headers += [f"authorization: Bearer {chance.choice(self.keys)}"] if chance.random() < 0.95 else []
        if chance.random() < 0.1:
            headers.append("transfer-encoding: chunked")
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]) if part) + b"0\r\n\r\n"
        elif chance.random() < 0.98:
            headers.append(f"content-length: {len(body)}")
        headers += chance.sample(HEADERS, chance.choice((0, 0, 0, 0, 0, 1, 2)))
        is_valid = chance.random() < 0.95
        method = ("POST" if path in (*WRITING, "/v1/audio/transcriptions") else "GET") if is_valid else None
        version = "HTTP/1.1" if chance.random() < 0.98 else chance.choice(("HTTP/1.0", "HTTP/2.0", "HTTP/9"))
        head = "\r\n".join([f"{method or chance.choice(METHODS)} {path} {version}", *headers, "", ""])
        return head.encode("latin-1") + body
