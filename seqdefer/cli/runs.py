"""`seqdefer run`, and `seqdefer plot`, which draws a run again."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from seqdefer.cli import common
from seqdefer.cli.common import Command, Parser
from seqdefer.progress_bars import show_progress
from seqdefer.storage.files import writable_folder

if TYPE_CHECKING:
    from seqdefer.interfaces import TaskEntry


def run(arguments: list[str]) -> int:
    from rich.console import Console

    from seqdefer.report.run import run_task
    from seqdefer.report.terminal import results_table

    entry = common.task_of("run", arguments)
    chosen = _run_parser(entry).parse_args(arguments[1:])
    options, settings = common.chosen_settings(entry, chosen)
    folder = common.run_folder(entry, chosen)
    how = {"preset": chosen.preset, "command": f"seqdefer run {shlex.join(arguments)}", "device": chosen.device}
    how |= {"labelling": common.chosen_executor(chosen), "timing": not chosen.no_timing}
    with common.work_in(folder, entry), show_progress(quiet=chosen.quiet) as meter:
        results = run_task(entry, options, settings, folder, **how, meter=meter)
    if chosen.json:
        print(json.dumps(results.to_json(), allow_nan=False))
    else:
        Console().print(results_table(results))
    print(f"\nreport: {folder / 'report.html'}\nresults: {folder / 'results.json'}", file=sys.stderr)
    return 0


def _run_parser(entry: TaskEntry) -> Parser:
    defaults = common.default_settings(entry)
    parser = common.task_parser(
        "run",
        entry,
        "Fit every rejector, evaluate every method, and write results.json, report.html and the fitted rejectors. "
        "An interrupted run resumes where it stopped.",
        folder=f"runs/{entry.name}-PRESET; -published is added for that recipe",
        printed="the results as JSON instead of a table",
    )
    group = parser.add_argument_group("evaluation")
    words = f"runs, each with its own test instances and weights ({defaults.seeds})"
    group.add_argument("--seeds", type=int, metavar="N", help=words)
    group.add_argument("--instances", type=int, metavar="N", help=f"test instances per run ({defaults.instances})")
    words = "methods to compare with Random and oracles (all but other people's rules and those that read first)"
    group.add_argument("--methods", type=common.names, metavar="A,B", help=words)
    words = "do not time the pair and its methods for curves against seconds"
    group.add_argument("--no-timing", action="store_true", help=words)
    common.add_learning(parser, entry)
    parser.keep_for_help_all(common.add_executor(parser, store="labels, in the folder of --out"))
    common.add_task_options(parser, entry)
    return parser


def plot(arguments: list[str]) -> int:
    from seqdefer.budgets.prices import read_prices
    from seqdefer.evaluation.results import load_results
    from seqdefer.report.figure import write_card
    from seqdefer.report.html import write_report
    from seqdefer.report.panels import panels_of
    from seqdefer.report.svg import write_plots

    parser = Parser(prog="seqdefer plot")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of a run (it holds results.json)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (the same folder)")
    common.add_prices(parser)
    chosen = parser.parse_args(arguments)
    prices = None if chosen.prices is None else read_prices(chosen.prices).with_times(None, None)
    results = load_results(chosen.folder)
    home = chosen.folder if chosen.folder.is_dir() else chosen.folder.parent
    folder = chosen.out or home
    with writable_folder(folder):
        card = write_card(results, folder)
        report = write_report(results, folder / "report.html", panels=panels_of(home), card=card, prices=prices)
        written = [report, *([] if card is None else [card]), *write_plots(results, folder)]
    for path in written:
        print(path)
    return 0


RUN = Command("run", "fit and evaluate every method on a task, and write a report", run, resumes=True)
PLOT = Command("plot", "draw the report and the figures of a run again", plot)
