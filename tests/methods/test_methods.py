"""Every method of the registry: it fits, sweeps, calibrates and plans, and the three agree with each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import hand_off, write_all
from runs import TINY

from seqdefer import registry as plugins
from seqdefer.budgets.calibration import calibrate, loss_curve
from seqdefer.budgets.rules import FINITE_LIMIT
from seqdefer.errors import ContractError, OptionError
from seqdefer.evaluation.curves import Ends, curve_of
from seqdefer.evaluation.experiment import Experiment
from seqdefer.methods import registry
from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.methods.deferral import deferral_of
from seqdefer.methods.plans import PlanStep
from seqdefer.methods.registry import all_methods, get_method
from seqdefer.rejectors.checkpoints import Rejector, load_rejector
from seqdefer.rejectors.confidence import ChowMean
from seqdefer.testing import ToyTask
from seqdefer.types import Rollout, Sequences

TASK = ToyTask(n=30, length=4)
each_method = pytest.mark.parametrize("name", all_methods())


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return Experiment(TASK, TINY, tmp_path_factory.mktemp("methods"))


@pytest.fixture(scope="module")
def rejectors(experiment: Experiment) -> dict[str, Rejector]:
    return experiment.fit(experiment.splits.train, experiment.splits.validation, 0)


@each_method
def test_a_method_sweeps_calibrates_and_plans(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    """A setting of the calibration spends and loses in a plan what it says, and a sweep passes through that point."""
    splits, deferral = experiment.splits, deferral_of(rejectors[name])
    data, rows = splits.test, torch.arange(len(splits.test.examples))
    ends = Ends.of(data.table)
    curve = curve_of(deferral.sweep(data, rows), ends)
    assert curve.points[0] == pytest.approx([0.0, ends.predictor_loss.mean()])
    assert curve.points[-1] == pytest.approx([ends.expert_deferred.mean(), ends.expert_loss.mean()])

    spending = deferral.spending(TASK, data.examples)
    calibration = calibrate(spending, inputs=len(rows), rejector=rejectors[name].fingerprint)
    assert calibration.settings[0].threshold == FINITE_LIMIT
    losses = {point.share: point.loss for point in loss_curve(spending, unit="", inputs=0, rejector="").points}
    points = {(round(x, 6), round(y, 6)) for x, y in curve.points}
    for setting in calibration.settings[::10]:
        thresholds = torch.full((len(rows),), setting.threshold, dtype=torch.float64)
        rollout = deferral.plan(TASK, data.examples, thresholds).run().rollout
        loss = TASK.sequence_loss(data.examples, rollout.sequences)
        assert rollout.share == pytest.approx(setting.share)
        assert float(loss.mean()) == pytest.approx(losses[setting.share])
        x = float(rollout.deferred.double().mean())
        if x <= curve.deferred[-1] and get_method(name).granularity != "token":  # token sweeps stand at scores they met
            assert (round(x, 6), round(float(loss.double().mean()), 6)) in points


@each_method
def test_spending_of_labelled_data_is_that_of_its_examples(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    data, deferral = experiment.splits.validation, deferral_of(rejectors[name])
    fresh, known = deferral.spending(TASK, data.examples), deferral.spending(TASK, data.examples, labelled=data)
    np.testing.assert_array_equal(fresh.settings, known.settings)
    np.testing.assert_allclose(fresh.shares, known.shares)
    assert fresh.settings[0] == np.inf
    assert (np.diff(fresh.settings) < 0).all()
    assert fresh.shares[0] == 0.0


@each_method
def test_a_plan_writes_the_same_in_steps_and_for_any_batch(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    """Each row has its own setting; rows that may not defer are the predictor's, and show where they would defer."""
    examples, deferral = experiment.splits.test.examples, deferral_of(rejectors[name])
    settings = deferral.spending(TASK, examples).settings
    chosen = torch.from_numpy(np.random.default_rng(0).choice(settings, len(examples)))
    together = deferral.plan(TASK, examples, chosen).run()
    assert 0 < int(together.rollout.deferred.sum()) < int(together.rollout.sequences.lengths.sum())
    steps = list(deferral.plan(TASK, examples, chosen).steps())
    assert_same_rollout(joined(steps), together.rollout)
    for row in range(0, len(examples), 7):
        alone = deferral.plan(TASK, examples.select(torch.tensor([row])), chosen[row : row + 1]).run().rollout
        assert alone.sequences.tokens[0].tolist() == together.rollout.sequences.tokens[row].tolist()
    barred = torch.arange(len(examples)) % 2 == 0
    some = deferral.plan(TASK, examples, chosen, may_defer=~barred).run()
    assert int(some.rollout.deferred[barred].sum()) == 0
    drafts = [one.tokens for one in write_all(TASK, examples.select(barred.nonzero().squeeze(1)), hand_off(99))]
    tokens = some.rollout.sequences
    kept = [tokens.tokens[row, : int(tokens.lengths[row])].tolist() for row in barred.nonzero().squeeze(1).tolist()]
    assert kept == drafts
    assert torch.equal(some.rollout.authors[~barred], together.rollout.authors[~barred])
    wants = (chosen < torch.inf) & (together.rollout.deferred > 0)
    assert bool(some.wanted[barred & wants].any(1).all())


def joined(steps: list[PlanStep]) -> Rollout:
    """Join the positions of a plan, with 0 past the end of a row."""
    active = torch.stack([step.active for step in steps], 1)
    parts = (torch.stack([getattr(step, name) for step in steps], 1) for name in ("tokens", "authors", "scores"))
    tokens, authors, scores = (torch.where(active, part, 0) for part in parts)
    return Rollout(Sequences(tokens, active.sum(1)), authors, scores)


def assert_same_rollout(one: Rollout, other: Rollout) -> None:
    mask, width = other.sequences.mask(), one.sequences.tokens.shape[1]
    assert one.sequences.lengths.tolist() == other.sequences.lengths.tolist()
    for found, expected in ((one.sequences.tokens, other.sequences.tokens), (one.authors, other.authors)):
        assert torch.equal(found, torch.where(mask, expected, 0)[:, :width])


@each_method
def test_a_fitted_method_is_stored_and_loaded(name: str, rejectors: dict[str, Rejector], tmp_path: Path) -> None:
    rejector = rejectors[name]
    loaded = load_rejector(rejector.save_pretrained(tmp_path), TASK.predictor)
    assert (type(loaded), loaded.options()) == (type(rejector), rejector.options())
    assert loaded.fingerprint == rejector.fingerprint


def test_methods_are_listed_from_coarse_to_fine() -> None:
    methods = list(all_methods().values())
    assert [one.name for one in methods if one.is_learned] == [
        "WholeModelEmbed", "OneTimeModel", "OneTimeCost", "TokenwiseModel",
    ]  # fmt: skip
    granularities = [one.granularity for one in methods]
    assert granularities == sorted(granularities, key=("whole", "once", "span", "token").index)
    with pytest.raises(OptionError, match="unknown method 'OneTimeLuck'; available: ChowMean, "):
        get_method("OneTimeLuck")


def test_a_method_of_another_package_enters_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fitted, swept and compared in a run like the others."""

    def fit(context: FitContext) -> Fit:
        rule = ChowMean()
        rule.predictor = context.task.predictor.fingerprint
        return Fit(lambda _: (rule, None))

    def load_plugins(group: str) -> dict[str, Any]:
        return {"mine": Method("Mine", "whole", fit)} if group == "seqdefer.methods" else plugins.load_plugins(group)

    monkeypatch.setattr(registry, "load_plugins", load_plugins)
    all_methods.cache_clear()
    try:
        results = Experiment(TASK, replace(TINY, seeds=1, methods=("ChowMean", "Mine")), tmp_path).run()
    finally:
        monkeypatch.undo()
        all_methods.cache_clear()
    assert results.summary["Mine"] == results.summary["ChowMean"]
    assert "Mine" not in all_methods()


def test_a_name_that_two_packages_use_is_refused() -> None:
    """Another package's plug-in once replaced a built-in silently."""
    with pytest.raises(ContractError, match="two packages, seqdefer and other, define the method 'Mine'; uninstall"):
        plugins.by_name("method", [("Mine", "seqdefer", 1), ("Mine", "other", 2)])
    assert plugins.by_name("network", [("gru", "mine", 1), ("gru", "mine", 2)]) == {"gru": 2}


def test_a_plugin_does_not_replace_a_built_in_method(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"mine": get_method("ChowMean")}
    monkeypatch.setattr(registry, "load_plugins", lambda _: same)
    all_methods.cache_clear()
    try:
        with pytest.raises(ContractError, match=r"seqdefer and \?, define the method 'ChowMean'"):
            all_methods()
    finally:
        monkeypatch.undo()
        all_methods.cache_clear()
