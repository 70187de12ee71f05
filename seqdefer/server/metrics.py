"""Counters, gauges and a histogram in the Prometheus text format, without a dependency.

metrics.count("seqdefer_requests_total", {"path": "/v1/completions", "status": "200"})
print(metrics.render())
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
COUNTERS = {
    "seqdefer_requests_total": "Responses, by path and status; 499 if the client disconnected first.",
    "seqdefer_streams_failed_total": "Incomplete streams, by reason: an error code, client_left or unread.",
    "seqdefer_tokens_total": "Tokens sent, by author.",
    "seqdefer_switches_total": "Changes of author within a sequence.",
    "seqdefer_expert_failures_total": "Failures of the expert, by reason; the predictor took its place.",
}
REQUEST_SECONDS = "seqdefer_request_seconds"
Labels = tuple[tuple[str, str], ...]


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[sum(value > bound for bound in SECONDS_BOUNDS)] += 1
        self.total += value


class Metrics:
    """The server's metrics. Threads may share it; `gauges` are evaluated when the metrics are rendered."""

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

    def render(self) -> str:
        with self._lock:
            lines = [*self._counter_lines(), *self._histogram_lines()]
        for name, (description, value) in self.gauges.items():
            lines += [*_head(name, description, "gauge"), _line(name, (), value())]
        return "\n".join(lines) + "\n"

    def _counter_lines(self) -> Iterator[str]:
        for name, values in self._counters.items():
            yield from _head(name, COUNTERS[name], "counter")
            yield from (_line(name, labels, value) for labels, value in sorted(values.items()))

    def _histogram_lines(self) -> Iterator[str]:
        yield from _head(REQUEST_SECONDS, "Wall time of requests, by path.", "histogram")
        for labels, histogram in sorted(self._seconds.items(), key=lambda item: item[0]):
            cumulative = 0
            for bound, count in zip((*map(str, SECONDS_BOUNDS), "+Inf"), histogram.counts, strict=True):
                cumulative += count
                yield _line(f"{REQUEST_SECONDS}_bucket", (*labels, ("le", bound)), cumulative)
            yield _line(f"{REQUEST_SECONDS}_sum", labels, histogram.total)
            yield _line(f"{REQUEST_SECONDS}_count", labels, cumulative)


def _head(name: str, description: str, kind: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {value:.10g}" if inside else f"{name} {value:.10g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
