"""Clients of a server in a separate process: python -m benchmarks.clients ADDRESS MODEL CLIENTS [stream].

Inputs come from stdin, one JSON string per line. Each client sends the next one as soon as it has a response. Responses
and times go to stdout as JSON. In the server's own process the clients would compete with it for the interpreter.
"""

from __future__ import annotations

import http.client
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

OVERHEAD_HEADER = "x-seqdefer-overhead-ms"
EVENT = b"data: {"


class RequestFailed(Exception):
    """The server answered with an error."""


def complete(connection: http.client.HTTPConnection, model: str, text: str, stream: bool) -> dict[str, Any]:
    """Send one request; return its text and the bodies that it came in, its seconds, the server's overhead and, of a
    stream, the seconds between its pieces, the first from the request on."""
    body = json.dumps({"model": model, "prompt": text, "stream": stream})
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    lines, times = list[bytes](), [begun]
    for line in response:
        lines.append(line)
        if line.startswith(EVENT):
            times.append(time.perf_counter())
    response.read()  # nothing, but now the connection can be used again
    seconds = time.perf_counter() - begun
    content = b"".join(lines)
    if response.status != 200:
        raise RequestFailed(f"status {response.status}: {content[:200]!r}")
    pieces = [line.removeprefix(b"data: ") for line in lines if line.startswith(EVENT)] if stream else [content]
    bodies = [json.loads(piece) for piece in pieces]
    if not bodies or any("error" in body for body in bodies):
        raise RequestFailed(f"a stream failed: {content[-200:]!r}")
    whole = "".join(body["choices"][0]["text"] for body in bodies)
    overhead = float(response.headers[OVERHEAD_HEADER]) / 1000
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {"seconds": seconds, "overhead": overhead, "text": whole, "gaps": gaps, "bodies": bodies}


def run_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run each of `works` in a thread, until all have ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(address: str, model: str, n_clients: int, inputs: list[str], stream: bool) -> dict[str, Any]:
    """Return all answers in the order of the inputs, and the seconds from the first request to the last response."""
    waiting, answers = queue.SimpleQueue[int](), [dict[str, Any]()] * len(inputs)
    for place in range(len(inputs)):
        waiting.put(place)

    def work() -> None:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=600)
        while True:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return connection.close()
            answers[place] = complete(connection, model, inputs[place], stream)
            del answers[place]["bodies"]

    begun = time.perf_counter()
    run_threads([work] * n_clients)
    if not all(answers):
        raise SystemExit("a client failed; see above")
    return {"seconds": time.perf_counter() - begun, "answers": answers}


if __name__ == "__main__":
    address, model, n_clients, *rest = sys.argv[1:]
    inputs = [json.loads(line) for line in sys.stdin]
    print(json.dumps(run(address, model, int(n_clients), inputs, rest == ["stream"])))
