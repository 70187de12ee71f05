"""Shared parts of commands: options from dataclasses, folders."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqdefer.cli.parser import Parser as Parser  # noqa: PLC0414, commands import it from here
from seqdefer.errors import CheckpointError, ContractError, OptionError, SeqdeferError, one_line
from seqdefer.recipes import DEFAULT_PRESET

if TYPE_CHECKING:
    from seqdefer.budgets.caps import Cap
    from seqdefer.evaluation.settings import ExperimentSettings
    from seqdefer.interfaces import TaskEntry
    from seqdefer.labels.executors.settings import ExecutorSettings


DEFAULTS_NOTE = "Defaults are in parentheses."
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `seqdefer`. `main` takes the arguments after its name and returns the exit status."""

    name: str
    help: str
    main: Callable[[list[str]], int]
    resumes: bool = False  # what was stopped, if it is run again


def exit_status(command: Callable[[], int], *, resumes: bool) -> int:
    """Run a command and return its exit status; errors that the user can correct become one line on stderr."""
    try:
        return command()
    except SeqdeferError as error:
        print(f"seqdefer: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        more = "; the same command resumes from what is finished" if resumes else ""
        print(f"seqdefer: stopped{more}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has left, as `| head` does
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a folder in place of a file
        print(f"seqdefer: {one_line(str(error))}; correct that and run again", file=sys.stderr)
        return 2


def run_module(command: Callable[[list[str]], str]) -> int:
    """Run a module that is a command of its own, `python -m MODULE ...`: print what it returns."""

    def run() -> int:
        print(command(sys.argv[1:]))
        return 0

    return exit_status(run, resumes=True)


def names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def given_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in vars(chosen).items() if value is not None}


def override(defaults: Any, given: dict[str, Any]) -> Any:
    """Replace the fields of a dataclass that are in `given`."""
    known = {field.name for field in dataclasses.fields(defaults)}
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if name in known})


# -- commands on tasks ---------------------------------------------------------------------------------------------


def task_of(command: str, arguments: list[str], *, needs: str | None = None) -> TaskEntry:
    """Load the task named by the first argument. `needs`: a field of its entry that not all tasks have."""
    from seqdefer.registry import find_tasks, load_task

    if not arguments or arguments[0] in ("-h", "--help"):
        tasks = [name for name in sorted(find_tasks()) if needs is None or getattr(load_task(name), needs)]
        usage = f"seqdefer {command} TASK"
        print(f"usage: {usage} [options]\n\ntasks: {', '.join(tasks)}\n\noptions of a task: {usage} --help")
        raise SystemExit(0 if arguments else 2)
    if arguments[0].startswith("-"):
        raise OptionError(f"name the task first: seqdefer {command} TASK {arguments[0]} ...; see: seqdefer tasks")
    return load_task(arguments[0])


def task_parser(
    command: str, entry: TaskEntry, description: str, *, folder: str, printed: str, epilog: str | None = None
) -> Parser:
    """Return a parser with the options of all commands that work on a task."""
    presets = sorted(entry.presets, reverse=True)
    parser = Parser(
        prog=f"seqdefer {command} {entry.name}",
        description=f"{entry.summary[:1].upper()}{entry.summary[1:]}. {description}",
        epilog=epilog or f"{DEFAULTS_NOTE} Presets other than {DEFAULT_PRESET} and --recipe published change them.",
    )
    words = f"sizes of data to start from; the paper's method is --recipe published ({DEFAULT_PRESET})"
    parser.add_argument("--preset", default=DEFAULT_PRESET, metavar="|".join(presets), help=words)
    words = "how rejectors are made: our way, or as published in the paper (ours)"
    parser.add_argument("--recipe", default="ours", metavar="|".join(entry.recipes), help=words)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where to write ({folder})")
    add_common(parser, printed)
    return parser


def add_common(parser: argparse.ArgumentParser, printed: str | None = None) -> None:
    """Add --device, --quiet and, for a command that prints data, --json."""
    words = "where to compute; auto uses a GPU if there is one (auto)"
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help=words)
    if printed is not None:
        parser.add_argument("--json", action="store_true", help=f"print {printed}")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def model_folder(text: str) -> Path:
    """Return the folder or the repository of a model. What begins with ./ is never a repository."""
    return Path(text).absolute() if text.startswith("./") else Path(text)


def add_model(parser: Parser) -> None:
    """Add the folder of a fitted model, and where its pair is now."""
    words = "folder of seqdefer fit, or a repository OWNER/NAME of the Hugging Face Hub"
    parser.add_argument("folder", type=model_folder, metavar="DIR", help=words)
    for role in ("predictor", "expert"):
        words = f"where the {role} is now: a name on the Hub, a folder or an address (as fitted); another is refused"
        parser.add_argument(f"--{role}", metavar="TEXT", help=words)


def add_guarantee(parser: Parser, usual: str) -> None:
    """Add the options that choose a budget rule; `usual` says what happens without them."""
    words = (
        "promise that budgets are kept on inputs like those of the calibration: in expectation, or with a confidence "
        f"({usual})"
    )
    parser.add_argument("--guarantee", metavar="expected|confident", help=words)
    words = "of --guarantee confident: the probability that the promise is right (0.9)"
    parser.add_argument("--confidence", type=float, metavar="X", help=words)
    words = "of --guarantee: share of all tokens, or mean share of the inputs (tokens)"
    parser.add_argument("--share-of", metavar="tokens|inputs", help=words)


def add_prices(parser: Parser) -> None:
    """Add the file of prices."""
    words = "TOML file of the prices of predictor and expert: what is spent and saved is shown (none)"
    parser.add_argument("--prices", type=Path, metavar="FILE", help=words)


def add_caps(parser: Parser) -> None:
    """Add the options of a hard cap."""
    group = parser.add_argument_group("hard caps, which are never exceeded")
    group.add_argument("--cap-tokens", type=int, metavar="N", help="tokens that the expert writes, at most (no cap)")
    words = "how often the expert is asked, at most: by token once for each, one for a hand-off (no cap)"
    group.add_argument("--cap-passes", type=int, metavar="N", help=words)
    group.add_argument(
        "--cap-money", type=float, metavar="X", help="money for the expert, at most; needs --prices (no cap)"
    )
    group.add_argument("--cap-per", metavar="sequence|request", help="what a cap is about (sequence)")
    words = "raise the threshold as the cap is used up, or defer as usual until it is (rising)"
    group.add_argument("--cap-policy", metavar="rising|cut-off", help=words)


def chosen_caps(chosen: Any) -> tuple[Cap, ...]:
    """Return the cap that `add_caps`, or settings of the same names, ask for."""
    from seqdefer.budgets.caps import Cap

    names = ("tokens", "passes", "money", "per", "policy")
    given = {name: value for name in names if (value := getattr(chosen, f"cap_{name}")) is not None}
    if given and not set(given) - {"per", "policy"}:
        raise OptionError("--cap-per and --cap-policy say how to cap; give --cap-tokens, --cap-passes or --cap-money")
    return (Cap(**given),) if given else ()


def add_learning(parser: Parser, entry: TaskEntry) -> None:
    """Add the options of commands that fit rejectors."""
    from seqdefer.hyperparameters import STRATEGIES
    from seqdefer.rejectors.checkpoints import draft_networks, token_networks
    from seqdefer.rejectors.losses import PHIS, PSIS

    group, defaults = parser.add_argument_group("learning"), default_settings(entry)
    words = f"token-level network ({defaults.token.architecture})"
    group.add_argument("--architecture", metavar="|".join(token_networks()), help=words)
    words = f"network that scores whole drafts ({defaults.once.architecture})"
    group.add_argument("--draft-architecture", metavar="|".join(draft_networks()), help=words)
    group.add_argument("--phi", metavar="|".join(PHIS), help=f"token-level surrogate ({defaults.phi})")
    group.add_argument("--psi", metavar="|".join(PSIS), help=f"one-time surrogate ({defaults.psi})")
    words = f"how token-level training rollouts continue ({defaults.strategy})"
    group.add_argument("--strategy", metavar="|".join(STRATEGIES), help=words)
    add_trees(group, defaults)
    group.add_argument("--hand-offs", type=int, metavar="N", help="number of allowed hand-off points (all)")
    group.add_argument("--alpha", type=float, metavar="X", help="cost of deferring a whole sequence (rule of thumb)")
    words = "cost added to each expert token (0, or a little where losses are flat; branched trees: the mean loss)"
    group.add_argument("--price", type=float, metavar="X", help=words)
    parser.keep_for_help_all(group._group_actions)


def add_executor(parser: argparse.ArgumentParser, *, store: str) -> list[argparse.Action]:
    """Add the options of all commands that label, and return them. `store` describes the default folder of labels."""
    group = parser.add_argument_group("labelling")
    words = "label in local processes or on a Ray cluster (this process)"
    group.add_argument("--engine", metavar="local|ray", help=words)
    group.add_argument("--workers", type=int, metavar="N", help="processes or actors (one per core, or per GPU)")
    words = "threads per worker; results are equal to the bit for equal numbers (1)"
    group.add_argument("--threads", type=int, metavar="N", help=words)
    words = "address of a Ray cluster; auto finds one on this machine (a temporary local cluster)"
    group.add_argument("--address", metavar="HOST:PORT", help=words)
    words = "examples per file; an interruption loses no more than the files in work (a batch of the models)"
    group.add_argument("--shard-size", type=int, metavar="N", help=words)
    group.add_argument("--labels", type=Path, metavar="DIR", help=f"where labels are stored ({store})")
    return group._group_actions


def chosen_executor(chosen: argparse.Namespace) -> ExecutorSettings:
    from seqdefer.labels.executors.settings import ExecutorSettings

    settings: ExecutorSettings = override(ExecutorSettings(), given_options(chosen))
    return settings


def add_trees(group: Any, defaults: ExperimentSettings) -> None:
    """Add what token-level rejectors of long sequences learn from."""
    from seqdefer.hyperparameters import TREE_KINDS

    words = (
        "decision trees of long sequences in token-level training: open ones call the models wherever a rollout leads, "
        "closed ones are made ahead, branched ones (ours) too, and count what a decision costs up to the end "
        f"({defaults.trees or 'closed for explore, else open'})"
    )
    group.add_argument("--trees", metavar="|".join(TREE_KINDS), help=words)
    words = f"rollouts per training example that trees are made of ahead ({defaults.rollouts})"
    group.add_argument("--rollouts", type=int, metavar="N", help=words)


def default_settings(entry: TaskEntry) -> ExperimentSettings:
    """Return the experiment settings of the default preset."""
    from seqdefer.evaluation.settings import experiment_settings

    return experiment_settings(entry, DEFAULT_PRESET)


def add_task_options(parser: Parser, entry: TaskEntry, *, reports: bool = True) -> None:
    """Add the options of a task. A command that reports on nothing uses test data for promises alone."""
    defaults = entry.presets.get(DEFAULT_PRESET) or next(iter(entry.presets.values()))
    added = add_options(parser, f"the {entry.name} task", entry.name, defaults)
    of_test = [] if reports else [option for option in added if option.dest in getattr(defaults, "test_options", ())]
    for option in of_test:
        option.help = f"of --guarantee and --within: {option.help}"
    parser.keep_for_help_all(of_test)


def add_options(parser: Parser, title: str, task: str, defaults: Any) -> list[argparse.Action]:
    """Add an option for each field of a task's dataclass, and return them. If it has `usual_options`, its others are
    left to --help-all."""
    group, hints = parser.add_argument_group(title), typing.get_type_hints(type(defaults))
    choices, added = getattr(defaults, "choices", {}), []
    for field in dataclasses.fields(defaults):
        flag, words = "--" + field.name.replace("_", "-"), _option_help(field, getattr(defaults, field.name))
        named = {"metavar": "PATH"} if field.metadata.get("is_path") else {}
        if field.name in choices:
            named = {"metavar": "|".join(choices[field.name])}
        try:
            added.append(group.add_argument(flag, help=words, **_option_type(hints[field.name]) | named))
        except argparse.ArgumentError as error:  # it names the option that exists
            raise ContractError(
                f"the field {field.name!r} of the options of task {task!r} cannot become the option {flag}: "
                f"{error.message}; rename the field"
            ) from error
    usual = getattr(defaults, "usual_options", None)
    if usual is not None:
        parser.keep_for_help_all([option for option in added if option.dest not in usual])
    return added


def _option_help(field: dataclasses.Field[Any], default: Any) -> str:
    shown = {True: "yes", False: "no"}[default] if isinstance(default, bool) else default
    words = f"{field.metadata.get('help', '')}{'' if default in (None, '') else f' ({shown})'}"
    return words.strip().replace("%", "%%")  # argparse expands single percent signs


def _option_type(hint: Any) -> dict[str, Any]:
    """Return argparse's settings for a field of this type."""
    kinds = [kind for kind in (typing.get_args(hint) or [hint]) if kind is not type(None)]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if typing.get_origin(hint) is typing.Literal:
        return {"metavar": "|".join(kinds)}
    return {"type": kinds[0], "metavar": METAVARS.get(kinds[0], kinds[0].__name__.upper())}


def chosen_settings(entry: TaskEntry, chosen: argparse.Namespace) -> tuple[Any, ExperimentSettings]:
    """Return the task options and experiment settings of preset and recipe, with those of the command line."""
    from seqdefer.evaluation.settings import choose_settings

    return choose_settings(entry, given_options(chosen), preset=chosen.preset, recipe=chosen.recipe)


def run_folder(entry: TaskEntry, chosen: argparse.Namespace) -> Path:
    """Return the folder of a run: as given, or by task, preset and recipe."""
    return Path(chosen.out or Path("runs") / f"{entry.name}-{chosen.preset}{recipe_suffix(chosen)}")


def recipe_suffix(chosen: argparse.Namespace) -> str:
    """Return what the names of folders end with where the recipe is not ours."""
    return "" if chosen.recipe == "ours" else f"-{chosen.recipe}"


@contextmanager
def work_in(folder: Path, entry: TaskEntry) -> Iterator[None]:
    """Open a folder for the work of a task; refuse one that holds the work of another."""
    from seqdefer.storage.files import read_json, writable_folder

    task = entry.name
    for file in ("results.json", "deferral.json"):
        with suppress(CheckpointError):  # missing, or damaged and to be written again
            found = read_json(folder / file)
            other = found.get("task", task) if isinstance(found, dict) else task
            if other not in (task, entry.file):
                raise OptionError(f"{folder} holds work of task {other!r:.80}; choose another folder with --out")
    with writable_folder(folder):
        yield
