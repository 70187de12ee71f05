"""Checks of predictors and experts: each rule can fail, with a message that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from seqdefer import testing
from seqdefer.interfaces import Expert, NextTokenExpert, Task
from seqdefer.testing import ToyTask, check_expert, check_predictor, check_task
from seqdefer.testing.fakes import ToyExpert, ToyPredictor, ToyState, mix
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec
from tests.testing.test_testing import END, EXAMPLES, LENGTH, SPEC, TOY, cases, refused

pytestmark = pytest.mark.usefixtures("one_thread")


# Predictors


def changed(**changes: Callable[[ToyPredictor, Proposal], Any]) -> type[ToyPredictor]:
    """Return a toy predictor with other fields in its proposals."""

    class Changed(ToyPredictor):
        def propose(self, state: ToyState) -> Proposal:
            proposal = super().propose(state)
            return replace(proposal, **{name: change(self, proposal) for name, change in changes.items()})

    return Changed


class Nameless(ToyPredictor):
    def __init__(self, task: ToyTask) -> None:
        super().__init__(task)
        self.fingerprint = ""


class StateOnly(ToyPredictor):
    def start(self, inputs: Tensor) -> Any:
        return super().start(inputs)[0]


class IntegerContext(ToyPredictor):
    def start(self, inputs: Tensor) -> tuple[ToyState, Tensor]:
        return ToyState.before(inputs), inputs[:, None]


class TokenAlone(ToyPredictor):
    def propose(self, state: ToyState) -> Any:
        return super().propose(state).tokens


class GrowingFeatures(ToyPredictor):
    def propose(self, state: ToyState) -> Proposal:
        return replace(super().propose(state), features=torch.ones(len(state.inputs), state.position + 1))


class EntropyAtFirst(ToyPredictor):
    def propose(self, state: ToyState) -> Proposal:
        return super().propose(state) if state.position == 0 else replace(super().propose(state), entropy=None)


class Moody(ToyPredictor):
    mood = 0

    def propose(self, state: ToyState) -> Proposal:
        self.mood += 1
        return replace(super().propose(state), uncertainty=torch.full((len(state.inputs),), float(self.mood)))


class Sorted(ToyPredictor):
    def select(self, state: ToyState, rows: Tensor) -> ToyState:
        return super().select(state, rows.sort().values)


class WithoutRepeats(ToyPredictor):
    def select(self, state: ToyState, rows: Tensor) -> ToyState:
        return super().select(state, rows.unique().flip(0))


class InPlace(ToyPredictor):
    def append(self, state: ToyState, tokens: Tensor) -> ToyState:
        state.prefix.copy_(mix(state.prefix, tokens))
        return state


class SelectsInPlace(ToyPredictor):
    def select(self, state: ToyState, rows: Tensor) -> ToyState:
        picked = super().select(state, rows)
        state.prefix.add_(1)
        return picked


class AppendsTheBatch(ToyPredictor):
    def append(self, state: ToyState, tokens: Tensor) -> ToyState:
        return super().append(state, tokens + tokens.sum())


class StandardisesTheBatch(ToyPredictor):
    def start(self, inputs: Tensor) -> tuple[ToyState, Tensor]:
        return super().start(inputs - inputs.min())


class CentresTheBatch(ToyPredictor):
    """Bug: the message spoke of `select` alone."""

    def propose(self, state: ToyState) -> Proposal:
        proposal = super().propose(state)
        return replace(proposal, features=proposal.features - proposal.features.mean(0))


class Ledger:
    """A state that is neither a tensor nor a record."""


class WithoutSelect(ToyPredictor):
    """Bug: the check, a run and a server ended with AttributeError: 'Ledger' object has no attribute 'select'."""

    def start(self, inputs: Tensor) -> Any:
        return Ledger(), super().start(inputs)[1]

    def propose(self, state: Any) -> Proposal:
        return super().propose(ToyState.before(EXAMPLES.inputs))


class SmallVocabulary(ToyPredictor):
    def __init__(self, task: ToyTask) -> None:
        super().__init__(task)
        self.vocabulary_size = 2


BROKEN_PREDICTORS = [
    (r"Nameless.fingerprint is ''; use a string", Nameless),
    (r"start returned a ToyState; return a pair", StateOnly),
    (r"context of IntegerContext.start has dtype int64; use float", IntegerContext),
    (r"propose returned a Tensor; return a Proposal", TokenAlone),
    (r"tokens has shape \(8, 1\); use \(8\)", changed(tokens=lambda _, proposal: proposal.tokens[:, None])),
    (r"tokens has dtype int32; use float or int64", changed(tokens=lambda _, proposal: proposal.tokens.int())),
    (r"tokens is a list; use a tensor", changed(tokens=lambda _, proposal: proposal.tokens.tolist())),
    (r"tokens are floats, but the end token is 4", changed(tokens=lambda _, proposal: proposal.tokens.float())),
    (r"features has shape \(8,\); use \(8, 8\)", changed(features=lambda _, proposal: proposal.uncertainty)),
    (r"features holds \[inf\]; use finite", changed(features=lambda _, proposal: proposal.features / 0)),
    (r"features has shape \(\d, 2\); use \(\d, 1\)", GrowingFeatures),
    (r"uncertainty is -\d.*; it must be 0 or more", changed(uncertainty=lambda _, proposal: -proposal.uncertainty)),
    (r"uncertainty has shape", changed(uncertainty=lambda _, proposal: proposal.features)),
    (r"entropy holds \[nan\]", changed(entropy=lambda _, proposal: proposal.uncertainty * torch.nan)),
    (r"entropy is None at some positions only; set it always or never", EntropyAtFirst),
    (r"Moody.propose called twice: uncertainty: 2.0 is not 1.0; make it depend on the state only", Moody),
    (r"Sorted.select of rows \[7, .*: tokens: .*; select every part", Sorted),
    (r"select of rows .* shape \(8,\) is not \(9,\)", WithoutRepeats),
    (r"CentresTheBatch.select of rows .*: features: .*, and compute each row from itself alone", CentresTheBatch),
    (r"state of WithoutSelect, a Ledger, has no select; .* or write WithoutSelect.select", WithoutSelect),
    (r"tokens holds \[[234]\], but vocabulary_size is 2; use tokens from 0 on below it", SmallVocabulary),
    (r"InPlace.append changed the state it was given: .*; states are values", InPlace),
    (r"SelectsInPlace.select changed the state it was given: .*; states are values", SelectsInPlace),
    (r"AppendsTheBatch: append after select is not select after append", AppendsTheBatch),
    (
        r"StandardisesTheBatch: row 0 in a batch is not row 0 alone at position 0: .*; compute each row",
        StandardisesTheBatch,
    ),
]


@cases(BROKEN_PREDICTORS)
def test_broken_predictors(words: str, broken: type[ToyPredictor]) -> None:
    with refused(words):
        check_predictor(broken(TOY), EXAMPLES.inputs, SPEC)


# Experts


class Completing(Expert):
    """The completions of the toy expert; broken experts change them."""

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        return self.change(examples, prefixes, TOY.expert.complete(examples, prefixes, spec))

    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Any:
        return whole


def changing(change: Callable[[Examples, Sequences, Sequences], Any]) -> type[Completing]:
    class Changing(Completing):
        def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Any:
            return change(examples, prefixes, whole)

    return Changing


def with_tokens(change: Callable[[Tensor], Tensor]) -> type[Completing]:
    return changing(lambda examples, prefixes, whole: replace(whole, tokens=change(whole.tokens)))


def with_lengths(change: Callable[[Tensor], Tensor]) -> type[Completing]:
    return changing(lambda examples, prefixes, whole: replace(whole, lengths=change(whole.lengths)))


class Scribbles(Completing):
    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        prefixes.tokens.copy_(whole.tokens)
        prefixes.tokens[:, -1] = 3
        return whole


class ChangesPrefix(Completing):
    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        return replace(whole, tokens=torch.where(prefixes.mask(), (whole.tokens + 1) % 4, whole.tokens))


class GoesOnAfterTheEnd(Completing):
    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        had_ended = (prefixes.lengths == whole.lengths) & (whole.lengths < LENGTH)
        return replace(whole, lengths=torch.where(had_ended, LENGTH, whole.lengths))


class CountsPadding(Completing):
    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        return replace(whole, lengths=torch.where(prefixes.lengths == 0, LENGTH, whole.lengths))


class Dice(Completing):
    rolls = 0

    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        self.rolls += 1
        return written(prefixes, mix(examples.inputs, self.rolls))


class Replans(Completing):
    """Follows another plan from every position."""

    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        return written(prefixes, mix(examples.inputs, prefixes.lengths))


class PretendsNotToRead(Completing):
    reads_prefix = False


class LooksAtTheLongest(Completing):
    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        longest = prefixes.lengths.max() if prefixes.lengths.unique().numel() > 1 else 0
        return written(prefixes, mix(examples.inputs, longest))


class LooksAtTheBatch(Completing):
    def change(self, examples: Examples, prefixes: Sequences, whole: Sequences) -> Sequences:
        return written(prefixes, mix(examples.inputs, len(examples)))


def written(prefixes: Sequences, plan: Tensor) -> Sequences:
    """Return full-length completions that follow `plan` (B,); ended prefixes stay."""
    planned = torch.stack([mix(plan, position) % 4 for position in range(LENGTH)], 1)
    tokens = torch.where(prefixes.mask(), prefixes.tokens, planned)
    has_ended = ((prefixes.tokens == END) & prefixes.mask()).any(1)
    return Sequences(tokens, torch.where(has_ended, prefixes.lengths, LENGTH))


BROKEN_EXPERTS = [
    (r"complete returned a Tensor; return Sequences", changing(lambda examples, prefixes, whole: whole.tokens)),
    (r"tokens has shape \(8, 4\); use \(8, 5\)", with_tokens(lambda tokens: tokens[:, :4])),
    (r"tokens has dtype bool", with_tokens(lambda tokens: tokens > 0)),
    (r"lengths has dtype int32; use int64", with_lengths(lambda lengths: lengths.int())),
    (r"returned lengths \[0, .*; return 1 to 5", with_lengths(lambda lengths: 0 * lengths)),
    (r"returned lengths .*; return 1 to 5", with_lengths(lambda lengths: lengths + 1)),
    (r"returned torch.float32 for a prefix of torch.int64", with_tokens(lambda tokens: tokens.float())),
    (r"Scribbles.complete changed the prefixes it was given; clone", Scribbles),
    (r"ChangesPrefix.complete changed a token of the prefix: \d is not \d; start", ChangesPrefix),
    (r"changed the length of a prefix that has ended: 5 is not \d; return it", GoesOnAfterTheEnd),
    (
        r"stopped after \[\d\] tokens; continue to the end token 4 or to length 5",
        with_lengths(lambda n: (n - 1).clamp(min=1)),
    ),
    (r"continued after the end token 4; set lengths", CountsPadding),
    (r"Dice is deterministic, but the same prefix got two completions", Dice),
    (r"Replans is .* but it leaves its own completion after one more token", Replans),
    (r"PretendsNotToRead has reads_prefix = False, but another prefix of \d tokens changes", PretendsNotToRead),
    (r"LooksAtTheLongest.complete of row \d beside prefixes of other lengths", LooksAtTheLongest),
    (r"LooksAtTheBatch.complete of row \d alone", LooksAtTheBatch),
]


@cases(BROKEN_EXPERTS)
def test_broken_experts(words: str, broken: type[Expert]) -> None:
    drafts = testing.policies.draft(TOY.predictor, EXAMPLES, SPEC).sequences
    with refused(words):
        check_expert(broken(), EXAMPLES, SPEC, drafts=drafts)


# Experts that name next tokens


class TokensAlone(ToyExpert):
    def next(self, state: ToyState, rows: Tensor) -> Any:
        return super().next(state, rows)[0]


class Columns(ToyExpert):
    def next(self, state: ToyState, rows: Tensor) -> tuple[Tensor, ToyState]:
        tokens, state = super().next(state, rows)
        return tokens[:, None], state


class TwoRules(ToyExpert):
    def next(self, state: ToyState, rows: Tensor) -> tuple[Tensor, ToyState]:
        return torch.full_like(rows, 2), state

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        return TOY.expert.complete(examples, prefixes, spec)


class Fixed(ToyExpert):
    """Completes like the toy expert; broken experts below change `next` only."""

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        return TOY.expert.complete(examples, prefixes, spec)


class WearsOut(Fixed):
    def next(self, state: ToyState, rows: Tensor) -> tuple[Tensor, ToyState]:
        tokens, _ = super().next(state, rows)
        state.prefix.add_(1)
        return tokens, ToyState(state.inputs, state.prefix - 1, state.position)


class Advances(Fixed):
    def next(self, state: ToyState, rows: Tensor) -> tuple[Tensor, ToyState]:
        tokens, state = super().next(state, rows)
        return tokens, ToyState(state.inputs, state.prefix, state.position + 1)


class AllRows(Fixed):
    def next(self, state: ToyState, rows: Tensor) -> tuple[Tensor, ToyState]:
        return super().next(state, rows.sort().values)


class SortedExpert(Fixed):
    def select(self, state: ToyState, rows: Tensor) -> ToyState:
        return super().select(state, rows.sort().values)


class InPlaceExpert(Fixed):
    def append(self, state: ToyState, tokens: Tensor) -> ToyState:
        following = super().append(state, tokens)
        state.inputs.add_(1)  # its own copy: select made it
        return ToyState(state.inputs - 1, following.prefix, following.position)

    def select(self, state: ToyState, rows: Tensor) -> ToyState:
        same = len(rows) == len(state.inputs)
        return state if same else super().select(state, rows)

    def start(self, examples: Examples) -> ToyState:
        return ToyState.before(examples.inputs.clone())


@dataclass(frozen=True)
class Buffered:
    toy: ToyState
    pending: Tensor | None = None


class ForgetsTokens(NextTokenExpert[Buffered]):
    """Reads tokens when it is called, but buffers only the last one."""

    def start(self, examples: Examples) -> Buffered:
        return Buffered(TOY.expert.start(examples))

    def _read(self, state: Buffered) -> ToyState:
        return state.toy if state.pending is None else TOY.expert.append(state.toy, state.pending)

    def next(self, state: Buffered, rows: Tensor) -> tuple[Tensor, Buffered]:
        toy = self._read(state)
        return TOY.expert.next(toy, rows)[0], Buffered(toy)

    def append(self, state: Buffered, tokens: Tensor) -> Buffered:
        return Buffered(state.toy, tokens)

    def select(self, state: Buffered, rows: Tensor) -> Buffered:
        return Buffered(state.toy.select(rows), None if state.pending is None else state.pending[rows])


BROKEN_NEXT_TOKEN_EXPERTS = [
    (r"next returned a Tensor; return a pair: tokens \(R,\), state", TokensAlone),
    (r"next: tokens has shape \(8, 1\); use \(8\)", Columns),
    (r"TwoRules.next at position 0 is not what complete writes there: 2 is not \d; make both", TwoRules),
    (r"WearsOut.next called twice: .*; states are values", WearsOut),
    (r"Advances.next from the state it returned: .*; keep the position", Advances),
    (r"AllRows.next for rows \[7, .*; answer for these rows", AllRows),
    (r"SortedExpert.select of rows \[7, .*; select every part", SortedExpert),
    (r"InPlaceExpert.append or select changed the state it was given", InPlaceExpert),
    (r"ForgetsTokens.next called late: .*; read every appended token", ForgetsTokens),
]


@cases(BROKEN_NEXT_TOKEN_EXPERTS)
def test_broken_next_token_experts(words: str, broken: type[NextTokenExpert[Any]]) -> None:
    expert = broken(TOY) if issubclass(broken, ToyExpert) else broken()
    drafts = testing.policies.draft(TOY.predictor, EXAMPLES, SPEC).sequences
    with refused(words):
        check_expert(expert, EXAMPLES, SPEC, drafts=drafts)


# Models in a task


def toy_with_models(**models: Any) -> Task:
    task = ToyTask(n=8, seed=1)
    for name, made in models.items():
        setattr(task, name, made(task))
    return task


def test_models_of_a_task_are_checked() -> None:
    with refused("StateOnly.start returned a ToyState"):
        check_task(toy_with_models(predictor=StateOnly))
    with refused("ChangesPrefix.complete changed a token of the prefix"):
        check_task(toy_with_models(expert=lambda _: ChangesPrefix()))


def test_a_predictor_is_checked_along_the_paths_of_the_expert() -> None:
    """This one is correct on its own paths only."""

    class Stumbles(ToyPredictor):
        def append(self, state: ToyState, tokens: Tensor) -> ToyState:
            own = self.propose(state).tokens
            return super().append(state, torch.where(tokens == own, tokens, tokens.sum()))

    check_predictor(Stumbles(TOY), EXAMPLES.inputs, SPEC)
    with refused("Stumbles: append after select"):
        check_task(toy_with_models(predictor=Stumbles))
