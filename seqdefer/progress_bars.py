"""Progress on stderr: bars on a terminal, lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from seqdefer.progress import Meter, Silent

FINISHED_BARS = 10  # that stay visible: more than a terminal has lines would hide the running one
LINE_SECONDS = 30.0  # between two lines of a stage
FIRST_LINE_SECONDS = 10.0  # of a stage: sooner, to show that something happens


@contextmanager
def show_progress(*, quiet: bool) -> Iterator[Meter]:
    """Yield the meter for stderr; `quiet` shows nothing."""
    if quiet:
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    if not console.is_interactive:
        yield _Lines()
        return
    # On a terminal, output is printed above the bars; where stdout is a file, it is not redirected.
    with Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty()) as bars:
        yield _Bars(bars)


def say(*parts: Any, quiet: bool) -> None:
    """Print texts and tables on stderr, where progress is shown; leave out what is None."""
    if quiet:
        return
    from rich.console import Console

    console = Console(stderr=True)
    for part in parts:
        if part is not None:
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


class _Bars:
    """One bar per stage."""

    def __init__(self, bars: Any) -> None:
        self.bars, self.finished = bars, deque[Any]()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        bar = self.bars.add_task(name, total=total)
        yield lambda steps: self.bars.advance(bar, steps)
        self.bars.update(bar, completed=total)  # early stopping leaves epochs unused
        self.bars.stop_task(bar)
        self.finished.append(bar)
        if len(self.finished) > FINISHED_BARS:
            self.bars.update(self.finished.popleft(), visible=False)


class _Lines:
    """Lines for logs and pipes, only for stages that take long."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        done, started = 0, time.monotonic()
        printed = started

        def advance(steps: int) -> None:
            nonlocal done
            done, now = done + steps, time.monotonic()
            if now - printed >= (LINE_SECONDS if printed > started else FIRST_LINE_SECONDS):
                print_line(now)

        def print_first_line() -> None:
            """Show that something happens, although no step has ended."""
            if printed == started:
                print_line(time.monotonic())

        def print_line(now: float) -> None:
            nonlocal printed
            printed = now
            left = (now - started) / done * max(0, total - done) if done else 0.0
            more = f", about {left:.0f} s left" if left else ""
            print(f"{name}: {done} of {total}, {now - started:.0f} s{more}", file=sys.stderr, flush=True)

        timer = threading.Timer(FIRST_LINE_SECONDS, print_first_line)
        timer.daemon = True
        timer.start()
        try:
            yield advance
        finally:
            timer.cancel()
        if printed > started:
            print(f"{name}: done, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
