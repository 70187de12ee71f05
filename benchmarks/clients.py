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
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

OVERHEAD_HEADER = "x-seqdefer-overhead-ms"
EVENT = b"data: {"


def complete(connection: http.client.HTTPConnection, model: str, text: str, stream: bool) -> dict[str, Any]:
    """Send one request; return its text, its seconds, the server's overhead and, of a stream, the seconds between its
    pieces, the first from the request on."""
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
    if response.status != 200:
        raise SystemExit(f"the server returned {response.status}: {b''.join(lines)[:200]!r}")
    overhead = float(response.headers[OVERHEAD_HEADER]) / 1000
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {"seconds": seconds, "overhead": overhead, "text": _text(lines, stream), "gaps": gaps}


def _text(lines: list[bytes], stream: bool) -> str:
    bodies = [line.removeprefix(b"data: ") for line in lines if line.startswith(EVENT)] if stream else [b"".join(lines)]
    return "".join(json.loads(body)["choices"][0]["text"] for body in bodies)


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

    threads = [threading.Thread(target=work) for _ in range(n_clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(answers):
        raise SystemExit("a client failed; see above")
    return {"seconds": time.perf_counter() - begun, "answers": answers}


if __name__ == "__main__":
    address, model, n_clients, *rest = sys.argv[1:]
    inputs = [json.loads(line) for line in sys.stdin]
    print(json.dumps(run(address, model, int(n_clients), inputs, rest == ["stream"])))
