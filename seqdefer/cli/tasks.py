"""`seqdefer tasks` and `seqdefer train-predictor`."""

from __future__ import annotations

import json
from pathlib import Path

from seqdefer.cli import common
from seqdefer.cli.common import Command, Parser
from seqdefer.errors import OptionError
from seqdefer.progress_bars import show_progress
from seqdefer.storage.files import writable_folder


def list_tasks(arguments: list[str]) -> int:
    from seqdefer.registry import find_tasks, load_task

    parser = Parser(prog="seqdefer tasks")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args(arguments)
    found = {name: load_task(name).summary for name in sorted(find_tasks())}
    if chosen.json:
        print(json.dumps(found))
    else:
        width = max(map(len, found), default=0)
        print("\n".join(f"{name:<{width}}  {summary}" for name, summary in found.items()))
    return 0


def train_predictor(arguments: list[str]) -> int:
    from seqdefer.environment import choose_device

    entry = common.task_of("train-predictor", arguments, needs="training")
    if entry.training is None:
        raise OptionError(
            f"the predictor of {entry.name} has no training command; seqdefer run {entry.name} makes the predictor"
        )
    parser = Parser(
        prog=f"seqdefer train-predictor {entry.name}",
        description="Train the predictor and measure how good it is. Interrupted training resumes where it stopped.",
        epilog=common.DEFAULTS_NOTE,
    )
    folder = Path("predictors") / entry.name
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help=f"where to write ({folder})")
    common.add_common(parser, "the results as JSON")
    common.add_options(parser, "training", entry.name, entry.training.options)
    chosen = parser.parse_args(arguments[1:])
    options = common.override(entry.training.options, common.given_options(chosen))
    with writable_folder(chosen.out), show_progress(quiet=chosen.quiet) as meter:
        reached = entry.training.train(options, chosen.out, choose_device(chosen.device), meter)
    print(json.dumps(dict(reached)) if chosen.json else "\n".join(f"{key}: {text}" for key, text in reached.items()))
    return 0


TASKS = Command("tasks", "list the installed tasks", list_tasks)
TRAIN_PREDICTOR = Command(
    "train-predictor", "train the predictor of a task that has one to train", train_predictor, resumes=True
)
