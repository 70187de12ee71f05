"""`seqdefer generate`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.cli.common import (
    DEFAULTS_NOTE,
    Command,
    Parser,
    add_caps,
    add_common,
    add_model,
    add_prices,
    chosen_caps,
    one_line,
)
from seqdefer.errors import OptionError
from seqdefer.progress_bars import show_progress

if TYPE_CHECKING:
    from seqdefer.interfaces import Codec


def generate(arguments: list[str]) -> int:
    from rich.console import Console

    from seqdefer.budgets.prices import read_prices
    from seqdefer.model.deferring_model import DEFAULT_BUDGET, DeferringModel
    from seqdefer.report.terminal import written_lines

    chosen = _parser(DEFAULT_BUDGET).parse_args(arguments)
    names = [name for name in ("budget", "budget_money", "threshold") if getattr(chosen, name) is not None]
    if len(names) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in names[:2])
        raise OptionError(f"{first} and {second} exclude each other; give one of them")
    budget = DEFAULT_BUDGET if chosen.budget is None else chosen.budget
    caps, prices = chosen_caps(chosen), None if chosen.prices is None else read_prices(chosen.prices)
    with show_progress(quiet=chosen.quiet) as meter:
        pair = {"predictor": chosen.predictor, "expert": chosen.expert}
        model = DeferringModel.from_pretrained(chosen.folder, **pair, device=chosen.device, meter=meter)
        inputs = [_read(text, model.served.codec) for text in chosen.inputs]
        _warn_about_files(chosen, inputs)
        if prices is not None:
            model.use_prices(prices)
        how = {"threshold": chosen.threshold, "budget_money": chosen.budget_money, "cap": caps}
        written = model.generate(inputs, budget, **how)
    console = Console(highlight=False, soft_wrap=True)  # a pipe gets the text without line breaks
    has_colours = console.color_system is not None and not console.no_color
    for row in written.rows(model.served.codec):
        if chosen.json:
            print(json.dumps(row, allow_nan=False))
        else:
            for line in written_lines(row, colours=has_colours):
                console.print(line)
    return 0


def _parser(default_budget: float) -> Parser:
    parser = Parser(
        prog="seqdefer generate",
        description="Write for one or several inputs, and show who wrote what: the expert's tokens are coloured, or in "
        "brackets where there are no colours.",
        epilog=DEFAULTS_NOTE,
    )
    add_model(parser)
    words = "input of the model: a text, a word, a sound file, cities as JSON; - reads one from standard input"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=words)
    words = f"share of tokens for the expert ({default_budget})"
    parser.add_argument("--budget", type=float, metavar="X", help=words)
    words = "money for a sequence, about, instead of a share; needs --prices"
    parser.add_argument("--budget-money", type=float, metavar="X", help=words)
    words = "defer above this score, instead of a budget; inf never defers"
    parser.add_argument("--threshold", type=float, metavar="X", help=words)
    add_prices(parser)
    add_caps(parser)
    add_common(parser, "one JSON object per line and input")
    return parser


def _read(text: str, codec: Codec) -> Any:
    if text != "-":
        return codec.local_input(text, Path())
    return sys.stdin.buffer.read() if codec.reads_bytes else sys.stdin.read()


def _warn_about_files(chosen: argparse.Namespace, inputs: Sequence[Any]) -> None:
    """Warn if an input is the name of a file: its content may have been meant."""
    for text in (one for one in inputs if isinstance(one, str) and one in chosen.inputs):
        with suppress(OSError, ValueError):  # not a valid name
            if Path(text).is_file():
                command = f"seqdefer generate {shlex.quote(str(chosen.folder))} - < {shlex.quote(text)}"
                words = f"{one_line(text)} is a file, but its name is used as the input"
                print(f"{words}; to use its content: {one_line(command)}", file=sys.stderr)


GENERATE = Command("generate", "write with a fitted pair, at a budget", generate)
