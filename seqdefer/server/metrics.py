"""The server's metrics, with the official Prometheus client, which comes with the extra 'server'.

    metrics.count("seqdefer_requests_total", {"path": "/v1/completions", "status": "200"})
    print(metrics.render())

`COUNTERS`, `HISTOGRAMS` and `GAUGES` list all of them. Metrics of the process and of Python come with the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SHORT_SECONDS = (0.0005, 0.001, 0.0025, *SECONDS[:11])  # of single tokens
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "seqdefer_requests_total": ("Responses, by path and status; 499 if the client left first.", ("path", "status")),
    "seqdefer_requests_rejected_total": ("Requests that were not queued, by reason.", ("reason",)),
    "seqdefer_requests_degraded_total": ("Answers in which the predictor took the expert's place.", ()),
    "seqdefer_streams_failed_total": ("Incomplete streams: an error code, client_left or unread.", ("reason",)),
    "seqdefer_tokens_total": ("Tokens sent, by author.", ("author",)),
    "seqdefer_key_tokens_total": ("Tokens written for an API key, by author.", ("key", "author")),
    "seqdefer_switches_total": ("Changes of author within a sequence.", ()),
    "seqdefer_expert_failures_total": ("Calls of the expert that failed: error, timeout, unavailable.", ("reason",)),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "seqdefer_request_seconds": ("Wall time of requests, by path.", ("path",), SECONDS),
    "seqdefer_queue_seconds": ("Time in the queue, by how the request ended.", ("status",), SECONDS),
    "seqdefer_time_to_first_token_seconds": ("Time to the first token of a request.", ("status",), SECONDS),
    "seqdefer_time_between_tokens_seconds": ("Time between two tokens of a sequence.", ("status",), SHORT_SECONDS),
    "seqdefer_expert_seconds": ("Time of calls of the expert: ok, error or timeout.", ("status",), SECONDS),
    "seqdefer_budget": ("Budgets that requests asked for.", (), SHARES),
    "seqdefer_share": ("Share of tokens by the expert in a response.", (), SHARES),
    "seqdefer_batch_size": ("Sequences in a turn.", (), ROWS),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "seqdefer_sequences_running": ("Sequences in memory, those that wait included.", ()),
    "seqdefer_sequences_waiting": ("Sequences that wait for a remote expert.", ()),
    "seqdefer_queue_length": ("Requests in the queue.", ()),
    "seqdefer_expert_calls": ("Pending calls of a remote expert.", ()),
    "seqdefer_drift_evidence": ("Evidence of drift, by test: 50 or more is an alarm.", ("test",)),
    "seqdefer_drift_alarm": ("1 after an alarm of a test of drift, until the server ends.", ("test",)),
    "seqdefer_breaker_state": ("1 for the state of the breaker before a remote expert.", ("state",)),
    "seqdefer_info": (
        "1, with the version, the served model, its task and its method.",
        ("version", "model", "task", "method"),
    ),
}


class Metrics:
    """The metrics of one server. Any thread may use it."""

    def __init__(self) -> None:
        import prometheus_client as prometheus

        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        prometheus.PlatformCollector(registry=self.registry)
        prometheus.GCCollector(registry=self.registry)
        self._metrics: dict[str, Any] = {}
        for name, (words, labels) in COUNTERS.items():
            self._metrics[name] = prometheus.Counter(name, words, labels, registry=self.registry)
        for name, (words, labels, buckets) in HISTOGRAMS.items():
            self._metrics[name] = prometheus.Histogram(name, words, labels, buckets=buckets, registry=self.registry)
        for name, (words, labels) in GAUGES.items():
            self._metrics[name] = prometheus.Gauge(name, words, labels, registry=self.registry)

    def count(self, name: str, labels: Mapping[str, str] | None = None, by: float = 1) -> None:
        self._with(name, labels).inc(by)

    def observe(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        self._with(name, labels).observe(value)

    def gauge(self, name: str, value: Callable[[], float], labels: Mapping[str, str] | None = None) -> None:
        """Show what `value` returns when the metrics are rendered."""
        self._with(name, labels).set_function(value)

    def inform(self, **facts: str) -> None:
        """Say what is served."""
        self._with("seqdefer_info", facts).set(1)

    def render(self) -> str:
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def _with(self, name: str, labels: Mapping[str, str] | None) -> Any:
        return self._metrics[name].labels(**labels) if labels else self._metrics[name]
