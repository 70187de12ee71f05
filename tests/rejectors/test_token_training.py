"""Fitting token-level rejectors: how rollouts are steered, what is minimised, and that it is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import expert_after, rows_of, score_after, write
from torch import Tensor

from seqdefer.budgets.policies import Threshold
from seqdefer.budgets.sweeps import GridSweep
from seqdefer.budgets.token_sweeps import sweep_thresholds
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.errors import OptionError
from seqdefer.evaluation.curves import Ends, curve_of, improvement, random_curve
from seqdefer.interfaces import SplitName, TokenRejector
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import explore_trees
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors import token_training
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rejectors.losses import get_phi
from seqdefer.rejectors.token import LSTMRejector
from seqdefer.rejectors.token_training import (
    COIN_PATHS,
    STRATEGIES,
    Coins,
    Steering,
    Strategy,
    default_price,
    fit_token,
    teacher_probability,
    token_risk,
)
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import ToyPredictor, ToyState
from seqdefer.types import Examples, Proposal, Sequences
from tests.rejectors.test_training import QUICK

TOKEN = replace(QUICK, architecture="lstm", epochs=30, patience=30, learning_rate=2e-2, units=8)
each_strategy = pytest.mark.parametrize(
    ("architecture", "strategy"), [("lstm", "free"), ("lstm", "explore"), ("mlp", "explore"), ("mlp", "scheduled")]
)


# -- steering ----------------------------------------------------------------------------------------------------


def test_teacher_schedule() -> None:
    """Five warm-up epochs with the teacher, then 0.95 of the last each epoch, down to 0.5."""
    probabilities = [teacher_probability(epoch) for epoch in range(60)]
    assert probabilities[:5] == [1.0] * 5
    assert probabilities[5:18] == pytest.approx([0.95**k for k in range(1, 14)])
    assert probabilities[18:] == [0.5] * 42
    assert 0.95**13 > 0.5 > 0.95**14


def steer(strategy: Strategy, epoch: int = 0, n: int = 4000) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a strategy decides, and what the rejector and hindsight would."""
    generator = torch.Generator().manual_seed(0)
    scores, loss, cost = (torch.randn(n, generator=generator) for _ in range(3))
    cost[::10] = loss[::10]
    steering = Steering(strategy, seed=0)
    steering.before_epoch(epoch)
    return steering.decide(scores, steering.thresholds(n), loss, cost), scores >= 0, loss >= cost


def test_free_follows_the_rejector() -> None:
    decided, rejector, _ = steer("free", epoch=30)
    assert torch.equal(decided, rejector)


def test_teacher_follows_hindsight() -> None:
    decided, _, hindsight = steer("teacher", epoch=30)
    assert torch.equal(decided, hindsight)


def test_hindsight_defers_where_both_lose_the_same() -> None:
    """As in section 3, l >= c; the appendix prints l > c. Where losses are 0 or 1, most tokens are ties."""
    loss, cost = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    decided = Steering("teacher", 0).decide(torch.full((4,), -9.0), torch.zeros(4), loss, cost)
    assert decided.tolist() == [True, True, True, False]


def test_scheduled_tosses_a_coin_for_each_token() -> None:
    for epoch in (0, 4):
        decided, _, hindsight = steer("scheduled", epoch)
        assert torch.equal(decided, hindsight)
    for epoch in (8, 40):
        decided, rejector, hindsight = steer("scheduled", epoch)
        differ = rejector != hindsight
        assert torch.equal(decided[~differ], rejector[~differ])
        taught = float((decided == hindsight)[differ].float().mean())
        assert taught == pytest.approx(teacher_probability(epoch), abs=0.04)


def test_explore_draws_thresholds_from_recent_scores() -> None:
    steering = Steering("explore", seed=0)
    assert steering.thresholds(5).tolist() == [0.0] * 5  # no scores yet
    scores = torch.linspace(-3, 5, 800)
    plain = steering.decide(scores, torch.zeros(800), torch.zeros(800), torch.zeros(800))
    assert torch.equal(plain, scores >= 0)
    steering.before_epoch(1)
    thresholds = steering.thresholds(2000)
    assert set(thresholds.tolist()) <= set(scores.tolist())
    assert float(thresholds.mean()) == pytest.approx(1.0, abs=0.2)  # spread like the scores
    assert thresholds.unique().numel() > 50
    own = torch.tensor([2.0, -1.0])
    assert steering.decide(torch.tensor([1.0, 1.0]), own, torch.zeros(2), torch.zeros(2)).tolist() == [False, True]


def test_steering_is_the_same_for_the_same_seed() -> None:
    for strategy in STRATEGIES:
        assert torch.equal(steer(strategy, 20)[0], steer(strategy, 20)[0])


def toss(coins: Coins, n: int, length: int) -> tuple[Tensor, Tensor]:
    """Return shares (n,), and the decisions (n, L) at all positions of n sequences that do not end."""
    shares, blank = coins.thresholds(n), torch.zeros(n)
    return shares, torch.stack([coins.decide(blank, shares, blank, blank) for _ in range(length)], 1)


def test_coins_repeat_whatever_the_scores() -> None:
    coins, blank = Coins(3), torch.zeros(50)
    shares, decided = toss(coins, 50, 20)
    again = coins.thresholds(50)
    scored = [coins.decide(torch.randn(50) * 100, again, blank + 1, blank) for _ in range(20)]
    assert torch.equal(again, shares)
    assert torch.equal(torch.stack(scored, 1), decided)
    assert torch.equal(toss(Coins(3), 50, 20)[1], decided)
    assert not torch.equal(toss(Coins(4), 50, 20)[1], decided)


def test_coins_cover_all_shares() -> None:
    shares, decided = toss(Coins(0), 400, 200)
    torch.testing.assert_close(shares.sort().values, (torch.arange(400) + 0.5) / 400)
    assert not torch.equal(shares, shares.sort().values)  # which sequence defers how much is drawn
    torch.testing.assert_close(decided.float().mean(1), shares, atol=0.15, rtol=0)
    assert float(decided.float().mean()) == pytest.approx(0.5, abs=0.01)


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown training strategy 'luck'; available: explore, free"):
        Steering("luck", 0)  # type: ignore[arg-type]


# -- the risk ------------------------------------------------------------------------------------------------------


def lstm(task: ToyTask) -> LSTMRejector:
    torch.manual_seed(3)
    return LSTMRejector(Sizes(2, 3, task.spec.length, True, layers=2, units=5, dropout=0.4), "toy").eval()


def after(prefix: list[Any]) -> Sequences:
    return Sequences(torch.tensor([prefix]).view(1, len(prefix)), torch.tensor([len(prefix)]))


@pytest.mark.parametrize("strategy", ["free", "teacher"])
@pytest.mark.parametrize("phi", ["logistic", "square"])
@pytest.mark.parametrize(("ends", "price"), [(True, 0.0), (False, 0.0), (True, 0.25)])
def test_token_risk_is_the_surrogate_along_the_rollout(strategy: Strategy, phi: str, ends: bool, price: float) -> None:
    """Compare with the plain loop, token by token: mean over sequences of 1/L sum of l phi(r) + c phi(-r). A price is
    part of c in the loss, and has no say in what hindsight decides: ties stay ties."""
    task = ToyTask(n=12, ends=ends)
    examples, network, loss_of = task.split("train"), lstm(task), get_phi(phi)
    rows = torch.tensor([3, 0, 7, 11, 8])
    risk = token_risk(network, enumerate_trees(task, examples), rows, loss_of, Steering(strategy, 0), price)
    total = 0.0
    for one in rows_of(examples.select(rows)):
        terms: list[float] = []

        def decide(
            position: int, prefix: list[Any], proposal: Proposal, one: Examples = one, terms: Any = terms
        ) -> bool:
            score, place = torch.tensor(score_after(task, one, network, prefix)), after(prefix)
            loss = task.token_loss(one, place, proposal.tokens)
            cost = task.token_cost(one, place, torch.tensor([expert_after(task, one, prefix)]))
            terms.append(float(loss * loss_of(score) + (cost + price) * loss_of(-score)))
            return bool(score >= 0) if strategy == "free" else bool(loss >= cost)

        write(task, one, decide)
        total += sum(terms) / len(terms)
    assert risk.item() == pytest.approx(total / len(rows), rel=1e-5)


def test_token_risk_has_the_gradient_of_the_scores_alone() -> None:
    """Decisions carry no gradient: a small change of the weights changes the risk by the gradient."""
    task = ToyTask(n=12, length=4)
    network, trees = lstm(task).double(), enumerate_trees(task, task.split("train"))
    trees.context, trees.nodes.features = trees.context.double(), trees.nodes.features.double()
    trees.nodes.uncertainty, trees.nodes.entropy = trees.nodes.uncertainty.double(), trees.nodes.entropy.double()

    def risk() -> Tensor:
        return token_risk(network, trees, torch.arange(12), get_phi("logistic"), Steering("teacher", 0))

    risk().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in network.parameters())
    weight = network.cells[0].weight_ih
    with torch.no_grad():
        weight[2, 1] += 1e-5
        up = risk().item()
        weight[2, 1] -= 2e-5
        down = risk().item()
    assert weight.grad is not None
    assert (up - down) / 2e-5 == pytest.approx(float(weight.grad[2, 1]), rel=1e-4)


def test_rollouts_by_coins_do_not_follow_the_rejector() -> None:
    """On closed trees validation takes the same paths with any weights: only the scores change."""
    task = ToyTask(n=12, length=14)
    trees = explore_trees(task, task.split("train"), 4)
    visited: list[list[Tensor]] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        network, went = lstm(task), list[Tensor]()
        children = trees.children

        def noted(nodes: Tensor, defer: Tensor, went: list[Tensor] = went, children: Any = children) -> Tensor:
            went.append(nodes * 2 + defer)
            return children(nodes, defer)

        trees.children = noted  # type: ignore[method-assign]
        first = token_risk(network, trees, torch.arange(12), get_phi("logistic"), Coins(0))
        assert torch.equal(token_risk(network, trees, torch.arange(12), get_phi("logistic"), Coins(0)), first)
        trees.children = children  # type: ignore[method-assign]
        visited.append(went)
    assert all(torch.equal(one, other) for one, other in zip(*visited, strict=True))


@pytest.mark.parametrize("is_closed", [True, False])
def test_closed_trees_are_judged_by_coins(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    task, judged = ToyTask(n=8, length=13), []
    trees = [
        explore_trees(task, task.split(name), 3) if is_closed else DecisionTrees(task, task.split(name))
        for name in ("train", "validation")
    ]
    risk = token_training.token_risk

    def noted(rejector: Any, trees_of: DecisionTrees, rows: Tensor, phi: Any, steering: Steering, price: float) -> Any:
        if trees_of is trees[1]:
            judged.append((type(steering), rows.tolist()))
        return risk(rejector, trees_of, rows, phi, steering, price)

    monkeypatch.setattr(token_training, "token_risk", noted)
    fit_token(*trees, replace(QUICK, architecture="mlp", epochs=1), seed=0)
    expected = (Coins, [*range(8)] * COIN_PATHS) if is_closed else (Steering, [*range(8)])
    assert judged == [expected]


class Visible(TokenRejector[Tensor]):
    """Reads the feature that shows where the predictor errs."""

    def start(self, context: Tensor) -> Tensor:
        return context

    def score(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return proposal.features[:, 0], state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


class Honest(ToyPredictor):
    """A predictor whose first feature is 1 where its token is wrong and 0 elsewhere."""

    def propose(self, state: ToyState) -> Proposal:
        proposal = super().propose(state)
        wrong = proposal.tokens != self.task.target(state.inputs, state.position)
        return replace(proposal, features=torch.stack([wrong.float(), *proposal.features[:, 1:].T], 1))


def trees_of(task: ToyTask) -> list[DecisionTrees]:
    names: tuple[SplitName, ...] = ("train", "validation", "test")
    return [enumerate_trees(task, task.split(name)) for name in names]


@pytest.fixture(scope="module")
def toy_trees() -> list[DecisionTrees]:
    return trees_of(ToyTask(n=300, length=4))


@pytest.fixture(scope="module")
def honest_trees() -> list[DecisionTrees]:
    task = ToyTask(n=300, length=4)
    task.predictor = Honest(task)
    return trees_of(task)


@each_strategy
def test_token_rejectors_find_visible_decisions(
    honest_trees: list[DecisionTrees], architecture: str, strategy: Strategy
) -> None:
    train, validation, test = honest_trees
    settings = replace(TOKEN, architecture=architecture)
    rejector, history = fit_token(train, validation, settings, seed=0, strategy=strategy)
    undecided, _ = fit_token(train, validation, replace(settings, learning_rate=1e-30, epochs=1), seed=0)
    for weights in undecided.parameters():
        weights.data.zero_()  # scores 0 everywhere
    with torch.no_grad():
        rows = torch.arange(len(validation))
        baseline = float(token_risk(undecided, validation, rows, get_phi("logistic"), Steering("free", 0)))
    assert history.validation[history.best] < 0.8 * baseline
    mine, right = (
        roll_out(test.predictor, test.task.expert, test.examples, Threshold(chosen, at), test.task.spec)
        for chosen, at in ((rejector, 0.0), (Visible(), 0.5))
    )
    assert 0.3 < right.share < 0.7
    assert float((mine.by_expert == right.by_expert).float().mean()) > 0.97


@pytest.mark.slow
@each_strategy
def test_token_rejectors_use_noisy_features(
    toy_trees: list[DecisionTrees], architecture: str, strategy: Strategy
) -> None:
    train, validation, test = toy_trees
    rejector, _ = fit_token(train, validation, replace(TOKEN, architecture=architecture), seed=0, strategy=strategy)
    table, _ = hand_off_table(test.task, test.examples, draft(test.predictor, test.examples, test.task.spec))
    ends = Ends.of(table)

    def improved(chosen: TokenRejector[Any]) -> float:
        swept = sweep_thresholds(chosen, test)
        return improvement(curve_of(GridSweep(swept.deferred, swept.loss), ends), random_curve(ends))

    assert improved(rejector) > 0.9 * improved(Visible()) > 20


def test_the_same_seed_fits_the_same_rejector(toy_trees: list[DecisionTrees]) -> None:
    train, validation = toy_trees[:2]
    settings = replace(TOKEN, epochs=2, dropout=0.3)

    def weights(seed: int, strategy: Strategy = "explore") -> dict[str, Tensor]:
        torch.rand(3)  # earlier draws do not matter
        return fit_token(train, validation, settings, seed=seed, strategy=strategy)[0].state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_fitting_calls_no_model(
    toy_trees: list[DecisionTrees], spy: Callable[[Any, str], list[tuple[Any, ...]]]
) -> None:
    train, validation = toy_trees[:2]
    asked = [spy(train.task.predictor, "propose"), spy(train.task.expert, "next")]
    fit_token(train, validation, replace(TOKEN, epochs=1), seed=0)
    assert not any(asked)


def test_a_price_is_added_where_some_tokens_cost_nothing() -> None:
    """Where both are right l = c = 0, and scores are arbitrary: without a price one task reached -44 %."""

    class Free(ToyTask):
        def token_cost(self, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
            return self.token_loss(examples, prefixes, tokens)

    free, priced = (enumerate_trees(task, task.split("train")) for task in (Free(n=50), ToyTask(n=50)))
    mean = float(free.nodes.losses[: free.nodes.size, 0].mean())
    assert default_price(free) == pytest.approx(0.05 * mean)
    assert default_price(priced) == 0.0
    rejector, _ = fit_token(free, free, replace(TOKEN, epochs=1), seed=0)
    assert rejector.notes["price"] == default_price(free)
    steering, rows = Steering("free", 0), torch.arange(50)
    with torch.no_grad():
        plain, dearer = (token_risk(rejector, free, rows, get_phi("logistic"), steering, price) for price in (0.0, 1.0))
    assert dearer > plain


def test_a_rare_cost_of_0_adds_no_price() -> None:
    """With noise of 0.1 degrees one reading in 100,000 is exact, which once switched the price on for all."""
    trees = enumerate_trees(task := ToyTask(n=50), task.split("train"))
    trees.nodes.losses[5] = 0.0
    assert default_price(trees) == 0.0


def test_statistics_of_lazy_trees_do_not_depend_on_growth() -> None:
    task = ToyTask(n=20, length=6)
    fresh, grown = DecisionTrees(task, task.split("train")), DecisionTrees(task, task.split("train"))
    sweep_thresholds(Confidence(), grown)
    nodes = [trees.typical_nodes() for trees in (fresh, grown)]
    for name in ("losses", "features", "uncertainty"):
        first, second = (getattr(trees.nodes, name)[at] for trees, at in zip((fresh, grown), nodes, strict=True))
        assert torch.equal(first, second)
    assert len(nodes[0]) > 2 * len(fresh)


def test_a_rejector_records_its_predictor_and_statistics(toy_trees: list[DecisionTrees]) -> None:
    train, validation = toy_trees[:2]
    rejector, _ = fit_token(train, validation, replace(TOKEN, epochs=1), seed=0, phi="square", strategy="teacher")
    assert rejector.predictor == train.task.predictor.fingerprint
    assert rejector.notes == {"phi": "square", "strategy": "teacher", "price": 0.0}
    torch.testing.assert_close(rejector.context_mean, train.context.mean(0))
    torch.testing.assert_close(rejector.step_mean[:3], train.nodes.features[: train.nodes.size].mean(0))


def test_draft_networks_do_not_score_by_token(toy_trees: list[DecisionTrees]) -> None:
    with pytest.raises(OptionError, match="unknown token-level architecture 'draft_mlp'; available: lstm, mlp"):
        fit_token(toy_trees[0], toy_trees[1], QUICK, seed=0)
