"""Counters in Prometheus' text format, without a dependency.

metrics.count("seqdefer_requests_total", {"path": "/v1/completions", "status": "200"})
print(metrics.render())
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
COUNTERS = {
    "seqdefer_requests_total": "Requests answered, by path and status; 499 where the client left first.",
    "seqdefer_streams_failed_total": "Streams that ended early, by reason: an error's code, client_left, or unread.",
    "seqdefer_tokens_total": "Tokens sent, by author.",
    "seqdefer_switches_total": "How often the author changed within a sequence.",
    "seqdefer_expert_failures_total": "Cohorts that the predictor had to finish, by reason.",
}
SECONDS = "seqdefer_request_seconds"
Labels = tuple[tuple[str, str], ...]


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[sum(value > bound for bound in BOUNDS)] += 1
        self.total += value


class Metrics:
    """Safe to use from several threads. `gauges` are asked when somebody looks."""

    def __init__(self) -> None:
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Labels, float]] = {name: {} for name in COUNTERS}
        self._seconds: dict[Labels, _Histogram] = {}

    def count(self, name: str, labels: Mapping[str, str] | None = None, by: float = 1) -> None:
        key = tuple(sorted((labels or {}).items()))
        with self._lock:
            self._counters[name][key] = self._counters[name].get(key, 0) + by

    def observe_seconds(self, value: float, labels: Mapping[str, str]) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._seconds.setdefault(key, _Histogram()).observe(value)

    def value(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        with self._lock:
            return self._counters[name].get(tuple(sorted((labels or {}).items())), 0)

    def render(self) -> str:
        with self._lock:
            lines = [*self._counter_lines(), *self._histogram_lines()]
        for name, (words, ask) in self.gauges.items():
            lines += [*_head(name, words, "gauge"), _line(name, (), ask())]
        return "\n".join(lines) + "\n"

    def _counter_lines(self) -> Iterator[str]:
        for name, values in self._counters.items():
            yield from _head(name, COUNTERS[name], "counter")
            yield from (_line(name, labels, value) for labels, value in sorted(values.items()))

    def _histogram_lines(self) -> Iterator[str]:
        yield from _head(SECONDS, "Wall time of requests, by path.", "histogram")
        for labels, seen in sorted(self._seconds.items(), key=lambda item: item[0]):
            below = 0
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), seen.counts, strict=True):
                below += count
                yield _line(f"{SECONDS}_bucket", (*labels, ("le", bound)), below)
            yield _line(f"{SECONDS}_sum", labels, seen.total)
            yield _line(f"{SECONDS}_count", labels, below)


def _head(name: str, words: str, kind: str) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {value:.10g}" if inside else f"{name} {value:.10g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
