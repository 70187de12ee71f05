"""OpenTelemetry spans, with the extra 'tracing'. Off unless SEQDEFER_TRACING is 1; nothing is imported then.

    seqdefer.request      from its submission to its end: its status, inputs and time in the queue
      seqdefer.predictor  the predictor's steps in a turn of its batch
      seqdefer.expert     the expert's pass or call in that turn, with an event `rollback` where tokens were taken back

Where they go is said by the standard variables, such as OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_SERVICE_NAME. Spans hold
numbers alone, no text of requests or responses. A request's span is a child of the current one, if something else
traces the HTTP server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from seqdefer.engine.pace import Turn
from seqdefer.errors import OptionError, missing_extra

if TYPE_CHECKING:
    from opentelemetry.trace import Span

VARIABLE = "SEQDEFER_TRACING"


class Tracing:
    """Makes spans with an OpenTelemetry provider, the global one by default."""

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._tracer = trace.get_tracer("seqdefer", tracer_provider=provider)

    def begin(self, inputs: int) -> Span:
        """Start the span of a request."""
        return self._tracer.start_span("seqdefer.request", attributes={"seqdefer.inputs": inputs})

    def end(self, span: Span, status: str, queue_seconds: float | None) -> None:
        span.set_attribute("seqdefer.status", status)
        if queue_seconds is not None:
            span.set_attribute("seqdefer.queue_seconds", queue_seconds)
        if status == "failed":
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()

    def note(self, spans: Sequence[Span], turn: Turn) -> None:
        """Add the turn that has just ended to the requests that took part in it."""
        end = time.time_ns()
        asked = end - int(1e9 * (turn.seconds - turn.step_seconds))
        begin, answered = asked - int(1e9 * turn.step_seconds), asked + int(1e9 * turn.pass_seconds)
        for span in spans:
            if turn.steps:
                facts = {"seqdefer.rows": turn.rows, "seqdefer.steps": turn.steps}
                self._child(span, "seqdefer.predictor", begin, facts).end(asked)
            if turn.passes:
                facts = {"seqdefer.rows": turn.chunks, "seqdefer.tokens_read": turn.tokens_read}
                child = self._child(span, "seqdefer.expert", asked, facts)
                if turn.proposed > turn.written:
                    child.add_event("rollback", {"seqdefer.tokens": turn.proposed - turn.written}, answered)
                child.end(answered)

    def _child(self, span: Span, name: str, begin: int, facts: dict[str, int]) -> Span:
        context = self._trace.set_span_in_context(span)
        return self._tracer.start_span(name, context, start_time=begin, attributes=facts)


def tracing_from_environment() -> Tracing | None:
    """Return what traces requests if SEQDEFER_TRACING is 1, and sends spans where the standard variables say."""
    wanted = os.environ.get(VARIABLE, "0")
    if wanted not in ("", "0", "1"):
        raise OptionError(f"{VARIABLE} is {wanted!r:.40}; set 1 to trace requests, or 0")
    if wanted != "1":
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise missing_extra(error.name or "opentelemetry", "tracing", f"{VARIABLE}=1") from error
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # else the program has one of its own
        name = os.environ.get("OTEL_SERVICE_NAME", "seqdefer")
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    return Tracing()
