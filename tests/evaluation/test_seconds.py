"""Seconds as a cost: derived from what was measured, the same for a resumed run, and left out where nobody timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import WithExpert, completing
from small_runs import TINY

from seqdefer.budgets.passes import CHUNK
from seqdefer.budgets.sweeps import GridSweep, Sweep, switch_sweep
from seqdefer.evaluation import seconds
from seqdefer.evaluation.areas import seed_result
from seqdefer.evaluation.curves import Ends, Run, curve_of, improvement, random_curve
from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.results import PairTiming, Results
from seqdefer.evaluation.seconds import (
    TIMED_SHARES,
    can_be_timed,
    has_slower_expert,
    in_seconds,
    places_to_time,
    time_methods,
    time_pair,
)
from seqdefer.methods.deferral import deferral_of
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import ToyTask

TIMING = PairTiming(inputs=4, at_once=2, predictor=1.0, expert=6.0, a_token=2.0, a_pass=0.5)
SETTINGS = replace(TINY, methods=("TokenwiseScore", "Token2", "BiLD", "ChowSum", "OneTimeScore"))


def small_run() -> Run:
    """Two sequences of three tokens; the predictor is wrong on the first."""
    whole = switch_sweep([0.9, 0.1], keep=([0, 0], [4.0, 0.0]), defer=([3, 3], [0.0, 0.0]))
    loss = [[4.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    token = GridSweep([[0, 0], [2, 2], [3, 3]], loss, passes=[[0, 0], [1, 1], [2, 1]])
    sweeps: dict[str, Sweep] = {"ChowSum": whole, "TokenwiseScore": token, "Chow": GridSweep(token.deferred, loss)}
    return Run(Ends([4.0, 0.0], [0.0, 0.0], [3, 3]), sweeps)


def test_curves_run_from_the_seconds_of_the_predictor_to_those_of_the_expert() -> None:
    found = seed_result(0, {}, small_run(), timing=TIMING).methods
    curves = {name: row.against["seconds"].curve for name, row in found.items() if "seconds" in row.against}
    assert set(curves) == {"Random", "ChowSum", "TokenwiseScore"}  # nobody counted the passes of Chow
    assert curves["Random"] == ((1.0, 2.0), (6.0, 0.0))
    for curve in curves.values():
        assert (curve[0], curve[-1]) == ((1.0, 2.0), (6.0, 0.0))
    # By hand: 1 + 0.5 x 1 and 1 + 0.5 x 1.5 for passes; 1 + 2 x 1.5 for tokens, and 1 + 2 x 3 is beyond the expert.
    assert curves["TokenwiseScore"] == ((1.0, 2.0), (1.0, 2.0), (1.5, 0.5), (1.75, 0.0), (6.0, 0.0))
    assert curves["ChowSum"] == ((1.0, 2.0), (1.0, 2.0), (4.0, 0.0), (6.0, 0.0), (6.0, 0.0))
    area = found["TokenwiseScore"].against["seconds"].audc  # from the predictor's seconds on
    assert area == pytest.approx(0.5 * 1.25 + 0.25 * 0.25)
    assert found["TokenwiseScore"].against["seconds"].improvement == pytest.approx(100 * (1 - area / 5.0))


def test_more_passes_take_longer_and_the_unit_of_time_does_not_matter() -> None:
    run = small_run()
    passes, by_second = (one.sweeps["TokenwiseScore"] for one in (run.in_passes(), in_seconds(run, TIMING)))
    weights = np.random.default_rng(0).integers(1, 5, (3, 2)).astype(float)
    for x, counted in zip(by_second.curves(weights)[0], passes.curves(weights)[0], strict=True):
        order = np.argsort(counted)
        assert all(earlier < later for earlier, later in pairwise(x[order]))
    slower = replace(TIMING, **{name: 7 * getattr(TIMING, name) for name in ("predictor", "a_token", "a_pass")})
    for name in ("ChowSum", "TokenwiseScore"):
        first, second = (
            improvement(curve_of(one.sweeps[name], one.ends), random_curve(one.ends))
            for one in (in_seconds(run, TIMING), in_seconds(run, slower))
        )
        assert first == pytest.approx(second)


def test_a_method_that_is_always_slower_than_the_expert_has_no_curve() -> None:
    """It had the line of Random, and so a better area than methods with a few slow settings."""
    assert set(in_seconds(small_run(), replace(TIMING, a_pass=9.0)).sweeps) == {"ChowSum"}
    found = seed_result(0, {}, small_run(), timing=replace(TIMING, a_pass=9.0)).methods["TokenwiseScore"]
    assert set(found.against) == {"passes"}


def test_an_expert_as_fast_as_the_predictor_leaves_no_time_to_save() -> None:
    assert has_slower_expert(small_run(), TIMING)
    assert not has_slower_expert(small_run(), replace(TIMING, predictor=6.0))


def test_only_models_that_run_here_are_timed(weather: WeatherTask) -> None:
    task = ToyTask(n=4)
    assert can_be_timed(task)
    assert not can_be_timed(weather)  # a simulated person
    assert not can_be_timed(WithExpert(completing, n=4))
    task.expert.waits = True
    assert not can_be_timed(task)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return Experiment(ToyTask(n=40, length=6), SETTINGS, tmp_path_factory.mktemp("seconds"))


@pytest.fixture(scope="module")
def fitted(experiment: Experiment) -> tuple[dict[str, Rejector], Run]:
    rejectors = experiment.fit(experiment.splits.train, experiment.splits.validation, 0)
    return rejectors, experiment.sweep(0, rejectors)


def test_the_pair_is_timed_by_what_it_writes(experiment: Experiment, spy: Callable[[Any, str], list[Any]]) -> None:
    task = experiment.task
    examples, written = task.split("test"), spy(seconds, "_write")
    timing = time_pair(task, examples)
    assert (timing.inputs, timing.at_once) == (40, 32)
    assert min(timing.predictor, timing.expert, timing.a_token) > 0
    assert timing.a_token * 40 <= timing.expert * 40  # a sequence has a token at least
    assert {setting for *_, setting in written} == {np.inf, -np.inf}


def test_settings_write_what_the_sweep_says(experiment: Experiment, fitted: tuple[dict[str, Rejector], Run]) -> None:
    """What is timed is the point of the curve."""
    rejectors, run = fitted
    examples = experiment.splits.test.examples.select(experiment.splits.rows(0))
    for name in ("TokenwiseScore", "ChowSum", "OneTimeScore"):
        sweep = run.sweeps[name]
        assert sweep.settings is not None
        deferred = sweep.curves(np.ones((1, len(examples))))[0][0]
        assert len(sweep.settings) == len(deferred)
        for place in places_to_time(sweep, run.ends):
            settings = torch.full((len(examples),), float(sweep.settings[place]), dtype=torch.float64)
            written = deferral_of(rejectors[name]).write(experiment.task, examples, settings).rollout
            assert float(written.deferred.double().mean()) == pytest.approx(deferred[place])


def test_methods_that_write_are_measured_once(
    experiment: Experiment,
    fitted: tuple[dict[str, Rejector], Run],
    tmp_path: Path,
    spy: Callable[[Any, str], list[Any]],
) -> None:
    rejectors, run = fitted
    examples, file = experiment.splits.test.examples.select(experiment.splits.rows(0)), tmp_path / "timing.json"
    made = time_methods(experiment.task, examples, rejectors, run, file)
    assert set(made.methods) == {"TokenwiseScore", "ChowSum", "OneTimeScore"}  # Token2 and BiLD read first
    assert made.machine["device"]
    for name, settings in made.methods.items():
        assert 1 <= len(settings) <= len(TIMED_SHARES)
        by_second = run.sweeps[name].in_seconds(a_pass=made.a_pass, a_token=made.a_token)
        assert by_second is not None
        derived = made.predictor + by_second.curves((np.arange(15) < made.inputs)[None] * 1.0)[0][0]
        losses = run.sweeps[name].curves(np.ones((1, 15)))[1][0]
        for one in settings:
            assert one.measured > 0
            assert np.isclose(derived, one.derived).any()
            assert np.isclose(losses, one.loss).any()
    written = spy(seconds, "_write")
    assert time_methods(experiment.task, examples, rejectors, run, file) == made
    assert written == []
    fewer = {name: one for name, one in rejectors.items() if name != "ChowSum"}
    assert set(time_methods(experiment.task, examples, fewer, run, file).methods) == {"TokenwiseScore", "OneTimeScore"}
    file.write_text("damaged")
    again = time_methods(experiment.task, examples, rejectors, run, file)
    assert again.made_by == made.made_by
    assert written != []


def run_timed(folder: Path) -> Results:
    return Experiment(ToyTask(n=40, length=6), SETTINGS, folder).run(timing=True)


@pytest.fixture
def slow_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys take no time: say that they do."""
    monkeypatch.setattr(seconds, "time_pair", lambda *_: TIMING)


@pytest.mark.usefixtures("slow_expert")
def test_a_resumed_run_has_the_seconds_of_the_first(tmp_path: Path, spy: Callable[[Any, str], list[Any]]) -> None:
    fresh = run_timed(tmp_path)
    written = spy(seconds, "_write")
    resumed = run_timed(tmp_path)
    assert written == []
    assert resumed.seeds == fresh.seeds
    assert resumed.timing == fresh.timing
    assert resumed.cost_comparisons == fresh.cost_comparisons
    by_second = Results.from_json(fresh.to_json()).by_cost("seconds")
    assert by_second is not None
    assert by_second.cost == "seconds"
    assert {"Random", "RandomSpeculative", *SETTINGS.methods} <= set(by_second.summary)  # also who reads first


def test_an_untimed_run_is_the_same_without_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Experiment(ToyTask(n=40, length=6), SETTINGS, tmp_path).run()
    assert plain.timing is None
    assert plain.by_cost("seconds") is None
    assert "seconds" not in plain.cost_comparisons
    monkeypatch.setattr(seconds, "time_pair", lambda *_: replace(TIMING, predictor=99.0))
    fast = run_timed(tmp_path)
    assert fast.timing is not None
    assert fast.by_cost("seconds") is None
    assert fast.seeds == plain.seeds


def test_the_coin_drafts_all_tokens_of_the_expert(experiment: Experiment) -> None:
    """Against passes, RandomSpeculative ends where every chunk takes one; against tokens it is Random."""
    coin = experiment.coin(0)["RandomSpeculative"]
    ends = Ends.of(experiment.splits.test.table.select(experiment.splits.rows(0)))
    assert curve_of(coin, ends).area == pytest.approx(random_curve(ends).area)
    by_pass = coin.in_passes()
    assert by_pass is not None
    passes = by_pass.curves(np.ones((1, 15)))[0][0].max()
    assert np.ceil(ends.expert_deferred / CHUNK).mean() <= passes < ends.expert_deferred.mean()
    first, last, end = ends.predictor_loss.mean(), ends.expert_loss.mean(), ends.expert_deferred.mean()
    assert curve_of(by_pass, ends).area == pytest.approx(passes * (first + last) / 2 + (end - passes) * last)
