"""Plans: together, in parts and alone they write what the interleaved loop writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles import hand_off, write_all
from torch import Tensor

from seqdefer.budgets.policies import Threshold
from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import HandOff, roll_out
from seqdefer.engine.speculative import collect
from seqdefer.evaluation.experiment import Experiment
from seqdefer.interfaces import TokenRejector
from seqdefer.methods.deferral import deferral_of
from seqdefer.methods.plans import Plan, PlanRow, scored_hand_offs
from seqdefer.methods.registry import fittable_methods, get_method
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.types import Examples, Rollout, Sequences

each_method = pytest.mark.parametrize("name", fittable_methods())


def admitted_in_parts(plan: Plan, examples: Examples, settings: Tensor) -> list[PlanRow]:
    """Write rows that come two at a time, one turn after the other."""
    rows = list[PlanRow]()
    for some in torch.arange(len(examples)).split(2):
        rows += plan.admit(examples.select(some), settings[some])
        plan.turn()
    while plan.rows:
        plan.turn()
    return rows


@each_method
def test_a_plan_writes_the_same_in_parts_and_for_any_batch(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    """Each row has its own setting; rows that may not defer are the predictor's, and show where they would defer."""
    task, examples, deferral = experiment.task, experiment.splits.test.examples, deferral_of(rejectors[name])
    settings = deferral.spending(task, examples).settings
    chosen = torch.from_numpy(np.random.default_rng(0).choice(settings, len(examples)))
    together = deferral.write(task, examples, chosen)
    assert 0 < int(together.rollout.deferred.sum()) < int(together.rollout.sequences.lengths.sum())
    assert_plain(name, experiment, rejectors, chosen, together.rollout)
    rows = admitted_in_parts(deferral.plan(task), examples, chosen)
    assert_same_rollout(collect([row.written for row in rows], task.spec), together.rollout)
    for row, marks in zip(rows, together.wanted.tolist(), strict=True):
        assert row.wanted == marks[: len(row.wanted)]
    assert_same_rollout(deferral.write(task, examples, chosen, at_once=3).rollout, together.rollout)
    barred = deferral.write(task, examples, chosen, may_defer=False)
    assert int(barred.rollout.deferred.sum()) == 0
    tokens = barred.rollout.sequences
    kept = [tokens.tokens[row, : int(tokens.lengths[row])].tolist() for row in range(len(examples))]
    assert kept == [one.tokens for one in write_all(task, examples, hand_off(99))]
    wants = (chosen < torch.inf) & (together.rollout.deferred > 0)
    assert bool(barred.wanted[wants].any(1).all())


def assert_plain(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector], chosen: Tensor, found: Rollout
) -> None:
    """Compare with the interleaved loop."""
    task, examples, rejector = experiment.task, experiment.splits.test.examples, rejectors[name]
    if isinstance(rejector, TokenRejector):
        policy: Any = Threshold(rejector, chosen)
    else:
        drafted = draft(task.predictor, examples, task.spec)
        policy = HandOff(torch.from_numpy(scored_hand_offs(rejector, drafted, task.spec.length).kept(chosen)))
    assert_same_rollout(found, roll_out(task.predictor, task.expert, examples, policy, task.spec))


@each_method
def test_rows_that_are_dropped_cost_no_expert_and_change_no_others(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    task, examples, deferral = experiment.task, experiment.splits.test.examples, deferral_of(rejectors[name])
    settings = deferral.spending(task, examples).settings
    chosen = torch.full((len(examples),), float(settings[len(settings) // 2]), dtype=torch.float64)
    every = deferral.write(task, examples, chosen).rollout
    plan = deferral.plan(task)
    rows = plan.admit(examples, chosen)
    plan.turn()
    dropped = rows[1::3]
    before = [list(row.written.tokens) for row in dropped]
    plan.drop([row for row in dropped if not row.is_over])
    while plan.rows:
        plan.turn()
    assert [row.written.tokens for row in dropped] == before
    stay = torch.tensor([place for place in range(len(rows)) if place % 3 != 1])
    found = collect([rows[place].written for place in stay.tolist()], task.spec)
    assert_same_rollout(found, select(every, stay))


@pytest.mark.parametrize("name", [name for name in fittable_methods() if get_method(name).granularity == "token"])
def test_a_token_whose_score_meets_its_setting_is_wanted_and_deferred(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    task, examples, deferral = experiment.task, experiment.splits.test.examples, deferral_of(rejectors[name])
    never = torch.full((len(examples),), torch.inf, dtype=torch.float64)
    first_scores = deferral.write(task, examples, never).rollout.scores[:, 0].double()
    whole = deferral.write(task, examples, first_scores)
    for marks in (whole.wanted[:, 0], whole.rollout.authors[:, 0]):
        assert bool(marks.all())


def select(rollout: Rollout, rows: Tensor) -> Rollout:
    sequences = Sequences(rollout.sequences.tokens[rows], rollout.sequences.lengths[rows])
    return Rollout(sequences, rollout.authors[rows], rollout.scores[rows])


def assert_same_rollout(one: Rollout, other: Rollout) -> None:
    mask, width = other.sequences.mask(), one.sequences.tokens.shape[1]
    assert one.sequences.lengths.tolist() == other.sequences.lengths.tolist()
    for found, expected in ((one.sequences.tokens, other.sequences.tokens), (one.authors, other.authors)):
        assert torch.equal(found, torch.where(mask, expected, 0)[:, :width])
