"""From scores to decisions: sweeps against the plain loop, oracles and budgets against brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracles import Hashing, WithExpert, completing, hand_off, write_all
from torch import Tensor

from seqdefer.budgets.hand_off_rules import HAND_OFF_RULES, ScoredHandOffs
from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.rules import (
    FINITE_LIMIT,
    Setting,
    once_threshold_for,
    price_for,
    threshold_for,
    whole_threshold_for,
)
from seqdefer.budgets.sweeps import GridSweep, hand_off_sweep
from seqdefer.budgets.token_sweeps import TokenSweep, sweep_thresholds
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.errors import DataError, OptionError
from seqdefer.evaluation.curves import Curve, Ends, curve_of, optimal_curve, optimal_once, optimal_whole
from seqdefer.evaluation.oracle import all_outcomes
from seqdefer.interfaces import Policy, TokenRejector
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.trees import DecisionTrees, enumerate_trees
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.confidence import ChowMean, ChowQuantile, ChowSum, Confidence, DraftConfidence
from seqdefer.rejectors.losses import hand_off_grid, is_ended
from seqdefer.rejectors.token import LSTMRejector, MLPRejector
from seqdefer.testing import ToyTask
from seqdefer.types import HandOffTable, Rollout

TOYS = {
    "lengths differ": ToyTask(n=20, length=4),
    "all of one length": ToyTask(n=12, length=4, ends=False),
    "two words": ToyTask(n=20, length=5, vocabulary=3, seed=1),
}
each_toy = pytest.mark.parametrize("task", TOYS.values(), ids=TOYS)


def network(kind: type[LSTMRejector] | type[MLPRejector], task: ToyTask) -> LSTMRejector | MLPRejector:
    torch.manual_seed(1)
    return kind(Sizes(2, 3, task.spec.length, True, layers=2, units=6, dropout=0.3), "toy").eval()


def roll(task: ToyTask, policy: Policy[Any]) -> Rollout:
    return roll_out(task.predictor, task.expert, task.split("test"), policy, task.spec)


def table_of(task: ToyTask, kept: list[int] | None = None) -> HandOffTable:
    examples = task.split("test")
    return hand_off_table(task, examples, draft(task.predictor, examples, task.spec), kept=kept)[0]


def lengths_of(task: ToyTask) -> Tensor:
    return draft(task.predictor, task.split("test"), task.spec).sequences.lengths


# -- sweeps --------------------------------------------------------------------------------------------------------


@each_toy
@pytest.mark.parametrize("rejector", [Hashing(), Confidence(), Confidence("entropy"), LSTMRejector, MLPRejector])
def test_a_sweep_is_a_rollout_for_each_threshold(task: ToyTask, rejector: Any) -> None:
    rejector = network(rejector, task) if isinstance(rejector, type) else rejector
    examples = task.split("test")
    trees = DecisionTrees(task, examples)
    met = sweep_thresholds(rejector, trees).thresholds[1:-1]
    thresholds = ((met[1:] + met[:-1]) / 2)[:: max(1, len(met) // 8)]  # between scores: no decision hangs on rounding
    swept = sweep_thresholds(rejector, trees, thresholds=thresholds)
    assert torch.equal(swept.thresholds, thresholds)
    for row, threshold in enumerate(thresholds.tolist()):
        rollout = roll(task, Threshold(rejector, threshold))
        assert torch.equal(swept.deferred[row], rollout.deferred)
        assert torch.equal(swept.lengths[row], rollout.sequences.lengths)
        assert torch.equal(swept.loss[row], task.sequence_loss(examples, rollout.sequences))
        assert swept.share[row] == pytest.approx(rollout.share)


@each_toy
def test_a_score_that_meets_the_threshold_defers(task: ToyTask) -> None:
    trees = enumerate_trees(task, task.split("test"))
    thresholds = torch.arange(17) / 16  # the very scores of the rejector
    swept = sweep_thresholds(Hashing(levels=16), trees, thresholds=thresholds)
    for row, threshold in enumerate(thresholds.tolist()):
        assert torch.equal(swept.deferred[row], roll(task, Threshold(Hashing(levels=16), threshold)).deferred)


@each_toy
def test_sweeps_run_from_the_expert_alone_to_the_predictor_alone(task: ToyTask) -> None:
    examples = task.split("test")
    swept = sweep_thresholds(Hashing(), enumerate_trees(task, examples))
    table = table_of(task)
    assert bool((swept.thresholds.diff() > 0).all())
    assert torch.equal(swept.loss[0], table.loss[:, 0])
    assert torch.equal(swept.deferred[0], table.deferred[:, 0])
    assert torch.equal(swept.deferred[0], swept.lengths[0])
    assert torch.equal(swept.loss[-1], table.loss[:, -1])
    assert int(swept.deferred[-1].sum()) == 0
    assert (float(swept.share[0]), float(swept.share[-1])) == (1.0, 0.0)


@each_toy
def test_few_scores_are_all_tried(task: ToyTask) -> None:
    """Where rollouts meet fewer scores than thresholds, the sweep misses no outcome that some threshold has."""
    rejector = Hashing(3, levels=16)
    swept = sweep_thresholds(rejector, enumerate_trees(task, task.split("test")))
    outcomes = {tuple(row) for row in swept.deferred.tolist()}
    for level in range(18):
        assert tuple(roll(task, Threshold(rejector, (level - 0.5) / 16)).deferred.tolist()) in outcomes


def test_a_sweep_of_some_rows() -> None:
    task, rows = TOYS["two words"], torch.tensor([7, 2, 11])
    trees, thresholds = enumerate_trees(task, task.split("test")), torch.linspace(0, 1, 7)
    some = sweep_thresholds(Hashing(), trees, rows, thresholds)
    every = sweep_thresholds(Hashing(), trees, thresholds=thresholds)
    assert torch.equal(some.deferred, every.deferred[:, rows])
    assert torch.equal(some.loss, every.loss[:, rows])


class Counting(Hashing):
    """Notes how many rows it scored at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[int] = []

    def score(self, state: Tensor, position: int, proposal: Any) -> tuple[Tensor, Tensor]:
        self.scored.append(len(state))
        return super().score(state, position, proposal)


def test_a_prefix_is_scored_once_however_many_thresholds_reach_it() -> None:
    task, counting = TOYS["all of one length"], Counting()
    trees = enumerate_trees(task, task.split("test"))
    sweep_thresholds(counting, trees, thresholds=torch.linspace(0, 1, 100))
    at_each = [int((trees.nodes.position[: trees.nodes.size] == position).sum()) for position in range(4)]
    assert counting.scored[0] == task.n
    assert all(scored <= nodes for scored, nodes in zip(counting.scored, at_each, strict=True))


# -- the oracle ----------------------------------------------------------------------------------------------------


def token_curve(rejector: TokenRejector[Any], trees: DecisionTrees, ends: Ends) -> Curve:
    swept = sweep_thresholds(rejector, trees)
    return curve_of(GridSweep(swept.deferred, swept.loss), ends)


def once_curve(scores: Tensor, grid: Tensor | None, table: HandOffTable, rule: str) -> Curve:
    length = table.loss.shape[1] - 1
    scored = ScoredHandOffs.of(scores, length, hand_offs=() if grid is None else grid, rule=rule)
    return curve_of(hand_off_sweep(scored, table), Ends.of(table))


@each_toy
def test_no_method_beats_the_oracle(task: ToyTask) -> None:
    examples = task.split("test")
    trees, table = enumerate_trees(task, examples), table_of(task)
    drafted, ends, grid = draft(task.predictor, examples, task.spec), Ends.of(table), hand_off_grid(task.spec.length, 3)
    loss, deferred = all_outcomes(trees)
    until = float(ends.expert_deferred.mean())
    oracle = {
        "token": optimal_curve(loss, deferred, until=until),
        "once": optimal_once(table),
        "whole": optimal_whole(table),
    }
    random = torch.Generator().manual_seed(0)
    rejectors = [Confidence(), Confidence("entropy"), network(LSTMRejector, task), *map(Hashing, range(5))]
    curves = {
        "token": [token_curve(rejector, trees, ends) for rejector in rejectors],
        "once": [once_curve(torch.randn(task.n, 3, generator=random), grid, table, "odds") for _ in range(10)],
        "whole": [
            once_curve(chow.score(drafted), None, table, "largest")
            for chow in (ChowSum(), ChowMean(), ChowQuantile(0.4))
        ],
    }
    least_certain = DraftConfidence(grid.tolist(), "entropy").score(drafted)
    curves["once"].append(once_curve(least_certain, grid, table, "largest"))
    budgets = np.linspace(0, until, 50)
    for granularity, best in oracle.items():
        for curve in curves[granularity]:
            assert best.area <= curve.area + 1e-9
            assert (best.at(budgets) <= curve.at(budgets) + 1e-9).all()
    assert oracle["token"].area <= oracle["once"].area <= oracle["whole"].area


# -- decisions by draft --------------------------------------------------------------------------------------------


def deferral_odds(scores: Tensor) -> Tensor:
    return torch.from_numpy(
        ScoredHandOffs.of(
            scores, scores.shape[1], hand_offs=[*range(scores.shape[1] - 1), scores.shape[1]], rule="odds"
        )
        .path()
        .settings
    )


def choose_hand_off(scores: Tensor, grid: Tensor, threshold: float, rule: str = "odds") -> Tensor:
    return torch.from_numpy(ScoredHandOffs.of(scores, int(grid[-1]), hand_offs=grid, rule=rule).kept(threshold))


def choose_by_cost(scores: Tensor, grid: Tensor, lengths: Tensor, price: float) -> Tensor:
    scored = ScoredHandOffs.of(scores, int(grid[-1]), hand_offs=grid, rule="cost", lengths=lengths)
    return torch.from_numpy(scored.kept(price))


def choose_whole(scores: Tensor, length: int, threshold: float) -> Tensor:
    return torch.from_numpy(ScoredHandOffs.of(scores, length).kept(threshold))


def test_odds_of_deferring() -> None:
    scores = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0], [-1.0, -3.0, 4.0]])
    p = scores.softmax(1)
    torch.testing.assert_close(deferral_odds(scores).float(), ((1 - p[:, -1]) / p[:, -1]).log())
    torch.testing.assert_close(deferral_odds(scores + 7), deferral_odds(scores))


def test_hand_offs_are_chosen_by_score_and_threshold() -> None:
    grid = torch.tensor([0, 3, 6])
    scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 9.0]])
    assert choose_hand_off(scores, grid, 0.0).tolist() == [0, 3, 6]
    assert choose_hand_off(scores, grid, torch.inf).tolist() == [6, 6, 6]
    assert choose_hand_off(scores, grid, -torch.inf).tolist() == [0, 3, 0]
    exactly = float(deferral_odds(scores)[1])
    assert choose_hand_off(scores, grid, exactly).tolist() == [0, 3, 6]
    assert choose_whole(torch.tensor([0.1, 0.5, 0.9]), 6, 0.5).tolist() == [6, 0, 0]


def estimates_of(task: ToyTask, size: int, seed: int = 0, *, coarse: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, grid and lengths of the drafts: minus made-up losses, -inf for hand-offs past the end of a draft."""
    generator, grid = torch.Generator().manual_seed(seed), hand_off_grid(task.spec.length, size)
    lengths = lengths_of(task)
    loss = torch.randn(task.n, size, generator=generator, dtype=torch.double)
    loss = (4 * loss).round() / 4 if coarse else loss
    return -torch.where(is_ended(grid, lengths), torch.inf, loss), grid, lengths


@each_toy
@pytest.mark.parametrize("price", [-torch.inf, -1.3, 0.0, 0.4, 2.5, torch.inf])
def test_the_cheapest_hand_off_is_chosen(task: ToyTask, price: float) -> None:
    """One by one, from the definition; where a hand-off is impossible no price makes it possible."""
    scores, grid, lengths = estimates_of(task, task.spec.length + 1, coarse=True)
    scores[:, 1] = -torch.inf
    chosen = choose_by_cost(scores, grid, lengths, price)
    for row in range(task.n):

        def cost(kept: int, row: int = row) -> tuple[float, int]:
            ahead = max(int(lengths[row]) - kept, 0)
            return (price * ahead if ahead else 0.0) - float(scores[row, kept]), kept

        possible = [kept for kept in grid.tolist() if scores[row, kept] > -torch.inf]
        assert int(chosen[row]) == min(possible, key=cost)


@each_toy
def test_curves_of_hand_offs_are_what_the_engine_writes(task: ToyTask, generator: torch.Generator) -> None:
    """Every threshold of the engine's policy is a point of the sweep that the curve is drawn from."""
    grid, table, examples = hand_off_grid(task.spec.length, 3), table_of(task), task.split("test")
    scores = torch.randn(task.n, 3, generator=generator).double()
    points = {(round(x, 9), round(y, 9)) for x, y in once_curve(scores, grid, table, "odds").points}
    for threshold in [-torch.inf, torch.inf, *(deferral_odds(scores) - 1e-9).tolist()]:
        rollout = roll(task, HandOff(choose_hand_off(scores, grid, threshold)))
        x, y = rollout.deferred.double().mean(), task.sequence_loss(examples, rollout.sequences).double().mean()
        assert (round(float(x), 9), round(float(y), 9)) in points


@each_toy
@pytest.mark.parametrize("rule", sorted(HAND_OFF_RULES))
def test_a_rule_chooses_what_its_path_says(task: ToyTask, rule: str, generator: torch.Generator) -> None:
    """Walking along the path, step by step, gives the choice at every setting between two steps."""
    grid, lengths = hand_off_grid(task.spec.length, 4), lengths_of(task)
    scores = torch.where(is_ended(grid, lengths), -torch.inf, torch.randn(task.n, 4, generator=generator).double())
    scores[:, -1] = torch.randn(task.n, generator=generator)  # no deferral is always possible
    scored = ScoredHandOffs.of(scores, task.spec.length, hand_offs=grid, rule=rule, lengths=lengths)
    path = scored.path()
    falling = np.unique(path.settings[np.isfinite(path.settings)])[::-1]
    for setting in [np.inf, *((falling[1:] + falling[:-1]) / 2), -np.inf]:
        columns = path.first.copy()
        for at, row, before, after in zip(path.settings, path.rows, path.before, path.after, strict=True):
            if at >= setting:
                assert columns[row] == before
                columns[row] = after
        assert columns.tolist() == scored.columns(setting).tolist()


def test_each_draft_may_have_its_own_setting(generator: torch.Generator) -> None:
    scores, grid = torch.randn(9, 3, generator=generator), torch.tensor([0, 2, 5])
    settings = torch.randn(9, generator=generator).double()
    for rule in HAND_OFF_RULES:
        scored = ScoredHandOffs.of(scores, 5, hand_offs=grid, rule=rule)
        alone = [
            int(ScoredHandOffs.of(scores[[row]], 5, hand_offs=grid, rule=rule).kept(settings[row])[0])
            for row in range(9)
        ]
        assert scored.kept(settings).tolist() == alone


def test_grids_and_scores_that_cannot_be_used() -> None:
    with pytest.raises(OptionError, match=r"must rise from 0 or more to 4 \(no deferral\): \[0, 3\]"):
        ScoredHandOffs.of(torch.zeros(2, 2), 4, hand_offs=[0, 3], rule="odds")
    with pytest.raises(OptionError, match="unknown decision rule 'dice'; available: cost, largest, odds"):
        ScoredHandOffs.of(torch.zeros(2), 4, rule="dice")
    with pytest.raises(DataError, match="1 scores are NaN"):
        ScoredHandOffs.of(torch.tensor([0.0, torch.nan]), 4)


# -- budgets -------------------------------------------------------------------------------------------------------

BUDGETS = [0.0, 0.13, 0.3, 0.5, 0.77, 1.0]


def nearest(budget: float, shares: list[float]) -> float:
    return min(abs(share - budget) for share in shares)


@each_toy
def test_token_budget_is_met_as_nearly_as_any_threshold_can(task: ToyTask) -> None:
    rejector = Hashing(levels=16)
    sweep = sweep_thresholds(rejector, enumerate_trees(task, task.split("test")))
    every = [roll(task, Threshold(rejector, (level - 0.5) / 16)).share for level in range(18)]
    for budget in BUDGETS:
        found = threshold_for(budget, sweep)
        spent = roll(task, Threshold(rejector, found.threshold)).share
        assert found.share == pytest.approx(spent)
        assert abs(spent - budget) == pytest.approx(nearest(budget, every), abs=1e-6)


@each_toy
@pytest.mark.parametrize("levels", [3, 1000])
def test_whole_budget_is_met_as_nearly_as_any_threshold_can(task: ToyTask, levels: int) -> None:
    """With few levels many scores are equal, and equal scores are deferred together. The share is that of all tokens
    written: it once was that of the tokens the expert alone would have written."""
    scores = torch.randint(levels, (task.n,), generator=torch.Generator().manual_seed(4)).float()
    found = [whole_threshold_for(budget, scores, lengths_of(task), table_of(task)) for budget in BUDGETS]
    check_budgets(task, found, scores, lambda threshold: choose_whole(scores, task.spec.length, threshold))


@each_toy
@pytest.mark.parametrize("size", [2, 4])
def test_once_budget_is_met_as_nearly_as_any_threshold_can(task: ToyTask, size: int) -> None:
    grid = hand_off_grid(task.spec.length, size)
    scores = torch.randn(task.n, size, generator=torch.Generator().manual_seed(4))
    found = [
        once_threshold_for(budget, scores, grid, lengths_of(task), table_of(task, grid.tolist())) for budget in BUDGETS
    ]
    check_budgets(task, found, deferral_odds(scores), lambda threshold: choose_hand_off(scores, grid, threshold))


def check_budgets(task: ToyTask, found: list[Setting], scores: Tensor, choose: Callable[[float], Tensor]) -> None:
    """The thresholds spend what they say, and none of all others comes nearer to its budget; 0 and 1 are the ends."""
    shares = [roll(task, HandOff(choose(at))).share for at in [torch.inf, *scores.unique().flip(0).tolist()]]
    for budget, one in zip(BUDGETS, found, strict=True):
        assert one.share == pytest.approx(roll(task, HandOff(choose(one.threshold))).share)
        if budget in (0, 1):
            assert one.share == pytest.approx(shares[0 if budget == 0 else -1])
        else:
            assert abs(one.share - budget) == pytest.approx(nearest(budget, shares), abs=1e-6)


def every_price(scores: Tensor, grid: Tensor, lengths: Tensor) -> list[float]:
    """All prices at which any two hand-offs of an example are equally dear, those between them, and beyond."""
    ahead = (lengths[:, None] - grid).clamp(min=0)
    more = (ahead[:, :, None] - ahead[:, None, :]).double()  # (n, J, J)
    equal = (scores[:, :, None] - scores[:, None, :]) / more
    ties = equal[(more > 0) & equal.isfinite()].unique()  # sorted
    return [-torch.inf, *ties.tolist(), *((ties[1:] + ties[:-1]) / 2).tolist(), torch.inf]


def share_of(kept: Tensor, lengths: Tensor, table: HandOffTable) -> float:
    by_expert = int(table.deferred.gather(1, kept[:, None]).sum())
    return by_expert / (by_expert + int(torch.minimum(kept, lengths).sum()))


@each_toy
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_cost_budget_is_met_as_nearly_as_any_price_can(task: ToyTask, coarse: bool, seed: int) -> None:
    """Experts write as much as they please, so the share may fall where the price does: halving an interval missed the
    nearest. And at the very price where a choice changes, rounding decided whether it had."""
    scores, grid, lengths = estimates_of(task, task.spec.length + 1, seed, coarse=coarse)
    table = table_of(task)
    prices = every_price(scores, grid, lengths)
    shares = [share_of(choose_by_cost(scores, grid, lengths, price), lengths, table) for price in prices]
    for budget in BUDGETS:
        found = price_for(budget, scores, grid, lengths, table)
        kept = choose_by_cost(scores, grid, lengths, found.threshold)
        assert found.share == pytest.approx(roll(task, HandOff(kept)).share)
        if budget in (0, 1):
            assert found.threshold == FINITE_LIMIT * (1 - 2 * budget)
        else:
            assert abs(found.share - budget) == pytest.approx(nearest(budget, shares), abs=1e-9)


@pytest.mark.parametrize("size", [2, 5])
def test_a_larger_budget_has_a_lower_price(size: int) -> None:
    """With sequences of one length, what is deferred is what was foreseen."""
    task = TOYS["all of one length"]
    estimates, table = estimates_of(task, size), table_of(task)
    found = [price_for(budget, *estimates, table) for budget in np.linspace(0, 1, 41)]
    for one, other in pairwise(found):
        assert one.threshold >= other.threshold
        assert one.share <= other.share
    assert (found[0].threshold, found[0].share) == (FINITE_LIMIT, 0.0)
    assert (found[-1].threshold, found[-1].share) == (-FINITE_LIMIT, 1.0)
    assert len({one.share for one in found}) > 5


def test_a_price_where_nothing_can_be_handed_off() -> None:
    table = HandOffTable(torch.zeros(2, 3), torch.tensor([[2, 1, 0]] * 2))
    scores = torch.tensor([[-torch.inf, -torch.inf, 0.0]] * 2)
    assert price_for(0.7, scores, torch.arange(3), torch.tensor([2, 2]), table) == Setting(
        0.7, FINITE_LIMIT, 0.0, 0.0, 0.0
    )


@pytest.mark.parametrize("budget", [-0.01, 1.01, float("nan"), float("inf")])
def test_budgets_out_of_range(budget: float) -> None:
    sweep = TokenSweep(torch.zeros(1), torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
    table = HandOffTable(torch.zeros(2, 3), torch.tensor([[2, 1, 0]] * 2))
    message = "budget is .*; it is the share of tokens the expert writes, from 0 to 1"
    with pytest.raises(OptionError, match=message):
        threshold_for(budget, sweep)
    with pytest.raises(OptionError, match=message):
        whole_threshold_for(budget, torch.zeros(2), torch.tensor([2, 2]), table)
    with pytest.raises(OptionError, match=message):
        once_threshold_for(budget, torch.zeros(2, 3), torch.tensor([0, 1, 2]), torch.tensor([2, 2]), table)
    with pytest.raises(OptionError, match=message):
        price_for(budget, torch.zeros(2, 3), torch.tensor([0, 1, 2]), torch.tensor([2, 2]), table)


def test_budgets_of_an_expert_that_only_completes() -> None:
    task = WithExpert(completing, n=8, length=4)
    found = whole_threshold_for(0.5, torch.arange(8.0), lengths_of(task), table_of(task))
    assert roll(task, HandOff(choose_whole(torch.arange(8.0), 4, found.threshold))).share == pytest.approx(found.share)


def test_the_first_column_is_the_expert_alone() -> None:
    task = TOYS["lengths differ"]
    expert = write_all(task, task.split("test"), hand_off(0))
    assert table_of(task).deferred[:, 0].tolist() == [len(one) for one in expert]
