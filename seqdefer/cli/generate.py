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

from seqdefer.cli import common
from seqdefer.cli.common import Command, Parser
from seqdefer.errors import InputError, OptionError, one_line, require_one
from seqdefer.progress_bars import show_progress

if TYPE_CHECKING:
    from seqdefer.budgets.caps import Cap
    from seqdefer.budgets.prices import Prices
    from seqdefer.interfaces import Codec
    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.progress import Meter


def generate(arguments: list[str]) -> int:
    from rich.console import Console

    from seqdefer.model.calibrated_pair import DEFAULT_BUDGET
    from seqdefer.report.terminal import written_lines

    chosen = _parser(DEFAULT_BUDGET).parse_args(arguments)
    caps, prices = _check(chosen)
    if chosen.data is not None or chosen.out is not None:
        return _write_file(chosen, caps, prices)
    if not chosen.inputs:
        raise OptionError("there is no input; give one or several, or a file with --data FILE --out FILE")
    with show_progress(quiet=chosen.quiet) as meter:
        model = _load(chosen, prices, meter)
        inputs = [_read(text, model.served.codec) for text in chosen.inputs]
        _warn_about_files(chosen, inputs)
        how = {"threshold": chosen.threshold, "budget_money": chosen.budget_money, "cap": caps}
        written = model.generate(inputs, chosen.budget, **how)
    console = Console(highlight=False, soft_wrap=True)  # a pipe gets the text without line breaks
    has_colours = console.color_system is not None and not console.no_color
    for row in written.rows(model.served.codec):
        if chosen.json:
            print(json.dumps(row, allow_nan=False))
        else:
            for line in written_lines(row, colours=has_colours):
                console.print(line)
    return 0


def _check(chosen: argparse.Namespace) -> tuple[Sequence[Cap], Prices | None]:
    """Return caps and prices. Raise where options are wrong, before models are loaded."""
    from seqdefer.budgets.caps import allowances
    from seqdefer.budgets.prices import check_money, read_prices, require_prices
    from seqdefer.budgets.rules import check_budget, check_threshold

    require_one("--", budget=chosen.budget, budget_money=chosen.budget_money, threshold=chosen.threshold)
    caps, prices = common.chosen_caps(chosen), None if chosen.prices is None else read_prices(chosen.prices)
    if chosen.budget is not None:
        check_budget(chosen.budget)
    if chosen.threshold is not None:
        check_threshold(chosen.threshold)
    if chosen.budget_money is not None:
        check_money(chosen.budget_money)
        require_prices(prices)
    allowances(caps, [], prices)  # a cap in money needs prices
    return caps, prices


def _load(chosen: argparse.Namespace, prices: Prices | None, meter: Meter) -> DeferringModel:
    from seqdefer.model.deferring_model import DeferringModel

    pair = {"predictor": chosen.predictor, "expert": chosen.expert}
    model = DeferringModel.from_pretrained(chosen.folder, **pair, device=chosen.device, meter=meter)
    if prices is not None:
        model.use_prices(prices)
    return model


def _write_file(chosen: argparse.Namespace, caps: Sequence[Cap], prices: Prices | None) -> int:
    from seqdefer.model.batch_files import check_request, write_file
    from seqdefer.model.calibrated_pair import DEFAULT_BUDGET

    if chosen.data is None or chosen.out is None:
        raise OptionError("--data FILE and --out FILE go together: inputs to read, and the file to write")
    if chosen.inputs:
        raise OptionError(f"give inputs or --data, not both: {one_line(chosen.inputs[0]):.80}")
    if chosen.budget_money is not None:
        raise OptionError(
            "--budget-money depends on the length of an input, so it does not go with --data; give --budget"
        )
    check_request(chosen.data, chosen.out, chosen.batch_size, caps)  # before models are loaded
    budget = DEFAULT_BUDGET if chosen.budget is None else chosen.budget
    with show_progress(quiet=chosen.quiet) as meter:
        model = _load(chosen, prices, meter)
        threshold = model.setting(budget).threshold if chosen.threshold is None else chosen.threshold
        how = {"field": chosen.field, "batch_size": chosen.batch_size, "caps": caps, "meter": meter}
        done = write_file(model, chosen.data, chosen.out, threshold=threshold, **how)
    if done.failed == done.inputs > 0:
        reason = f"none of the {done.inputs} inputs of {chosen.data} could be read"
        raise InputError(f"{reason}; see their field 'error' in {chosen.out}, or choose another --field")
    found = f", {done.found} of them found from before" if done.found else ""
    failed = f"; {done.failed} could not be read, see their field 'error'" if done.failed else ""
    print(f"written: {chosen.out}, {done.inputs} inputs{found}{failed}", file=sys.stderr)
    return 0


def _parser(default_budget: float) -> Parser:
    parser = Parser(
        prog="seqdefer generate",
        description="Write for one or several inputs, and show who wrote what: the expert's tokens are coloured, or in "
        "brackets where there are no colours.",
        epilog=common.DEFAULTS_NOTE,
    )
    common.add_model(parser)
    words = "input of the model: a text, a word, a sound file, cities as JSON; - reads one from standard input"
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help=words)
    words = "instead of INPUT: a file, plain or gzip; JSONL (*.jsonl), or any other text with one input per line"
    parser.add_argument("--data", type=Path, metavar="FILE", help=words)
    words = "with --data: the file to write, a JSON object per line and input; the same command resumes"
    parser.add_argument("--out", type=Path, metavar="FILE", help=words)
    parser.add_argument("--field", metavar="NAME", help="field of JSONL that holds the input (the one used by fit)")
    words = "with --data: sequences written together (32)"
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help=words)
    words = f"share of tokens for the expert ({default_budget})"
    parser.add_argument("--budget", type=float, metavar="X", help=words)
    words = "money for a sequence, about, instead of a share; needs --prices"
    parser.add_argument("--budget-money", type=float, metavar="X", help=words)
    words = "defer above this score, instead of a budget; inf never defers"
    parser.add_argument("--threshold", type=float, metavar="X", help=words)
    common.add_prices(parser)
    common.add_caps(parser)
    common.add_common(parser, "one JSON object per line and input")
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


GENERATE = Command("generate", "write with a fitted pair, at a budget", generate, resumes=True)
