"""Where the loop is slower than the expert alone would be, one warning says so. Times are typed in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice

import pytest

from seqdefer.engine.pace import Pace, Turn
from seqdefer.methods.deferral import TokenDeferral
from seqdefer.methods.plans import TokenPlan
from seqdefer.rejectors.confidence import Confidence
from seqdefer.testing import ToyTask

FIXED, EACH = 0.05, 0.001  # seconds of a pass, and of each token that it reads


def turns(n: int, *, written: int = 8, inputs: int = 0, scale: float = 1.0) -> Iterator[Turn]:
    """Yield turns of 8 rows that write `written` tokens, in 20 ms and a pass over 8, 16 or 24 tokens, each third turn
    with inputs."""
    for read in islice(cycle((8, 16, 24)), n):
        new = inputs if read == 24 else 0
        seconds = scale * (FIXED + EACH * (read + new))
        yield Turn(
            rows=8, steps=4, step_seconds=scale * 0.02, passes=1, chunks=8, tokens_read=read + new,
            inputs_read=new, pass_seconds=seconds, written=written, seconds=seconds + scale * 0.02,
        )  # fmt: skip


def warned(turns: Iterator[Turn], caplog: pytest.LogCaptureFixture, pace: Pace | None = None) -> list[str]:
    caplog.clear()
    pace = pace or Pace()
    for turn in turns:
        pace.note(turn)
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return caplog.messages


def test_a_slow_loop_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = Pace()
    (said,) = warned(turns(300), caplog, pace)
    assert "10.72 instead of about 7.25 ms a token" in said  # 1000 / 8 of 0.02 + 0.05 + 0.016, and of 0.05 + 0.008
    assert "lower the budget" in said
    assert not warned(turns(300), caplog, pace)  # another loop with the same pace
    assert not warned(turns(200, written=40), caplog, pace)
    assert not warned(turns(300), caplog, pace)


def test_it_warns_after_three_slow_stretches_that_cost_a_second(caplog: pytest.LogCaptureFixture) -> None:
    assert not warned(turns(29, scale=10), caplog)
    assert warned(turns(30, scale=10), caplog)
    assert not warned(turns(30), caplog)  # they lose 0.028 seconds each
    assert warned(turns(40), caplog)
    assert not warned(turns(300, scale=0.01), caplog)


@pytest.mark.parametrize("written", [16, 11])
def test_a_fast_loop_does_not_warn(written: int, caplog: pytest.LogCaptureFixture) -> None:
    """11 tokens a turn are slower than the expert alone, by less than the margin."""
    assert not warned(turns(300, written=written), caplog)


def test_one_noisy_turn_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    noisy = [*turns(30, written=16), *turns(30, written=16)]
    noisy[34] = replace(noisy[34], seconds=60.0)
    assert not warned(iter(noisy), caplog)
    noisy[34] = replace(noisy[34], pass_seconds=60.0)
    assert not warned(iter(noisy), caplog)


def test_two_slow_stretches_in_a_row_are_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    mixed = [*turns(20, scale=10), *turns(10, written=40, scale=10)] * 10
    assert not warned(iter(mixed), caplog)


def test_the_expert_alone_reads_inputs_too(caplog: pytest.LogCaptureFixture) -> None:
    assert not warned(turns(300, inputs=500), caplog)
    assert warned((replace(turn, inputs_read=0) for turn in turns(300, inputs=500)), caplog)


def test_without_passes_there_is_nothing_to_compare(caplog: pytest.LogCaptureFixture) -> None:
    alone = (replace(turn, passes=0, tokens_read=0, pass_seconds=0.0) for turn in turns(300))
    assert not warned(alone, caplog)


def test_batches_of_a_server_share_a_pace() -> None:
    """Otherwise each would warn."""
    deferral, task = TokenDeferral(Confidence()), ToyTask(n=2)
    plans = [deferral.plan(task) for _ in range(2)]
    assert all(isinstance(plan, TokenPlan) and plan.loop.pace is deferral.pace for plan in plans)


def test_few_rows_run_ahead_as_far_as_many() -> None:
    """When a stream of documents ends, few rows are left; turns before had more, and gained more tokens."""
    many, few = Pace(), Pace()
    for turn in turns(30, written=32):
        many.note(turn)
        few.note(replace(turn, rows=1, written=4))
    for useful in (0.01, 0.2, 0.5, 1.0):
        assert many.goes_on(useful) == few.goes_on(useful)
    # A step of 5 ms must gain more than turns of 70 ms (without their reading) that write 4 tokens of a row do: 0.286.
    assert not many.goes_on(0.28)
    assert many.goes_on(0.29)


def test_a_turn_of_one_step_has_a_cost_of_steps() -> None:
    """Its step reads what the expert answered."""
    pace = Pace()
    for turn in turns(30):
        pace.note(replace(turn, steps=1, step_seconds=0.0, last_step_seconds=0.02))
    assert not pace.goes_on(0.28)  # as above, but for one token in a turn and a step of 20 ms
    assert pace.goes_on(0.29)


def test_it_looks_on_where_that_costs_less_than_it_saves() -> None:
    pace = Pace()
    for turn in turns(30):
        pace.note(replace(turn, asked=8, agreed=4, proposed=32, deferred=8))
    # A step and a pass take 55 ms, of 8 rows; a quarter of the tokens is deferred, half of the guesses stand.
    saved = pace.share * pace.agreement * (0.005 + FIXED) / 8
    assert saved == pytest.approx(0.25 * 0.5 * 0.055 / 8, rel=0.05)
    assert not pace.looks_on(1, 1, 8)
    assert pace.looks_on(1, 1, 1)
    assert not pace.looks_on(4, 1, 1)
