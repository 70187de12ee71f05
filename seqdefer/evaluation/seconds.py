"""Seconds as a cost of curves: what the pair takes on this machine, and what settings take of it.

Three costs are measured, in batches as served: a sequence of the predictor alone, one of the expert alone, and one of
lossless speculative decoding in chunks, whose seconds beyond the predictor's are those of its passes. The seconds of
every setting of every method are derived from them, also of rules that read first and cannot write:

    token by token       predictor + passes x (speculative - predictor) / its passes
    whole and one-time   predictor + tokens of the expert x expert / its tokens

Methods that can write are also measured at a few settings, by the engine that generates. It chooses its chunks by what
they take, and in a batch few rows share a pass where little is deferred: measured and derived seconds differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from seqdefer import __version__
from seqdefer.budgets.convex_hull import Floats
from seqdefer.budgets.passes import CHUNK
from seqdefer.budgets.sweeps import Sweep
from seqdefer.engine.pace import FixedPace
from seqdefer.environment import machine
from seqdefer.errors import InputError
from seqdefer.evaluation.curves import Ends, Run
from seqdefer.evaluation.results import PairTiming, TimedSetting
from seqdefer.interfaces import NextTokenExpert, Task
from seqdefer.methods.deferral import DeferralRunner, TokenDeferral, deferral_of
from seqdefer.methods.plans import BATCH_SIZE, Pair, PlanResult
from seqdefer.methods.timing import as_many_as_fit, timed, write_alone
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.rejectors.confidence import Confidence
from seqdefer.storage.files import fingerprint, write_json
from seqdefer.storage.records import read_record, to_plain
from seqdefer.types import Examples

TIMING_FILE = "timing.json"
TIMED_SHARES = (0.1, 0.3, 0.6)  # of the tokens of the expert alone: the settings nearest to them are measured
MAX_SECONDS = 2.0  # that the expert alone may take for the timed inputs
REPEATS = 3  # of what all curves depend on; the least counts
REPEATED_SECONDS = 1.0  # what takes longer is not repeated
Result = TypeVar("Result")


def can_be_timed(task: Task) -> bool:
    """Return whether both models run here, token by token. An expert that reads no prefix stands for a person or an
    instrument, and a remote one may cost money."""
    expert = task.expert
    return isinstance(expert, NextTokenExpert) and expert.reads_prefix and not expert.waits


def in_seconds(run: Run, timing: PairTiming) -> Run:
    """Return the same run with derived seconds beyond those of the predictor alone in the place of deferred tokens.
    Methods are left out that have no setting between both models alone: their curve would be that of Random."""
    ends = Ends(run.ends.predictor_loss, run.ends.expert_loss, _beyond_predictor(run, timing))
    sweeps = {name: one.in_seconds(a_pass=timing.a_pass, a_token=timing.a_token) for name, one in run.sweeps.items()}
    return Run(ends, {name: one for name, one in sweeps.items() if one is not None and _is_on_axis(one, ends)})


def _is_on_axis(sweep: Sweep, ends: Ends) -> bool:
    seconds = sweep.curves(np.ones((1, len(ends))))[0]
    return bool(((seconds > 0) & (seconds <= ends.expert_deferred.mean())).any())


def has_slower_expert(run: Run, timing: PairTiming) -> bool:
    """Return whether the expert alone takes longer than the predictor; otherwise there is no time to save."""
    return bool(_beyond_predictor(run, timing).mean() > 0)


def _beyond_predictor(run: Run, timing: PairTiming) -> Floats:
    """Return the seconds that the expert alone takes beyond those of the predictor alone. (n,)"""
    return run.ends.expert_deferred * timing.a_token - timing.predictor


def time_methods(
    task: Task,
    examples: Examples,
    rejectors: Mapping[str, Rejector],
    run: Run,
    file: Path,
    progress: Progress = NO_PROGRESS,
) -> PairTiming:
    """Time the pair, and each method that can write at a few settings of its sweep in `run`, whose instances are
    `examples`. The record is stored in `file`, and found there if pair, settings, inputs and machine are the same."""
    writing = {name: one for name, one in rejectors.items() if not getattr(one, "reads_first", False)}
    places = {name: places_to_time(run.sweeps[name], run.ends) for name in writing}
    settings = {name: [str(_setting(run.sweeps[name], place)) for place in places[name]] for name in writing}
    models = (task.predictor.fingerprint, task.expert.fingerprint)
    where = machine(task.predictor.device)
    made_by = fingerprint(settings, models, examples.inputs, where, BATCH_SIZE, __version__)
    found = _read_if_same(file, made_by)
    if found is not None:
        return found
    some = as_many_as_fit(task, examples, BATCH_SIZE, MAX_SECONDS)
    timing = replace(time_pair(task, some), made_by=made_by, machine=where)
    methods = {}
    for name, rejector in writing.items():
        deferral = deferral_of(rejector)  # whose pace learns from setting to setting
        times = partial(_time_setting, task, deferral, run.sweeps[name], run.ends, some, timing)
        methods[name] = tuple(times(place) for place in places[name])
        progress(1)
    timing = replace(timing, methods=methods)
    write_json(file, to_plain(timing))
    return timing


def time_pair(pair: Pair, examples: Examples) -> PairTiming:
    """Measure both models alone, and what a token and a pass of the expert take."""
    chunked = TokenDeferral(Confidence())
    chunked.pace = FixedPace(CHUNK)
    predictor, _ = _least(partial(_write, pair, TokenDeferral(Confidence()), examples, np.inf), REPEATS)
    speculative, result = _least(partial(_write, pair, chunked, examples, -np.inf), REPEATS)
    expert, written = _least(partial(write_alone, pair, examples, BATCH_SIZE), REPEATS)
    n = len(examples)
    return PairTiming(
        inputs=n,
        at_once=min(BATCH_SIZE, n),
        predictor=predictor / n,
        expert=expert / n,
        a_token=expert / int(written.lengths.sum()),
        a_pass=max(speculative - predictor, 0.0) / result.work.chunks,
    )


def places_to_time(sweep: Sweep, ends: Ends) -> tuple[int, ...]:
    """Return where in a sweep the settings stand that defer about TIMED_SHARES; none where settings are not known."""
    if sweep.settings is None:
        return ()
    deferred = sweep.curves(np.ones((1, len(ends))))[0][0]
    wanted = (share * ends.expert_deferred.mean() for share in TIMED_SHARES)
    return tuple(dict.fromkeys(int(np.abs(deferred - one).argmin()) for one in wanted))


def _time_setting(
    pair: Pair, deferral: DeferralRunner, sweep: Sweep, ends: Ends, some: Examples, timing: PairTiming, place: int
) -> TimedSetting:
    """Write the timed inputs, the first of the sweep's instances; seconds are derived for the same."""
    every, timed_ones = np.ones((1, len(ends))), (np.arange(len(ends)) < len(some))[None].astype(float)
    by_second = sweep.in_seconds(a_pass=timing.a_pass, a_token=timing.a_token)
    assert by_second is not None
    deferred, loss = (values[0, place] for values in sweep.curves(every))
    derived = timing.predictor + by_second.curves(timed_ones)[0][0, place]
    measured, _ = _least(partial(_write, pair, deferral, some, _setting(sweep, place)), 2)
    share = float(deferred / ends.expert_deferred.mean())
    return TimedSetting(share, float(loss), float(derived), measured / len(some))


def _setting(sweep: Sweep, place: int) -> float:
    assert sweep.settings is not None
    return float(sweep.settings[place])


def _write(pair: Pair, deferral: DeferralRunner, examples: Examples, setting: float) -> PlanResult:
    settings = torch.full((len(examples),), setting, dtype=torch.float64)
    return deferral.write(pair, examples, settings, at_once=BATCH_SIZE)


def _least(call: Callable[[], Result], repeats: int) -> tuple[float, Result]:
    """Return the least seconds of several calls, fewer where they are slow, and a result. The first allocates memory,
    and learns how far to run ahead."""
    least, result = timed(call)
    spent, made = least, 1
    while made < repeats and spent < REPEATED_SECONDS:
        again, result = timed(call)
        least, spent, made = min(least, again), spent + again, made + 1
    return least, result


def _read_if_same(file: Path, made_by: str) -> PairTiming | None:
    try:
        found = read_record(PairTiming, file)
    except InputError:  # none there, or damaged
        return None
    return found if found.made_by == made_by else None
