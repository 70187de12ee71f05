"""Quality that is promised: kept as often as it says, found as one by one, and refused where too little is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from toy_pair import LetterCodec

from seqdefer.budgets.guarantees import betting_p_values
from seqdefer.budgets.hand_off_rules import ScoredHandOffs
from seqdefer.budgets.quality import QualityPromise, promise_quality
from seqdefer.budgets.spending import HandOffSpending, TokenSpending
from seqdefer.budgets.token_sweeps import TokenSweep
from seqdefer.errors import OptionError
from seqdefer.interfaces import Served
from seqdefer.labels.labelled import CalibrationData
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.rejectors.confidence import Confidence
from seqdefer.testing import ToyTask
from seqdefer.types import HandOffTable

LENGTH, SETTINGS, MAX_LOSS = 10, 21, 10.0


def by_token(n: int, seed: int) -> TokenSpending:
    """Each setting less than always loses 0.2 more in expectation, and differences vary."""
    random = np.random.default_rng(seed)
    thresholds = np.concatenate([[-np.inf], np.linspace(0.1, 0.9, SETTINGS - 2), [np.inf]])
    expert = 2 + 2 * random.random(n)
    rises = np.arange(SETTINGS)[:, None] * 0.2
    noise = np.where(np.arange(SETTINGS)[:, None] == 0, 0.0, 3 * (random.random((SETTINGS, n)) - 0.5))
    loss = (expert + rises + noise).clip(0, MAX_LOSS)
    deferred = np.broadcast_to(np.linspace(LENGTH, 0, SETTINGS).round()[:, None], (SETTINGS, n))
    lengths = np.full((SETTINGS, n), LENGTH)
    columns = (torch.from_numpy(np.ascontiguousarray(one)) for one in (thresholds, deferred, lengths, loss))
    return TokenSpending(TokenSweep(*columns), LENGTH, has_fixed_settings=True)


def test_quality_is_kept_as_often_as_it_says_and_most_of_the_budget_is_saved() -> None:
    population, repeats, within = by_token(4000, 1), 150, 1.1
    truth = population.at(range(SETTINGS)).loss.mean(1) - population.expert_loss.mean()
    random, lost, shares = np.random.default_rng(2), [], []
    for _ in range(repeats):
        sample = population.select(random.integers(0, 4000, 400))
        found = promise_quality(sample, within=within, max_loss=MAX_LOSS, confidence=0.9)
        lost.append(truth[int(np.flatnonzero(population.settings == found.threshold)[0])])
        shares.append(found.share)
    assert np.mean(np.array(lost) > within) <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / repeats)
    assert 0.5 < np.mean(shares) < 0.9  # at a share of 0.75 one loses 1.0 more


def test_the_setting_is_that_of_testing_one_by_one() -> None:
    spending = by_token(400, 3)
    found = promise_quality(spending, within=1.1, max_loss=MAX_LOSS, confidence=0.9)
    order, last = np.random.default_rng(0).permutation(400), None
    limit = (1.1 + MAX_LOSS) / (2 * MAX_LOSS)
    for place in reversed(range(SETTINGS)):
        difference = spending.at([place]).loss[0] - spending.expert_loss
        scaled = ((difference + MAX_LOSS) / (2 * MAX_LOSS))[order]
        if betting_p_values(scaled[None], limit, 0.1, most=1 / (1 - limit))[0] > 0.1:
            break
        last = place
    assert last is not None
    assert found.threshold == spending.settings[last]
    assert found.loss == pytest.approx(spending.at([last]).loss.mean())
    assert found.expert_loss == pytest.approx(spending.expert_loss.mean())
    assert found.inputs == 400


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_higher_stakes_are_still_fair(most: float) -> None:
    """All sequences of 10 losses of 0 or 1 with a limit of 0.5: wealth reaches 1 / delta with probability delta."""
    sequences = (np.arange(2**10)[:, None] >> np.arange(10)) % 2 * 1.0
    for delta in (0.05, 0.2):
        assert (betting_p_values(sequences, 0.5, delta, most=most) <= delta).mean() <= delta


@pytest.mark.parametrize(
    ("n", "within", "message"),
    [
        (40, 0.3, r"from 40 inputs, no setting but the expert alone can be promised .*; about (\d+) inputs would be"),
        (2000, 0.1, r"the first that was tested lost 0\.\d+ more; allow more, or fit a better rejector"),
    ],
)
def test_what_cannot_be_promised_says_what_would_help(n: int, within: float, message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        promise_quality(by_token(n, 4), within=within, max_loss=MAX_LOSS, confidence=0.9)
    if n == 40:
        needed = int(str(error.value).split("about ")[1].split()[0])
        limit = (within + MAX_LOSS) / (2 * MAX_LOSS)
        for size, is_enough in ((needed, True), (needed - 1, False)):  # of an expert's equal, at the least
            equal = np.full((1, size), 0.5)
            assert (betting_p_values(equal, limit, 0.1, most=1 / (1 - limit))[0] <= 0.1) == is_enough


def hand_offs(n: int) -> HandOffSpending:
    """Whole deferral by scores that know the gain: inputs with low scores lose nothing by the predictor."""
    scores = torch.rand(n, generator=torch.Generator().manual_seed(1))
    deferred, loss = torch.zeros(n, LENGTH + 1), torch.ones(n, LENGTH + 1)
    deferred[:, 0] = LENGTH
    loss[:, -1] += torch.where(scores > 0.6, 3.0, 0.0)
    return HandOffSpending(ScoredHandOffs.of(scores, LENGTH), HandOffTable(loss, deferred))


def test_whole_deferral_saves_what_the_predictor_does_as_well() -> None:
    found = promise_quality(hand_offs(600), within=0.5, max_loss=MAX_LOSS, confidence=0.9, set_aside=32)
    assert found.inputs == 568
    assert 0.2 < found.share < 0.6
    assert found.loss - found.expert_loss < 0.5


def test_to_hand_off_all_that_one_can_may_save_enough() -> None:
    """One-time deferral at its best places spends less than the expert alone: that was refused as if it were the expert
    where no other setting could be promised."""
    n, half = 600, LENGTH // 2
    chance = torch.Generator().manual_seed(2)
    scores = torch.stack([torch.zeros(n), 1 + torch.rand(n, generator=chance), torch.zeros(n)], 1)
    deferred, loss = torch.zeros(n, LENGTH + 1), torch.ones(n, LENGTH + 1)
    deferred[:, 0], deferred[:, half] = LENGTH, LENGTH - half
    loss[:, -1] = MAX_LOSS  # the predictor is useless, the expert's second half is all that it takes
    scored = ScoredHandOffs.of(scores, LENGTH, hand_offs=(0, half, LENGTH), rule="largest")
    spending = HandOffSpending(scored, HandOffTable(loss, deferred))
    found = promise_quality(spending, within=0.5, max_loss=MAX_LOSS, confidence=0.9, set_aside=1)
    assert found.share == 0.5
    assert found.loss == found.expert_loss


@pytest.mark.parametrize("within", [0.0, -1.0, math.nan, math.inf])
def test_within_is_a_loss(within: float) -> None:
    with pytest.raises(OptionError, match=r"within is .*; it is how much may be lost beside the expert alone"):
        promise_quality(by_token(50, 1), within=within, max_loss=MAX_LOSS, confidence=0.9)


def test_losses_outside_the_range_of_the_task_are_refused() -> None:
    with pytest.raises(OptionError, match="a loss lies outside 0 to 1, which the task says is its range"):
        promise_quality(by_token(50, 1), within=0.5, max_loss=1.0, confidence=0.9)


def test_a_model_promises_quality_where_losses_have_a_limit() -> None:
    task = ToyTask(n=600, length=5)
    examples = task.split("test")
    model = DeferringModel(Served(task.predictor, task.expert, task.spec, LetterCodec()), Confidence("uncertainty"))
    spending = model.spending_on(CalibrationData.of(examples, ()), judge=task)
    with pytest.raises(OptionError, match=r"the loss of task 'toy' .* has no upper limit, so nothing can be promised"):
        model.promise_quality(spending, task, within=0.5, confidence=0.9)
    task.max_loss = float(spending.at(range(len(spending.settings))).loss.max())
    found = model.promise_quality(spending, task, within=0.3 * task.max_loss, confidence=0.9)
    assert isinstance(found, QualityPromise)
    assert model.quality == found
    assert found.share < 1
    assert found.unit == task.loss_unit
    assert "at most" in found.in_words()
