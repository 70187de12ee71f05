"""`seqdefer fit` and `seqdefer calibrate`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from seqdefer.cli import common
from seqdefer.cli.common import Command, Parser
from seqdefer.errors import CheckpointError, OptionError
from seqdefer.progress_bars import show_progress

if TYPE_CHECKING:
    import argparse

    from seqdefer.budgets.rules import BudgetRule, Setting
    from seqdefer.interfaces import TaskEntry
    from seqdefer.model.deferring_model import DeferringModel

MAX_INPUTS_MIB = 32  # of the files that calibrate reads; JSON takes 20 times as much memory when it is parsed


def fit(arguments: list[str]) -> int:
    from seqdefer.model.calibrated_pair import DEFAULT_BUDGET
    from seqdefer.model.fitting import fit_model
    from seqdefer.model.learning import requested_promises, require_served

    entry = common.task_of("fit", arguments, needs="serve")
    require_served(entry)
    chosen = _fit_parser(entry).parse_args(arguments[1:])
    options, settings = common.chosen_settings(entry, chosen)
    folder = chosen.out or Path("models") / f"{entry.name}{common.recipe_suffix(chosen)}"
    rule, quality = requested_promises(
        chosen.guarantee or "nearest", confidence=chosen.confidence, share_of=chosen.share_of, within=chosen.within
    )
    how = {"method": chosen.method, "device": chosen.device, "labelling": common.chosen_executor(chosen)}
    with common.work_in(folder, entry), show_progress(quiet=chosen.quiet) as meter:
        model = fit_model(
            entry, options, settings, folder, rule=rule, quality=quality, replace=chosen.replace, **how, meter=meter
        )
    _print_calibration(model, as_json=chosen.json)
    assert model.calibration is not None
    name = shlex.quote(str(folder))
    if model.curve is not None:
        print(f"\n{model.curve.worth()}", file=sys.stderr)
    if model.quality is not None:
        print(f"\n{model.quality.in_words()}", file=sys.stderr)
    print(f"\n{model.fitted_in_words()}", file=sys.stderr)
    if (rough := model.calibration.roughness()) is not None:
        print(f"\n{rough}: seqdefer calibrate {name} --data FILE", file=sys.stderr)
    hint = shlex.quote(model.served.codec.hint or "INPUT")
    print(f"\nuse it: seqdefer generate {name} {hint} --budget {DEFAULT_BUDGET}", file=sys.stderr)
    print(f"or: seqdefer serve {name}", file=sys.stderr)
    return 0


def _fit_parser(entry: TaskEntry) -> Parser:
    from seqdefer.methods.registry import PREFERRED, fittable_methods

    parser = common.task_parser(
        "fit",
        entry,
        "Fit one rejector, measure which threshold spends which budget, and write a folder for seqdefer generate. "
        "Interrupted work resumes where it stopped.",
        folder=f"models/{entry.name}; -published is added for that recipe",
        printed="what budgets spend as JSON instead of a table",
    )
    words = f"{', '.join(fittable_methods())} ({PREFERRED[0]}, or {PREFERRED[1]} where the expert only completes)"
    parser.add_argument("--method", metavar="NAME", help=words)
    common.add_guarantee(parser, "no promise; with one, some data is kept apart for it")
    words = (
        "also find the setting that spends the least and whose expected loss is at most X above the expert's, with "
        "--confidence; for tasks whose loss has an upper limit (none)"
    )
    parser.add_argument("--within", type=float, metavar="X", help=words)
    words = "fit in a folder that holds a model which was fitted another way, and lose that (refuse)"
    parser.add_argument("--replace", action="store_true", help=words)
    common.add_learning(parser, entry)
    parser.keep_for_help_all(common.add_executor(parser, store="work/labels, in the folder of --out"))
    common.add_task_options(parser, entry, reports=False)
    return parser


def calibrate(arguments: list[str]) -> int:
    from seqdefer.budgets.prices import read_prices
    from seqdefer.budgets.promises import budget_rule
    from seqdefer.methods.timing import TIMED_BUDGETS
    from seqdefer.model.calibrated_pair import calibration_remarks
    from seqdefer.model.deferring_model import DeferringModel
    from seqdefer.model.folders import read_pairing
    from seqdefer.model.generation import input_tokens
    from seqdefer.model.writing_pair import CHECKED_BUDGETS
    from seqdefer.storage.files import writable_folder
    from seqdefer.storage.user_files import parse_inputs, read_lines

    chosen = _calibrate_parser().parse_args(arguments)
    rule = budget_rule(chosen.guarantee or "nearest", confidence=chosen.confidence, share_of=chosen.share_of)
    prices = None if chosen.prices is None else read_prices(chosen.prices)
    _check_calibrate(chosen)
    given = {
        path: list(islice(read_lines(path, kind="JSONL or one input a line", max_mib=MAX_INPUTS_MIB), chosen.inputs))
        for path in (chosen.data, chosen.check)
        if path is not None
    }
    is_new = chosen.data is not None or chosen.from_log is not None
    if is_new:
        read_pairing(chosen.folder)  # what is written goes there, so it must not be the name of a repository
        with writable_folder(chosen.folder, "DIR, such as a copy"):
            pass  # raises before anything is measured
    seen: tuple[Setting, ...] = ()
    mean_tokens: int | None = None
    with show_progress(quiet=chosen.quiet) as meter:
        model = DeferringModel.from_pretrained(chosen.folder, device=chosen.device, meter=meter, budgets=not is_new)
        field = chosen.field or model.served.codec.field
        codec = model.served.codec
        inputs = {
            path: [codec.local_input(one, path.parent) for one in parse_inputs(lines, path, field)]
            for path, lines in given.items()
        }
        if chosen.from_log is not None:
            _calibrate_from_log(model, chosen, rule)
        if chosen.data is not None:
            examples = model.served.codec.encode(inputs[chosen.data])
            with meter.stage("calibrate budgets", len(examples)) as advance:
                model.calibrate_by(rule, examples, progress=advance)
            with meter.stage("time budgets", len(TIMED_BUDGETS)) as advance:
                model.time(examples, at_once=chosen.batch_size, progress=advance)
            _save_calibration(model, chosen.folder)
            if prices is not None:
                model.use_prices(prices)
                lengths = input_tokens(codec, inputs[chosen.data], examples)
                mean_tokens = round(sum(lengths) / len(lengths))
        if chosen.check is not None:
            with meter.stage("check budgets", len(CHECKED_BUDGETS)) as advance:
                seen = model.check(inputs[chosen.check], progress=advance)
    if chosen.data is not None and model.calibration is not None:
        for remark in calibration_remarks(model.calibration, len(inputs[chosen.data])):
            print(remark, file=sys.stderr)
    if is_new and not (seen and chosen.json):
        _print_calibration(model, as_json=chosen.json, mean_tokens=mean_tokens)
    if seen:
        _print_check(seen, model, len(inputs[chosen.check]), as_json=chosen.json)
    return 0


def _check_calibrate(chosen: argparse.Namespace) -> None:
    """Raise where options contradict each other or miss one."""
    if chosen.from_log is not None and chosen.data is not None:
        raise OptionError("--data and --from-log both calibrate; give one of them")
    if chosen.inputs < 2:
        raise OptionError(f"--inputs is {chosen.inputs}; it must be at least 2")
    if chosen.batch_size < 1:
        raise OptionError(f"--batch-size is {chosen.batch_size}; it must be at least 1")
    if chosen.guarantee is not None and chosen.data is None and chosen.from_log is None:
        raise OptionError("--guarantee needs --data FILE: inputs that the rejector was not fitted on")
    if chosen.data is None and chosen.check is None and chosen.from_log is None:
        raise OptionError("nothing to do; give --data FILE to calibrate with, or --check FILE to check budgets on")
    if chosen.prices is not None and chosen.data is None:
        raise OptionError("--prices needs --data FILE: what a budget costs depends on the length of inputs")


def _save_calibration(model: DeferringModel, folder: Path) -> None:
    """Write the budgets, and say what they replace."""
    from seqdefer.model.folders import record_path
    from seqdefer.storage.files import read_json

    with suppress(CheckpointError, KeyError):  # there was none, or it was damaged
        before = read_json(record_path(folder, "calibration"))["inputs"]
        print(f"this replaces the budgets of {folder}, which were measured on {before} inputs", file=sys.stderr)
    model.save_calibration(folder)


def _calibrate_from_log(model: DeferringModel, chosen: argparse.Namespace, rule: BudgetRule) -> None:
    from seqdefer.model.served_log import read_served

    rows, n_skipped = read_served(chosen.from_log, model.rejector.fingerprint, most=chosen.inputs)
    found = model.calibrate_from_log(rows, rule)
    _save_calibration(model, chosen.folder)
    n_learned = sum(row.is_learned for row in rows) if found.promise is not None else 0
    said = f"calibrated on {len(rows) - n_learned} inputs that were served"
    said += f"; {n_learned} that the rejector was fitted on are not counted" if n_learned else ""
    said += f"; {n_skipped} incomplete lines were skipped" if n_skipped else ""
    if model.is_token_level:
        said += "; shares at other settings than those served are estimates, so check them: --check FILE"
    print(said, file=sys.stderr)


def _print_check(seen: tuple[Setting, ...], model: DeferringModel, n: int, *, as_json: bool) -> None:
    from rich.console import Console

    from seqdefer.report.terminal import check_table

    if as_json:
        budgets = [{**dataclasses.asdict(one), "expected": model.setting(one.budget).share} for one in seen]
        print(json.dumps({"inputs": n, "checked": budgets}, allow_nan=False))
    else:
        Console().print(check_table(seen, [model.setting(one.budget).share for one in seen], n))


def _print_calibration(model: DeferringModel, *, as_json: bool, mean_tokens: int | None = None) -> None:
    from rich.console import Console

    from seqdefer.report.terminal import bought_table, calibration_table, money_table, shown_settings
    from seqdefer.storage.records import to_plain

    found, timing = model.calibration, model.timing
    assert found is not None
    settings = shown_settings(found)
    spent = [] if mean_tokens is None else [model.expected_money(mean_tokens, one.share) for one in settings]
    if as_json:
        budgets = [{**dataclasses.asdict(one), "met": found.shortfall(one.budget) is None} for one in settings]
        for one, money in zip(budgets, spent, strict=bool(spent)):
            one["money"] = money
        more = {} if timing is None else {"timing": to_plain(timing)}
        if (curve := model.curve) is not None:
            for one in budgets:
                one |= {"loss": curve.loss_at(one["share"]), "random": curve.random_at(one["share"])}
            more["curve"] = to_plain(curve)
        if found.promise is not None:
            more["promise"] = dataclasses.asdict(found.promise)
        if model.quality is not None:
            more["quality"] = to_plain(model.quality)
        print(json.dumps({"inputs": found.inputs, "budgets": budgets, **more}, allow_nan=False))
        return
    Console().print(calibration_table(found))
    if (bought := bought_table(found, timing, model.curve)) is not None:
        Console().print(bought)
    if spent and mean_tokens is not None and model.prices is not None:
        alone = model.prices.alone(mean_tokens, found.mean_length or 1.0)
        Console().print(money_table(settings, spent, alone, model.prices.currency, mean_tokens))


def _calibrate_parser() -> Parser:
    parser = Parser(
        prog="seqdefer calibrate",
        description="Write inputs at every threshold and count the expert's tokens, so that budgets hold on inputs "
        "like these. No references are needed.",
        epilog=common.DEFAULTS_NOTE,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of seqdefer fit; calibration.json goes there")
    words = "inputs, plain or gzip: JSONL (*.jsonl), or any other text with one input per line"
    parser.add_argument("--data", type=Path, metavar="FILE", help=words)
    words = "log of seqdefer serve --served-log, instead of inputs; FILE.1 is read too, and the newest N lines are used"
    parser.add_argument("--from-log", type=Path, metavar="FILE", help=words)
    words = "other inputs, in the same form: measure what some budgets spend on them"
    parser.add_argument("--check", type=Path, metavar="FILE", help=words)
    parser.add_argument("--field", metavar="NAME", help="field of JSONL that holds the input (the one used by fit)")
    parser.add_argument("--inputs", type=int, default=500, metavar="N", help="inputs to read, at most (500)")
    common.add_guarantee(parser, "no promise: the setting that spends nearest to a budget")
    common.add_prices(parser)
    words = "sequences written together, as they will be served: what budgets take is measured so (32)"
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help=words)
    common.add_common(parser, "what budgets spend as JSON instead of a table")
    return parser


FIT = Command("fit", "fit a rejector for your own pair and data, ready to use", fit, resumes=True)
CALIBRATE = Command("calibrate", "measure which threshold spends which budget on your inputs", calibrate)
