"""`seqdefer label` and `seqdefer cache`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.cli import common
from seqdefer.cli.common import Command, Parser
from seqdefer.errors import OptionError, one_line
from seqdefer.progress_bars import show_progress

if TYPE_CHECKING:
    from seqdefer.interfaces import TaskEntry
    from seqdefer.labels.label_store import LabellingResult

LABEL_EXAMPLES = f"""\
examples:
  seqdefer label tsp --engine local                       a process on every core
  seqdefer run tsp                                        finds the labels in the same folder
  seqdefer label tsp --engine ray --address HOST:6379     on a cluster whose machines read the same folders
  seqdefer cache ls runs/tsp-quick                        list the labels

After an interruption, the same command resumes. {common.DEFAULTS_NOTE}
"""
CACHE_EXAMPLES = """\
examples:
  seqdefer cache ls runs/tsp-quick              labellings, and shards of unfinished ones
  seqdefer cache verify runs/tsp-quick          read every byte; exit status 1 if something is damaged
  seqdefer cache rm runs/tsp-quick --damaged    the next run makes them again
  seqdefer cache rm labels 3f9c                 one labelling, by its name or the start of its name

DIR is the folder of --labels, of a run or of a fitted model. Shards that another labelling needs stay.
"""
COLUMNS = ("name", "task", "split", "kind", "rows", "shards", "bytes")
EVERY_SPLIT = "train,validation,test"


# -- label ---------------------------------------------------------------------------------------------------------


def label(arguments: list[str]) -> int:
    from seqdefer.evaluation.splits import label_task

    entry = common.task_of("label", arguments)
    chosen = _label_parser(entry).parse_args(arguments[1:])
    options, settings = common.chosen_settings(entry, chosen)
    labelling = common.chosen_executor(chosen)
    folder = common.run_folder(entry, chosen)
    sizes = {"seeds": settings.seeds, "instances": settings.instances}
    started = time.perf_counter()
    with common.work_in(folder, entry), show_progress(quiet=chosen.quiet) as meter:
        results = label_task(
            entry, options, folder, chosen.splits, labelling, **sizes, trees=settings.tree_kind,
            rollouts=settings.rollouts, device=chosen.device, meter=meter,
        )  # fmt: skip
    _print_results(results, labelling.store_in(folder), time.perf_counter() - started, as_json=chosen.json)
    return 0


def _label_parser(entry: TaskEntry) -> Parser:
    defaults = common.default_settings(entry)
    parser = common.task_parser(
        "label",
        entry,
        "Make the labels that seqdefer run will need, with any number of workers, in files that are verified on every "
        "read. The labels are equal to the bit, whichever engine makes them.",
        folder=f"runs/{entry.name}-PRESET, like run",
        printed="what was made as JSON instead of a table",
        epilog=LABEL_EXAMPLES,
    )
    group = parser.add_argument_group("what to label")
    words = f"splits of the task ({EVERY_SPLIT})"
    group.add_argument("--splits", type=common.names, default=common.names(EVERY_SPLIT), metavar="A,B", help=words)
    words = f"runs that will need their own test instances ({defaults.seeds})"
    group.add_argument("--seeds", type=int, metavar="N", help=words)
    group.add_argument("--instances", type=int, metavar="N", help=f"test instances per run ({defaults.instances})")
    common.add_trees(group, defaults)
    common.add_executor(parser, store="labels, in the folder of --out")
    common.add_task_options(parser, entry)
    parser.set_defaults(architecture=None, draft_architecture=None)
    return parser


def _print_results(results: list[LabellingResult], store: Path, seconds: float, *, as_json: bool) -> None:
    rows = [
        {"split": one.manifest.split, "kind": one.manifest.kind, "rows": one.manifest.rows, "found": one.found,
         "made": one.made, "bytes": one.manifest.size, "expert_calls": one.manifest.expert_calls}
        for one in results
    ]  # fmt: skip
    if as_json:
        print(json.dumps({"labels": str(store), "seconds": round(seconds, 3), "parts": rows}))
        return
    headings = ("split", "kind", "rows", "shards found", "shards made", "bytes", "expert calls")
    _print_table(f"labels in {store}", headings, [list(row.values()) for row in rows])


def _print_table(title: str, headings: tuple[str, ...], rows: list[list[Any]]) -> None:
    """Print a plain table, which keeps names whole on a narrow terminal and in a pipe."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(one_line(title))
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


# -- cache ---------------------------------------------------------------------------------------------------------


def cache(arguments: list[str]) -> int:
    parser = Parser(prog="seqdefer cache", description="List, verify or remove stored labels.", epilog=CACHE_EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, words, run in (
        ("ls", "list the labellings", _list),
        ("verify", "read every byte, and list what is damaged or missing", _verify),
        ("rm", "remove labellings, damaged files or unfinished ones", _remove),
    ):
        action = actions.add_parser(name, help=words, description=f"{words[:1].upper()}{words[1:]}.")
        action.add_argument("folder", type=Path, metavar="DIR", help="folder of --labels, of a run or of a model")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=run)
    words = "labellings to remove: names, or unambiguous starts of names"
    action.add_argument("names", nargs="*", default=(), metavar="NAME", help=words)
    action.add_argument("--damaged", action="store_true", help="remove what verify lists")
    words = "remove shards of no labelling; not while something is labelling"
    action.add_argument("--unfinished", action="store_true", help=words)
    action.add_argument("--all", action="store_true", help="remove all labels; other files stay")
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


def _list(chosen: argparse.Namespace) -> int:
    from seqdefer.labels.inventory import find_store, take_inventory

    store = find_store(chosen.folder)
    found, rows = take_inventory(store), []
    for one in found.labellings:
        manifest = one.manifest
        values = (manifest.name, manifest.task, manifest.split, manifest.kind, manifest.rows, len(manifest.shards))
        row = dict(zip(COLUMNS, (*values, manifest.size), strict=True))
        rows.append(row | {"made": one.made, "missing": len(one.missing)})
    shards, size, partial = len(found.orphans), found.orphan_bytes, len(found.partial_files)
    if chosen.json:
        unfinished = {"shards": shards, "bytes": size, "half_written": partial}
        print(json.dumps({"labels": str(store.folder), "labellings": rows, "unfinished": unfinished}))
        return 0
    _print_table(f"labels in {store.folder}", (*COLUMNS, "made (UTC)", "missing"), [list(row.values()) for row in rows])
    if shards or partial:
        print(f"unfinished: {shards} shards ({size:,} bytes), {partial} partial files; labelling again uses the shards")
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    from seqdefer.labels.inventory import find_store, verify

    store = find_store(chosen.folder)
    problems = verify(store)
    if chosen.json:
        damaged = {str(path): problem for path, problem in problems.items()}
        print(json.dumps({"labels": str(store.folder), "damaged": damaged}))
    else:
        print("\n".join(problems.values()) or f"all {len(store.names())} shards in {store.folder} are intact")
    return 1 if problems else 0


def _remove(chosen: argparse.Namespace) -> int:
    from seqdefer.labels import inventory

    store = inventory.find_store(chosen.folder)
    removers = {
        "--damaged": inventory.remove_damaged,
        "--unfinished": inventory.remove_unfinished,
        "--all": inventory.remove_all,
    }
    asked = [remover for flag, remover in removers.items() if getattr(chosen, flag[2:])]
    if not (asked or chosen.names):
        raise OptionError("nothing to remove; give names (seqdefer cache ls lists them), or " + ", ".join(removers))
    removed = inventory.remove_labellings(store, chosen.names) if chosen.names else []
    for remover in asked:
        removed += remover(store)
    if chosen.json:
        print(json.dumps({"labels": str(store.folder), "removed": [str(path) for path in removed]}))
    else:
        print("\n".join(f"removed {path}" for path in removed) or "nothing was removed")
    return 0


LABEL = Command("label", "make the labels of a task ahead of run, with many workers", label, resumes=True)
CACHE = Command("cache", "list, verify and remove stored labels", cache)
