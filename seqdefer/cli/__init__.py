"""The command line: parse, call one library function, print. Results go to stdout, messages to stderr.

Exit status: 0 done, 2 an error that the user can correct (one line says how), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from seqdefer import __version__
from seqdefer.cli import completion, doctor, generate, labelling, models, new_task, reproduce, runs, serve, tasks
from seqdefer.cli.common import Command, Parser, exit_status
from seqdefer.errors import one_line, unknown

COMMANDS: tuple[Command, ...] = (
    runs.RUN, labelling.LABEL, labelling.CACHE, tasks.TRAIN_PREDICTOR, models.FIT, models.CALIBRATE, generate.GENERATE,
    serve.SERVE, serve.KEYS, tasks.TASKS, new_task.NEW_TASK, reproduce.REPRODUCE, runs.PLOT, doctor.DOCTOR,
    Command("completion", "print a completion script for a shell", lambda rest: completion.complete(COMMANDS, rest)),
)  # fmt: skip
EXAMPLES = """\
start here:
  seqdefer run weather --preset quick        a few minutes: fit, evaluate, report
  seqdefer run weather --data my.csv.gz      the same on your own temperature record
  seqdefer run weather --help                all options of a task
  seqdefer run tsp --preset quick            tours: a pointer network and a solver
  seqdefer plot runs/weather-quick           draw the report and the figures of a run again
  seqdefer run weather --recipe published    the method as the paper has it, instead of our default
  seqdefer reproduce all --preset quick      the paper's tables and figures by both recipes, with the paper's numbers
  seqdefer fit pronounce                     a small pair to try, in minutes; then: seqdefer serve models/pronounce
  seqdefer new-task mine                     a task of your own to start from; then: seqdefer run mine/mine.py
  seqdefer doctor                            what is installed, and what is missing
  seqdefer fit text --help                   a rejector for your own pair and documents; then: seqdefer generate

A cheap predictor writes a sequence; a learned rejector decides where a stronger, more expensive expert takes over.
`run` measures how much loss is left for each number of tokens the expert writes; the area under that curve is the AUDC.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    # PyTorch's threads spin while they wait, which is slow on a busy machine. It reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # print tables even where the terminal has no degree sign
        sys.stdout.reconfigure(errors="replace")  # stderr escapes by default
    warnings.formatwarning = lambda message, *_, **__: f"seqdefer: {one_line(str(message))}\n"
    if logging.lastResort is not None:  # prints log messages of level warning to stderr
        logging.lastResort.setFormatter(logging.Formatter("seqdefer: %(message)s"))
        if not logging.root.handlers:  # packages (absl) that find none would add one with another form
            logging.root.addHandler(logging.lastResort)
    given = list(sys.argv[1:] if arguments is None else arguments)
    resumes = any(command.resumes for command in COMMANDS if given[:1] == [command.name])
    return exit_status(lambda: _run_command(given), resumes=resumes)


def _run_command(arguments: list[str]) -> int:
    for command in COMMANDS:
        if arguments[:1] == [command.name]:
            return command.main(arguments[1:])
    parser = Parser(prog="seqdefer", description="Partial deferral of sequences.", epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"seqdefer {__version__}")
    listed = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        listed.add_parser(command.name, help=command.help)
    if arguments and not arguments[0].startswith("-"):
        raise unknown("command", arguments[0], [command.name for command in COMMANDS])
    parser.parse_args(arguments)  # prints the help or the version, or raises: no command was named
    return 2
