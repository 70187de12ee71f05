"""`seqdefer reproduce`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from seqdefer.cli import common
from seqdefer.cli.common import Command, Parser
from seqdefer.errors import OptionError
from seqdefer.progress_bars import show_progress
from seqdefer.storage.files import writable_folder

EXAMPLES = f"""\
names:
  table1           all methods on the three tasks: the paper's table of results
  figure-curves    deferral curves of the three tasks
  table-handoffs   one-time deferral with few and many hand-off points
  figure-alpha     one-time deferral trained with several costs alpha_1 and hand-off points
  table-psi        one-time deferral trained with either of the paper's surrogates
  table-ablation   token-level rejectors: LSTM and MLP, with and without teacher forcing
  all              all of these, and a verdict on each of the paper's claims

examples:
  seqdefer reproduce all --preset quick --jobs 2   16 minutes on two cores; downloads no models
  seqdefer reproduce table1                  the paper's size: hours on a CPU, well under one on a GPU
  seqdefer reproduce all --set xsum.predictor=small --set xsum.expert=large --set xsum.train=my.jsonl

Each is made twice, as published and by our recipe, and writes RECIPE/NAME.json and .csv, NAME.tex, .pdf and .svg with
both beside each other, and verdicts.*. Studies share stored labels and rejectors: after an interruption, the same
command resumes. {common.DEFAULTS_NOTE}
"""


def _parser() -> Parser:
    parser = Parser(
        prog="seqdefer reproduce",
        description="Reproduce a table or figure of the paper, and judge the paper's claims by paired intervals.",
        epilog=EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", help="table or figure; see below")
    parser.add_argument("--preset", default="paper", metavar="paper|quick", help="sizes (paper)")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs, each with its own test instances (5; quick: 2)")
    parser.add_argument("--instances", type=int, metavar="N", help="test instances per run (100)")
    words = "how rejectors are made: published, ours, or both (published,ours)"
    parser.add_argument("--recipe", type=common.names, default=None, metavar="A,B", help=words)
    words = "tasks to study, also others than the paper's (the paper's)"
    parser.add_argument("--tasks", type=common.names, metavar="A,B", help=words)
    words = "set an option of a task (see seqdefer run TASK --help); repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="TASK.OPTION=VALUE", help=words)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (runs/reproduce-PRESET)")
    parser.add_argument("--no-figures", action="store_true", help="no PDF and SVG, which need the extra 'figures'")
    words = "processes that fit and measure; each needs memory for the models (1)"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=words)
    common.add_common(parser, "the studies as JSON, one per line, instead of tables")
    parser.keep_for_help_all(common.add_executor(parser, store="TASK/labels, in the folder of --out"))
    return parser


def reproduce(arguments: list[str]) -> int:
    from rich.console import Console

    from seqdefer.paper.labs import BOTH, Choices
    from seqdefer.paper.records import Judgements, Study
    from seqdefer.paper.render.files import tables_of
    from seqdefer.paper.reproduce import reproduce as reproduce_paper
    from seqdefer.storage.records import to_plain

    chosen = _parser().parse_args(arguments)
    choices = Choices(
        chosen.preset, chosen.seeds, chosen.instances, chosen.tasks,
        recipes=BOTH if chosen.recipe is None else chosen.recipe, options=_set_options(chosen.set),
        device=chosen.device, jobs=chosen.jobs, figures=not chosen.no_figures, labelling=common.chosen_executor(chosen),
    )  # fmt: skip
    folder = chosen.out or Path("runs") / f"reproduce-{chosen.preset}"

    def show(records: Sequence[Study] | Judgements, paths: list[Path]) -> None:
        if chosen.json:
            for record in [records] if isinstance(records, Judgements) else records:
                print(json.dumps(to_plain(record), allow_nan=False), flush=True)
        else:
            console = Console()
            with console.capture() as shown:
                for table in tables_of(records, console.width):
                    console.print(table)
            print(shown.get(), end="", flush=True)  # a console would print over the progress bars
        print("written: " + " ".join(str(path) for path in paths), file=sys.stderr)

    command = f"seqdefer reproduce {shlex.join(arguments)}"
    with writable_folder(folder), show_progress(quiet=chosen.quiet) as meter:
        reproduce_paper(chosen.name, folder, choices, command=command, meter=meter, written=show)
    return 0


def _set_options(given: list[str]) -> dict[str, dict[str, str]]:
    """Return {'xsum': {'train': 'my.jsonl'}} for 'xsum.train=my.jsonl'."""
    options: dict[str, dict[str, str]] = {}
    for text in given:
        name, is_set, value = text.partition("=")
        task, has_option, option = name.partition(".")
        if not (is_set and has_option and task and option):
            raise OptionError(f"--set {text}: it must be TASK.OPTION=VALUE, such as weather.data=my.csv")
        options.setdefault(task, {})[option] = value
    return options


REPRODUCE = Command(
    "reproduce", "make the paper's tables and figures again, ours beside the paper's", reproduce, resumes=True
)
