"""Experts that pay by the call: trees ask them late, hold the same labels, and make few calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Hashing, WithExpert
from torch import Tensor

from seqdefer.budgets.rules import NEAREST
from seqdefer.budgets.token_sweeps import sweep_hindsight, sweep_thresholds
from seqdefer.evaluation.oracle import beam_outcomes
from seqdefer.interfaces import NextTokenExpert
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import draw_decisions, explore_trees, grow_along
from seqdefer.labels.trees import DecisionTrees
from seqdefer.methods.deferral import deferral_of
from seqdefer.testing import ToyTask, check_expert
from seqdefer.types import Examples
from tests.labels.test_exploration import by_prefix

Written = tuple[int, ...]


@dataclass(frozen=True)
class PaidState:
    ids: list[int]
    written: list[Written]
    answers: dict[tuple[int, Written], int]
    length: int = 0


class PaidExpert(NextTokenExpert[PaidState]):
    """The toy expert behind a desk: one call tells its tokens after all prefixes, and on up to `length` tokens."""

    pays_by_call = True

    def __init__(self, task: ToyTask) -> None:
        self.inner, self.spec, self.calls = task.expert, task.spec, list[tuple[int, Written]]()
        self.examples: dict[int, Tensor] = {}

    @property
    def n_calls(self) -> int:
        return len(self.calls)

    def start(self, examples: Examples) -> PaidState:
        self.examples |= {one: examples.select(torch.tensor([row])) for row, one in enumerate(examples.ids.tolist())}  # type: ignore[assignment]
        return PaidState(examples.ids.tolist(), [()] * len(examples), {})

    def write_ahead(self, state: PaidState, length: int) -> PaidState:
        return replace(state, length=length)

    def _call(self, place: tuple[int, Written], answers: dict[tuple[int, Written], int], length: int) -> None:
        self.calls.append(place)
        one, written = place
        state: Any = self.inner.start(self.examples[one])  # type: ignore[arg-type]
        read: Written = ()
        for token in [*written, None]:
            named, state = self.inner.next(state, torch.tensor([0]))
            answers[(one, read)] = int(named)
            read = (*read, int(named) if token is None else token)
            state = self.inner.append(state, torch.tensor([read[-1]]))
        while len(read) < length and read[-1] != self.spec.end:
            named, state = self.inner.next(state, torch.tensor([0]))
            answers[(one, read)] = int(named)
            read = (*read, int(named))
            state = self.inner.append(state, torch.tensor([read[-1]]))

    def next(self, state: PaidState, rows: Tensor) -> tuple[Tensor, PaidState]:
        places = [(state.ids[row], state.written[row]) for row in rows.tolist()]
        for place in places:
            if place not in state.answers:
                self._call(place, state.answers, state.length)
        return torch.tensor([state.answers[place] for place in places]), state

    def append(self, state: PaidState, tokens: Tensor) -> PaidState:
        written = [(*row, token) for row, token in zip(state.written, tokens.tolist(), strict=True)]
        return replace(state, written=written)

    def select(self, state: PaidState, rows: Tensor) -> PaidState:
        chosen = rows.tolist()
        ids, written = [state.ids[row] for row in chosen], [state.written[row] for row in chosen]
        return replace(state, ids=ids, written=written)


def both(**sizes: Any) -> tuple[ToyTask, WithExpert]:
    """Return the toy, and the same toy with its expert behind a desk."""
    return ToyTask(**sizes), WithExpert(PaidExpert, **sizes)


def test_contract() -> None:
    _, paid = both(n=6, length=5)
    check_expert(paid.expert, paid.split("test"), paid.spec)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(3, 6), st.integers(0, 9), st.booleans(), st.integers(2, 6))
def test_labels_are_those_of_an_expert_that_is_asked_at_once(
    length: int, vocabulary: int, seed: int, ends: bool, rollouts: int
) -> None:
    plain, paid = both(n=5, length=length, vocabulary=vocabulary, seed=seed, ends=ends)
    examples = plain.split("train")
    decisions = draw_decisions(0, len(examples), rollouts, length)
    one, other = (grow_along(task, examples, decisions) for task in (plain, paid))
    assert by_prefix(one) == by_prefix(other)
    assert not other.nodes.used()["losses"].isnan().any()
    assert other.calls.made == paid.expert.n_calls <= one.calls.made  # type: ignore[attr-defined]
    closed = [explore_trees(task, examples, rollouts) for task in (plain, paid)]
    assert by_prefix(closed[0]) == by_prefix(closed[1])


@pytest.mark.parametrize("ends", [True, False])
def test_enumerated_trees_are_equal_and_cost_a_call_per_last_decision(ends: bool) -> None:
    plain, paid = both(n=6, length=5, ends=ends)
    examples = plain.split("train")
    one, other = enumerate_trees(plain, examples), enumerate_trees(paid, examples)
    assert by_prefix(one) == by_prefix(other)
    assert other.is_complete
    assert other.calls.made <= len(examples) * 2**4


def test_sweeps_and_oracles_are_equal_and_ask_only_where_they_defer() -> None:
    plain, paid = both(n=8, length=9)
    examples = plain.split("test")
    one, other = DecisionTrees(plain, examples), DecisionTrees(paid, examples)
    kept = sweep_thresholds(Hashing(), other, thresholds=torch.tensor([torch.inf]))
    assert (int(kept.deferred.sum()), other.calls.made) == (0, 0)
    for swept, expected in (
        (sweep_thresholds(Hashing(), other), sweep_thresholds(Hashing(), one)),
        (sweep_hindsight(other), sweep_hindsight(one)),
    ):
        assert torch.equal(swept.thresholds, expected.thresholds)
        assert torch.equal(swept.deferred, expected.deferred)
        assert torch.equal(swept.loss, expected.loss)
    assert all(torch.equal(*pair) for pair in zip(beam_outcomes(other), beam_outcomes(one), strict=True))
    assert other.calls.made == paid.expert.n_calls < one.calls.made / 2  # type: ignore[attr-defined]


def test_a_draft_of_the_predictor_is_one_call() -> None:
    """And the expert's own sequence is another."""
    _, paid = both(n=4, length=9, ends=False)
    examples = paid.split("train")
    trees = explore_trees(paid, examples, 2)
    assert trees.nodes.size > 4 * 9
    assert paid.expert.n_calls <= 2 * len(examples)  # type: ignore[attr-defined]


# -- trees that are opened again ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["complete", "closed", "open"])
def test_reopened_trees_grow_like_fresh_ones(kind: str) -> None:
    task, rows = ToyTask(n=12, length=7), torch.tensor([7, 2, 9])
    examples = task.split("train")
    trees = {
        "complete": lambda: enumerate_trees(task, examples),
        "closed": lambda: explore_trees(task, examples, 3),
        "open": lambda: DecisionTrees(task, examples),
    }[kind]()
    reopened, fresh = trees.reopened(rows), DecisionTrees(task, examples.select(rows))
    assert not reopened.is_closed
    assert reopened.is_complete == (kind == "complete")
    held = {place: content[:6] for place, content in by_prefix(trees).items()}
    for (row, prefix), content in by_prefix(reopened).items():
        assert content[:6] == held[(int(rows[row]), prefix)]
    one, other = (sweep_thresholds(Hashing(), grown) for grown in (reopened, fresh))
    assert torch.equal(one.thresholds, other.thresholds)
    assert torch.equal(one.deferred, other.deferred)
    assert torch.equal(one.loss, other.loss)


@pytest.mark.parametrize("n", [20, 50])
def test_calibration_continues_from_trees(n: int) -> None:
    """It asks only about what the trees lack, and tells the same."""
    plain, paid = both(n=n, length=8)
    examples, deferral = plain.split("train"), deferral_of(Hashing())
    alone = deferral.spending(plain, examples)
    trees = explore_trees(paid, examples, 8)
    before = paid.expert.n_calls  # type: ignore[attr-defined]
    continued = deferral.spending(paid, examples, trees=trees)
    assert alone.settings.tolist() == continued.settings.tolist()
    for budget in (0.1, 0.5, 0.9):
        assert NEAREST.choose(alone, budget) == NEAREST.choose(continued, budget)
    more = paid.expert.n_calls - before  # type: ignore[attr-defined]
    deferral.spending(paid, examples)
    assert more < paid.expert.n_calls - before - more  # type: ignore[attr-defined]
