"""Drafts: what the predictor writes alone, and what the expert makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracles import (
    PlannedHandOff,
    hand_off,
    padded,
    write_all,
)
from torch import Tensor
from toy_budgets import TOYS, each_toy

from seqdefer.engine.drafts import completing, draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.interfaces import Expert
from seqdefer.rows import run_turn
from seqdefer.tasks.weather.task import WeatherTask
from seqdefer.testing import ToyTask
from seqdefer.types import Examples, Sequences, SequenceSpec


@each_toy
def test_draft_holds_what_the_predictor_knew_at_every_token(task: ToyTask) -> None:
    examples = task.split("test")
    drafted, expected = (
        draft(task.predictor, examples, task.spec),
        write_all(task, examples, hand_off(task.spec.length)),
    )
    length = task.spec.length

    def along(value: Callable[[Any], Tensor]) -> list[Any]:
        blank = torch.zeros_like(value(expected[0].proposals[0]))
        rows = [[value(proposal) for proposal in one.proposals] for one in expected]
        return [torch.cat([*row, *[blank] * (length - len(row))]).tolist() for row in rows]

    assert drafted.sequences.tokens.tolist() == padded([one.tokens for one in expected], length).tolist()
    assert drafted.sequences.lengths.tolist() == [len(one) for one in expected]
    assert drafted.features.tolist() == along(lambda proposal: proposal.features)
    assert drafted.uncertainty.tolist() == along(lambda proposal: proposal.uncertainty)
    assert drafted.entropy is not None
    assert drafted.entropy.tolist() == along(lambda proposal: proposal.entropy)
    assert torch.equal(drafted.context, task.predictor.start(examples.inputs)[1])


def test_draft_does_not_depend_on_the_size_of_batches() -> None:
    task, finished = TOYS["two words"], []
    examples = task.split("test")
    whole = draft(task.predictor, examples, task.spec)
    parts = draft(task.predictor, examples, task.spec, batch_size=6, progress=finished.append)
    assert finished == [6, 6, 6, 2]
    assert torch.equal(whole.sequences.tokens, parts.sequences.tokens)
    assert torch.equal(whole.features, parts.features)
    assert torch.equal(whole.uncertainty, parts.uncertainty)


def test_real_numbers_have_no_entropy(weather: WeatherTask) -> None:
    assert draft(weather.predictor, weather.split("test"), weather.spec).entropy is None


class Watching(Expert):
    """Sees nothing of what it replaces, is asked where a draft has tokens left, and leaves rubbish past the end."""

    def __init__(self, expert: Expert, drafts: Sequences) -> None:
        self.expert, self.drafts = expert, drafts

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        assert not prefixes.tokens[~prefixes.mask()].any()
        assert bool((prefixes.lengths < self.drafts.lengths[examples.ids]).all())
        whole = self.expert.complete(examples, prefixes, spec)
        return Sequences(whole.tokens.masked_fill(~whole.mask(), 1), whole.lengths)


@each_toy
def test_a_completed_draft_is_what_the_engine_writes(task: ToyTask, generator: torch.Generator) -> None:
    """Tokens, authors and scores, wherever each row is handed off."""
    examples, spec = task.split("test"), task.spec
    examples = Examples(examples.inputs, examples.targets, torch.arange(len(examples)))
    kept = torch.randint(spec.length + 1, (len(examples),), generator=generator)
    scores = 1 + torch.rand(len(examples), spec.length, generator=generator)
    drafts = draft(task.predictor, examples, spec).sequences
    expert = Watching(task.expert, drafts)
    turning = completing(task.predictor.device, examples, drafts, kept, scores, spec)
    found = run_turn(turning, lambda handed: expert.complete(handed.examples, handed.prefixes, spec))
    expected = roll_out(task.predictor, task.expert, examples, PlannedHandOff(kept, scores), spec)
    assert torch.equal(found.sequences.tokens, expected.sequences.tokens)
    assert torch.equal(found.sequences.lengths, expected.sequences.lengths)
    assert torch.equal(found.authors, expected.authors)
    assert torch.equal(found.scores, expected.scores)
