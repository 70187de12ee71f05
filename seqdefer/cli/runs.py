"""Commands on tasks: run, train-predictor, tasks; and plot, which draws a run again."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from seqdefer.cli.common import (
    USUAL,
    Parser,
    add_learning,
    add_options,
    chosen_settings,
    names,
    override,
    progress,
    task_of,
    task_parser,
    usual_options,
    work_in,
)
from seqdefer.cli.labelling import add_engine, chosen_engine
from seqdefer.errors import OptionError
from seqdefer.storage.files import writable_folder

if TYPE_CHECKING:
    from seqdefer.evaluation.results import Results
    from seqdefer.interfaces import TaskEntry


def run(arguments: list[str]) -> int:
    from seqdefer.report.run import run_task

    entry = task_of("run", arguments)
    chosen = _run_parser(entry).parse_args(arguments[1:])
    options, settings = chosen_settings(entry, chosen)
    folder = chosen.out or Path("runs") / f"{entry.name}-{chosen.preset}"
    how = {"preset": chosen.preset, "command": f"seqdefer run {shlex.join(arguments)}", "device": chosen.device}
    labelling = chosen_engine(chosen)
    with work_in(folder, entry.name), progress(quiet=chosen.quiet) as meter:
        results = run_task(entry, options, settings, folder, **how, meter=meter, labelling=labelling)
    if chosen.json:
        print(json.dumps(results.to_json(), allow_nan=False))
    else:
        _print_table(results)
    print(f"\nreport: {folder / 'report.html'}\nresults: {folder / 'results.json'}", file=sys.stderr)
    return 0


def _run_parser(entry: TaskEntry) -> Parser:
    from seqdefer.evaluation.settings import experiment_settings

    usual = experiment_settings(entry, USUAL)
    parser = task_parser(
        "run",
        entry,
        "Fits every rejector, evaluates every method, and writes results.json, report.html and the fitted rejectors. "
        "Stopped runs go on where they were.",
        folder=f"runs/{entry.name}-PRESET",
        printed="the results as JSON instead of a table",
    )
    group = parser.add_argument_group("evaluation")
    words = f"runs, each with its own test instances and weights ({usual.seeds})"
    group.add_argument("--seeds", type=int, metavar="N", help=words)
    group.add_argument("--instances", type=int, metavar="N", help=f"test instances a run ({usual.instances})")
    group.add_argument("--methods", type=names, metavar="A,B", help="only these (all); Random and oracles come along")
    add_learning(parser, usual)
    add_engine(parser, store="labels, in the folder of --out")
    add_options(parser, f"the {entry.name} task", entry.name, usual_options(entry))
    return parser


def _print_table(results: Results) -> None:
    from rich.console import Console

    from seqdefer.report.terminal import results_table

    Console().print(results_table(results))


def train_predictor(arguments: list[str]) -> int:
    from seqdefer.environment import choose_device

    entry = task_of("train-predictor", arguments, needs="training")
    if entry.training is None:
        raise OptionError(
            f"the predictor of {entry.name} has no training of its own: seqdefer run {entry.name} makes it"
        )
    parser = Parser(
        prog=f"seqdefer train-predictor {entry.name}",
        description="Trains the predictor and tells how good it is. Stopped training goes on where it was.",
        epilog="In parentheses: what is used if an option is not given.",
        allow_abbrev=False,
    )
    folder = Path("predictors") / entry.name
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help=f"where to write ({folder})")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU where there is one (auto)")
    parser.add_argument("--json", action="store_true", help="print what was reached as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    add_options(parser, "training", entry.name, entry.training.options)
    chosen = parser.parse_args(arguments[1:])
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    options = override(entry.training.options, given)
    with writable_folder(chosen.out), progress(quiet=chosen.quiet) as meter:
        reached = entry.training.train(options, chosen.out, choose_device(chosen.device), meter)
    print(json.dumps(dict(reached)) if chosen.json else "\n".join(f"{key}: {text}" for key, text in reached.items()))
    return 0


def list_tasks(chosen: argparse.Namespace) -> int:
    from seqdefer.registry import find_tasks, load_task

    found = {name: load_task(name).summary for name in sorted(find_tasks())}
    if chosen.json:
        print(json.dumps(found))
    else:
        width = max(map(len, found), default=0)
        print("\n".join(f"{name:<{width}}  {summary}" for name, summary in found.items()))
    return 0


def plot_again(chosen: argparse.Namespace) -> int:
    from seqdefer.evaluation.results import load_results
    from seqdefer.report.html import write_report
    from seqdefer.report.panels import panels_of
    from seqdefer.report.svg import write_plots

    results = load_results(chosen.folder)
    home = chosen.folder if chosen.folder.is_dir() else chosen.folder.parent
    folder = chosen.out or home
    with writable_folder(folder):
        report = write_report(results, folder / "report.html", panels=panels_of(home))
        written = [report, *write_plots(results, folder)]
    for path in written:
        print(path)
    return 0
