"""Budget rules that promise: what they choose by brute force, how often they keep it, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from toy_pair import METHODS, Toy, numbers

from seqdefer.budgets import promises
from seqdefer.budgets.calibration import BUDGETS, Calibration
from seqdefer.budgets.guarantees import betting_p_values, token_losses
from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.promises import Confident, Expected, PromisingRule, budget_rule
from seqdefer.budgets.rules import FINITE_LIMIT, NEAREST, BudgetRule
from seqdefer.budgets.spending import HandOffSpending, Spending, TokenSpending, n_set_aside
from seqdefer.budgets.token_sweeps import TokenSweep
from seqdefer.errors import OptionError
from seqdefer.labels.labelled import CalibrationData, input_names
from seqdefer.methods.deferral import UnjudgedTask
from seqdefer.model.calibrated_pair import BudgetWarning
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.folders import LearnedFrom, Pairing
from seqdefer.types import Examples, HandOffTable

LENGTH = 20
RULES: dict[str, PromisingRule] = {
    f"{name}, {share_of}": made
    for share_of in ("tokens", "inputs")
    for name, made in {
        "expected": Expected(share_of),  # type: ignore[arg-type]
        "betting": Confident(0.9, share_of),  # type: ignore[arg-type]
        "means": Confident(0.9, share_of, "hoeffding-bentkus"),  # type: ignore[arg-type]
    }.items()
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def whole(n: int, seed: int) -> HandOffSpending:
    """Sequences of different lengths, deferred whole where a uniform score is high; long ones have higher scores."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (n,), generator=random)
    scores = torch.rand(n, generator=random) + 0.02 * lengths
    deferred = torch.zeros(n, LENGTH + 1)
    deferred[:, 0] = lengths
    table = HandOffTable(torch.zeros(n, LENGTH + 1), deferred)
    return HandOffSpending(ScoredHandOffs.of(scores, LENGTH, lengths=lengths), table)


def by_token(n: int, seed: int) -> TokenSpending:
    """Shares that rise as thresholds fall, with noise of their own at each: not monotone."""
    random = np.random.default_rng(seed)
    thresholds = np.concatenate([[-np.inf], np.linspace(0.02, 0.98, 49), [np.inf]])
    lengths = np.broadcast_to(random.integers(1, LENGTH + 1, n), (51, n))
    wanted = (1 - np.clip(thresholds, 0, 1))[:, None] * random.beta(2, 2, n) * 2
    deferred = np.round((wanted + 0.05 * random.standard_normal((51, n))).clip(0, 1) * lengths)
    deferred[0], deferred[-1] = lengths[0], 0
    columns = (torch.from_numpy(np.ascontiguousarray(one)) for one in (thresholds, deferred, lengths, 0.0 * deferred))
    return TokenSpending(TokenSweep(*columns), LENGTH, has_fixed_settings=True)


def plain_losses(rule: PromisingRule, spending: Spending, place: int, budget: float) -> list[float]:
    seen = spending.at([place])
    pairs = zip(seen.deferred[0], seen.written[0], strict=True)
    if rule.share_of == "inputs":
        return [deferred / written for deferred, written in pairs]
    return [float(token_losses(deferred, written, budget, LENGTH)) for deferred, written in pairs]


def plain_place(rule: PromisingRule, spending: Spending, budget: float) -> int:
    """Setting by setting, one input after the other."""
    order, place = np.random.default_rng(0).permutation(spending.inputs), 0
    highest = plain_losses(rule, spending, 0, budget)
    for after in range(1, len(spending.settings)):
        losses = plain_losses(rule, spending, after, budget)
        highest = [max(pair) for pair in zip(highest, losses, strict=True)]
        is_raised = isinstance(rule, Expected) or isinstance(spending, HandOffSpending)
        used = np.array(highest if is_raised else losses)[order]
        n = len(used)
        if isinstance(rule, Expected):
            passes = (used.sum() + 1) / (n + 1) <= budget + 1e-12
        elif rule.bound == "betting":
            passes = betting_p_values(used[None], budget, 0.1)[0] <= 0.1
        else:
            passes = rule.passes(used[None], budget)[0]
        if not passes:
            break
        place = after
    return place


@each_rule
@pytest.mark.parametrize("make", [whole, by_token])
def test_places_are_those_of_testing_one_by_one(
    rule: PromisingRule, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "SETTINGS_AT_ONCE", 7)
    spending = make(150, seed=1)
    for budget in (0.01, 0.1, 0.3, 0.7):
        assert rule.place(spending, budget) == plain_place(rule, spending, budget)
    assert rule.place(spending, 0.0) == 0
    assert rule.place(spending, 1.0) == len(spending.settings) - 1


def realised(rule: BudgetRule, population: Spending, chosen: Spending, budget: float, share_of: str) -> float:
    """The share of the whole population at the setting that some of it choose."""
    threshold = rule.choose(chosen, budget).threshold
    settings = np.clip(population.settings, -FINITE_LIMIT, FINITE_LIMIT)
    place = int(np.searchsorted(-settings, -threshold, side="right")) - 1
    seen = population.at([place])
    if share_of == "tokens":
        return float(seen.deferred.sum() / seen.written.sum())
    return float((seen.deferred / seen.written).mean())


@pytest.mark.parametrize("share_of", ["tokens", "inputs"])
@pytest.mark.parametrize("make", [whole, by_token])
def test_promises_are_kept_as_often_as_they_say_and_nearest_is_not(share_of: Any, make: Any) -> None:
    """A hundred inputs drawn again and again from 2,000: their expectation is known."""
    population, repeats, budget = make(2000, seed=2), 120, 0.25
    random = np.random.default_rng(3)
    spent: dict[str, list[float]] = {"nearest": [], "expected": [], "confident": []}
    rules = {"nearest": NEAREST, "expected": Expected(share_of), "confident": Confident(0.9, share_of)}
    for _ in range(repeats):
        chosen = population.select(random.integers(0, 2000, 100))
        for name, rule in rules.items():
            spent[name].append(realised(rule, population, chosen, budget, share_of))
    exceeds = {name: np.mean(np.array(shares) > budget + 1e-9) for name, shares in spent.items()}
    if share_of == "tokens":  # what nearest comes near to
        assert exceeds["nearest"] > 0.2
    assert exceeds["confident"] <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / repeats)
    error = np.std(spent["expected"]) / math.sqrt(repeats)
    assert np.mean(spent["expected"]) <= budget + 3 * error
    assert np.mean(spent["confident"]) > 0.1  # a promise is easily kept by whoever spends nothing


# -- models --------------------------------------------------------------------------------------------------------

each_method = pytest.mark.parametrize("method", METHODS)


def promised(method: str, n: int = 200, **options: Any) -> tuple[DeferringModel, Calibration]:
    model = Toy.of(length=6).model(method)
    return model, model.calibrate(numbers(n), **options)


@each_method
def test_calibrations_say_what_they_promise_and_spend_less_than_the_budget(method: str) -> None:
    model, found = promised(method, guarantee="confident", confidence=0.8)
    counted = 200 - n_set_aside(200) if method == "TokenwiseModel" else 200
    assert found.promise == Confident(0.8).promise(counted)
    assert found.inputs == counted
    for one in found.settings[1:-1]:
        assert one.share < one.budget
    assert found.settings[50].share > 0.3
    assert found.for_budget(0.209) == found.settings[20]  # a promise for 0.21 is none for 0.209
    assert found.for_budget(0.21) == found.settings[21]
    assert model.setting(0.4) == found.settings[40]
    nearest = promised(method)[1]
    assert nearest.promise is None
    assert nearest.settings[30].share > found.settings[30].share


@each_method
def test_thresholds_do_not_depend_on_the_inputs_that_are_counted(method: str) -> None:
    model, examples = Toy.of(length=6).model(method), Toy.of(length=6).served.codec.encode(numbers(100))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    last = order[n_set_aside(100) :]
    inputs = examples.inputs.clone()
    inputs[last] = torch.tensor(numbers(len(last), first=500))
    changed = Examples(inputs, inputs[:, None], examples.ids)
    task = UnjudgedTask(model.served)
    found, other = (model.deferral.spending(task, one, set_aside=True) for one in (examples, changed))
    assert found.inputs == (80 if method == "TokenwiseModel" else 100)
    assert np.array_equal(found.settings, other.settings) == found.has_fixed_settings == (method == "TokenwiseModel")


def test_small_budgets_that_too_few_inputs_cannot_promise_say_how_many_could() -> None:
    model, found = promised("OneTimeCost", n=40, guarantee="expected")
    assert found.settings[2].share == 0
    with pytest.warns(BudgetWarning, match="a budget of 0.02 cannot be promised from 40 inputs.* at least 49"):
        assert model.generate([5], 0.02).share == 0
    assert found.promise is not None
    assert found.promise.least_inputs(0.02) == 49
    assert found.shortfall(0.02) is not None
    assert found.shortfall(0.0) is found.shortfall(0.5) is None


@pytest.mark.parametrize("options", [{"guarantee": "expected"}, {"guarantee": "confident", "confidence": 0.99}])
def test_too_few_inputs_for_anything_name_the_least(options: dict[str, Any]) -> None:
    least = budget_rule(**options).promise(2).least_inputs(0.5)  # type: ignore[attr-defined]
    if least > 2:
        with pytest.raises(OptionError, match=f"{least - 1} inputs are too few.*at least {least}"):
            promised("OneTimeModel", n=least - 1, **options)
    promised("OneTimeModel", n=max(least, 2), **options)


def test_too_few_inputs_name_how_many_to_give_where_some_choose_the_thresholds() -> None:
    """Six inputs were refused for being fewer than six."""
    with pytest.raises(OptionError, match=r"5 inputs are too few .* at least 6 beside the thresholds' own, 7 in all"):
        promised("TokenwiseModel", n=6, guarantee="confident")
    assert promised("TokenwiseModel", n=7, guarantee="confident")[1].inputs == 6


def test_least_inputs_are_those_of_an_expert_who_writes_nothing() -> None:
    for rule in (Confident(0.9), Confident(0.9, "inputs", "hoeffding-bentkus")):
        for budget in (0.05, 0.2, 0.5):
            least = rule.promise(1).least_inputs(budget)
            assert rule.passes(np.zeros((1, least)), budget)[0]
            assert not rule.passes(np.zeros((1, least - 1)), budget)[0]
    assert Confident(0.9, "inputs", "hoeffding-bentkus").promise(1).least_inputs(0.2) == math.ceil(
        math.log(0.1) / math.log(0.8)
    )
    assert Expected().promise(1).least_inputs(0.1) == 9


# -- data ----------------------------------------------------------------------------------------------------------


def test_inputs_of_the_fit_are_refused() -> None:
    toy = Toy.of(length=4)
    examples = toy.served.codec.encode(numbers(60))
    model = toy.model("TokenwiseModel")
    model.learned_from = LearnedFrom(tuple(input_names(examples)[40:]), model.rejector.fingerprint)
    with pytest.raises(OptionError, match=r"20 of 60 inputs were used to fit this rejector, the first at place 41;"):
        model.calibrate(numbers(60), guarantee="expected")
    assert model.calibrate(numbers(40), guarantee="expected").promise is not None
    assert model.calibrate(numbers(60)).promise is None  # without a guarantee nothing is refused


def test_a_model_that_does_not_know_what_it_was_fitted_on_promises_nothing() -> None:
    model = Toy.of(length=4).model("TokenwiseModel")
    model.pairing = Pairing("toy", {}, "", "")
    with pytest.raises(OptionError, match=r"fitted before the inputs of a fit were recorded.*fit it again"):
        model.calibrate(numbers(60), guarantee="expected")


def test_names_of_inputs_do_not_depend_on_padding() -> None:
    short, long = torch.tensor([[4, 7, -1]]), torch.tensor([[4, 7, -1, -1], [4, 7, 5, -1]])
    names = [input_names(Examples(rows, rows, torch.arange(len(rows)))) for rows in (short, long)]
    assert names[0][0] == names[1][0] != names[1][1]
    zeros = torch.tensor([[4, 7, 0, 0, 0]])  # of a task that pads with these
    assert input_names(Examples(zeros, zeros, torch.arange(1))) == names[0]
    floats = torch.tensor([[0.5, -1.0], [0.5, -2.0]])
    first, second = input_names(Examples(floats, floats, torch.arange(2)))
    assert first != second
    assert CalibrationData.of(Examples(short, short, torch.arange(1)), []).examples.inputs is short


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guarantee": "sure"}, "unknown guarantee 'sure'"),
        ({"guarantee": "confident", "confidence": 1.0}, "confidence is 1.0; it must be between 0 and 1"),
        ({"guarantee": "confident", "confidence": 0.0}, "confidence is 0.0; it must be between 0 and 1"),
        ({"guarantee": "confident", "confidence": math.nan}, "confidence is nan; it must be"),
        ({"guarantee": "expected", "confidence": 0.9}, "confidence 0.9 belongs to the guarantee confident"),
        ({"confidence": 0.9}, "confidence 0.9 belongs to the guarantee confident, not to nearest"),
        ({"share_of": "inputs"}, "the share of inputs belongs to a guarantee"),
        ({"guarantee": "expected", "share_of": "words"}, "unknown kind of share 'words'"),
    ],
)
def test_bad_levels_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        budget_rule(**options)


def test_a_guarantee_that_was_not_calibrated_is_refused() -> None:
    model, _ = promised("OneTimeModel")
    with pytest.raises(OptionError, match=r"has no guarantee; make one: seqdefer calibrate .* --guarantee confident"):
        model.require_promise(Confident(0.9))
    model.require_promise(NEAREST)
    model, _ = promised("OneTimeModel", guarantee="confident", confidence=0.9)
    model.require_promise(Confident(0.8))
    for rule in (Confident(0.95), Expected(), Confident(0.9, "inputs")):
        with pytest.raises(
            OptionError, match=r"has another guarantee: with confidence 0\.9, the expert writes at most"
        ):
            model.require_promise(rule)


def test_promises_in_words_name_their_condition() -> None:
    words = Confident(0.9).promise(468).in_words(0.2)
    assert words == (
        "with confidence 0.9, the expert writes at most 20 % of all tokens, for inputs like the 468 of the calibration"
    )
    assert (
        Expected("inputs").promise(9).in_words(0.155).startswith("in expectation, the expert writes at most 15.5 % of")
    )
    assert len(BUDGETS) == 101
