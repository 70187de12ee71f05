"""The command line: parse, call one library function, print. Results go to stdout, talk goes to stderr.

Exit status: 0 done, 2 something the user can mend (one line says what), 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import shlex
import sys
import typing
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from seqdefer import __version__
from seqdefer.errors import ContractError, OptionError, SeqdeferError, unknown
from seqdefer.store import writable_folder

if TYPE_CHECKING:
    from seqdefer.calibration import Calibration
    from seqdefer.interfaces import TaskEntry
    from seqdefer.results import Results
    from seqdefer.settings import ExperimentSettings

USUAL = "quick"  # the preset where none is named
FEW = 200  # inputs: the share that a budget spends is known to some points at best
EXAMPLES = """\
start here:
  seqdefer run weather --preset quick        a few minutes: fit, evaluate, report
  seqdefer run weather --data my.csv.gz      the same on your own temperature record
  seqdefer run weather --help                everything that can be chosen
  seqdefer run tsp --preset quick            tours: a pointer network and a solver
  seqdefer plot runs/weather-quick           draw the report and the figures of a run again
  seqdefer reproduce all --preset quick      the paper's tables and figures, ours beside the paper's
  seqdefer fit text --help                   a rejector for your own pair and documents; then: seqdefer generate

A cheap predictor writes a sequence; a learned rejector decides where a stronger, dearer expert takes over. `run`
measures how much loss is left for each number of tokens the expert writes; the area under that curve is the AUDC.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see: {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    # PyTorch's threads spin while they wait, which on a busy machine costs more than the work; read when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without the degree sign still gets its table
        sys.stdout.reconfigure(errors="replace")  # stderr never fails: it writes escapes
    warnings.formatwarning = lambda message, *_, **__: f"seqdefer: {_one_line(str(message))}\n"
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except SeqdeferError as error:
        print(f"seqdefer: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("seqdefer: stopped; the same command goes on from what is finished", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a folder in the place of a file
        print(f"seqdefer: {_one_line(str(error))}; mend that and run again", file=sys.stderr)
        return 2


def _one_line(message: str) -> str:
    """Names of files and options may hold line ends and escape sequences, which are not for the terminal to obey."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in message)


def _main(arguments: list[str]) -> int:
    parser = _Parser(
        prog="seqdefer",
        description="Partial deferral of sequences.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"seqdefer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    commands.add_parser("run", help="fit and evaluate every method on a task, write a report", add_help=False)
    commands.add_parser("train-predictor", help="train the predictor of a task that has one to train", add_help=False)
    commands.add_parser("fit", help="fit a rejector for your own pair and data, ready to use", add_help=False)
    _add_calibrate(commands)
    _add_generate(commands)
    _add_serve(commands)
    tasks = commands.add_parser("tasks", help="list the tasks that are installed")
    tasks.add_argument("--json", action="store_true", help="print JSON")
    tasks.set_defaults(command=_tasks)
    _add_reproduce(commands)
    plot = commands.add_parser("plot", help="draw the report and the figures of a run again")
    plot.add_argument("folder", type=Path, metavar="DIR", help="folder of a run (it holds results.json)")
    plot.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: into the same folder)")
    plot.set_defaults(command=_plot)
    if arguments[:1] == ["run"]:  # its options depend on the task, so it has a parser of its own
        return _run(arguments[1:])
    if arguments[:1] == ["train-predictor"]:
        return _train_predictor(arguments[1:])
    if arguments[:1] == ["fit"]:
        return _fit(arguments[1:])
    chosen = parser.parse_args(arguments)
    chosen.arguments = arguments
    status: int = chosen.command(chosen)
    return status


# -- run -----------------------------------------------------------------------------------------------------------


def _run(arguments: list[str]) -> int:
    from seqdefer.experiment import run_task

    entry = _task_of("run", arguments)
    chosen = _run_parser(entry).parse_args(arguments[1:])
    options, settings = _chosen_settings(entry, chosen)
    folder = chosen.out or Path("runs") / f"{entry.name}-{chosen.preset}"
    how = {"preset": chosen.preset, "command": f"seqdefer run {shlex.join(arguments)}", "device": chosen.device}
    with writable_folder(folder), _progress(quiet=chosen.quiet) as meter:
        results = run_task(entry, options, settings, folder, **how, meter=meter)
    if chosen.json:
        print(json.dumps(results.to_json(), allow_nan=False))
    else:
        _print_table(results)
    print(f"\nreport: {folder / 'report.html'}\nresults: {folder / 'results.json'}", file=sys.stderr)
    return 0


def _task_of(command: str, arguments: list[str]) -> TaskEntry:
    """The task named first among the arguments of a command."""
    from seqdefer.experiment import find_tasks, load_task

    if not arguments or arguments[0] in ("-h", "--help"):
        names = ", ".join(sorted(find_tasks()))
        usage = f"seqdefer {command} TASK"
        print(f"usage: {usage} [options]\n\ntasks: {names}\n\noptions of a task: {usage} --help")
        raise SystemExit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise OptionError(f"name the task first: seqdefer {command} TASK {arguments[0]} ...; see: seqdefer tasks")
    return load_task(arguments[0])


def _chosen_settings(entry: TaskEntry, chosen: argparse.Namespace) -> tuple[Any, ExperimentSettings]:
    """The preset's options of the task and settings of the experiment, with what was chosen on the command line."""
    from seqdefer.settings import experiment_settings

    if chosen.preset not in entry.presets:
        raise unknown("preset", chosen.preset, entry.presets)
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    defaults = entry.presets[chosen.preset]
    # A task's option is nobody else's, even where the experiment has a setting of that name.
    own = {field.name: given.pop(field.name) for field in dataclasses.fields(defaults) if field.name in given}
    usual = experiment_settings(entry, chosen.preset, chosen.draft_architecture, chosen.architecture)
    settings: ExperimentSettings = _override(usual, given)
    return dataclasses.replace(defaults, **own), settings


def _run_parser(entry: TaskEntry) -> _Parser:
    from seqdefer.settings import experiment_settings

    usual = experiment_settings(entry, USUAL)
    parser = _task_parser(
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
    group.add_argument("--methods", type=_names, metavar="A,B", help="only these (all); Random and oracles come along")
    _add_learning(parser, usual)
    _add_options(parser, f"the {entry.name} task", entry.name, _usual_options(entry))
    return parser


def _task_parser(command: str, entry: TaskEntry, does: str, *, folder: str, printed: str) -> _Parser:
    """What all commands have that learn something on a task."""
    presets = sorted(entry.presets, reverse=True)
    parser = _Parser(
        prog=f"seqdefer {command} {entry.name}",
        description=f"{entry.summary[:1].upper()}{entry.summary[1:]}. {does}",
        epilog=f"In parentheses: what is used if an option is not given. Other presets than {USUAL} change it.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default=USUAL, metavar="|".join(presets), help=f"sizes to start from ({USUAL})")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where to write ({folder})")
    _add_common(parser, printed)
    return parser


def _add_common(parser: argparse.ArgumentParser, printed: str) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU where there is one (auto)")
    parser.add_argument("--json", action="store_true", help=f"print {printed}")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _add_learning(parser: _Parser, usual: ExperimentSettings) -> None:
    from seqdefer.losses import PHIS, PSIS
    from seqdefer.rejectors import DRAFT_NETWORKS
    from seqdefer.training import STRATEGIES

    group = parser.add_argument_group("learning")
    group.add_argument("--architecture", metavar="lstm|mlp", help=f"token-level network ({usual.token.architecture})")
    words = f"network that scores whole drafts ({usual.once.architecture})"
    group.add_argument("--draft-architecture", metavar="|".join(DRAFT_NETWORKS), help=words)
    group.add_argument("--phi", metavar="|".join(PHIS), help=f"token-level surrogate ({usual.phi})")
    group.add_argument("--psi", metavar="|".join(PSIS), help=f"one-time surrogate ({usual.psi})")
    words = f"how token-level training rollouts go on ({usual.strategy})"
    group.add_argument("--strategy", metavar="|".join(STRATEGIES), help=words)
    words = f"of each example to learn from by token, where sequences are long ({usual.rollouts})"
    group.add_argument("--rollouts", type=int, metavar="N", help=words)
    group.add_argument("--hand-offs", type=int, metavar="N", help="how many hand-off points are allowed (all)")
    group.add_argument("--alpha", type=float, metavar="X", help="cost of deferring a whole sequence (rule of thumb)")
    group.add_argument(
        "--price",
        type=float,
        metavar="X",
        help="cost added to each expert token (0, or a little where losses are flat)",
    )


def _usual_options(entry: TaskEntry) -> Any:
    return entry.presets.get(USUAL) or next(iter(entry.presets.values()))


def _add_options(parser: _Parser, title: str, task: str, defaults: Any) -> None:
    """An option for each field of a task's dataclass."""
    group, hints = parser.add_argument_group(title), typing.get_type_hints(type(defaults))
    for field in dataclasses.fields(defaults):
        flag, words = "--" + field.name.replace("_", "-"), _help_of(field, getattr(defaults, field.name))
        try:
            group.add_argument(flag, help=words, **_kind_of_option(hints[field.name]))
        except argparse.ArgumentError as error:  # it names the option that is there already
            raise ContractError(
                f"the field {field.name!r} of the options of task {task!r} cannot become the option {flag}: "
                f"{error.message}; rename the field"
            ) from error


def _help_of(field: dataclasses.Field[Any], default: Any) -> str:
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    words = f"{field.metadata.get('help', '')}{'' if default in (None, '') else f' ({shown})'}"
    return words.strip().replace("%", "%%")  # argparse would fill in what follows a single one


def _kind_of_option(hint: Any) -> dict[str, Any]:
    """What argparse is told of an option whose field has this type."""
    kinds = [kind for kind in (typing.get_args(hint) or [hint]) if kind is not type(None)]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if typing.get_origin(hint) is typing.Literal:
        return {"metavar": "|".join(kinds)}
    return {"type": kinds[0], "metavar": kinds[0].__name__.upper()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _override(defaults: Any, given: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(defaults)}
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if name in known})


def _print_table(results: Results) -> None:
    from rich.console import Console

    from seqdefer.tables import results_table

    Console().print(results_table(results))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """Bars on stderr, one a stage."""
    from seqdefer.interfaces import Silent

    if quiet:
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Nobody watches a log: there the bars would only stand between the reader and the one line of an error. What is
    # printed meanwhile goes above them on a terminal, and nowhere but to stdout where that is a file or a pipe.
    is_shared = sys.stdout.isatty()
    with Progress(*columns, console=console, disable=not console.is_interactive, redirect_stdout=is_shared) as bars:
        yield _Bars(bars)


class _Bars:
    SHOWN = 10  # finished stages: more than a terminal has lines would hide the one that runs

    def __init__(self, bars: Any) -> None:
        self.bars, self.finished = bars, deque[Any]()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        bar = self.bars.add_task(name, total=total)
        yield lambda steps: self.bars.advance(bar, steps)
        self.bars.update(bar, completed=total)  # early stopping leaves epochs unused
        self.bars.stop_task(bar)
        self.finished.append(bar)
        if len(self.finished) > self.SHOWN:
            self.bars.update(self.finished.popleft(), visible=False)


# -- train-predictor -----------------------------------------------------------------------------------------------


def _train_predictor(arguments: list[str]) -> int:
    from seqdefer.environment import choose_device

    entry = _task_of("train-predictor", arguments)
    if entry.training is None:
        raise OptionError(
            f"the predictor of {entry.name} has no training of its own: seqdefer run {entry.name} makes it"
        )
    parser = _Parser(
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
    _add_options(parser, "training", entry.name, entry.training.options)
    chosen = parser.parse_args(arguments[1:])
    given = {name: value for name, value in vars(chosen).items() if value is not None}
    options = _override(entry.training.options, given)
    with writable_folder(chosen.out), _progress(quiet=chosen.quiet) as meter:
        reached = entry.training.train(options, chosen.out, choose_device(chosen.device), meter)
    print(json.dumps(dict(reached)) if chosen.json else "\n".join(f"{key}: {text}" for key, text in reached.items()))
    return 0


# -- fit, calibrate, generate --------------------------------------------------------------------------------------


def _fit(arguments: list[str]) -> int:
    from seqdefer.fitting import fit_model, require_served

    entry = _task_of("fit", arguments)
    require_served(entry)
    chosen = _fit_parser(entry).parse_args(arguments[1:])
    options, settings = _chosen_settings(entry, chosen)
    folder = chosen.out or Path("models") / entry.name
    with writable_folder(folder), _progress(quiet=chosen.quiet) as meter:
        model = fit_model(entry, options, settings, folder, method=chosen.method, device=chosen.device, meter=meter)
    assert model.calibration is not None
    _print_calibration(model.calibration, as_json=chosen.json)
    name = shlex.quote(str(folder))
    if model.calibration.inputs < FEW:
        few = f"budgets were measured on {model.calibration.inputs} inputs only"
        print(f"\n{few}; with more they hold better: seqdefer calibrate {name} --data FILE", file=sys.stderr)
    print(f"\nuse it: seqdefer generate {name} INPUT --budget 0.2", file=sys.stderr)
    return 0


def _fit_parser(entry: TaskEntry) -> _Parser:
    from seqdefer.settings import experiment_settings

    parser = _task_parser(
        "fit",
        entry,
        "Fits one rejector, finds out which threshold spends which budget, and writes a folder for: seqdefer generate. "
        "Stopped work goes on where it was.",
        folder=f"models/{entry.name}",
        printed="what budgets spend as JSON instead of a table",
    )
    words = "TokenwiseModel, OneTimeModel or OneTimeCost (the first, or where the expert only completes, the last)"
    parser.add_argument("--method", metavar="NAME", help=words)
    _add_learning(parser, experiment_settings(entry, USUAL))
    _add_options(parser, f"the {entry.name} task", entry.name, _usual_options(entry))
    return parser


def _add_calibrate(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="find out which threshold spends which budget on inputs like yours",
        description="Writes inputs at every threshold and counts what the expert wrote: budgets of the model then mean "
        "what they say on inputs like these. No references are needed.",
        epilog="In parentheses: what is used if an option is not given.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what seqdefer fit wrote; the budgets go there too")
    words = "inputs, plain or gzip: JSONL (*.jsonl), or any other text with one input a line"
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help=words)
    parser.add_argument("--field", metavar="NAME", help="of JSONL, what holds the input (as it was called for fit)")
    parser.add_argument("--inputs", type=int, default=500, metavar="N", help="how many of them, at most (500)")
    _add_common(parser, "what budgets spend as JSON instead of a table")
    parser.set_defaults(command=_calibrate)


def _calibrate(chosen: argparse.Namespace) -> int:
    from seqdefer.deferring import DeferringModel
    from seqdefer.store import inputs_in, read_lines

    if chosen.inputs < 2:
        raise OptionError(f"--inputs is {chosen.inputs}; it must be at least 2")
    lines = read_lines(chosen.data)[: chosen.inputs]
    with _progress(quiet=chosen.quiet) as meter:
        model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter, budgets=False)
        inputs = inputs_in(lines, chosen.data, chosen.field or model.served.codec.field)
        with meter.stage("calibrate budgets", len(inputs)) as advance:
            found = model.calibrate(inputs, progress=advance)
        model.save_calibration(chosen.folder)
    _print_calibration(found, as_json=chosen.json)
    return 0


def _print_calibration(found: Calibration, *, as_json: bool) -> None:
    from rich.console import Console

    from seqdefer.tables import calibration_table, shown_settings

    if as_json:
        budgets = [{**dataclasses.asdict(one), "met": one.is_near(one.budget)} for one in shown_settings(found)]
        print(json.dumps({"inputs": found.inputs, "budgets": budgets}, allow_nan=False))
    else:
        Console().print(calibration_table(found))


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="write with a fitted pair, at a budget",
        description="Writes for one input or several, and shows who wrote what: the expert's tokens are coloured, or "
        "where there are no colours in brackets.",
        epilog="In parentheses: what is used if an option is not given.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what seqdefer fit wrote")
    words = "what to write for: a text, cities as JSON; - reads one from standard input"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=words)
    parser.add_argument("--budget", type=float, default=0.2, metavar="X", help="share of tokens for the expert (0.2)")
    words = "decide by a score of your own instead of a budget; inf never defers"
    parser.add_argument("--threshold", type=float, metavar="X", help=words)
    _add_common(parser, "JSON, one object a line for each input")
    parser.set_defaults(command=_generate)


def _generate(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from seqdefer.deferring import DeferringModel
    from seqdefer.tables import written_lines

    inputs = [sys.stdin.read() if text == "-" else text for text in chosen.inputs]
    with _progress(quiet=chosen.quiet) as meter:
        model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter)
        written = model.generate(inputs, chosen.budget, threshold=chosen.threshold)
    console = Console(highlight=False, soft_wrap=True)  # a pipe gets the text as it is, not in lines of 80
    has_colours = console.color_system is not None and not console.no_color
    for row in written.rows(model.served.codec):
        if chosen.json:
            print(json.dumps(row, allow_nan=False))
        else:
            for line in written_lines(row, colours=has_colours):
                console.print(line)
    return 0


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="a fitted pair behind the API that clients of OpenAI speak",
        description="Answers /v1/completions, /v1/chat/completions and /v1/models as OpenAI does, streams included, at "
        "the budget that a request names: model NAME@0.20, or a field deferral with a budget. Also /v1/deferral/score, "
        "/health and /metrics. Ctrl-C ends it.",
        epilog="In parentheses: what is used if an option is not given.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what seqdefer fit wrote")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (8000)")
    parser.add_argument("--name", help="what clients call the model (the name of the folder)")
    parser.add_argument("--budget", type=float, default=0.2, metavar="X", help="where a request names none (0.2)")
    words = "what clients must send; better in SEQDEFER_API_KEY, where no list of processes shows it (none)"
    parser.add_argument("--api-key", metavar="KEY", help=words)
    parser.add_argument("--body-bytes", type=int, metavar="N", help="of one request, at most (1 MiB)")
    parser.add_argument("--request-seconds", type=float, metavar="X", help="for one request, at most (120)")
    parser.add_argument("--inputs", type=int, metavar="N", help="of one request, at most (16)")
    parser.add_argument("--queue", type=int, metavar="N", help="requests that may wait (256)")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences written together, at most (32)")
    parser.add_argument("--running", type=int, metavar="N", help="sequences in memory at once, at most (128)")
    words = "for one call of the expert; then the predictor finishes (no limit)"
    parser.add_argument("--expert-seconds", type=float, metavar="X", help=words)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU where there is one (auto)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(command=_serve)


def _serve(chosen: argparse.Namespace) -> int:
    from seqdefer.deferring import DeferringModel
    from seqdefer.server.limits import Limits
    from seqdefer.server.running import address_of, listen, require_extra, serve

    require_extra()
    limits = _override(Limits(), {name: value for name, value in vars(chosen).items() if value is not None})
    api_key = os.environ.get("SEQDEFER_API_KEY") if chosen.api_key is None else chosen.api_key
    if api_key == "":
        raise OptionError("the API key is empty; give one, or leave --api-key and SEQDEFER_API_KEY out")
    name = chosen.name or chosen.folder.resolve().name
    with listen(chosen.host, chosen.port) as listening:
        with _progress(quiet=chosen.quiet) as meter:
            model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter)
        talk = f"serving {name} at {address_of(listening)}/v1; Ctrl-C ends it"
        if api_key is None and not listening.getsockname()[0].startswith(("127.", "::1")):
            talk += "\nwithout an API key: whoever reaches this machine can use it"

        def say() -> None:
            print(talk, file=sys.stderr, flush=True)

        serve(model, name, listening, limits=limits, api_key=api_key, budget=chosen.budget, ready=say)
    return 0


# -- reproduce -----------------------------------------------------------------------------------------------------


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


def _add_reproduce(commands: Any) -> None:
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
    parser.add_argument("--tasks", type=_names, metavar="A,B", help="only these of the tasks (all)")
    words = "an option of a task, as in: seqdefer run TASK --help; may be given again"
    parser.add_argument("--set", action="append", default=[], metavar="TASK.OPTION=VALUE", help=words)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (runs/reproduce-PRESET)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto: a GPU where there is one (auto)")
    parser.add_argument(
        "--no-figures", action="store_true", help="no PDF and SVG, for which the extra 'figures' is needed"
    )
    parser.add_argument("--json", action="store_true", help="print the studies as JSON, one a line, instead of tables")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(command=_reproduce)


def _reproduce(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from seqdefer.reproduction.command import Choices, reproduce
    from seqdefer.reproduction.records import Judgements, Study
    from seqdefer.reproduction.writing import tables_of
    from seqdefer.results import to_plain

    choices = Choices(
        chosen.preset, chosen.seeds, chosen.instances, chosen.tasks, _set_options(chosen.set), chosen.device,
        figures=not chosen.no_figures,
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
    with writable_folder(folder), _progress(quiet=chosen.quiet) as meter:
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


# -- the others ----------------------------------------------------------------------------------------------------


def _tasks(chosen: argparse.Namespace) -> int:
    from seqdefer.experiment import find_tasks, load_task

    found = {name: load_task(name).summary for name in sorted(find_tasks())}
    if chosen.json:
        print(json.dumps(found))
    else:
        width = max(map(len, found), default=0)
        print("\n".join(f"{name:<{width}}  {summary}" for name, summary in found.items()))
    return 0


def _plot(chosen: argparse.Namespace) -> int:
    from seqdefer.plots import write_plots
    from seqdefer.report import panels_of, write_report
    from seqdefer.results import load_results

    results = load_results(chosen.folder)
    home = chosen.folder if chosen.folder.is_dir() else chosen.folder.parent
    folder = chosen.out or home
    with writable_folder(folder):
        report = write_report(results, folder / "report.html", panels=panels_of(home))
        written = [report, *write_plots(results, folder)]
    for path in written:
        print(path)
    return 0
