"""Stop strings: texts end before them, streamed or not, and rows that meet one cost nothing more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import (
    COMPLETIONS,
    LENGTH,
    RunningServer,
    check_error,
    events_of,
    inputs_of,
    running,
    slow_model,
    toy_model,
    until,
)

from seqdefer.engine.speculative import SHOWN_SECONDS, RowWritten
from seqdefer.methods.plans import PlanRow
from seqdefer.server.stopping import StopText
from seqdefer.server.tickets import TicketRow, WriteRequest
from seqdefer.types import PREDICTOR

LETTERS = st.text("ab", max_size=6)


@given(st.lists(LETTERS, max_size=6), st.lists(LETTERS.filter(bool), max_size=4))
def test_pieces_are_shown_as_the_whole_text_would_be(pieces: list[str], stops: list[str]) -> None:
    """Whatever the pieces, the text is cut before the first stop string, and nothing of one is ever shown."""
    stop, shown, is_stopped = StopText(stops), "", False
    for place, piece in enumerate(pieces):
        if not is_stopped:
            more, is_stopped = stop.push(piece, is_last=place + 1 == len(pieces))
            shown += more
    whole = "".join(pieces)
    places = [whole.find(one) for one in stops if one in whole]
    assert is_stopped == bool(places)
    assert shown == (whole[: min(places)] if places else whole)


def test_what_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    stop = StopText(["END", "DOT"])
    assert stop.push("one E", is_last=False) == ("one ", False)
    assert stop.push("N", is_last=False) == ("", False)
    assert stop.push("d D", is_last=False) == ("ENd ", False)
    assert stop.push("OT, two", is_last=False) == ("", True)


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_texts_end_before_a_stop_string(server: RunningServer, budget: float) -> None:
    prompts = inputs_of(8)
    for prompt, whole in zip(prompts, toy_model().generate(prompts, budget).outputs, strict=True):
        middle = whole[len(whole) // 2 :][:2]
        cut = whole.partition(middle)[0]
        answer = server.complete(prompt, budget, stop=[middle, "not there"])
        assert answer.choices[0].text == cut
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(cut) + len(middle)  # one letter a token
        events = events_of(
            server.post(COMPLETIONS, {"model": f"toy@{budget}", "prompt": prompt, "stop": middle, "stream": True})
        )
        assert "".join(event["choices"][0]["text"] for event in events) == cut
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_rows_that_stop_leave_the_batch() -> None:
    """The row ends at its first token, so the predictor writes far fewer than all."""
    model, slow = slow_model(SHOWN_SECONDS * 1.2, pause_after=1)
    slow.gate.clear()
    prompts = inputs_of(40)
    texts = dict(zip(prompts, toy_model().generate(prompts, 0.0).outputs, strict=True))
    prompt = next(one for one in prompts if len(texts[one]) == LENGTH)
    with running(model) as server:
        assert server.complete(prompt, 0.0, stop=texts[prompt][0]).choices[0].text == ""
        until(lambda: not server.scheduler._open)
        slow.gate.set()
        server.wait_until_idle()
        assert slow.calls <= 3


def test_stop_strings_of_others_do_not_matter(server: RunningServer) -> None:
    whole = toy_model().generate(["13", "26"], 0.5).outputs
    assert server.complete(["13", "26"], 0.5).choices[1].text == whole[1]
    both = server.complete(["13", "26"], 0.5, stop=whole[0][2:4]).choices
    assert both[0].text == whole[0].partition(whole[0][2:4])[0]
    assert both[1].text == whole[1].partition(whole[0][2:4])[0]


@pytest.mark.parametrize("stop", ["", [""], list("abcde"), [5], 5, {"a": 1}])
def test_stop_strings_that_are_refused(server: RunningServer, stop: Any) -> None:
    response = server.post(COMPLETIONS, {"model": "toy", "prompt": "13", "stop": stop})
    assert check_error(response, 400)["param"].startswith("stop")


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_strings(server: RunningServer, stop: Any) -> None:
    assert server.complete("13", 0.5, stop=stop).choices[0].text == toy_model().generate(["13"], 0.5).outputs[0]


def test_a_row_that_stopped_stays_so_when_it_is_written_anew() -> None:
    """Regression: after a failed batch, tokens behind the stop string were sent, and the row ended twice."""
    model = toy_model()
    written = model.generate(["13"], 0.0)
    tokens, text = written.sequences.tokens[0, : int(written.sequences.lengths[0])].tolist(), written.outputs[0]
    place = next(at for at in range(1, len(text) - 1) if text[at] not in text[:at])
    request = WriteRequest(["13"], 0.0, LENGTH, stop=(text[place],))
    line = RowWritten(0, tokens, [PREDICTOR] * len(tokens), [0.0] * len(tokens))
    plan_row = PlanRow(0.0, True, line, [False] * len(tokens))
    row = TicketRow(request, 0, plan_row, tokens[: place + 1])
    assert list(row.new_tokens(model.served)) == []
    assert row.is_finished
