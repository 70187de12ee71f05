"""Budgets: what a calibration promises is what plain rollouts spend, on the same inputs exactly, on others nearly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from toy_pair import METHODS, Toy, numbers

from seqdefer.budgets import rules
from seqdefer.budgets.calibration import BUDGETS, Calibration, LossCurve, LossPoint, loss_curve
from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.promises import Promise
from seqdefer.budgets.rules import FINITE_LIMIT, TOLERANCE, Setting, realised_shares
from seqdefer.budgets.spending import TokenSpending
from seqdefer.budgets.token_sweeps import TokenSweep
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.errors import OptionError
from seqdefer.labels import hand_offs
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.labelled import LearningData
from seqdefer.methods.deferral import UnjudgedTask, _between
from seqdefer.model.calibrated_pair import BudgetWarning
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.report.terminal import calibration_table

pytestmark = pytest.mark.usefixtures("one_thread")
each_method = pytest.mark.parametrize("method", METHODS)
N = 70  # more than two parts of trees


@cache
def calibrated(method: str) -> DeferringModel:
    """Nobody may change it."""
    model = Toy.of(length=6).model(method)
    model.calibrate(numbers(N))
    return model


def settings_of(model: DeferringModel) -> tuple[Setting, ...]:
    assert model.calibration is not None
    return model.calibration.settings


@each_method
def test_every_share_is_that_of_a_plain_rollout(method: str) -> None:
    """In batches of another size than those of the calibration, and exactly."""
    model = calibrated(method)
    distinct = list({one.threshold: one for one in settings_of(model)}.values())
    for setting in [*distinct[:2], *distinct[2:-2:4], *distinct[-2:]]:
        written = model.generate(numbers(N), threshold=setting.threshold, batch_size=17)
        assert sum(written.expert_tokens) / int(written.sequences.lengths.sum()) == setting.share


@each_method
def test_settings_are_of_all_budgets_and_their_intervals_hold_the_share(method: str) -> None:
    settings = settings_of(calibrated(method))
    assert tuple(one.budget for one in settings) == BUDGETS
    assert {0.0, 0.05, 0.2, 0.95, 1.0} <= {one.budget for one in settings}
    for one in settings:
        assert 0 <= one.low <= one.share <= one.high <= 1
        assert math.isfinite(one.threshold)
    assert settings[0].share == 0
    assert any(one.high - one.low > 0.02 for one in settings)


@each_method
def test_nearest_share_serves_a_budget(method: str) -> None:
    found = calibrated(method).calibration
    assert found is not None
    for budget in (0.013, 0.2, 0.5, 0.777, 0.99):
        best = min(abs(one.share - budget) for one in found.settings)
        assert abs(found.for_budget(budget).share - budget) == best


@each_method
def test_the_ends_are_never_and_as_much_as_can_be_on_other_inputs_too(method: str) -> None:
    """The largest share on 70 inputs may come from a threshold that keeps a token of others."""
    settings = settings_of(calibrated(method))
    assert settings[0].threshold == FINITE_LIMIT
    assert settings[-1].threshold == -FINITE_LIMIT
    model, others = calibrated(method), numbers(300, first=1000)
    assert model.generate(others, threshold=settings[0].threshold, batch_size=300).share == 0
    most = model.generate(others, threshold=settings[-1].threshold, batch_size=300).share
    assert (most == 1) == (method != "OneTimeModel")


def spent_on_others(method: str, n: int, budgets: Sequence[float], **options: Any) -> list[tuple[Setting, float]]:
    """Settings for budgets, and what they spend on as many inputs that were not calibrated with."""
    model, others = Toy.of(ends=False, **options).model(method), numbers(n, first=100_000)
    found = model.calibrate(numbers(n))
    settings = [found.for_budget(budget) for budget in budgets]
    return [(one, model.generate(others, threshold=one.threshold, batch_size=n).share) for one in settings]


@pytest.mark.slow
def test_budgets_hold_on_some_hundred_inputs_that_were_not_seen() -> None:
    """The error has a standard deviation of 0.2 to 0.8 points here: 2 points are no matter of luck."""
    model, others = Toy.of(ends=False, length=30).model("TokenwiseModel"), numbers(500, first=100_000)
    found, served = model.calibrate(numbers(500)), model.served
    for budget in BUDGETS[::10]:
        policy = Threshold(model.rejector, found.for_budget(budget).threshold)
        rollout = roll_out(served.predictor, served.expert, served.codec.encode(others), policy, served.spec)
        assert abs(rollout.share - budget) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("OneTimeModel", 0.8), ("OneTimeCost", 1.0)])
def test_one_time_budgets_hold_with_thousands_of_inputs(method: str, most: float) -> None:
    """An input is handed off or not: 600 of them leave an error of 1.5 to 3 points, these one of 0.6."""
    budgets = [most * step / 4 for step in (1, 2, 3, 4)]
    for budget, (_, spent) in zip(budgets, spent_on_others(method, 10_000, budgets, length=12), strict=True):
        assert abs(spent - budget) <= TOLERANCE


@each_method
def test_intervals_tell_how_far_off_other_inputs_may_be(method: str) -> None:
    """Both shares are uncertain; four standard errors of their difference are never met by chance."""
    for setting, spent in spent_on_others(method, 300, (0.2, 0.5, 0.7), length=12):
        error = (setting.high - setting.low) / (2 * 1.96) * math.sqrt(2)
        assert abs(spent - setting.share) <= 4 * error


def test_offline_scores_would_not_do() -> None:
    """The share of a draft's scores above a threshold is another than what is spent."""
    model = calibrated("TokenwiseModel")
    apart = []
    for one in settings_of(model)[20:81:20]:
        decided = model.decide(numbers(N), threshold=one.threshold)
        apart.append(abs(float(decided.defer.sum() / decided.sequences.lengths.sum()) - one.share))
    assert max(apart) > TOLERANCE


def test_a_budget_that_cannot_be_met_says_so() -> None:
    """By its odds an input is handed off at its best place, seldom at its first token."""
    model = calibrated("OneTimeModel")
    most = settings_of(model)[-1]
    assert most.share < 1 - TOLERANCE
    with pytest.warns(BudgetWarning, match=rf"a budget of 1 cannot be met; the nearest is {most.share:.3f}"):
        assert model.setting(1.0) == most
    with pytest.warns(BudgetWarning):
        assert model.generate(numbers(N), 1.0).share == pytest.approx(most.share)


def test_a_rejector_that_always_says_the_same_meets_nothing_between() -> None:
    toy = Toy.of(length=5)
    rejector = toy.rejector("TokenwiseModel")
    for weight in rejector.parameters():
        weight.data.zero_()
    model = DeferringModel(toy.served, rejector)
    found = model.calibrate(numbers(40))
    assert {one.share for one in found.settings} == {0.0, 1.0}
    with pytest.warns(BudgetWarning, match="a budget of 0.3 cannot be met"):
        assert model.generate(numbers(3), 0.3).share == 0


def test_the_repr_is_a_line() -> None:
    found = calibrated("TokenwiseModel").calibration
    assert found is not None
    text = repr(found)
    assert text.startswith(f"Calibration({found.inputs} inputs, spent: ")
    assert f"{found.settings[20].share:.3f} at 0.2" in text
    assert len(text) < 120
    promised = replace(found, promise=Promise("expected", "tokens", 300, "betting"))
    assert f"{found.inputs} inputs, guarantee expected, spent" in repr(promised)
    bought = LossCurve("errors", 30, "", (LossPoint(0.0, 4.0), LossPoint(0.5, 2.0), LossPoint(1.0, 1.0)))
    assert repr(bought) == (
        "LossCurve(errors, 30 inputs, loss: 4.00 at 0, 3.80 at 0.05, 3.60 at 0.1, 3.20 at 0.2, 2.00 at 0.5, 1.00 at 1)"
    )


def test_a_curve_says_what_the_rejector_is_worth() -> None:
    """A fit whose expert was no better, or whose rejector was no better than chance, ended without a word about it."""
    ends = LossPoint(0.0, 4.0), LossPoint(1.0, 1.0)
    good = LossCurve("errors", 30, "", (ends[0], LossPoint(0.2, 2.5), ends[1]))
    assert good.worth() == (
        "20 % of the tokens by the expert close 50 % of the gap between both models, at random 20 % on these 30 inputs"
    )
    poor = replace(good, points=(ends[0], LossPoint(0.2, 3.7), ends[1]))
    assert poor.worth().endswith("no better than chance; give more data, or use one of the models alone")
    useless = replace(good, points=(ends[1], LossPoint(1.0, 1.5)))
    assert useless.worth().startswith("deferring does not pay on these 30 inputs: the predictor alone loses 1, and")


def test_a_verdict_has_an_interval() -> None:
    """A rejector that was better on 30 inputs by chance was said to be better."""
    good = LossCurve("errors", 30, "", (LossPoint(0.0, 4.0), LossPoint(0.2, 2.5), LossPoint(1.0, 1.0)), (2.0, 4.0))
    sure, unsure = replace(good, gain=(0.3, 1.5)).worth(), replace(good, gain=(-0.3, 1.5)).worth()
    assert sure.endswith("at random 20 % (10 to 50 points more in 95 % of resamples) on these 30 inputs")
    assert unsure.endswith(
        "(-10 to 50 points more in 95 % of resamples) on these 30 inputs: cannot tell whether this rejector is better "
        "than chance; give more data"
    )
    assert replace(good, gap=(-1.0, 7.0)).worth() == (
        "cannot tell whether deferring pays on these 30 inputs: the predictor alone loses 4, and with 100 % of the "
        "tokens by the expert it is 1 (-1 to 7 less in 95 % of resamples); check the prompt (prefix, suffix), the "
        "metric and the expert, give more data, or use the predictor alone"
    )


def test_ends_that_are_alike_do_not_decide_the_verdict() -> None:
    """Two models that err at different places were said not to pay, above a table that had less loss at 20 %. Two that
    write the same were said to need more data."""
    points = LossPoint(0.0, 4.0), LossPoint(0.2, 2.5), LossPoint(1.0, 4.1)
    unlike = LossCurve("errors", 30, "", points, gap=(-0.9, 0.7), gain=(0.9, 2.1))
    for curve in (unlike, replace(unlike, gap=(-0.9, -0.1))):
        assert curve.worth().startswith(
            "deferring pays on these 30 inputs, though the expert alone is not clearly better: with 20 % of the tokens "
            "by the expert the loss is 2.5; the predictor alone loses 4, and with 100 % of the tokens by the expert it "
            "is 4.1 (-0.9 to "
        )
    assert replace(unlike, gain=(0.1, 2.1)).worth().startswith("cannot tell whether deferring pays on these 30 inputs")
    thresholds = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    deferred, loss = torch.tensor([[0] * 30, [4] * 30]), torch.rand(30, dtype=torch.float64).expand(2, 30)
    same = TokenSpending(TokenSweep(thresholds, deferred, torch.full((2, 30), 4), loss), 4)
    found = loss_curve(same, unit="errors", inputs=30, rejector="")
    assert found.gap == (0.0, 0.0)
    assert found.worth().startswith("deferring does not pay on these 30 inputs")


def test_a_rejector_that_only_defers_all_or_nothing_is_no_better_than_chance() -> None:
    """It was said to need more data, by 0 to 2.3e-14 points."""
    thresholds = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    loss = torch.stack([torch.rand(40, generator=generator) + 2, torch.rand(40, generator=generator)]).double()
    deferred = torch.tensor([[0] * 40, [4] * 40])
    spending = TokenSpending(TokenSweep(thresholds, deferred, torch.full((2, 40), 4), loss), 4)
    found = loss_curve(spending, unit="errors", inputs=40, rejector="")
    assert found.gain == (0.0, 0.0)
    assert "no better than chance" in found.worth()


def test_the_intervals_of_a_curve_are_those_of_resampled_curves() -> None:
    """Paired: a resample's own curve, beside the line between its own ends."""
    generator = torch.Generator().manual_seed(1)
    thresholds = torch.tensor([math.inf, 0.7, 0.4, 0.1, -math.inf], dtype=torch.float64)
    deferred = torch.stack([torch.randint(k, k + 1 + (0 < k < 4), (40,), generator=generator) for k in range(5)])
    loss = 4.0 - deferred + torch.rand(5, 40, generator=generator)
    spending = TokenSpending(TokenSweep(thresholds, deferred, torch.full((5, 40), 4), loss), 4)
    found = loss_curve(spending, unit="errors", inputs=40, rejector="")
    gaps, gains = [], []
    for draw in rules.resamples(40).astype(int)[:1000]:
        rows = np.repeat(np.arange(40), draw)
        one = loss_curve(spending.select(rows), unit="errors", inputs=40, rejector="")
        share = 0.2 * one.points[-1].share
        gaps.append(one.points[0].loss - one.points[-1].loss)
        gains.append(one.random_at(share) - one.loss_at(share))
    assert found.gap == pytest.approx(tuple(np.percentile(gaps, [2.5, 97.5])))
    assert found.gain == pytest.approx(tuple(np.percentile(gains, [2.5, 97.5])))


@pytest.mark.parametrize("budget", [-0.1, 1.1, math.nan, math.inf, "0.2", [0.2]])
def test_budgets_are_shares(budget: Any) -> None:
    with pytest.raises(OptionError, match="it is the share of tokens the expert writes, from 0 to 1"):
        calibrated("TokenwiseModel").generate([1], budget)


def test_two_inputs_are_enough_and_one_is_not() -> None:
    model = Toy.of(length=4).model("TokenwiseModel")
    assert model.calibrate(numbers(2)).inputs == 2
    with pytest.raises(OptionError, match="inputs to calibrate with: 1; give at least 2"):
        model.calibrate(numbers(1))


@each_method
def test_the_order_of_inputs_does_not_matter_much_and_repeats_are_the_same(method: str) -> None:
    model = Toy.of(length=6).model(method)
    assert model.calibrate(numbers(N)) == calibrated(method).calibration
    turned = model.calibrate(numbers(N)[::-1])
    both = zip(turned.settings, settings_of(calibrated(method)), strict=True)
    assert max(abs(one.share - other.share) for one, other in both) < 0.05


@pytest.mark.parametrize("method", METHODS[1:])
def test_hand_offs_that_are_known_are_not_asked_for_again(method: str, spy: Callable[[Any, str], list[Any]]) -> None:
    toy = Toy.of(length=6)
    model, examples = toy.model(method), toy.served.codec.encode(numbers(N))
    expected = model.calibrate_on(examples)
    drafted = draft(toy.served.predictor, examples, toy.served.spec)
    table, _ = hand_off_table(UnjudgedTask(toy.served), examples, drafted)
    labelled = LearningData(examples, drafted, table, None)
    asked = [spy(toy.served.expert, name) for name in ("next", "complete")]
    assert model.calibrate_on(examples, labelled=labelled) == expected
    assert asked == [[], []]


@pytest.mark.parametrize("method", METHODS[1:])
def test_no_other_hand_offs_are_asked_for_than_are_chosen_from(
    method: str, spy: Callable[[Any, str], list[Any]]
) -> None:
    toy = Toy.of(length=6)
    model, asked = toy.model(method), spy(hand_offs, "branch_out")
    *chosen, _ = model.rejector.sizes.hand_offs
    model.calibrate(numbers(N))
    assert {tuple(kept.tolist()) for _, _, _, kept, _ in asked} == {tuple(chosen)}
    assert len(chosen) < 6


def test_progress_counts_every_input_once() -> None:
    for method in METHODS:
        told: list[int] = []
        model = Toy.of(length=4).model(method)
        model.calibrate_on(model.served.codec.encode(list(numbers(N))), progress=told.append)
        assert sum(told) == N


def test_neither_model_is_asked_for_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy.of(length=4)

    def refuse(*_: object) -> None:
        raise AssertionError("nobody knows the answers")

    for name in ("sequence_loss", "token_loss", "token_cost"):
        monkeypatch.setattr(type(toy.task), name, refuse)
    for method in METHODS:
        toy.model(method).calibrate(numbers(5))


def test_a_rejector_is_not_changed() -> None:
    toy = Toy.of(length=4)
    rejector = toy.rejector("TokenwiseModel")
    assert isinstance(rejector, LSTMRejector)
    before = {name: value.clone() for name, value in rejector.state_dict().items()}
    DeferringModel(toy.served, rejector).calibrate(numbers(9))
    assert all(torch.equal(before[name], value) for name, value in rejector.state_dict().items())


def test_intervals_are_those_of_drawing_inputs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "INTERVAL_RESAMPLES", 40_000)  # so that chance is small beside one per cent more or less
    generator = np.random.default_rng(3)
    written = generator.integers(1, 9, (1, 50)).repeat(2, 0)
    deferred = generator.integers(0, written + 1)
    shares, low, high = realised_shares(deferred.astype(float), written.astype(float))
    rows = generator.integers(0, 50, (40_000, 50))
    drawn = deferred[1, rows].sum(1) / written[1, rows].sum(1)
    assert shares[1] == deferred[1].sum() / written[1].sum()
    assert [low[1], high[1]] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.04 * drawn.std())


def test_thresholds_stand_between_scores() -> None:
    scores = torch.tensor([-torch.inf, 1.0, 2.0, 4.0, torch.inf])
    assert _between(scores).tolist() == [math.inf, 3.0, 1.5, -math.inf]
    assert _between(scores[:2]).tolist() == [math.inf, -math.inf]


def test_the_table_tells_what_cannot_be_met() -> None:
    settings = tuple(Setting(budget, 0.5, min(budget, 0.8), 0.1, 0.9) for budget in BUDGETS)
    settings = (Setting(0.0, FINITE_LIMIT, 0.0, 0.0, 0.0), *settings[1:-1], Setting(1.0, -FINITE_LIMIT, 0.8, 0.7, 0.9))
    console = Console(width=100)
    with console.capture() as shown:
        console.print(calibration_table(Calibration(settings, 70, "")))
    lines = [line.split() for line in shown.get().splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and line[0][:1].isdigit()}
    assert list(rows) == [f"{step / 20:.2f}" for step in range(21)]
    assert rows["0.00"][0] == "never"
    assert rows["1.00"] == ["always", "0.800", "[0.700,", "0.900]", "cannot", "be", "met"]
    assert rows["0.80"] == ["0.5", "0.800", "[0.100,", "0.900]"]
