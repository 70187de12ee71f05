"""The training loop, what steers its rollouts, what it minimises, and that it learns what can be seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import expert_after, proposal_after, rows_of, score_after, write
from torch import Tensor, nn

from seqdefer import training
from seqdefer.baselines import Confidence
from seqdefer.curves import Ends, GridSweep, curve_of, improvement, once_sweep, optimal_once, random_curve, whole_sweep
from seqdefer.engine import draft, roll_out
from seqdefer.errors import OptionError, SeqdeferError
from seqdefer.exploration import explore_trees
from seqdefer.interfaces import SplitName, TokenRejector
from seqdefer.labels import hand_off_table
from seqdefer.losses import get_phi, one_time_loss, query_costs
from seqdefer.policies import Threshold, choose_by_cost, choose_hand_off, sweep_thresholds
from seqdefer.rejectors import DraftMLP, DraftNetwork, LSTMRejector, MLPRejector, Sizes, TokenNetwork, draft_inputs
from seqdefer.testing import ToyTask
from seqdefer.testing.fakes import ToyPredictor, ToyState
from seqdefer.training import (
    PRESETS,
    STRATEGIES,
    Coins,
    History,
    Settings,
    Steering,
    Strategy,
    default_price,
    fit,
    fit_cost,
    fit_once,
    fit_token,
    fit_whole,
    teacher_probability,
    token_risk,
)
from seqdefer.trees import DecisionTrees, enumerate_trees
from seqdefer.types import Draft, Examples, HandOffTable, Proposal, Sequences

QUICK = Settings(1e-2, 5, "draft_mlp", 1, 16, 0.0, 30, 0.0, 0, batch_size=64)


# -- the loop ------------------------------------------------------------------------------------------------------


def follow(
    validation: list[float], *, patience: int = 3, delta: float = 0.1
) -> tuple[nn.Linear, History, list[Tensor]]:
    """Fits a network whose validation losses are written down beforehand; also its weights after each epoch."""
    torch.manual_seed(0)
    network, script, weights = nn.Linear(2, 1), iter(validation), []

    def scripted() -> Tensor:
        weights.append(network.weight.detach().clone())
        return torch.tensor(next(script))

    settings = replace(QUICK, patience=patience, delta=delta, epochs=len(validation), batch_size=4)
    data = torch.randn(12, 2)
    history = fit(network, 12, lambda rows: network(data[rows]).square().mean(), scripted, settings, seed=0)
    return network, history, weights


@pytest.mark.parametrize(
    ("validation", "best", "epochs"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0], 4, 5),  # better to the last
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0, 4),  # never better than after the first epoch: that one, not the start
        ([5.0, 1.0, 2.0, 3.0, 0.0], 4, 5),  # better again just before patience ends
        ([5.0, 1.0, 2.0, 3.0, 4.0, 0.0], 1, 5),  # patience ends before it gets better
        ([5.0, 1.0, 2.0, 0.5, 2.0, 2.0, 2.0, 0.0], 3, 7),  # patience starts anew
        ([1.0, 0.95, 0.91, 0.92], 0, 4),  # none is better by delta
        ([1.0, 0.95, 0.91, 0.85, 0.8], 3, 5),  # in sum they are: delta counts from the best, not from the last
        ([math.nan, 2.0, 1.0, math.nan], 2, 4),  # not a number is not better
        ([2.0, math.nan, math.nan, math.nan, 1.0], 0, 4),
    ],
)
def test_the_best_epoch_is_kept(validation: list[float], best: int, epochs: int) -> None:
    network, history, weights = follow(validation)
    assert len(weights) == len(history.training) == len(history.validation) == epochs
    assert history.best == best
    assert torch.equal(network.weight.detach(), weights[best])
    assert not any(torch.equal(weights[best], other) for epoch, other in enumerate(weights) if epoch != best)
    assert not network.training


def test_no_rejector_comes_from_a_validation_that_is_no_number() -> None:
    """It once came back with its initial weights, as if they were those of the first epoch."""
    with pytest.raises(SeqdeferError, match="validation loss"):
        follow([math.nan, math.nan, math.inf])


def test_gradients_are_clipped() -> None:
    network = nn.Linear(3, 1)
    norms: list[float] = []

    def after_epoch(_: int) -> None:
        norms.append(float(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]).norm()))

    def steep(rows: Tensor) -> Tensor:
        return 1e3 * network(torch.ones(len(rows), 3)).sum()

    settings = replace(QUICK, epochs=2, clip_norm=0.5, patience=9)
    fit(network, 8, steep, lambda: torch.zeros(()), settings, seed=0, progress=after_epoch)
    assert norms == pytest.approx([0.5, 0.5], rel=1e-4)


def test_every_epoch_sees_every_example_once_in_the_order_of_the_seed() -> None:
    def orders(seed: int) -> list[list[int]]:
        seen: list[list[int]] = []
        network = nn.Linear(1, 1)

        def loss(rows: Tensor) -> Tensor:
            seen[-1].extend(rows.tolist())
            return network(torch.ones(len(rows), 1)).mean()

        settings = replace(QUICK, epochs=3, batch_size=4, patience=9)
        fit(network, 10, loss, lambda: torch.zeros(()), settings, seed=seed, before_epoch=lambda _: seen.append([]))
        return seen

    first = orders(0)
    assert [sorted(epoch) for epoch in first] == [list(range(10))] * 3
    assert first[0] != first[1]
    assert orders(0) == first
    assert orders(1) != first


def test_the_training_loss_is_the_mean_over_examples() -> None:
    """Also when the last batch is a small one."""
    network, values = nn.Linear(1, 1), torch.arange(10.0)
    settings = replace(QUICK, epochs=1, batch_size=4)
    history = fit(network, 10, lambda rows: values[rows].mean() + 0 * network(torch.ones(1, 1)).sum(),
                  lambda: torch.zeros(()), settings, seed=0)  # fmt: skip
    assert history.training == pytest.approx([4.5])


def test_dropout_is_on_in_training_and_off_in_validation() -> None:
    network, modes = nn.Linear(1, 1), []

    def loss(rows: Tensor) -> Tensor:
        modes.append(network.training)
        return network(torch.ones(1, 1)).sum()

    def validation() -> Tensor:
        modes.append(network.training)
        assert not torch.is_grad_enabled()
        return torch.zeros(())

    fit(network, 4, loss, validation, replace(QUICK, epochs=2), seed=0)
    assert modes == [True, False, True, False]


def test_presets_are_the_papers_table() -> None:
    columns = ("tsp-once", "xsum-token", "xsum-once", "mwp-token", "mwp-once")
    table: dict[str, tuple[Any, ...]] = {
        "learning_rate": (5e-4, 1e-3, 5e-4, 5e-4, 5e-4),
        "patience": (20, 7, 20, 7, 20),
        "delta": (1e-4, 1e-4, 1e-4, 1e-4, 1e-4),
        "architecture": ("draft_mlp", "lstm", "draft_mlp", "lstm", "draft_mlp"),
        "layers": (1, 3, 1, 2, 1),
        "units": (8, 128, 8, 64, 8),
        "dropout": (0.2, 0.4, 0.2, 0.4, 0.2),
        "epochs": (200, 100, 200, 100, 200),
        "samples": (2400, 800, 2400, 70080, 70080),
        "clip_norm": (1.0, 1.0, 1.0, 1.0, 1.0),
        "weight_decay": (0.005, 0.001, 0.005, 0.001, 0.005),
    }
    assert set(PRESETS) == set(columns)
    for name, row in table.items():
        assert tuple(getattr(PRESETS[column], name) for column in columns) == row, name


@pytest.mark.parametrize(
    "wrong",
    [{"architecture": "tree"}, {"learning_rate": 0.0}, {"learning_rate": math.nan}, {"epochs": 0}, {"batch_size": 0},
     {"layers": 0}, {"units": -1}, {"patience": 0}, {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": math.nan},
     {"least_steps": 0}],
)  # fmt: skip
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(wrong))}"):
        replace(QUICK, **wrong)


# -- steering ------------------------------------------------------------------------------------------------------


def test_the_schedule_of_the_teacher() -> None:
    """Five warm-up epochs with the teacher, then 0.95 of the last each epoch, down to 0.5."""
    probabilities = [teacher_probability(epoch) for epoch in range(60)]
    assert probabilities[:5] == [1.0] * 5
    assert probabilities[5:18] == pytest.approx([0.95**k for k in range(1, 14)])
    assert probabilities[18:] == [0.5] * 42
    assert 0.95**13 > 0.5 > 0.95**14


def steer(strategy: Strategy, epoch: int = 0, n: int = 4000) -> tuple[Tensor, Tensor, Tensor]:
    """What a strategy decides, and what the rejector and hindsight would."""
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
    assert steering.thresholds(5).tolist() == [0.0] * 5  # nothing was scored yet
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
    """Shares (n,), and the decisions (n, L) at all positions of n sequences that do not end."""
    shares, blank = coins.thresholds(n), torch.zeros(n)
    return shares, torch.stack([coins.decide(blank, shares, blank, blank) for _ in range(length)], 1)


def test_coins_decide_the_same_each_time_whatever_is_scored() -> None:
    coins, blank = Coins(3), torch.zeros(50)
    shares, decided = toss(coins, 50, 20)
    again = coins.thresholds(50)
    scored = [coins.decide(torch.randn(50) * 100, again, blank + 1, blank) for _ in range(20)]
    assert torch.equal(again, shares)
    assert torch.equal(torch.stack(scored, 1), decided)
    assert torch.equal(toss(Coins(3), 50, 20)[1], decided)
    assert not torch.equal(toss(Coins(4), 50, 20)[1], decided)


def test_coins_defer_every_share_alike() -> None:
    shares, decided = toss(Coins(0), 400, 200)
    torch.testing.assert_close(shares.sort().values, (torch.arange(400) + 0.5) / 400)
    assert not torch.equal(shares, shares.sort().values)  # which sequence defers how much is drawn
    torch.testing.assert_close(decided.float().mean(1), shares, atol=0.15, rtol=0)
    assert float(decided.float().mean()) == pytest.approx(0.5, abs=0.01)


def test_rollouts_by_coins_do_not_follow_the_rejector() -> None:
    """On closed trees validation goes the same ways whatever the weights: only the scores change."""
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
    risk = training.token_risk

    def noted(rejector: Any, trees_of: DecisionTrees, rows: Tensor, phi: Any, steering: Steering, price: float) -> Any:
        if trees_of is trees[1]:
            judged.append((type(steering), rows.tolist()))
        return risk(rejector, trees_of, rows, phi, steering, price)

    monkeypatch.setattr(training, "token_risk", noted)
    fit_token(*trees, replace(QUICK, architecture="mlp", epochs=1), seed=0)
    expected = (Coins, [*range(8)] * training.COINS) if is_closed else (Steering, [*range(8)])
    assert judged == [expected]


def test_unknown_strategy() -> None:
    with pytest.raises(OptionError, match="unknown training strategy 'luck'; available: explore, free"):
        Steering("luck", 0)  # type: ignore[arg-type]


# -- token level ---------------------------------------------------------------------------------------------------


def lstm(task: ToyTask) -> LSTMRejector:
    torch.manual_seed(3)
    return LSTMRejector(Sizes(2, 3, task.spec.length, True, layers=2, units=5, dropout=0.4), "toy").eval()


def after(prefix: list[Any]) -> Sequences:
    return Sequences(torch.tensor([prefix]).view(1, len(prefix)), torch.tensor([len(prefix)]))


@pytest.mark.parametrize("strategy", ["free", "teacher"])
@pytest.mark.parametrize("phi", ["logistic", "square"])
@pytest.mark.parametrize("ends", [True, False])
def test_token_risk_is_the_surrogate_along_the_rollout(strategy: Strategy, phi: str, ends: bool) -> None:
    """Token by token, with prefixes of the plain loop: mean over sequences of 1/L sum of l phi(r) + c phi(-r)."""
    task = ToyTask(n=12, ends=ends)
    examples, network, loss_of = task.split("train"), lstm(task), get_phi(phi)
    rows = torch.tensor([3, 0, 7, 11, 8])
    risk = token_risk(network, enumerate_trees(task, examples), rows, loss_of, Steering(strategy, 0))
    total = 0.0
    for one in rows_of(examples.select(rows)):
        terms: list[float] = []

        def decide(
            position: int, prefix: list[Any], proposal: Proposal, one: Examples = one, terms: Any = terms
        ) -> bool:
            score, place = torch.tensor(score_after(task, one, network, prefix)), after(prefix)
            loss = task.token_loss(one, place, proposal.tokens)
            cost = task.token_cost(one, place, torch.tensor([expert_after(task, one, prefix)]))
            terms.append(float(loss * loss_of(score) + cost * loss_of(-score)))
            return bool(score >= 0) if strategy == "free" else bool(loss >= cost)

        write(task, one, decide)
        total += sum(terms) / len(terms)
    assert risk.item() == pytest.approx(total / len(rows), rel=1e-5)


def test_token_risk_has_the_gradient_of_the_scores_alone() -> None:
    """Decisions carry no gradient: moving the weights a little changes the risk as the gradient says."""
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


class Visible(TokenRejector[Tensor]):
    """Reads the very feature that says where the predictor strays."""

    def start(self, context: Tensor) -> Tensor:
        return context

    def score(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor]:
        return proposal.features[:, 0], state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


class Honest(ToyPredictor):
    """Its first feature is 1 where its token is wrong and 0 elsewhere."""

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


TOKEN = replace(QUICK, architecture="lstm", epochs=30, patience=30, learning_rate=2e-2, units=8)
each_strategy = pytest.mark.parametrize(
    ("architecture", "strategy"), [("lstm", "free"), ("lstm", "explore"), ("mlp", "explore"), ("mlp", "scheduled")]
)


@each_strategy
def test_token_rejectors_find_the_right_decision_where_it_can_be_seen(
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


@each_strategy
def test_token_rejectors_use_what_can_be_seen_not_quite_reliably(
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
        torch.rand(3)  # whatever was drawn before
        return fit_token(train, validation, settings, seed=seed, strategy=strategy)[0].state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_fitting_asks_nobody(toy_trees: list[DecisionTrees], spy: Callable[[Any, str], list[tuple[Any, ...]]]) -> None:
    train, validation = toy_trees[:2]
    asked = [spy(train.task.predictor, "propose"), spy(train.task.expert, "next")]
    fit_token(train, validation, replace(TOKEN, epochs=1), seed=0)
    assert not any(asked)


def test_a_price_is_added_where_some_tokens_cost_nothing() -> None:
    """With l = c = 0 wherever both are right, scores there were arbitrary: a first speller came out at -44 %."""

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


def test_a_cost_that_rounds_to_nothing_is_no_reason_for_a_price() -> None:
    """With noise of 0.1 degrees one reading in some hundred thousand is exact; it switched the price on for all."""
    trees = enumerate_trees(task := ToyTask(n=50), task.split("train"))
    trees.nodes.losses[5] = 0.0
    assert default_price(trees) == 0.0


def test_statistics_of_lazy_trees_do_not_depend_on_what_was_grown() -> None:
    task = ToyTask(n=20, length=6)
    fresh, grown = DecisionTrees(task, task.split("train")), DecisionTrees(task, task.split("train"))
    sweep_thresholds(Confidence(), grown)
    nodes = [trees.typical_nodes() for trees in (fresh, grown)]
    for name in ("losses", "features", "uncertainty"):
        first, second = (getattr(trees.nodes, name)[at] for trees, at in zip((fresh, grown), nodes, strict=True))
        assert torch.equal(first, second)
    assert len(nodes[0]) > 2 * len(fresh)


@pytest.mark.parametrize(
    ("least_steps", "expected"),
    [(16, [10] + [20] * 16 + [256] * 25), (32, [10] + [16] * 20 + [200] * 32), (1, [10, 256, 64] + [256] * 25)],
)
def test_little_data_is_cut_into_smaller_batches(least_steps: int, expected: list[int]) -> None:
    sizes: list[int] = []
    network = nn.Linear(1, 1)

    def loss(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return network(torch.ones(1, 1)).sum()

    settings = replace(QUICK, epochs=1, batch_size=256, least_steps=least_steps)
    for n in (10, 320, 6400):
        fit(network, n, loss, lambda: torch.zeros(()), settings, seed=0)
    assert sizes == expected


def test_a_rejector_knows_its_predictor_and_its_training_inputs(toy_trees: list[DecisionTrees]) -> None:
    train, validation = toy_trees[:2]
    rejector, _ = fit_token(train, validation, replace(TOKEN, epochs=1), seed=0, phi="square", strategy="teacher")
    assert rejector.predictor == train.task.predictor.fingerprint
    assert rejector.notes == {"phi": "square", "strategy": "teacher", "price": 0.0}
    torch.testing.assert_close(rejector.context_mean, train.context.mean(0))
    torch.testing.assert_close(rejector.step_mean[:3], train.nodes.features[: train.nodes.size].mean(0))


def test_draft_networks_do_not_score_by_token(toy_trees: list[DecisionTrees]) -> None:
    with pytest.raises(OptionError, match="unknown token-level architecture 'draft_mlp'; available: lstm, mlp"):
        fit_token(toy_trees[0], toy_trees[1], QUICK, seed=0)


def test_every_token_architecture_is_a_token_network() -> None:
    assert issubclass(LSTMRejector, TokenNetwork)
    assert issubclass(MLPRejector, TokenNetwork)


# -- drafts --------------------------------------------------------------------------------------------------------

LENGTH = 3


def visible_drafts(n: int, seed: int) -> tuple[Draft, HandOffTable, Tensor]:
    """Drafts whose context shows the best hand-off, hidden among noise, with the table that makes it the best."""
    generator = torch.Generator().manual_seed(seed)
    best = torch.randint(LENGTH + 1, (n,), generator=generator)
    context = torch.cat([nn.functional.one_hot(best, LENGTH + 1).float(), torch.randn(n, 2, generator=generator)], 1)
    noise = torch.rand(n, LENGTH, 3, generator=generator)
    sequences = Sequences(torch.zeros(n, LENGTH, dtype=torch.long), torch.full((n,), LENGTH))
    loss = 2.0 - 2.0 * nn.functional.one_hot(best, LENGTH + 1).float()
    deferred = torch.arange(LENGTH, -1, -1).expand(n, LENGTH + 1)
    return Draft(context, sequences, noise[..., :2], noise[..., 2], None), HandOffTable(loss, deferred), best


@pytest.mark.parametrize("psi", ["cross_entropy", "mean_absolute_error"])
def test_one_time_rejectors_learn_what_can_be_seen(psi: str) -> None:
    train, validation, test = (visible_drafts(400, seed) for seed in range(3))
    grid = torch.arange(LENGTH + 1)
    rejector, _ = fit_once(train[:2], validation[:2], grid, QUICK, alpha=0.1, psi=psi, fingerprint="x", seed=0)
    scores = rejector.score(test[0])
    assert float((scores.argmax(1) == test[2]).float().mean()) > 0.95
    total = test[1].loss + query_costs(test[1].deferred, 0.1, LENGTH)
    assert float(one_time_loss(scores, total)) < 1.1 * float(total.amin(1).mean()) + 0.05
    ends, optimal = Ends.of(test[1]), optimal_once(test[1])
    curve = curve_of(once_sweep(scores, grid, test[1]), ends)
    # A threshold in the middle does what the oracle does with as many tokens; past it no one-time method can.
    assert float(curve.at(optimal.deferred[-2])) < 0.1 * ends.predictor_loss.mean()
    assert rejector.notes == {"grid": grid.tolist(), "alpha": 0.1, "psi": psi}
    assert rejector.predictor == "x"


def test_a_grid_of_few_hand_offs_learns_the_best_among_them() -> None:
    train, validation, test = (visible_drafts(400, seed) for seed in range(3))
    grid = torch.tensor([0, 2, LENGTH])
    rejector, _ = fit_once(train[:2], validation[:2], grid, QUICK, alpha=0.1, fingerprint="x", seed=0)
    allowed = (test[2][:, None] == grid).any(1)
    assert rejector.score(test[0]).shape == (400, 3)
    chosen = grid[rejector.score(test[0]).argmax(1)]
    assert float((chosen == test[2])[allowed].float().mean()) > 0.95


@pytest.mark.parametrize(("alpha", "kept"), [(100.0, LENGTH), (0.0, None)])
def test_a_dear_expert_is_not_asked(alpha: float, kept: int | None) -> None:
    train, validation, test = (visible_drafts(300, seed) for seed in range(3))
    grid = torch.arange(LENGTH + 1)
    rejector, _ = fit_once(train[:2], validation[:2], grid, QUICK, alpha=alpha, fingerprint="x", seed=0)
    chosen = rejector.score(test[0]).argmax(1)
    assert float((chosen == (test[2] if kept is None else kept)).float().mean()) > 0.95


def test_whole_rejectors_learn_where_the_expert_is_better() -> None:
    def labelled(seed: int) -> tuple[Draft, HandOffTable]:
        drafted, table, best = visible_drafts(300, seed)
        wins = best < 2  # the context shows this, too
        table.loss[:, 0], table.loss[:, -1] = torch.where(wins, 0.0, 1.0), torch.where(wins, 1.0, 0.0)
        table.loss[::7, 0] = table.loss[::7, -1]  # a draw is no win
        return drafted, table

    train, validation, test = (labelled(seed) for seed in range(3))
    rejector, _ = fit_whole(train, validation, QUICK, fingerprint="x", seed=0)
    scores = rejector.score(test[0])
    sure = torch.arange(300) % 7 != 0
    assert float(((scores > 0) == (test[1].loss[:, 0] < test[1].loss[:, -1]))[sure].float().mean()) > 0.95
    ends = Ends.of(test[1])
    assert improvement(curve_of(whole_sweep(scores, test[1]), ends), random_curve(ends)) > 25


def test_the_same_seed_fits_the_same_draft_rejector() -> None:
    train, validation = visible_drafts(100, 0)[:2], visible_drafts(100, 1)[:2]
    settings = replace(QUICK, epochs=3, dropout=0.2)

    def weights(seed: int) -> list[Tensor]:
        return list(fit_whole(train, validation, settings, fingerprint="x", seed=seed)[0].parameters())

    assert all(torch.equal(one, other) for one, other in zip(weights(0), weights(0), strict=True))
    assert not torch.equal(weights(0)[0], weights(1)[0])


def test_statistics_of_drafts_leave_padding_out() -> None:
    task = ToyTask(n=30)
    labelled = []
    for name in ("train", "validation"):
        examples = task.split(name)  # type: ignore[arg-type]
        drafted = draft(task.predictor, examples, task.spec)
        labelled.append((drafted, hand_off_table(task, examples, drafted)[0]))
    rejector, _ = fit_whole(*labelled, replace(QUICK, epochs=1), fingerprint="x", seed=0)
    drafted = labelled[0][0]
    mask = drafted.sequences.mask()
    assert not mask.all()
    torch.testing.assert_close(rejector.step_mean[:3], drafted.features[mask].mean(0))
    first = [proposal_after(task, one, []).features[0] for one in rows_of(task.split("train"))]
    torch.testing.assert_close(drafted.features[:, 0], torch.stack(first))


# -- attention, and the estimates of OneTimeCost -------------------------------------------------------------------

SPIKES = 6  # tokens of a draft
GRID = torch.arange(SPIKES + 1)
NETWORKS_BY_DRAFT = {
    "draft_mlp": replace(QUICK, units=48, layers=2, epochs=25, least_steps=24),
    "draft_transformer": replace(QUICK, architecture="draft_transformer", units=16, learning_rate=5e-3, epochs=20),
}
each_by_draft = pytest.mark.parametrize("settings", NETWORKS_BY_DRAFT.values(), ids=NETWORKS_BY_DRAFT)


def spiking_drafts(n: int, seed: int, noise: float = 0.3) -> tuple[Draft, HandOffTable, Tensor]:
    """Drafts of different lengths; one feature spikes where it is best to hand off, or nowhere."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SPIKES - 2, SPIKES + 1, (n,), generator=generator)
    best = (torch.rand(n, generator=generator) * (lengths + 1)).long()
    kept = torch.minimum(GRID, lengths[:, None])  # past the end of a draft nothing is left to hand off
    features = noise * torch.randn(n, SPIKES, 2, generator=generator)
    spiking = (best < lengths).nonzero().squeeze(1)
    features[spiking, best[spiking], 0] += 2.0
    loss = torch.where(kept == best[:, None], 0.0, 1.0) + 0.1 * torch.rand(n, 1, generator=generator)
    drafted = Draft(
        torch.randn(n, 2, generator=generator),
        Sequences(torch.zeros(n, SPIKES, dtype=torch.long), lengths),
        features,
        torch.rand(n, SPIKES, generator=generator),
        None,
    )
    return drafted, HandOffTable(loss, lengths[:, None] - kept), best


@pytest.fixture(scope="module")
def spiking() -> list[tuple[Draft, HandOffTable, Tensor]]:
    return [spiking_drafts(n, seed) for seed, n in enumerate((1500, 200, 200))]


@each_by_draft
def test_hand_offs_are_learned_from_the_step_that_shows_them(
    settings: Settings, spiking: list[tuple[Draft, HandOffTable, Tensor]]
) -> None:
    train, validation, test = spiking
    once, _ = fit_once(train[:2], validation[:2], GRID, settings, alpha=0.05, fingerprint="x", seed=0)
    cost, _ = fit_cost(train[:2], validation[:2], GRID, settings, fingerprint="x", seed=0)
    lengths = test[0].sequences.lengths
    chosen = {
        "once": choose_hand_off(once.score(test[0]), GRID, 0.0),
        "cost": choose_by_cost(cost.score(test[0]), GRID, lengths, 0.05),
    }
    for name, kept in chosen.items():
        assert float((torch.minimum(kept, lengths) == test[2]).float().mean()) > 0.9, name
    assert (once.kind, cost.kind) == (settings.architecture,) * 2
    assert (once.sizes.rule, cost.sizes.rule) == ("odds", "cost")
    assert cost.notes == {"grid": GRID.tolist()}


@each_by_draft
def test_estimates_approach_the_conditional_mean(settings: Settings) -> None:
    """Two kinds of examples that can be told apart, losses with a known mean for each, much noise around it."""
    means = torch.tensor([[1.0, 2.0, 5.0, 4.0], [3.0, 3.0, 0.0, 4.0]])

    def labelled(n: int, seed: int) -> tuple[Draft, HandOffTable, Tensor]:
        drafted, table, _ = visible_drafts(n, seed)
        kinds = torch.arange(n) % 2
        noise = torch.randn(n, LENGTH + 1, generator=torch.Generator().manual_seed(seed))
        features = kinds[:, None, None].float().expand_as(drafted.features)
        drafted = replace(drafted, context=nn.functional.one_hot(kinds, 2).float(), features=features)
        return drafted, HandOffTable(means[kinds] + noise, table.deferred), kinds

    train, validation, test = labelled(4000, 0), labelled(500, 1), labelled(50, 2)
    settings = replace(settings, epochs=8, learning_rate=3e-3)
    rejector, history = fit_cost(train[:2], validation[:2], torch.arange(LENGTH + 1), settings, fingerprint="x", seed=0)
    estimates = -rejector.score(test[0])
    assert float((estimates - means[test[2]]).abs().mean()) < 0.12
    error = -rejector.score(validation[0]) - validation[1].loss
    unit = train[1].loss.std(0).mean()
    assert history.validation[history.best] == pytest.approx(float((error / unit).square().mean()), rel=1e-4)


def captured_squares(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> tuple[DraftNetwork, Draft, Callable[[Tensor, Tensor], Tensor], Tensor]:
    """The network, drafts, loss function and labels with which `fit_cost` would begin."""
    noted: list[Any] = []

    def note(network: DraftNetwork, train: Draft, _: Draft, labels: Any, loss_of: Any, *rest: Any) -> History:
        context, steps, mask = draft_inputs(train)
        network.standardise(context, steps[mask])
        noted.extend([network, train, loss_of, labels[0]])
        return History()

    monkeypatch.setattr(training, "_fit_draft", note)
    train = spiking_drafts(12, 0)[:2]
    fit_cost(train, train, GRID, settings, fingerprint="x", seed=0)
    network, drafted, loss_of, losses = noted
    return network, drafted, loss_of, losses


@each_by_draft
def test_regression_is_by_squares_of_what_can_be_handed_off(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, drafted, loss_of, losses = captured_squares(monkeypatch, settings)
    scores, total = network.eval().score(drafted), 0.0
    unit = float(losses.std(0).mean())
    for row, length in enumerate(drafted.sequences.lengths.tolist()):
        for kept in GRID.tolist():
            if kept < length or kept == SPIKES:
                total += ((-float(scores[row, kept]) - float(losses[row, kept])) / unit) ** 2
    assert float(loss_of(scores, losses)) == pytest.approx(total / losses.numel(), rel=1e-4)


@each_by_draft
def test_regression_has_the_gradient_of_finite_differences(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """In double precision, through attention, the masks and the hand-offs that are none."""
    network, drafted, loss_of, losses = captured_squares(monkeypatch, settings)
    network.double().train()
    context, steps, mask = draft_inputs(drafted)
    assert not mask.all()

    def loss() -> Tensor:
        return loss_of(network(context.double(), steps.double(), mask), losses.double())

    loss().backward()
    for name, weights in network.named_parameters():
        assert weights.grad is not None, name
        place = int(weights.grad.abs().argmax())
        flat, slope = weights.data.view(-1), float(weights.grad.view(-1)[place])
        start = float(flat[place])
        flat[place] = start + 1e-5
        up = loss().item()
        flat[place] = start - 1e-5
        down = loss().item()
        flat[place] = start
        assert (up - down) / 2e-5 == pytest.approx(slope, rel=1e-4, abs=1e-8), name
        assert slope or "in_proj_bias" in name, name


def fit_any(method: str, settings: Settings, **how: Any) -> DraftNetwork:
    train, validation = spiking_drafts(60, 0)[:2], spiking_drafts(30, 1)[:2]
    common = {"fingerprint": "x", "seed": 0, **how}
    if method == "whole":
        return fit_whole(train, validation, settings, **common)[0]
    if method == "once":
        return fit_once(train, validation, GRID, settings, alpha=0.1, **common)[0]
    return fit_cost(train, validation, GRID, settings, **common)[0]


each_method = pytest.mark.parametrize("method", ["whole", "once", "cost"])


@each_method
@each_by_draft
def test_the_same_seed_fits_the_same_weights_by_any_method(method: str, settings: Settings) -> None:
    settings = replace(settings, epochs=2, dropout=0.2)

    def weights(seed: int) -> dict[str, Tensor]:
        torch.rand(3)  # whatever was drawn before
        return fit_any(method, settings, seed=seed).state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@each_method
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_network_works_on_a_device_and_comes_back(
    method: str, device: str, spy: Callable[[Any, str], list[tuple[Any, ...]]]
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    moved = spy(DraftMLP, "to")
    network = fit_any(method, replace(QUICK, epochs=1), device=torch.device(device))
    assert [str(where) for _, where in moved] == [device]
    assert {str(tensor.device) for tensor in network.state_dict().values()} == {"cpu"}
    assert network.score(spiking_drafts(5, 2)[0]).device.type == "cpu"
    assert not network.training


def test_estimates_that_are_no_number_are_no_success() -> None:
    """A network that had diverged scored NaN, which counted as an error of 0: the best epoch of all."""
    with pytest.raises(OptionError, match="the validation loss was nan"):
        fit_any("cost", replace(QUICK, learning_rate=1e30, clip_norm=1e30, epochs=3))


@each_method
def test_what_scores_tokens_cannot_score_drafts(method: str) -> None:
    with pytest.raises(
        OptionError, match="unknown architecture by draft 'lstm'; available: draft_mlp, draft_transformer"
    ):
        fit_any(method, replace(QUICK, architecture="lstm"))


def test_one_example_is_enough_to_estimate() -> None:
    """It has no spread, which must not become a division by 0."""
    one = spiking_drafts(1, 0)[:2]
    rejector, history = fit_cost(one, one, GRID, replace(QUICK, epochs=2), fingerprint="x", seed=0)
    assert all(map(math.isfinite, history.validation))
    assert rejector.score(one[0]).shape == (1, SPIKES + 1)
