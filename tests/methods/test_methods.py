"""Every method of the registry: it fits, sweeps, calibrates and plans, and the three agree with each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from seqdefer.budgets.calibration import calibrate, loss_curve
from seqdefer.budgets.rules import FINITE_LIMIT
from seqdefer.errors import OptionError
from seqdefer.evaluation.curves import Ends, curve_of
from seqdefer.evaluation.experiment import Experiment
from seqdefer.methods.base import FitContext
from seqdefer.methods.deferral import deferral_of
from seqdefer.methods.registry import all_methods, get_method
from seqdefer.rejectors.checkpoints import Rejector, load_rejector
from seqdefer.rejectors.losses import rule_of_thumb
from seqdefer.rejectors.token_training import default_price
from seqdefer.testing import ToyTask

TASK = ToyTask(n=30, length=4)
each_method = pytest.mark.parametrize("name", all_methods())


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
    if get_method(name).reads_first:
        with pytest.raises(OptionError, match="it can be compared with others"):
            deferral.plan(TASK)
        return
    for setting in calibration.settings[::10]:
        thresholds = torch.full((len(rows),), setting.threshold, dtype=torch.float64)
        rollout = deferral.write(TASK, data.examples, thresholds).rollout
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
def test_a_fitted_method_is_stored_and_loaded(name: str, rejectors: dict[str, Rejector], tmp_path: Path) -> None:
    rejector = rejectors[name]
    loaded = load_rejector(rejector.save_pretrained(tmp_path), TASK.predictor)
    assert (type(loaded), loaded.options(), loaded.notes) == (type(rejector), rejector.options(), rejector.notes)
    assert loaded.fingerprint == rejector.fingerprint


@pytest.fixture
def context(experiment: Experiment) -> FitContext:
    splits, settings = experiment.splits, replace(experiment.settings, alpha=None, price=None)
    return FitContext(experiment.task, settings, torch.tensor([0, 2, 4]), splits.train, splits.validation)


@pytest.mark.parametrize("name", ["WholeModelEmbed", "OneTimeModel", "OneTimeCost"])
def test_the_data_of_a_fit_are_the_hand_offs_it_learns_from(name: str, context: FitContext) -> None:
    """A stored rejector is used again while these stay the same."""
    learned = {0, 4} if name == "WholeModelEmbed" else {0, 2, 4}
    context = replace(context, settings=replace(context.settings, alpha=1.0))
    before = get_method(name).fit(context).data
    for split in ("train", "validation"):
        for column in range(5):
            data = getattr(context, split)
            loss = data.table.loss + (torch.arange(5) == column)
            other = replace(context, **{split: replace(data, table=replace(data.table, loss=loss))})
            assert (get_method(name).fit(other).data != before) == (column in learned)


def test_alpha_and_price_are_as_set_or_by_default(context: FitContext) -> None:
    """And the notes of a report tell which."""
    assert context.train.trees is not None
    assert context.alpha == rule_of_thumb(context.train.table)
    assert context.price == default_price(context.train.trees)
    chosen = replace(context, settings=replace(context.settings, alpha=0.25, price=0.125))
    assert (chosen.alpha, chosen.price) == (0.25, 0.125)
    free = replace(context, settings=replace(context.settings, price=0.0))
    assert replace(context, train=replace(context.train, make_trees=None)).price == free.price == 0.0
    once, token = (get_method(name).note for name in ("OneTimeModel", "TokenwiseModel"))
    assert "over 3 hand-offs" in once(context)
    assert once(context).endswith(f"alpha_1 = {context.alpha:.4g} by the rule of thumb.")
    assert once(chosen).endswith("alpha_1 = 0.25.")
    assert token(chosen).endswith("'; each expert token costs an extra 0.125.")
    assert token(free).endswith(f"the strategy '{context.settings.strategy}'.")
