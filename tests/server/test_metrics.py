"""/metrics: what is counted, and the Prometheus text format."""

from __future__ import annotations

import pytest
from servers import COMPLETIONS, FaultyExpert, fail, inputs_of, metric, running, toy_model, until, with_parts

import seqdefer


def test_counts_equal_what_was_written() -> None:
    model, inputs = toy_model(), inputs_of(6)
    written = model.generate(inputs, 0.5)
    with running(model) as server:
        for place, one in enumerate(inputs):
            list(server.complete(one, 0.5, stream=bool(place % 2)))
        server.post(COMPLETIONS, b"{")
        server.get("/nowhere")
        # A response is counted after it is sent: the client may be faster.
        until(lambda: metric(server, 'seqdefer_request_seconds_count{path="/v1/completions"}') == 7)
        until(lambda: metric(server, 'seqdefer_requests_total{path="other",status="404"}') == 1)
        assert metric(server, 'seqdefer_tokens_total{author="expert"}') == sum(written.expert_tokens)
        assert metric(server, 'seqdefer_tokens_total{author="predictor"}') == sum(written.predictor_tokens)
        assert metric(server, "seqdefer_switches_total") == sum(written.switches)
        assert metric(server, 'seqdefer_requests_total{path="/v1/completions",status="200"}') == 6
        assert metric(server, 'seqdefer_requests_total{path="/v1/completions",status="400"}') == 1
        assert metric(server, 'seqdefer_request_seconds_bucket{le="+Inf",path="/v1/completions"}') == 7
        until(lambda: metric(server, "seqdefer_sequences_running") == 0)
        assert metric(server, "seqdefer_queue_length") == 0


def test_times_and_shares_by_how_requests_ended() -> None:
    model, inputs = toy_model(), inputs_of(4)
    written = model.generate(inputs, 0.5)
    expert = FaultyExpert(model.served.expert)
    with running(with_parts(model, expert=expert)) as server:
        for one in inputs:
            server.complete(one, 0.5)
        expert.fault = fail
        server.complete("13", 1.0)
        until(lambda: metric(server, "seqdefer_requests_degraded_total") == 1)
        lengths = [len(text) for text in written.outputs]
        for name in ("queue", "time_to_first_token"):
            assert metric(server, f'seqdefer_{name}_seconds_count{{status="ok"}}') == 4
            assert metric(server, f'seqdefer_{name}_seconds_count{{status="degraded"}}') == 1
        assert metric(server, 'seqdefer_time_between_tokens_seconds_count{status="ok"}') <= sum(lengths) - 4
        assert metric(server, 'seqdefer_expert_seconds_count{status="ok"}') > 0
        assert metric(server, 'seqdefer_expert_seconds_count{status="error"}') == 1
        assert metric(server, "seqdefer_budget_count") == metric(server, "seqdefer_share_count") == 5
        assert metric(server, "seqdefer_budget_sum") == 4 * 0.5 + 1.0
        shares = [row.count("expert") / len(row) for row in written.sources]
        assert metric(server, "seqdefer_share_sum") == pytest.approx(sum(shares))
        assert metric(server, "seqdefer_batch_size_count") > 0
        assert "process_resident_memory_bytes" in server.get("/metrics").text
        assert f'version="{seqdefer.__version__}"' in server.get("/metrics").text
