"""Plans: in steps, in batches and alone they write the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import hand_off, write_all
from torch import Tensor

from seqdefer.evaluation.experiment import Experiment
from seqdefer.methods.deferral import deferral_of
from seqdefer.methods.plans import PlanStep
from seqdefer.methods.registry import fittable_methods, get_method
from seqdefer.rejectors.checkpoints import Rejector
from seqdefer.types import Draft, Proposal, Rollout, Sequences

each_method = pytest.mark.parametrize("name", fittable_methods())


@each_method
def test_a_plan_writes_the_same_in_steps_and_for_any_batch(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    """Each row has its own setting; rows that may not defer are the predictor's, and show where they would defer."""
    task, examples, deferral = experiment.task, experiment.splits.test.examples, deferral_of(rejectors[name])
    settings = deferral.spending(task, examples).settings
    chosen = torch.from_numpy(np.random.default_rng(0).choice(settings, len(examples)))
    watched: list[Proposal | Draft] = []
    together = deferral.plan(task, examples, chosen, watch=watched.append).run()
    assert 0 < int(together.rollout.deferred.sum()) < int(together.rollout.sequences.lengths.sum())
    steps = list(deferral.plan(task, examples, chosen).steps())
    assert_same_rollout(joined(steps), together.rollout)
    assert len(watched) == (len(steps) if get_method(name).granularity == "token" else 1)  # the drafts, once
    assert torch.equal(torch.stack([step.wanted & step.active for step in steps], 1), together.wanted[:, : len(steps)])
    for row in range(0, len(examples), 7):
        alone = deferral.plan(task, examples.select(torch.tensor([row])), chosen[row : row + 1]).run().rollout
        assert alone.sequences.tokens[0].tolist() == together.rollout.sequences.tokens[row].tolist()
    barred = torch.arange(len(examples)) % 2 == 0
    some = deferral.plan(task, examples, chosen, may_defer=~barred).run()
    assert int(some.rollout.deferred[barred].sum()) == 0
    drafts = [one.tokens for one in write_all(task, examples.select(barred.nonzero().squeeze(1)), hand_off(99))]
    tokens = some.rollout.sequences
    kept = [tokens.tokens[row, : int(tokens.lengths[row])].tolist() for row in barred.nonzero().squeeze(1).tolist()]
    assert kept == drafts
    assert torch.equal(some.rollout.authors[~barred], together.rollout.authors[~barred])
    wants = (chosen < torch.inf) & (together.rollout.deferred > 0)
    assert bool(some.wanted[barred & wants].any(1).all())


@each_method
def test_rows_that_are_dropped_cost_no_expert_and_change_no_others(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    """By token a row ends at once; a draft is written already, and stays the predictor's."""
    task, examples, deferral = experiment.task, experiment.splits.test.examples, deferral_of(rejectors[name])
    settings = deferral.spending(task, examples).settings
    chosen = torch.full((len(examples),), float(settings[len(settings) // 2]), dtype=torch.float64)
    every = deferral.plan(task, examples, chosen).run().rollout
    is_dropped = torch.arange(len(examples)) % 3 == 1
    rollout = joined(list(deferral.plan(task, examples, chosen).steps(lambda: is_dropped.nonzero().squeeze(1))))
    stay = (~is_dropped).nonzero().squeeze(1)
    assert_same_rollout(select(rollout, stay), select(every, stay))
    assert int(every.authors[is_dropped, 1:].sum()) > 0
    assert int(rollout.authors[is_dropped, 1:].sum()) == 0
    if get_method(name).granularity == "token":
        assert rollout.sequences.lengths[is_dropped].unique().tolist() == [1]


@pytest.mark.parametrize("name", [name for name in fittable_methods() if get_method(name).granularity == "token"])
def test_a_token_whose_score_meets_its_setting_is_wanted_and_deferred(
    name: str, experiment: Experiment, rejectors: dict[str, Rejector]
) -> None:
    task, examples, deferral = experiment.task, experiment.splits.test.examples, deferral_of(rejectors[name])
    never = torch.full((len(examples),), torch.inf, dtype=torch.float64)
    first_scores = deferral.plan(task, examples, never).run().rollout.scores[:, 0].double()
    step = next(deferral.plan(task, examples, first_scores).steps())
    whole = deferral.plan(task, examples, first_scores).run()
    for marks in (step.wanted, step.authors, whole.wanted[:, 0], whole.rollout.authors[:, 0]):
        assert bool(marks.all())


def select(rollout: Rollout, rows: Tensor) -> Rollout:
    sequences = Sequences(rollout.sequences.tokens[rows], rollout.sequences.lengths[rows])
    return Rollout(sequences, rollout.authors[rows], rollout.scores[rows])


def joined(steps: list[PlanStep]) -> Rollout:
    """Join the positions of a plan, with 0 past the end of a row."""
    active = torch.stack([step.active for step in steps], 1)
    parts = (torch.stack([getattr(step, name) for step in steps], 1) for name in ("tokens", "authors", "scores"))
    tokens, authors, scores = (torch.where(active, part, 0) for part in parts)
    return Rollout(Sequences(tokens, active.sum(1)), authors, scores)


def assert_same_rollout(one: Rollout, other: Rollout) -> None:
    mask, width = other.sequences.mask(), one.sequences.tokens.shape[1]
    assert one.sequences.lengths.tolist() == other.sequences.lengths.tolist()
    for found, expected in ((one.sequences.tokens, other.sequences.tokens), (one.authors, other.authors)):
        assert torch.equal(found, torch.where(mask, expected, 0)[:, :width])
