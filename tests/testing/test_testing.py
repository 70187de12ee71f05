"""The checks accept the toy, the weather, all policies and losses. `test_models` and `test_tasks` break each rule."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer import testing
from seqdefer.budgets.policies import Threshold
from seqdefer.engine.interleaved import HandOff
from seqdefer.errors import ContractError
from seqdefer.interfaces import Policy
from seqdefer.rejectors.base import Sizes
from seqdefer.rejectors.confidence import Confidence
from seqdefer.rejectors.losses import PHIS, PSIS, Phi, Psi
from seqdefer.rejectors.token import LSTMRejector, MLPRejector
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import (
    FunctionExpert,
    FunctionPredictor,
    ToyTask,
    check_expert,
    check_loss,
    check_policy,
    check_predictor,
    check_task,
    fakes,
)
from seqdefer.testing.fakes import blank_prefixes, mix
from seqdefer.types import Sequences

TOY = ToyTask(n=8, seed=1)
EXAMPLES, SPEC = TOY.split("train"), TOY.spec
LENGTH, END = SPEC.length, 4


pytestmark = pytest.mark.usefixtures("one_thread")


def cases(table: list[tuple[str, Any]]) -> Any:
    """Parametrize a test by (words of the message, what breaks the rule)."""
    return pytest.mark.parametrize(("words", "broken"), table, ids=[words.split(";")[0] for words, _ in table])


def refused(words: str) -> Any:
    return pytest.raises(ContractError, match=words)


@pytest.mark.parametrize(
    "options",
    [{"ends": False}, {"length": 1}, {"vocabulary": 2}, {"n": 1}, {"length": 10, "vocabulary": 20}],
    ids=str,
)
def test_toy_task(options: dict[str, Any]) -> None:
    check_task(ToyTask(**options))


def test_weather_task(weather: WeatherTask) -> None:
    check_task(weather)


@pytest.mark.parametrize("loss", [*PHIS.values(), *PSIS.values()], ids=lambda loss: loss.name)
def test_registered_losses(loss: Phi | Psi) -> None:
    check_loss(loss)


def network(kind: type[LSTMRejector] | type[MLPRejector]) -> LSTMRejector | MLPRejector:
    torch.manual_seed(0)
    sizes = Sizes(context=2, features=3, length=LENGTH, has_entropy=True, layers=2, units=4, dropout=0.5)
    return kind(sizes, TOY.predictor.fingerprint).eval()


@pytest.mark.parametrize(
    "policy",
    [
        HandOff(torch.arange(len(EXAMPLES)) % (LENGTH + 1)),
        Threshold(Confidence(), 1.0),
        Threshold(Confidence("entropy"), 0.7),
        Threshold(network(LSTMRejector)),
        Threshold(network(MLPRejector)),
    ],
    ids=["hand-off", "uncertainty", "entropy", "lstm", "mlp"],
)
def test_policies(policy: Policy[Any]) -> None:
    check_policy(policy, TOY.predictor, EXAMPLES, SPEC)


def count_up(start: Tensor, prefix: list[int]) -> list[int]:
    """Count up modulo 4 to start tokens, then end."""
    length = int(start) % LENGTH
    return (prefix + [(len(prefix) + step) % 4 for step in range(length - len(prefix))] + [END])[:LENGTH]


def test_function_expert() -> None:
    expert = FunctionExpert(count_up)
    check_expert(expert, EXAMPLES, SPEC)
    rows = EXAMPLES.select(torch.tensor([0, 0]))
    prefixes = Sequences(torch.tensor([[3, 3, 0, 0, 0], [3, END, 0, 0, 0]]), torch.tensor([1, 2]))
    completed = expert.complete(rows, prefixes, SPEC)
    assert completed.tokens[0, : completed.lengths[0]].tolist() == count_up(rows.inputs[0], [3])
    assert completed.tokens[1, :2].tolist() == [3, END]  # it had ended: the function is not called
    assert completed.lengths[1] == 2


def test_function_predictor() -> None:
    def propose(one: Tensor, prefix: list[int]) -> tuple[int, float]:
        return int(mix(one, len(prefix))) % 5, 0.5 * len(prefix)

    predictor = FunctionPredictor(propose, "count")
    check_predictor(predictor, EXAMPLES.inputs, SPEC)


def test_an_expert_may_declare_to_be_random() -> None:
    dice = itertools.count()

    def roll(one: Tensor, prefix: list[int]) -> list[int]:
        return prefix + [next(dice) % 4 for _ in range(LENGTH - len(prefix))]

    check_expert(FunctionExpert(roll, deterministic=False), EXAMPLES, SPEC)
    with refused("deterministic"):
        check_expert(FunctionExpert(roll), EXAMPLES, SPEC)


def test_the_toy_covers_many_cases() -> None:
    """Both models end early and late and often disagree; the expert is better; the seed matters."""
    task = ToyTask(n=200)
    examples = task.split("train")
    expert = task.expert.complete(examples, blank_prefixes(examples, task.spec), task.spec)
    predictor = testing.policies.draft(task.predictor, examples, task.spec).sequences
    for written in (expert, predictor):
        assert written.lengths.unique().tolist() == [1, 2, 3, 4, 5]
    assert 0.3 < (expert.tokens[:, 0] == predictor.tokens[:, 0]).float().mean() < 0.8
    losses = [task.sequence_loss(examples, written).mean() for written in (expert, predictor)]
    assert losses[0] < losses[1] / 2
    assert not torch.equal(examples.targets, ToyTask(n=200, seed=1).split("train").targets)


@pytest.mark.parametrize("module", [testing, fakes], ids=lambda module: module.__name__)
def test_examples_in_the_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
