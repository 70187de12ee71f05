"""Training on open trees: as on complete ones, and no decision is overridden. Counted against the obvious loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import expert_after, has_ended, proposal_after, rows_of, score_after
from torch import Tensor

from seqdefer.evaluation.experiment import Experiment
from seqdefer.evaluation.settings import ExperimentSettings
from seqdefer.evaluation.splits import Splits
from seqdefer.hyperparameters import Strategy
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import draw_decisions, explore_trees
from seqdefer.labels.inventory import take_inventory
from seqdefer.labels.trees import DecisionTrees
from seqdefer.rejectors.token_training import WARM_UP, fit_token
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Sequences
from tests.rejectors.test_training import QUICK

TOKEN = replace(QUICK, architecture="lstm", epochs=7, patience=4, learning_rate=2e-2, units=8, dropout=0.3)
FROZEN = replace(TOKEN, epochs=1, learning_rate=1e-30, weight_decay=0.0, dropout=0.0)
LONG = 14
each_strategy = pytest.mark.parametrize("strategy", ["free", "teacher", "scheduled"])


def trees_of(task: ToyTask, make: Callable[..., DecisionTrees], *more: Any) -> list[DecisionTrees]:
    return [make(task, task.split(name), *more) for name in ("train", "validation")]  # type: ignore[arg-type]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# -- open trees are complete ones ------------------------------------------------------------------------------------


@each_strategy
@pytest.mark.parametrize("architecture", ["lstm", "mlp"])
def test_training_on_open_trees_is_training_on_complete_ones(
    strategy: Strategy, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights to the bit, whatever the batches that the models are asked in. Inputs are standardised with the
    nodes of both models alone, as open trees do; complete trees usually take all nodes."""
    both = lambda trees: torch.cat([trees._path(defer=False), trees._path(defer=True)])  # noqa: E731
    monkeypatch.setattr(DecisionTrees, "typical_nodes", both)
    task, settings = ToyTask(n=40, length=6), replace(TOKEN, architecture=architecture)
    complete, history = fit_token(*trees_of(task, enumerate_trees), settings, seed=1, strategy=strategy)
    task.predictor.batch_size = 7  # validation in six parts
    grown = trees_of(task, DecisionTrees)
    opened, found = fit_token(*grown, settings, seed=1, strategy=strategy)
    assert not grown[0].is_complete
    assert same(complete.state_dict(), opened.state_dict())
    assert (found.training, found.best, found.overridden) == (history.training, history.best, history.overridden)
    assert found.validation == pytest.approx(history.validation, rel=1e-6)
    closed, _ = fit_token(*trees_of(task, explore_trees, 2), settings, seed=1, strategy=strategy)
    assert not same(complete.state_dict(), closed.state_dict())


def test_nodes_are_grown_once(spy: Callable[[Any, str], list[Any]]) -> None:
    """Another fit of the same kind finds all of them; another seed finds some."""
    trees = trees_of(task := ToyTask(n=30, length=LONG), DecisionTrees)
    first, _ = fit_token(*trees, TOKEN, seed=0)
    asked, sizes = spy(task.predictor, "propose"), [one.nodes.size for one in trees]
    again, _ = fit_token(*trees, TOKEN, seed=0)
    assert asked == []
    assert same(first.state_dict(), again.state_dict())
    fit_token(*trees, TOKEN, seed=1)
    fresh = trees_of(task, DecisionTrees)
    fit_token(*fresh, TOKEN, seed=1)
    assert 0 < trees[0].nodes.size - sizes[0] < fresh[0].nodes.size


# -- decisions that are not followed -----------------------------------------------------------------------------------


def explored(task: ToyTask, examples: Examples, rollouts: int) -> list[set[tuple[Any, ...]]]:
    """Return the prefixes of each example that rollouts by coins pass, written one by one."""
    drawn = draw_decisions(0, len(examples), rollouts, task.spec.length)
    passed: list[set[tuple[Any, ...]]] = [set() for _ in range(len(examples))]
    for row, one in enumerate(rows_of(examples)):
        for decisions in drawn[row].tolist():
            prefix: list[Any] = []
            for defer in decisions:
                if has_ended(task, prefix):
                    break
                passed[row].add(tuple(prefix))
                prefix.append(
                    expert_after(task, one, prefix) if defer else proposal_after(task, one, prefix).tokens.item()
                )
    return passed


def count_overridden(
    task: ToyTask, rejector: Any, strategy: Strategy, known: list[set[tuple[Any, ...]]] | None
) -> dict[str, float]:
    """Walk token by token; where `known` prefixes do not go on as decided, take the other token."""
    counts = {"decisions": 0, "teacher": 0, "closed": 0}
    for row, one in enumerate(rows_of(task.split("train"))):
        prefix: list[Any] = []
        while not has_ended(task, prefix):
            tokens = [proposal_after(task, one, prefix).tokens.item(), expert_after(task, one, prefix)]
            own = decided = score_after(task, one, rejector, prefix) >= 0
            if strategy == "teacher":
                at = Sequences(torch.tensor([prefix]).view(1, -1), torch.tensor([len(prefix)]))
                losses = (
                    task.token_loss(one, at, torch.tensor(tokens[:1])),
                    task.token_cost(one, at, torch.tensor(tokens[1:])),
                )
                decided = bool(losses[0] >= losses[1])
            counts["decisions"] += 1
            counts["teacher"] += tokens[own] != tokens[decided]
            following = [*prefix, tokens[decided]]
            if known is not None and not has_ended(task, following) and tuple(following) not in known[row]:
                counts["closed"] += 1
                following = [*prefix, tokens[not decided]]
            prefix = following
    return {name: counts[name] / counts["decisions"] for name in ("teacher", "closed")}


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("strategy", ["free", "teacher"])
def test_overridden_decisions_are_counted(strategy: Strategy, is_closed: bool) -> None:
    task = ToyTask(n=20, length=LONG)
    trees = trees_of(task, explore_trees, 3) if is_closed else trees_of(task, DecisionTrees)
    rejector, history = fit_token(*trees, FROZEN, seed=0, strategy=strategy)
    known = explored(task, task.split("train"), 3) if is_closed else None
    assert history.overridden == pytest.approx(count_overridden(task, rejector, strategy, known))
    assert (history.overridden["closed"] > 0.02) == is_closed
    assert (history.overridden["teacher"] > 0.02) == (strategy == "teacher")


def test_free_means_free() -> None:
    """On closed trees more than one decision in twenty of this rejector is not followed; on open ones none."""
    task = ToyTask(n=30, length=LONG)
    _, opened = fit_token(*trees_of(task, DecisionTrees), TOKEN, seed=0)
    _, closed = fit_token(*trees_of(task, explore_trees, 3), TOKEN, seed=0)
    assert opened.overridden == {"teacher": 0.0, "closed": 0.0}
    assert closed.overridden["closed"] > 0.05


def test_scheduled_sampling_goes_beyond_its_warm_up() -> None:
    """Until then it is teacher forcing: an epoch of the warm-up would be a rejector of the other strategy."""
    trees = trees_of(ToyTask(n=40, length=6), enumerate_trees)
    worse = replace(TOKEN, learning_rate=0.5, patience=2)  # the first epochs are the best
    (taught, teacher), (mixed, scheduled) = (
        fit_token(*trees, worse, seed=1, strategy=strategy) for strategy in ("teacher", "scheduled")
    )
    assert teacher.best < WARM_UP <= scheduled.best
    shared = min(len(teacher.training), WARM_UP)
    assert scheduled.training[:shared] == teacher.training[:shared]
    assert not same(taught.state_dict(), mixed.state_dict())


# -- who gets which trees ----------------------------------------------------------------------------------------------


def stored_toy(length: int = LONG) -> ToyTask:
    task = ToyTask(n=20, length=length)
    task.expert.fingerprint = "toy expert"
    return task


def experiment(folder: Path, strategy: Strategy, task: ToyTask, **more: Any) -> Experiment:
    settings = ExperimentSettings(
        seeds=2, instances=5, rollouts=2, token=replace(TOKEN, epochs=3), strategy=strategy, methods=("TokenwiseModel",)
    )
    return Experiment(task, settings, folder, **more)


def fit(one: Experiment, seed: int) -> Any:
    return one.fit(one.splits.train, one.splits.validation, seed)["TokenwiseModel"]


@pytest.mark.parametrize(("strategy", "made"), [("free", "open-trees"), ("explore", "trees")])
def test_trees_follow_from_the_strategy(strategy: Strategy, made: str, tmp_path: Path) -> None:
    """Labels of the other kind are not made, and nothing in the store is left over."""
    one = experiment(tmp_path, strategy, stored_toy())
    overridden = fit(one, 0).notes["history"]["overridden"]
    assert (overridden["closed"] == 0) == (strategy == "free")
    found = take_inventory(one.splits.labels.store)
    assert {labels.manifest.kind for labels in found.labellings} == {"hand-offs", made}
    assert found.orphans == ()


def test_experiments_that_share_splits_get_both_kinds(tmp_path: Path) -> None:
    task = stored_toy()
    splits = Splits(task, tmp_path / "shared", seeds=2, instances=5, rollouts=2)
    strategies: list[Strategy] = ["explore", "teacher", "free"]
    for strategy in strategies:
        shared = fit(experiment(tmp_path / "shared", strategy, task, splits=splits, variant=strategy), 0)
        alone = fit(experiment(tmp_path / strategy, strategy, stored_toy()), 0)
        assert same(shared.state_dict(), alone.state_dict())
    for part in (splits.train, splits.validation):
        opened, closed = part.trees_of("open"), part.trees_of("closed")
        assert opened is part.trees is part.trees_of("open")
        assert opened is not None
        assert closed is not None
        assert (opened.is_closed, closed.is_closed) == (False, True)
    assert len(splits.grown) == 4


def test_short_sequences_have_complete_trees(tmp_path: Path) -> None:
    data = experiment(tmp_path, "free", stored_toy(length=4)).splits.train
    opened, closed = data.trees_of("open"), data.trees_of("closed")
    assert opened is not None
    assert opened is closed
    assert opened.is_complete


@each_strategy
def test_resumed_is_fresh(strategy: Strategy, tmp_path: Path, spy: Callable[[Any, str], list[Any]]) -> None:
    """A run that was stopped after a fit goes on with the nodes that fit has grown."""
    fresh = experiment(tmp_path / "fresh", strategy, stored_toy())
    expected = [fit(fresh, seed) for seed in (0, 1)]
    sizes = [trees.nodes.size for trees in fresh.splits.grown]
    fit(experiment(tmp_path / "stopped", strategy, stored_toy()), 0)
    resumed = experiment(tmp_path / "stopped", strategy, task := stored_toy())
    second = fit(resumed, 1)
    assert [trees.nodes.size for trees in resumed.splits.grown] == sizes
    assert [trees.calls.made for trees in resumed.splits.grown] == [one.calls.made for one in fresh.splits.grown]
    asked = [spy(task.predictor, "start"), spy(task.expert, "start")]
    once_more = experiment(tmp_path / "stopped", strategy, task, variant="again")
    for seed, found in ((0, fit(once_more, 0)), (1, second), (1, fit(once_more, 1))):
        assert same(found.state_dict(), expected[seed].state_dict())
        assert found.notes["history"] == expected[seed].notes["history"]
    assert asked == [[], []]


def test_nothing_is_stored_of_an_expert_without_a_fingerprint(tmp_path: Path) -> None:
    one = experiment(tmp_path, "free", ToyTask(n=20, length=LONG))
    fit(one, 0)
    assert one.splits.labels.store.names() == []
