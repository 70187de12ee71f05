"""Checks of policies, tasks and losses: each rule can fail, with a message that names it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from seqdefer.interfaces import Expert, Policy, SplitName, Task
from seqdefer.rejectors.losses import Phi, Psi, get_phi, get_psi
from seqdefer.testing import ToyTask, check_loss, check_policy, check_task
from seqdefer.testing.fakes import mix
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec
from tests.testing.test_testing import EXAMPLES, SPEC, TOY, cases, refused

pytestmark = pytest.mark.usefixtures("one_thread")


# Policies


class Keeps(Policy[Tensor]):
    """Defers where the uncertainty is large; broken policies change that. The state is the context's first column."""

    def start(self, context: Tensor) -> Tensor:
        return context[:, 0]

    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Any, ...]:
        scores = proposal.uncertainty + state
        return scores, scores > 2, state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


def deciding(decide: Callable[[Tensor, Proposal], Any]) -> type[Keeps]:
    class Deciding(Keeps):
        def decide(self, state: Tensor, position: int, proposal: Proposal) -> Any:
            return decide(state, proposal)

    return Deciding


class Fickle(Keeps):
    turns = 0

    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Any, ...]:
        self.turns += 1
        return state, torch.full_like(state, self.turns % 3 == 0, dtype=torch.bool), state


class SortedPolicy(Keeps):
    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows.sort().values]


class ChangesItsState(Keeps):
    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Any, ...]:
        state += 1
        return super().decide(state, position, proposal)


class FirstTokenOnly(Keeps):
    final: ClassVar[bool] = True

    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Any, ...]:
        return state, torch.full_like(state, position == 0, dtype=torch.bool), state


class Rewrites(Keeps):
    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Any, ...]:
        proposal.tokens.fill_(0)
        return state, torch.zeros_like(state, dtype=torch.bool), state


BROKEN_POLICIES = [
    (r"decide returned a Tensor; return scores", deciding(lambda state, proposal: state)),
    (r"scores has dtype int64; use float", deciding(lambda state, proposal: (proposal.tokens, state > 2, state))),
    (r"scores holds \[nan\]", deciding(lambda state, proposal: (state * torch.nan, state > 2, state))),
    (r"scores has shape \(8, 3\)", deciding(lambda state, proposal: (proposal.features, state > 2, state))),
    (r"decisions has dtype float; use bool", deciding(lambda state, proposal: (state, state, state))),
    (r"decisions has shape \(1,\)", deciding(lambda state, proposal: (state, state[:1] > 2, state))),
    (r"Fickle.decide called twice: decisions", Fickle),
    (r"SortedPolicy.select of rows \[7, .*: scores: .*; select every part", SortedPolicy),
    (r"ChangesItsState.decide called twice: scores: .*; states are values", ChangesItsState),
    (r"FirstTokenOnly is final, but takes back row\(s\) \[\d.* at position 1; keep deferring", FirstTokenOnly),
    (r"with Rewrites and an expert that echoes the predictor, the engine does not write the draft", Rewrites),
]


@cases(BROKEN_POLICIES)
def test_broken_policies(words: str, broken: type[Policy[Any]]) -> None:
    check_policy(Keeps(), TOY.predictor, EXAMPLES, SPEC)
    with refused(words):
        check_policy(broken(), TOY.predictor, EXAMPLES, SPEC)


# Tasks


def toy_with(**members: Any) -> Task:
    """Return a toy task with other members; a callable becomes a method."""
    return type("Broken", (ToyTask,), members)(n=8, seed=1)


def splits(change: Callable[[ToyTask, SplitName], Any]) -> Task:
    return toy_with(split=change)


def other_split(**changes: Callable[[Examples], Tensor]) -> Task:
    def split(self: ToyTask, name: SplitName) -> Examples:
        examples = ToyTask.split(self, name)
        return replace(examples, **{field: change(examples) for field, change in changes.items()})

    return splits(split)


def other_loss(name: str, change: Callable[[Tensor, Any], Any]) -> Task:
    def loss(self: ToyTask, examples: Examples, *arguments: Any) -> Any:
        return change(getattr(ToyTask, name)(self, examples, *arguments), arguments[-1])

    return toy_with(**{name: loss})


def other_token_loss(token_loss: Callable[..., Tensor]) -> Task:
    """Return a task with another token loss, which the sequence loss does not use."""
    return toy_with(token_loss=token_loss, sequence_loss=lambda self, examples, sequences: sequences.lengths * 1.0)


def no_token_loss() -> Task:
    return other_token_loss(Task.token_loss)


def reads_padding() -> Task:
    return other_loss("sequence_loss", lambda _, sequences: 1.0 * sequences.tokens.sum(1))


def compares_rows() -> Task:
    return other_loss("sequence_loss", lambda loss, _: loss - loss.min() + loss[0])


def without_spec() -> Task:
    task = ToyTask()
    del task.spec
    return task


def without(part: str) -> Task:
    task = toy_with()
    setattr(task, part, None)
    return task


def random_split() -> Task:
    counter = itertools.count()
    return other_split(ids=lambda examples: examples.ids + 100 * next(counter))


def other_inputs_each_time() -> Task:
    """Bug: only ids were compared between two calls."""
    counter = itertools.count()
    return other_split(inputs=lambda examples: examples.inputs + next(counter))


def divides_by_the_worst() -> Task:
    """Bug: rows in another order have the same worst row, and `deterministic` of the expert was blamed."""
    return other_loss("sequence_loss", lambda loss, _: loss / loss.max().clamp(min=1e-9))


class ReplansAtThree(Expert):
    """Not deterministic at one prefix length, which the expert check of a long sequence skips."""

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        plan = mix(examples.inputs, (prefixes.lengths == 3).long())
        planned = torch.stack([mix(plan, position) % 4 for position in range(spec.length)], 1)
        tokens = torch.where(prefixes.mask(), prefixes.tokens, planned)
        return Sequences(tokens, torch.full_like(prefixes.lengths, spec.length))


def inconsistent_at_three() -> Task:
    task = ToyTask(n=8, length=12, ends=False)
    task.expert = ReplansAtThree()
    return task


BROKEN_TASKS = [
    (r"Broken.name is ''; use a string", lambda: toy_with(name="")),
    (r"Broken.loss_unit is None; use a string", lambda: toy_with(loss_unit=None)),
    (r"ToyTask.spec is None; use a SequenceSpec", without_spec),
    (r"Broken.describe returned \{'data': 3\}; return a dict", lambda: toy_with(describe=lambda self: {"data": 3})),
    (r"split 'train' of Broken is a int; return Examples", lambda: splits(lambda self, name: 3)),
    (r"ids of split 'train' .* dtype int32; use int64", lambda: other_split(ids=lambda some: some.ids.int())),
    (r"split 'train' .* has no examples", lambda: splits(lambda self, name: EXAMPLES.select(torch.arange(0)))),
    (r"has \{'inputs': 8, 'targets': 1, 'ids': 8\}", lambda: other_split(targets=lambda some: some.targets[:1])),
    (r"id 0 of split 'train' .* is also in split 'train'", lambda: other_split(ids=lambda some: 0 * some.ids)),
    (r"id 0 of split 'validation' .* is also in split 'train'", lambda: splits(lambda self, name: EXAMPLES)),
    (r"split 'train' .* differs between two calls; split with a fixed seed", random_split),
    (r"split 'train' .* differs between two calls; split with a fixed", other_inputs_each_time),
    (r"check_task got <class '.*ToyTask'>; pass an instance", lambda: ToyTask),
    (r"Broken.predictor is None; use an instance of a class that inherits Predictor", lambda: without("predictor")),
    (r"Broken.expert is None; use an instance of a class that inherits Expert", lambda: without("expert")),
    (r"Broken.codec is a str; use an instance of a class that inherits Codec", lambda: toy_with(codec="words")),
    (r"sequence_loss is [\d.]+, more than max_loss, 0.01; raise", lambda: toy_with(max_loss=0.01)),
    (r"sequence_loss of rows \[\d\]: .*; compute each row from itself", divides_by_the_worst),
    (r"sequence_loss has shape \(4, 1\)", lambda: other_loss("sequence_loss", lambda loss, _: loss[:, None])),
    (r"sequence_loss is -.*; it must be 0 or more", lambda: other_loss("sequence_loss", lambda loss, _: -1 - loss)),
    (r"sequence_loss holds \[nan\]", lambda: other_loss("sequence_loss", lambda loss, _: loss * torch.nan)),
    (r"depends on tokens after the end: .*; use", reads_padding),
    (r"sequence_loss of rows \[3, .*; compute each row", compares_rows),
    (r"ToyExpert names next tokens, but task 'toy' defines no token loss.*; define token_loss", no_token_loss),
    (r"token_loss is -.*; it must be 0", lambda: other_token_loss(lambda self, some, after, _: after.lengths - 9.0)),
    (r"token_loss has dtype bool", lambda: other_token_loss(lambda self, some, prefixes, tokens: tokens > 0)),
    (r"token_cost holds \[inf\]", lambda: other_loss("token_cost", lambda loss, _: loss + torch.inf)),
    (r"token_cost of rows in another order", lambda: other_loss("token_cost", lambda loss, _: loss + loss.cumsum(0))),
    (r"ToyTask: the loss of a hand-off with the short-cuts of labelling", inconsistent_at_three),
]  # fmt: skip


@cases(BROKEN_TASKS)
def test_broken_tasks(words: str, broken: Callable[[], Task]) -> None:
    with refused(words):
        check_task(broken())


# Losses


def phi_with(**changes: Any) -> Phi:
    return replace(get_phi("logistic"), **changes)


def psi_with(**changes: Any) -> Psi:
    return replace(get_psi("cross_entropy"), **changes)


BROKEN_LOSSES = [
    (r"name of a Phi is ''; use a string", phi_with(name="")),
    (r"logistic of scores .* has shape \(\); use", phi_with(function=lambda z: z.mean())),
    (r"logistic is -.* somewhere; it must be 0 or more", phi_with(function=lambda z: -z)),
    (r"value of logistic at scores of size 10000 holds \[inf\]", phi_with(function=lambda z: torch.exp(-z))),
    (r"gradient of logistic at scores of size 0 holds \[nan\]", phi_with(function=lambda z: (z - z).sqrt() + 1)),
    (r"logistic is not convex: .* above a chord; use a convex", phi_with(function=lambda z: 2 * torch.sigmoid(-z))),
    (r"logistic rises by .* per unit, more than its lipschitz 0.5; declare that, or None", phi_with(lipschitz=0.5)),
    (r"upper_scale x logistic is 0.693147 at a mistake, below the 0-1 loss; raise", phi_with(upper_scale=1.0)),
    (r"calibration of logistic gives .* excess 0-1 risk is .*; use a larger", phi_with(calibration=lambda z: z / 2)),
    (r"cross_entropy of scores \(1000, 2\) has shape \(1000,\)", psi_with(function=lambda g: g.exp().sum(1))),
    (r"cross_entropy rises by .*, more than its lipschitz 1; declare that", psi_with(lipschitz=1.0)),
    (r"mean_absolute_error is not convex: .*; set convex=False", replace(get_psi("mean_absolute_error"), convex=True)),
    (r"upper_scale x cross_entropy is 0.693147 at a mistake", psi_with(upper_scale=1.0)),
    (r"cross_entropy reaches .*, more than its bound 1; correct bound", psi_with(bound=lambda limit, n: 1.0)),
    (r"calibration of cross_entropy gives", psi_with(calibration=lambda z, n: z / 2)),
    (r"value of cross_entropy .* holds", psi_with(function=lambda g: g.exp().sum(-1, keepdim=True).log() - g)),
]  # fmt: skip


@cases(BROKEN_LOSSES)
def test_broken_losses(words: str, broken: Phi | Psi) -> None:
    with refused(words):
        check_loss(broken)
