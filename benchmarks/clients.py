"""Clients of a server, in a process of their own: python -m benchmarks.clients ADDRESS MODEL CLIENTS [stream].

Inputs come on stdin, one JSON string a line; each client asks for the next one as soon as it has its answer. What they
got and how long it took goes to stdout as JSON. Within the server's process they would take the interpreter from it.
"""

from __future__ import annotations

import http.client
import json
import queue
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

OVERHEAD = "x-seqdefer-overhead-ms"


def ask(connection: http.client.HTTPConnection, model: str, text: str, stream: bool) -> dict[str, Any]:
    body = json.dumps({"model": model, "prompt": text, "stream": stream})
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    seconds = time.perf_counter() - begun
    if answer.status != 200:
        raise SystemExit(f"the server answered {answer.status}: {content[:200]!r}")
    return {"seconds": seconds, "overhead": float(answer.headers[OVERHEAD]) / 1000, "text": _text(content, stream)}


def _text(content: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(content)["choices"][0]["text"])
    events = [line[6:] for line in content.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def run(address: str, model: str, n_clients: int, inputs: list[str], stream: bool) -> dict[str, Any]:
    """All answers in the order of the inputs, and the seconds from the first question to the last answer."""
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
            answers[place] = ask(connection, model, inputs[place], stream)

    threads = [threading.Thread(target=work) for _ in range(n_clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": time.perf_counter() - begun, "answers": answers}


if __name__ == "__main__":
    address, model, n_clients, *rest = sys.argv[1:]
    inputs = [json.loads(line) for line in sys.stdin]
    print(json.dumps(run(address, model, int(n_clients), inputs, rest == ["stream"])))
