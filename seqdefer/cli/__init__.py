"""The command line: parse, call one library function, print. Results go to stdout, talk goes to stderr.

Exit status: 0 done, 2 something the user can mend (one line says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from seqdefer import __version__
from seqdefer.cli.common import Parser, one_line
from seqdefer.cli.labelling import add_cache, label
from seqdefer.cli.models import add_calibrate, add_generate, add_serve, fit
from seqdefer.cli.reproduce import add_reproduce
from seqdefer.cli.runs import list_tasks, plot_again, run, train_predictor
from seqdefer.errors import SeqdeferError

EXAMPLES = """\
start here:
  seqdefer run weather --preset quick        a few minutes: fit, evaluate, report
  seqdefer run weather --data my.csv.gz      the same on your own temperature record
  seqdefer run weather --help                everything that can be chosen
  seqdefer run tsp --preset quick            tours: a pointer network and a solver
  seqdefer plot runs/weather-quick           draw the report and the figures of a run again
  seqdefer reproduce all --preset quick      the paper's tables and figures, ours beside the paper's
  seqdefer fit pronounce                     a small pair to try, in minutes; then: seqdefer serve models/pronounce
  seqdefer fit text --help                   a rejector for your own pair and documents; then: seqdefer generate

A cheap predictor writes a sequence; a learned rejector decides where a stronger, dearer expert takes over. `run`
measures how much loss is left for each number of tokens the expert writes; the area under that curve is the AUDC.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    # PyTorch's threads spin while they wait, which on a busy machine costs more than the work; read when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without the degree sign still gets its table
        sys.stdout.reconfigure(errors="replace")  # stderr never fails: it writes escapes
    warnings.formatwarning = lambda message, *_, **__: f"seqdefer: {one_line(str(message))}\n"
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except SeqdeferError as error:
        print(f"seqdefer: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("seqdefer: stopped; the same command goes on from what is finished", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a folder in the place of a file
        print(f"seqdefer: {one_line(str(error))}; mend that and run again", file=sys.stderr)
        return 2


def _main(arguments: list[str]) -> int:
    parser = Parser(
        prog="seqdefer",
        description="Partial deferral of sequences.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"seqdefer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    commands.add_parser("run", help="fit and evaluate every method on a task, write a report", add_help=False)
    commands.add_parser("label", help="make the labels of a task, by many workers, ahead of run", add_help=False)
    add_cache(commands)
    commands.add_parser("train-predictor", help="train the predictor of a task that has one to train", add_help=False)
    commands.add_parser("fit", help="fit a rejector for your own pair and data, ready to use", add_help=False)
    add_calibrate(commands)
    add_generate(commands)
    add_serve(commands)
    tasks = commands.add_parser("tasks", help="list the tasks that are installed")
    tasks.add_argument("--json", action="store_true", help="print JSON")
    tasks.set_defaults(command=list_tasks)
    add_reproduce(commands)
    plot = commands.add_parser("plot", help="draw the report and the figures of a run again")
    plot.add_argument("folder", type=Path, metavar="DIR", help="folder of a run (it holds results.json)")
    plot.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: into the same folder)")
    plot.set_defaults(command=plot_again)
    if arguments[:1] == ["run"]:  # its options depend on the task, so it has a parser of its own
        return run(arguments[1:])
    if arguments[:1] == ["label"]:
        return label(arguments[1:])
    if arguments[:1] == ["train-predictor"]:
        return train_predictor(arguments[1:])
    if arguments[:1] == ["fit"]:
        return fit(arguments[1:])
    chosen = parser.parse_args(arguments)
    chosen.arguments = arguments
    status: int = chosen.command(chosen)
    return status
