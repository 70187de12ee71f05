"""Commands on labels: label, cache; and the options of all commands that label."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.cli.common import (
    USUAL,
    Parser,
    add_options,
    chosen_settings,
    names,
    one_line,
    override,
    progress,
    task_of,
    task_parser,
    usual_options,
    work_in,
)
from seqdefer.errors import OptionError

if TYPE_CHECKING:
    from seqdefer.interfaces import TaskEntry
    from seqdefer.labels.executors.settings import ExecutorSettings
    from seqdefer.labels.inventory import Inventory
    from seqdefer.labels.label_store import LabellingResult

LABELLED = """\
examples:
  seqdefer label tsp --engine local                       a process on every core
  seqdefer run tsp                                        finds them: the folder is the same
  seqdefer label tsp --engine ray --address HOST:6379     on a cluster; its machines read the same folders
  seqdefer cache ls runs/tsp-quick                        what there is

Stopped or killed, the same command goes on. In parentheses: what is used if an option is not given.
"""
CACHED = """\
examples:
  seqdefer cache ls runs/tsp-quick              labellings, and shards of those that were not finished
  seqdefer cache verify runs/tsp-quick          reads every byte; exit status 1 where something is damaged
  seqdefer cache rm runs/tsp-quick --damaged    who needs it makes it again
  seqdefer cache rm labels 3f9c                 one labelling, by its name or the beginning of it

DIR is what --labels named, the folder of a run, or a fitted model's. Shards that another labelling needs stay.
"""
COLUMNS = ("name", "task", "split", "kind", "rows", "shards", "bytes")


def add_engine(parser: argparse.ArgumentParser, *, store: str) -> None:
    """The options of all that label. `store`: where labels are kept if nobody says."""
    group = parser.add_argument_group("labelling")
    words = "who labels: processes of this machine, or a Ray cluster (this process alone)"
    group.add_argument("--engine", metavar="local|ray", help=words)
    words = "processes or actors (one a core, or one a GPU)"
    group.add_argument("--workers", type=int, metavar="N", help=words)
    words = "of each worker; the same number gives the same bits (1)"
    group.add_argument("--threads", type=int, metavar="N", help=words)
    words = "of a Ray cluster that runs; auto is the one of this machine (one is started here for the time)"
    group.add_argument("--address", metavar="HOST:PORT", help=words)
    words = "examples of a file, which is what is made again where something is killed (as many as the models take)"
    group.add_argument("--shard-size", type=int, metavar="N", help=words)
    group.add_argument("--labels", type=Path, metavar="DIR", help=f"where labels are kept and looked for ({store})")


def chosen_engine(chosen: argparse.Namespace) -> ExecutorSettings:
    from seqdefer.labels.executors.settings import ExecutorSettings

    given = {name: value for name, value in vars(chosen).items() if value is not None}
    settings: ExecutorSettings = override(ExecutorSettings(), given)
    return settings


# -- label ---------------------------------------------------------------------------------------------------------


def label(arguments: list[str]) -> int:
    from seqdefer.evaluation.splits import label_task

    entry = task_of("label", arguments)
    chosen = _label_parser(entry).parse_args(arguments[1:])
    options, settings = chosen_settings(entry, chosen)
    labelling = chosen_engine(chosen)
    folder = chosen.out or Path("runs") / f"{entry.name}-{chosen.preset}"
    sizes = {"seeds": settings.seeds, "instances": settings.instances, "rollouts": settings.rollouts}
    begun = time.perf_counter()
    with work_in(folder, entry.name), progress(quiet=chosen.quiet) as meter:
        made = label_task(
            entry, options, folder, chosen.splits, labelling, **sizes, device=chosen.device, meter=meter
        )  # fmt: skip
    _print_made(made, labelling.store_in(folder), time.perf_counter() - begun, as_json=chosen.json)
    return 0


def _label_parser(entry: TaskEntry) -> Parser:
    from seqdefer.evaluation.settings import experiment_settings

    usual = experiment_settings(entry, USUAL)
    parser = task_parser(
        "label",
        entry,
        "Makes the labels that seqdefer run will need, by as many workers as you like, and keeps them in files that "
        "are checked whenever they are read. Whoever makes them, they are the same to the bit.",
        folder=f"runs/{entry.name}-PRESET, as run",
        printed="what was made as JSON instead of a table",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = LABELLED
    group = parser.add_argument_group("what to label")
    every = "train,validation,test"
    group.add_argument("--splits", type=names, default=names(every), metavar="A,B", help=f"of the task ({every})")
    group.add_argument("--seeds", type=int, metavar="N", help=f"runs that will need test instances ({usual.seeds})")
    group.add_argument("--instances", type=int, metavar="N", help=f"test instances of a run ({usual.instances})")
    words = f"of each example to learn from by token, where sequences are long ({usual.rollouts})"
    group.add_argument("--rollouts", type=int, metavar="N", help=words)
    add_engine(parser, store="labels, in the folder of --out")
    add_options(parser, f"the {entry.name} task", entry.name, usual_options(entry))
    parser.set_defaults(architecture=None, draft_architecture=None)
    return parser


def _print_made(made: list[LabellingResult], store: Path, seconds: float, *, as_json: bool) -> None:
    rows = [
        {"split": one.manifest.split, "kind": one.manifest.kind, "rows": one.manifest.rows, "found": one.found,
         "made": one.made, "bytes": one.manifest.size, "expert_calls": one.manifest.expert_calls}
        for one in made
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"labels": str(store), "seconds": round(seconds, 3), "parts": rows}))
        return
    headings = ("split", "kind", "rows", "shards found", "shards made", "bytes", "expert calls")
    _print_table(f"labels in {store}", headings, [list(row.values()) for row in rows])


def _print_table(title: str, headings: tuple[str, ...], rows: list[list[Any]]) -> None:
    """Plain, so that names stay whole on a narrow terminal and in a pipe."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(one_line(title))
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# -- cache ---------------------------------------------------------------------------------------------------------


def add_cache(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="list, verify and remove the labels in a folder",
        description="What is kept of labelling, and whether every byte of it is as it was written.",
        epilog=CACHED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=Parser)
    for name, words, command in (
        ("ls", "what there is", _list),
        ("verify", "read every byte, and say what is damaged or missing", _verify),
        ("rm", "remove labellings, or what is of no use", _remove),
    ):
        action = actions.add_parser(
            name, help=words, description=f"{words[:1].upper()}{words[1:]}.", allow_abbrev=False
        )
        action.add_argument(
            "folder", type=Path, metavar="DIR", help="what --labels named, or the folder of a run or model"
        )
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(command=command)
    action.add_argument(
        "names", nargs="*", default=(), metavar="NAME", help="of labellings, or the beginnings of names"
    )
    action.add_argument("--damaged", action="store_true", help="what verify would name")
    action.add_argument("--unfinished", action="store_true", help="what no labelling names; not while one is made")
    action.add_argument("--all", action="store_true", help="all labels; other files stay")


def _list(chosen: argparse.Namespace) -> int:
    from seqdefer.labels.inventory import find_store, take_inventory

    store = find_store(chosen.folder)
    found = take_inventory(store)
    rows = _rows(found)
    unfinished = {"shards": len(found.orphans), "bytes": found.orphan_bytes, "half_written": len(found.partial_files)}
    if chosen.json:
        print(json.dumps({"labels": str(store.folder), "labellings": rows, "unfinished": unfinished}))
        return 0
    _print_table(f"labels in {store.folder}", (*COLUMNS, "made (UTC)", "missing"), [list(row.values()) for row in rows])
    if any(unfinished.values()):
        parts = f"{len(found.orphans)} shards ({found.orphan_bytes:,} bytes), {len(found.partial_files)} half written"
        print(f"of no labelling: {parts}; a labelling that goes on finds its shards")
    return 0


def _rows(found: Inventory) -> list[dict[str, Any]]:
    rows = []
    for one in found.labellings:
        manifest = one.manifest
        values = (manifest.name, manifest.task, manifest.split, manifest.kind, manifest.rows, len(manifest.shards))
        rows.append(
            dict(zip(COLUMNS, (*values, manifest.size), strict=True)) | {"made": one.made, "missing": len(one.missing)}
        )
    return rows


def _verify(chosen: argparse.Namespace) -> int:
    from seqdefer.labels.inventory import find_store, verify

    store = find_store(chosen.folder)
    wrong = verify(store)
    if chosen.json:
        print(json.dumps({"labels": str(store.folder), "damaged": {str(path): words for path, words in wrong.items()}}))
    else:
        print(
            "\n".join(wrong.values()) or f"all {len(store.names())} shards in {store.folder} are as they were written"
        )
    return 1 if wrong else 0


def _remove(chosen: argparse.Namespace) -> int:
    from seqdefer.labels import inventory

    store = inventory.find_store(chosen.folder)
    ways = {
        "--damaged": inventory.remove_damaged,
        "--unfinished": inventory.remove_unfinished,
        "--all": inventory.remove_all,
    }
    asked = [way for flag, way in ways.items() if getattr(chosen, flag[2:])]
    if not (asked or chosen.names):
        raise OptionError(
            "nothing was named to remove; give names (seqdefer cache ls shows them), or " + ", ".join(ways)
        )
    removed = inventory.remove_labellings(store, chosen.names) if chosen.names else []
    for way in asked:
        removed += way(store)
    if chosen.json:
        print(json.dumps({"labels": str(store.folder), "removed": [str(path) for path in removed]}))
    else:
        print("\n".join(f"removed {path}" for path in removed) or "there was nothing of that")
    return 0
