"""`seqdefer reproduce`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.cli.common import names, progress
from seqdefer.cli.labelling import add_engine, chosen_engine
from seqdefer.errors import OptionError
from seqdefer.storage.files import writable_folder

if TYPE_CHECKING:
    pass


REPRODUCED = """\
names:
  table1           all methods on the three tasks: the paper's table of results
  figure-curves    deferral curves of the three tasks
  table-handoffs   one-time deferral with few and many hand-off points
  figure-alpha     one-time deferral trained with several costs alpha_1
  table-ablation   token-level rejectors: LSTM and MLP, with and without teacher forcing
  all              all of these, and a verdict on each of the paper's claims

examples:
  seqdefer reproduce all --preset quick      nine minutes on two cores; data and models are made on the spot
  seqdefer reproduce table1                  the paper's size: hours on a CPU, well under one on a GPU
  seqdefer reproduce all --set xsum.predictor=small --set xsum.expert=large --set xsum.train=my.jsonl

Each writes NAME.json, .csv, .tex, .pdf and .svg, and verdicts.*. Labels and rejectors are shared between studies and
kept: what was stopped goes on, with the same command, where it was.
"""


def add_reproduce(commands: Any) -> None:
    parser = commands.add_parser(
        "reproduce",
        help="make the paper's tables and figures again, ours beside the paper's",
        description="Makes a table or figure of the paper again and judges the paper's claims by paired intervals.",
        epilog=REPRODUCED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="what to make again; see below")
    parser.add_argument("--preset", default="paper", metavar="paper|quick", help="sizes (paper)")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs, each with its own test instances (5; quick: 2)")
    parser.add_argument("--instances", type=int, metavar="N", help="test instances a run (100)")
    parser.add_argument("--tasks", type=names, metavar="A,B", help="only these of the tasks (all)")
    words = "an option of a task, as in: seqdefer run TASK --help; may be given again"
    parser.add_argument("--set", action="append", default=[], metavar="TASK.OPTION=VALUE", help=words)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (runs/reproduce-PRESET)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU where there is one (auto)")
    parser.add_argument(
        "--no-figures", action="store_true", help="no PDF and SVG, for which the extra 'figures' is needed"
    )
    parser.add_argument("--json", action="store_true", help="print the studies as JSON, one a line, instead of tables")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    add_engine(parser, store="TASK/labels, in the folder of --out")
    parser.set_defaults(command=_reproduce)


def _reproduce(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from seqdefer.paper.records import Judgements, Study
    from seqdefer.paper.render.files import tables_of
    from seqdefer.paper.reproduce import Choices, reproduce
    from seqdefer.storage.records import to_plain

    choices = Choices(
        chosen.preset, chosen.seeds, chosen.instances, chosen.tasks, _set_options(chosen.set), chosen.device,
        figures=not chosen.no_figures, labelling=chosen_engine(chosen),
    )  # fmt: skip
    folder = chosen.out or Path("runs") / f"reproduce-{chosen.preset}"

    def show(record: Study | Judgements, paths: list[Path]) -> None:
        if chosen.json:
            print(json.dumps(to_plain(record), allow_nan=False), flush=True)
        else:
            console = Console()
            with console.capture() as shown:
                for table in tables_of(record, console.width):
                    console.print(table)
            print(shown.get(), end="", flush=True)  # a console would write past the bars, and they over it
        print("written: " + " ".join(str(path) for path in paths), file=sys.stderr)

    command = f"seqdefer {shlex.join(chosen.arguments)}"
    with writable_folder(folder), progress(quiet=chosen.quiet) as meter:
        reproduce(chosen.name, folder, choices, command=command, meter=meter, written=show)
    return 0


def _set_options(given: list[str]) -> dict[str, dict[str, str]]:
    """{'xsum': {'train': 'my.jsonl'}} from 'xsum.train=my.jsonl'."""
    options: dict[str, dict[str, str]] = {}
    for text in given:
        name, is_set, value = text.partition("=")
        task, has_option, option = name.partition(".")
        if not (is_set and has_option and task and option):
            raise OptionError(f"--set {text}: it must be TASK.OPTION=VALUE, such as weather.data=my.csv")
        options.setdefault(task, {})[option] = value
    return options
