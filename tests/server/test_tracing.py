"""Spans of requests and of the passes that they took part in; nothing without the variable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from servers import COMPLETIONS, FaultyExpert, fail, running, toy_model, with_parts

pytest.importorskip("opentelemetry.sdk", reason="needs the extra 'tracing'")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from seqdefer.engine.pace import Turn
from seqdefer.errors import OptionError
from seqdefer.server.tracing import VARIABLE, Tracing, tracing_from_environment
from tests.test_structure import loaded_after


def tracing_to(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def spans_of(model: Any, budget: float) -> list[Any]:
    exporter = InMemorySpanExporter()
    with running(model) as server:
        server.scheduler.tracing = tracing_to(exporter)
        response = server.post(COMPLETIONS, {"model": f"toy@{budget}", "prompt": "13"})
        assert response.status_code == 200
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("method", ["TokenwiseModel", "OneTimeCost"])
def test_passes_are_children_of_their_request(method: str) -> None:
    *passes, request = sorted(spans_of(toy_model(method), 1.0), key=lambda span: span.name)
    assert request.name == "seqdefer.request"
    assert request.attributes["seqdefer.status"] == "ok"
    assert request.attributes["seqdefer.queue_seconds"] >= 0
    assert {span.name for span in passes} == {"seqdefer.predictor", "seqdefer.expert"}
    slack = 10**8  # the two clocks differ a little
    for span in passes:
        assert span.parent.span_id == request.context.span_id
        assert request.start_time - slack <= span.start_time <= span.end_time <= request.end_time + slack


@pytest.mark.parametrize("written", [3, 5])
def test_tokens_taken_back_are_events(written: int) -> None:
    exporter = InMemorySpanExporter()
    tracing = tracing_to(exporter)
    turn = Turn(rows=2, steps=4, step_seconds=0.4, passes=1, chunks=2, pass_seconds=0.2, proposed=5, written=written)
    tracing.note([tracing.begin(1)], replace(turn, seconds=0.7))
    predictor, expert = exporter.get_finished_spans()
    assert predictor.end_time == expert.start_time
    assert expert.end_time - predictor.start_time == pytest.approx(0.6e9, rel=1e-6)
    assert [event.attributes["seqdefer.tokens"] for event in expert.events] == ([2] if written == 3 else [])


def test_a_request_without_deferral_has_no_expert() -> None:
    assert {span.name for span in spans_of(toy_model(), 0.0)} == {"seqdefer.request", "seqdefer.predictor"}


def test_a_degraded_request_says_so() -> None:
    spans = spans_of(with_parts(toy_model(), expert=FaultyExpert(toy_model().served.expert, fail)), 1.0)
    (request,) = (span for span in spans if span.name == "seqdefer.request")
    assert request.attributes["seqdefer.status"] == "degraded"


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert tracing_from_environment() is None
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(OptionError, match="set 1 to trace requests, or 0"):
        tracing_from_environment()
    assert "opentelemetry" not in loaded_after("import seqdefer.server.scheduler")
