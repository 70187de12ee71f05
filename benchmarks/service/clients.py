"""Clients in a process of their own that check every answer: python -m benchmarks.service.clients < job.json.

In the server's own process they would compete with it for the interpreter. Each client sends the next request as soon
as it has an answer. An answer is right if it is the expected text; or, if it says that it is degraded, one of the texts
that the pair writes when the expert fails somewhere.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients import RequestFailed, complete, run_threads

TIMEOUT = 150.0  # longer than a request may take
EXAMPLES = 5  # wrong answers and errors that are kept


@dataclass(frozen=True)
class Case:
    """A request and its answers: `text`, and those of an expert that fails."""

    prompt: str
    budget: float
    text: str
    degraded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Clients that send the same kind of requests."""

    name: str
    n_clients: int
    cases: Sequence[Case]


@dataclass
class Outcome:
    """What a group of clients saw. `times` holds (start, seconds) of each answer."""

    times: list[tuple[float, float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    degraded: int = 0
    examples: list[Any] = field(default_factory=list)

    def note(self, case: Case, answer: tuple[str, bool], start: float, seconds: float) -> None:
        text, is_degraded = answer
        self.times.append((start, seconds))
        self.degraded += is_degraded
        if text not in (case.degraded if is_degraded else (case.text,)):
            self.wrong += 1
            self.show({"case": asdict(case), "got": text, "degraded": is_degraded})

    def show(self, example: Any) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)


def ask(connection: http.client.HTTPConnection, model: str, case: Case, stream: bool) -> tuple[str, bool]:
    """Send a request; return its text, and whether it is degraded."""
    answer = complete(connection, f"{model}@{case.budget}", case.prompt, stream)
    return answer["text"], any(body["deferral"].get("degraded", False) for body in answer["bodies"])


def run(address: str, model: str, seconds: float, groups: Sequence[Group]) -> dict[str, Outcome]:
    """Let all clients of all groups send requests for some seconds."""
    outcomes, begun = {group.name: Outcome() for group in groups}, time.perf_counter()

    def work(group: Group, seed: int) -> None:
        outcome, chance = outcomes[group.name], random.Random(seed)
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=TIMEOUT)
        while (start := time.perf_counter()) < begun + seconds:
            case = chance.choice(group.cases)
            try:
                answer = ask(connection, model, case, stream=chance.random() < 0.5)
                outcome.note(case, answer, start - begun, time.perf_counter() - start)
            except (OSError, http.client.HTTPException, RequestFailed) as error:
                outcome.errors[type(error).__name__] += 1
                outcome.show(repr(error))
                connection.close()  # the next request opens another
                time.sleep(0.05)
        connection.close()

    everyone = [group for group in groups for _ in range(group.n_clients)]
    run_threads([partial(work, group, seed) for seed, group in enumerate(everyone)])
    return outcomes


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    groups = [
        Group(
            one["name"],
            one["n_clients"],
            [Case(**{**case, "degraded": tuple(case["degraded"])}) for case in one["cases"]],
        )
        for one in job.pop("groups")
    ]
    begun = time.perf_counter()
    outcomes = run(**job, groups=groups)
    seconds = time.perf_counter() - begun
    json.dump({"seconds": seconds, "outcomes": {name: asdict(one) for name, one in outcomes.items()}}, sys.stdout)


if __name__ == "__main__":
    main()
