"""A small expert in a process of its own: python -m benchmarks.service.expert PORT.

It speaks vLLM's protocol on 127.0.0.1 with token ids. Its next token is a checksum of all tokens before, so it starts
in a moment and answers the same after every restart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

WORDS = ("<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(3, 400)))
END = 1
MODEL = "checksum"


def named_tokens(ids: Sequence[int]) -> list[int]:
    """Return the token that the expert names after each prefix of `ids`, from one id on."""
    named, value = [], 0
    for token in ids:
        value = crc32(token.to_bytes(4, "little"), value)
        named.append(END if value % 23 == 0 else 3 + value % (len(WORDS) - 3))
    return named


def complete(body: dict[str, Any]) -> dict[str, Any]:
    """Answer a request for a completion of token ids."""
    ids, new = list(body["prompt"]), list[int]()
    while len(new) < body["max_tokens"] and not (new and new[-1] == END):
        new.append(named_tokens([*ids, *new])[-1])
    choice = {
        "index": 0,
        "text": " ".join(WORDS[token] for token in new if token != END),
        "finish_reason": "stop" if new and new[-1] == END else "length",
        "token_ids": new,
        "prompt_token_ids": ids,
        "prompt_logprobs": _prompt_logprobs(ids) if body.get("prompt_logprobs") else None,
    }
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def _prompt_logprobs(ids: Sequence[int]) -> list[Any]:
    """Return for each id but the first what it is, and the token that the expert names in its place."""
    entries: list[Any] = [None]
    for token, best in zip(ids[1:], named_tokens(ids), strict=False):
        entries.append({str(token): _about(token, 2)} | {str(best): _about(best, 1)})
    return entries


def _about(token: int, rank: int) -> dict[str, Any]:
    return {"logprob": -0.5 * rank, "rank": rank, "decoded_token": WORDS[token]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits for the receipt of the head

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = json.dumps(complete(body)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class ExpertServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    ExpertServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
