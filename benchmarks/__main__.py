"""python -m benchmarks: run the benchmarks, print one table to stdout and write bench.json. Progress goes to stderr.

Exit status: 0 success, 1 two ways gave different results, 2 an error that the user can fix, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import labelling, rejector, server, speculation, text, tsp, weather
from benchmarks.measure import ResultsDifferError, Row
from benchmarks.weather import DEFAULT, QUICK, Bench, Sizes
from seqdefer import __version__
from seqdefer.environment import choose_device, machine
from seqdefer.errors import MissingExtraError, OptionError, SeqdeferError, unknown
from seqdefer.storage.files import writable_folder, write_json
from seqdefer.tasks.text.loading import DTYPES
from seqdefer.tasks.text.models import transformers

PLAIN = {**weather.BENCHMARKS, **tsp.BENCHMARKS, **labelling.BENCHMARKS}
OF_PAIRS = {**text.BENCHMARKS, **speculation.BENCHMARKS, **rejector.BENCHMARKS, **server.BENCHMARKS}
BENCHMARKS = {**PLAIN, **OF_PAIRS}  # in the order of the table
OURS = {name: words for name, (_, words) in BENCHMARKS.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see: python -m benchmarks --help")


def main(
    arguments: Sequence[str] | None = None, sizes: Sizes | None = None, text_sizes: text.Sizes | None = None
) -> int:
    """Run the command line. `sizes` and `text_sizes` replace those of the options."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _main(arguments, sizes, text_sizes)
    except SeqdeferError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, ResultsDifferError) else 2
    except KeyboardInterrupt:
        print("benchmarks: stopped; nothing was written", file=sys.stderr)
        return 130


def _main(arguments: list[str], sizes: Sizes | None, text_sizes: text.Sizes | None) -> int:
    chosen = _parser().parse_args(arguments)
    names = _names(chosen.only)
    if chosen.out.is_dir():
        raise OptionError(f"--out {chosen.out} is a folder; give a file name")
    sizes = sizes or (QUICK if chosen.quick else DEFAULT)
    choice = _text_choice(chosen, text_sizes or (text.QUICK if chosen.quick else text.DEFAULT))
    begun = time.perf_counter()
    with writable_folder(chosen.out.parent), tempfile.TemporaryDirectory() as folder:
        bench = Bench(sizes, Path(folder), data=chosen.data, full=chosen.full)
        rows = run(bench, names, choice, begun)
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(rows))
    command = " ".join(["python -m benchmarks", *_without_out(arguments)])
    made = provenance(bench, command, begun)
    if any(row.benchmark in OF_PAIRS for row in rows):
        made["text"] = text.provenance(choice)
    made["ours"] = {row.benchmark: OURS[row.benchmark] for row in rows}
    write_json(chosen.out, made | {"rows": [asdict(row) for row in rows]})
    print(f"written: {chosen.out}", file=sys.stderr)
    return 0


def _without_out(arguments: list[str]) -> list[str]:
    """Remove --out, which does not affect the results."""
    if "--out" not in arguments:
        return [one for one in arguments if not one.startswith("--out=")]
    place = arguments.index("--out")
    return arguments[:place] + arguments[place + 2 :]


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m benchmarks",
        description="Measure how many times faster seqdefer is than other ways to the same results, and how long "
        "training at the paper's size takes. Each benchmark first checks that the results are equal.",
        epilog=f"benchmarks: {', '.join(BENCHMARKS)}",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes: a few minutes instead of about 25")
    parser.add_argument("--full", action="store_true", help="train paper_scale to the end instead of extrapolating")
    parser.add_argument("--only", action="append", metavar="NAME", help="run only this benchmark; may be repeated")
    parser.add_argument("--data", metavar="PATH", help="a temperature record, as for `seqdefer run weather`")
    parser.add_argument(
        "--pair", nargs=2, metavar=("PREDICTOR", "EXPERT"), help="text: two models, of the Hub or folders (synthetic)"
    )
    parser.add_argument("--documents", metavar="FILE", help="text: JSON lines, plain or gzip; needs --pair (random)")
    parser.add_argument("--device", default="auto", help="text: cpu, cuda or auto: a GPU if there is one (auto)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="text: type of the weights (float32)")
    parser.add_argument(
        "--at-once",
        type=int,
        action="append",
        metavar="N",
        help="speculation: documents at once; may be repeated (all)",
    )
    parser.add_argument("--out", type=Path, default=Path("bench.json"), metavar="FILE", help="output file (bench.json)")
    return parser


def _text_choice(chosen: argparse.Namespace, sizes: text.Sizes) -> text.Choice:
    if chosen.documents is not None and chosen.pair is None:
        raise OptionError("--documents needs --pair: the synthetic pair reads token ids, not texts")
    choose_device(chosen.device)  # fail before measuring anything
    pair = None
    if chosen.pair is not None:
        transformers()
        pair = (chosen.pair[0], chosen.pair[1])
    return text.Choice(pair, chosen.documents, chosen.device, chosen.dtype, sizes, tuple(chosen.at_once or ()))


def _names(only: list[str] | None) -> list[str]:
    for name in only or ():
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS)
    return [name for name in BENCHMARKS if not only or name in only]


def run(bench: Bench, names: Sequence[str], choice: text.Choice, begun: float) -> list[Row]:
    """Run the benchmarks and return their rows; skip those that need a package that is missing."""
    rows: list[Row] = []
    for name in names:
        benchmark, _ = BENCHMARKS[name]
        bench.log = _logger(name, begun)
        bench.log("start")
        try:
            rows += benchmark(bench, choice) if name in OF_PAIRS else benchmark(bench)
        except MissingExtraError as missing:
            bench.log(f"skipped: {missing}")
    return rows


def _logger(name: str, begun: float) -> Callable[[str], None]:
    def log(line: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {name}: {line}", file=sys.stderr)

    return log


def provenance(bench: Bench, command: str, begun: float) -> dict[str, Any]:
    """Return what the results depend on."""
    tasks = {name: vars(bench)[name].describe() for name in ("task", "paper_task") if name in vars(bench)}
    return {
        "version": __version__,
        "command": command,
        "machine": {**machine(torch.device("cpu")), "threads": str(torch.get_num_threads())},
        "repeats": bench.sizes.repeats,
        "sizes": asdict(bench.sizes),
        "tasks": tasks,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as one table, grouped by benchmark."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("compared with")
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("min-max", no_wrap=True)
    table.add_column("equality of results, notes")
    for position, row in enumerate(rows):
        if position == 0 or rows[position - 1].benchmark != row.benchmark:
            table.add_row(f"[bold]{row.benchmark}: {OURS[row.benchmark]}[/bold]")
        spread = "" if row.low == row.high else f"{_number(row.low)}-{_number(row.high)}"
        remarks = "; ".join(filter(None, (row.same, row.note)))
        table.add_row(f"  {row.what}", f"{_number(row.median)} {row.unit}", spread, remarks)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
