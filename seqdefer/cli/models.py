"""Commands on a fitted pair: fit, calibrate, generate, serve."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.cli.common import (
    USUAL,
    Parser,
    add_common,
    add_learning,
    add_options,
    chosen_settings,
    one_line,
    override,
    progress,
    task_of,
    task_parser,
    usual_options,
    work_in,
)
from seqdefer.cli.labelling import add_engine, chosen_engine
from seqdefer.errors import OptionError

if TYPE_CHECKING:
    from seqdefer.budgets.calibration import Calibration
    from seqdefer.budgets.rules import Setting
    from seqdefer.interfaces import TaskEntry
    from seqdefer.model.deferring_model import DeferringModel


USUAL_BUDGET = 0.2
MAX_INPUTS_MIB = 256  # of the inputs that calibrate reads
FEW = 200  # inputs: the share that a budget spends is known to some points at best
USED = "In parentheses: what is used if an option is not given."
SERVED = """\
Answers /v1/completions, /v1/chat/completions and /v1/models as OpenAI does,
streams included, at the budget that a request names: model NAME@0.20, or a
field deferral with a budget. Also /v1/deferral (what its budgets spend),
/v1/deferral/complete (every token with its author; tours, too),
/v1/deferral/score, /health and /metrics, and a page to try it at /.
Ctrl-C ends it.
"""
ASKING = f"""\
examples:
  seqdefer fit pronounce --out models/pronounce    a pair to begin with, trained in minutes on a CPU
  seqdefer serve models/pronounce                  then open http://127.0.0.1:8000, or in a shell:

  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{{"model": "pronounce@0.20", "prompt": "onomatopoeia"}}'

or with the client of OpenAI (pip install openai):

  from openai import OpenAI

  client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  answer = client.completions.create(model="pronounce@0.20", prompt="onomatopoeia")
  print(answer.choices[0].text, answer.usage)

  for part in client.completions.create(model="pronounce@0.20", prompt="onomatopoeia", stream=True):
      print(part.choices[0].text, end="", flush=True)

The number after @ is the budget: the share of tokens that the expert writes.
{USED}
"""


def fit(arguments: list[str]) -> int:
    from seqdefer.model.fitting import fit_model, require_served

    entry = task_of("fit", arguments, needs="serve")
    require_served(entry)
    chosen = _fit_parser(entry).parse_args(arguments[1:])
    options, settings = chosen_settings(entry, chosen)
    folder = chosen.out or Path("models") / entry.name
    how = {"method": chosen.method, "device": chosen.device, "labelling": chosen_engine(chosen)}
    with work_in(folder, entry.name), progress(quiet=chosen.quiet) as meter:
        model = fit_model(entry, options, settings, folder, **how, meter=meter)
    assert model.calibration is not None
    _print_calibration(model.calibration, as_json=chosen.json)
    name = shlex.quote(str(folder))
    hint = shlex.quote(model.served.codec.hint or "INPUT")
    if model.calibration.inputs < FEW:
        few = f"budgets were measured on {model.calibration.inputs} inputs only"
        print(f"\n{few}; with more they hold better: seqdefer calibrate {name} --data FILE", file=sys.stderr)
    print(f"\nuse it: seqdefer generate {name} {hint} --budget 0.2", file=sys.stderr)
    print(f"or: seqdefer serve {name}", file=sys.stderr)
    return 0


def _fit_parser(entry: TaskEntry) -> Parser:
    from seqdefer.evaluation.settings import experiment_settings

    parser = task_parser(
        "fit",
        entry,
        "Fits one rejector, finds out which threshold spends which budget, and writes a folder for: seqdefer generate. "
        "All data is learned from: none is kept to report on. Stopped work goes on where it was.",
        folder=f"models/{entry.name}",
        printed="what budgets spend as JSON instead of a table",
    )
    words = "TokenwiseModel, OneTimeModel or OneTimeCost (the first, or where the expert only completes, the last)"
    parser.add_argument("--method", metavar="NAME", help=words)
    add_learning(parser, experiment_settings(entry, USUAL))
    add_engine(parser, store="work/labels, in the folder of --out")
    add_options(parser, f"the {entry.name} task", entry.name, usual_options(entry))
    return parser


def _model_parser(
    commands: Any, name: str, *, help: str, description: str, folder: str = ""
) -> argparse.ArgumentParser:
    """What all commands have that work with a fitted pair."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, epilog=USED, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help=f"what seqdefer fit wrote{folder}")
    return parser


def add_calibrate(commands: Any) -> None:
    parser = _model_parser(
        commands,
        "calibrate",
        help="find out which threshold spends which budget on inputs like yours",
        description="Writes inputs at every threshold and counts what the expert wrote: budgets of the model then mean "
        "what they say on inputs like these. No references are needed.",
        folder="; the budgets go there too",
    )
    words = "inputs, plain or gzip: JSONL (*.jsonl), or any other text with one input a line"
    parser.add_argument("--data", type=Path, metavar="FILE", help=words)
    words = "other inputs, likewise: write them at some budgets and say what those spent; without --data, nothing else"
    parser.add_argument("--check", type=Path, metavar="FILE", help=words)
    parser.add_argument("--field", metavar="NAME", help="of JSONL, what holds the input (as it was called for fit)")
    parser.add_argument("--inputs", type=int, default=500, metavar="N", help="how many of them, at most (500)")
    add_common(parser, "what budgets spend as JSON instead of a table")
    parser.set_defaults(command=_calibrate)


def _calibrate(chosen: argparse.Namespace) -> int:
    from seqdefer.model.deferring_model import CHECKED_BUDGETS, DeferringModel
    from seqdefer.storage.user_files import parse_inputs, read_lines

    if chosen.inputs < 2:
        raise OptionError(f"--inputs is {chosen.inputs}; it must be at least 2")
    if chosen.data is None and chosen.check is None:
        raise OptionError("nothing to do: give --data FILE to calibrate with, --check FILE to see if budgets hold")
    given = {
        path: list(islice(read_lines(path, kind="JSONL or one input a line", max_mib=MAX_INPUTS_MIB), chosen.inputs))
        for path in (chosen.data, chosen.check)
        if path is not None
    }
    seen: tuple[Setting, ...] = ()
    with progress(quiet=chosen.quiet) as meter:
        is_new = chosen.data is not None
        model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter, budgets=not is_new)
        field = chosen.field or model.served.codec.field
        inputs = {path: parse_inputs(lines, path, field) for path, lines in given.items()}
        if is_new:
            with meter.stage("calibrate budgets", len(inputs[chosen.data])) as advance:
                model.calibrate(inputs[chosen.data], progress=advance)
            model.save_calibration(chosen.folder)
        if chosen.check is not None:
            with meter.stage("check budgets", len(CHECKED_BUDGETS)) as advance:
                seen = model.check(inputs[chosen.check], progress=advance)
    if is_new and not (seen and chosen.json):
        assert model.calibration is not None
        _print_calibration(model.calibration, as_json=chosen.json)
    if seen:
        _print_check(seen, model, len(inputs[chosen.check]), as_json=chosen.json)
    return 0


def _print_check(seen: tuple[Setting, ...], model: DeferringModel, n: int, *, as_json: bool) -> None:
    from rich.console import Console

    from seqdefer.report.terminal import check_table

    if as_json:
        budgets = [{**dataclasses.asdict(one), "expected": model.setting(one.budget).share} for one in seen]
        print(json.dumps({"inputs": n, "checked": budgets}, allow_nan=False))
    else:
        Console().print(check_table(seen, [model.setting(one.budget).share for one in seen], n))


def _print_calibration(found: Calibration, *, as_json: bool) -> None:
    from rich.console import Console

    from seqdefer.report.terminal import calibration_table, shown_settings

    if as_json:
        budgets = [{**dataclasses.asdict(one), "met": one.is_near(one.budget)} for one in shown_settings(found)]
        print(json.dumps({"inputs": found.inputs, "budgets": budgets}, allow_nan=False))
    else:
        Console().print(calibration_table(found))


def add_generate(commands: Any) -> None:
    parser = _model_parser(
        commands,
        "generate",
        help="write with a fitted pair, at a budget",
        description="Writes for one input or several, and shows who wrote what: the expert's tokens are coloured, or "
        "where there are no colours in brackets.",
    )
    words = "what to write for: a text, a word, cities as JSON; - reads one from standard input"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=words)
    parser.add_argument("--budget", type=float, metavar="X", help=f"share of tokens for the expert ({USUAL_BUDGET})")
    words = "decide by a score of your own instead of a budget; inf never defers"
    parser.add_argument("--threshold", type=float, metavar="X", help=words)
    add_common(parser, "JSON, one object a line for each input")
    parser.set_defaults(command=_generate)


def _generate(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.report.terminal import written_lines

    if chosen.budget is not None and chosen.threshold is not None:
        raise OptionError("--budget and --threshold both decide what the expert writes; give one of them")
    inputs = [sys.stdin.read() if text == "-" else text for text in chosen.inputs]
    _tell_files(chosen)
    budget = USUAL_BUDGET if chosen.budget is None else chosen.budget
    with progress(quiet=chosen.quiet) as meter:
        model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter)
        written = model.generate(inputs, budget, threshold=chosen.threshold)
    console = Console(highlight=False, soft_wrap=True)  # a pipe gets the text as it is, not in lines of 80
    has_colours = console.color_system is not None and not console.no_color
    for row in written.rows(model.served.codec):
        if chosen.json:
            print(json.dumps(row, allow_nan=False))
        else:
            for line in written_lines(row, colours=has_colours):
                console.print(line)
    return 0


def _tell_files(chosen: argparse.Namespace) -> None:
    """An input is a text. That of a file may have been meant; a word may be the name of one by chance."""
    for text in chosen.inputs:
        with suppress(OSError, ValueError):  # too long for a name, or no name at all
            if Path(text).is_file():
                words = f"{one_line(text)} is a file here: what is read is its name"
                command = f"seqdefer generate {shlex.quote(str(chosen.folder))} - < {shlex.quote(text)}"
                print(f"{words}; to read what is in it: {one_line(command)}", file=sys.stderr)


def add_serve(commands: Any) -> None:
    parser = _model_parser(
        commands, "serve", help="a fitted pair behind the API that clients of OpenAI speak", description=SERVED
    )
    parser.epilog, parser.formatter_class = ASKING, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (8000)")
    parser.add_argument("--name", help="what clients call the model (the name of the folder)")
    words = f"where a request names none ({USUAL_BUDGET})"
    parser.add_argument("--budget", type=float, default=USUAL_BUDGET, metavar="X", help=words)
    words = "what clients must send; better in SEQDEFER_API_KEY, where no list of processes shows it (none)"
    parser.add_argument("--api-key", metavar="KEY", help=words)
    parser.add_argument("--body-bytes", type=int, metavar="N", help="of one request, at most (1 MiB)")
    parser.add_argument("--request-seconds", type=float, metavar="X", help="for one request, at most (120)")
    parser.add_argument("--inputs", type=int, metavar="N", help="of one request, at most (16)")
    parser.add_argument("--queue", type=int, metavar="N", help="requests that may wait (256)")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences written together, at most (32)")
    parser.add_argument("--running", type=int, metavar="N", help="sequences in memory at once, at most (128)")
    parser.add_argument("--connections", type=int, metavar="N", help="open at once, at most (512)")
    words = "for one call of the expert; then the predictor finishes (half a request's for a remote one, else no limit)"
    parser.add_argument("--expert-seconds", type=float, metavar="X", help=words)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU where there is one (auto)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(command=_serve)


def _serve(chosen: argparse.Namespace) -> int:
    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.server.http import Limits, check_api_key
    from seqdefer.server.serve import address_of, listen, require_extra, serve

    require_extra()
    limits = override(Limits(), {name: value for name, value in vars(chosen).items() if value is not None})
    api_key = os.environ.get("SEQDEFER_API_KEY") if chosen.api_key is None else chosen.api_key
    if api_key is not None:
        check_api_key(api_key)  # before the models are loaded
    name = chosen.name or chosen.folder.resolve().name
    with listen(chosen.host, chosen.port) as listening:
        with progress(quiet=chosen.quiet) as meter:
            model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter)
        address = address_of(listening)
        talk = f"serving {name} at {address}/v1; open {address} to try it; Ctrl-C ends it"
        if api_key is None and not listening.getsockname()[0].startswith(("127.", "::1")):
            talk += "\nwithout an API key: whoever reaches this machine can use it"

        def say() -> None:
            print(talk, file=sys.stderr, flush=True)

        serve(
            model, name, listening, limits=limits, api_key=api_key, budget=chosen.budget, host=chosen.host, ready=say
        )  # fmt: skip
    return 0
