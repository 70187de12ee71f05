"""The checks: they pass what is right (the toy, the weather, every policy and loss), and each rule can fail."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from seqdefer import testing
from seqdefer.baselines import Confidence
from seqdefer.engine import HandOff
from seqdefer.errors import ContractError
from seqdefer.interfaces import Expert, NextTokenExpert, Policy, SplitName, Task
from seqdefer.losses import PHIS, PSIS, Phi, Psi, get_phi, get_psi
from seqdefer.policies import Threshold
from seqdefer.rejectors import LSTMRejector, MLPRejector, Sizes
from seqdefer.tasks.weather import WeatherTask
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
from seqdefer.testing.fakes import ToyExpert, ToyPredictor, ToyState, blank_prefixes, mix
from seqdefer.types import Examples, Proposal, Sequences, SequenceSpec

TOY = ToyTask(n=8, seed=1)
EXAMPLES, SPEC = TOY.split("train"), TOY.spec
LENGTH, END = SPEC.length, 4


pytestmark = pytest.mark.usefixtures("one_thread")


def cases(table: list[tuple[str, Any]]) -> Any:
    """(words of the message, what breaks the rule)"""
    return pytest.mark.parametrize(("words", "broken"), table, ids=[words.split(";")[0] for words, _ in table])


def refused(words: str) -> Any:
    return pytest.raises(ContractError, match=words)


# What is right


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
    """Goes on by ones, modulo 4, until it has written start + 1 tokens; then the end."""
    length = int(start) % LENGTH
    return (prefix + [(len(prefix) + step) % 4 for step in range(length - len(prefix))] + [END])[:LENGTH]


def test_function_expert() -> None:
    expert = FunctionExpert(count_up)
    check_expert(expert, EXAMPLES, SPEC)
    rows = EXAMPLES.select(torch.tensor([0, 0]))
    prefixes = Sequences(torch.tensor([[3, 3, 0, 0, 0], [3, END, 0, 0, 0]]), torch.tensor([1, 2]))
    completed = expert.complete(rows, prefixes, SPEC)
    assert completed.tokens[0, : completed.lengths[0]].tolist() == count_up(rows.inputs[0], [3])
    assert completed.tokens[1, :2].tolist() == [3, END]  # had ended: the function is not asked
    assert completed.lengths[1] == 2


def test_function_predictor() -> None:
    def propose(one: Tensor, prefix: list[int]) -> tuple[int, float]:
        return int(mix(one, len(prefix))) % 5, 0.5 * len(prefix)

    predictor = FunctionPredictor(propose, "count")
    check_predictor(predictor, EXAMPLES.inputs, SPEC)


def test_expert_that_admits_to_be_random() -> None:
    dice = itertools.count()

    def roll(one: Tensor, prefix: list[int]) -> list[int]:
        return prefix + [next(dice) % 4 for _ in range(LENGTH - len(prefix))]

    check_expert(FunctionExpert(roll, deterministic=False), EXAMPLES, SPEC)
    with refused("deterministic"):
        check_expert(FunctionExpert(roll), EXAMPLES, SPEC)


def test_toy_is_interesting() -> None:
    """Both writers end early and late, often agree, often not; the expert is better; the seed matters."""
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


# Predictors


def changed(**changes: Callable[[ToyPredictor, Proposal], Any]) -> type[ToyPredictor]:
    """The toy predictor with other fields in its proposals."""

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


BROKEN_PREDICTORS = [
    (r"Nameless.fingerprint is ''; give a text", Nameless),
    (r"start gave a ToyState; give a pair", StateOnly),
    (r"context of IntegerContext.start has dtype int64; give float", IntegerContext),
    (r"propose gave a Tensor; give a Proposal", TokenAlone),
    (r"tokens has shape \(8, 1\); give \(8\)", changed(tokens=lambda _, said: said.tokens[:, None])),
    (r"tokens has dtype int32; give float or int64", changed(tokens=lambda _, said: said.tokens.int())),
    (r"tokens is a list; give a tensor", changed(tokens=lambda _, said: said.tokens.tolist())),
    (r"tokens are real numbers, but the end token is 4", changed(tokens=lambda _, said: said.tokens.float())),
    (r"features has shape \(8,\); give \(8, 8\)", changed(features=lambda _, said: said.uncertainty)),
    (r"features holds \[inf\]; give finite", changed(features=lambda _, said: said.features / 0)),
    (r"features has shape \(\d, 2\); give \(\d, 1\)", GrowingFeatures),
    (r"uncertainty is -\d.*; give 0 or more", changed(uncertainty=lambda _, said: -said.uncertainty)),
    (r"uncertainty has shape", changed(uncertainty=lambda _, said: said.features)),
    (r"entropy holds \[nan\]", changed(entropy=lambda _, said: said.uncertainty * torch.nan)),
    (r"entropy is there at some positions alone; give it always or never", EntropyAtFirst),
    (r"Moody.propose asked twice: uncertainty: 2.0 is not 1.0; let it depend on the state alone", Moody),
    (r"Sorted.select of rows \[7, .*: tokens: .*; select every part", Sorted),
    (r"select of rows .* shape \(8,\) is not \(9,\)", WithoutRepeats),
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
    """The toy expert's completions alone; the broken ones change them."""

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


class KnowsBetter(Completing):
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
    """Another plan from every position."""

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
    """Full-length completions that follow `plan` (B,); prefixes that have ended stay."""
    planned = torch.stack([mix(plan, position) % 4 for position in range(LENGTH)], 1)
    tokens = torch.where(prefixes.mask(), prefixes.tokens, planned)
    has_ended = ((prefixes.tokens == END) & prefixes.mask()).any(1)
    return Sequences(tokens, torch.where(has_ended, prefixes.lengths, LENGTH))


BROKEN_EXPERTS = [
    (r"complete gave a Tensor; give Sequences", changing(lambda examples, prefixes, whole: whole.tokens)),
    (r"tokens has shape \(8, 4\); give \(8, 5\)", with_tokens(lambda tokens: tokens[:, :4])),
    (r"tokens has dtype bool", with_tokens(lambda tokens: tokens > 0)),
    (r"lengths has dtype int32; give int64", with_lengths(lambda lengths: lengths.int())),
    (r"gave lengths \[0, .*; give lengths from 1 to 5", with_lengths(lambda lengths: 0 * lengths)),
    (r"gave lengths .*; give lengths from 1 to 5", with_lengths(lambda lengths: lengths + 1)),
    (r"gave torch.float32 after a prefix of torch.int64", with_tokens(lambda tokens: tokens.float())),
    (r"Scribbles.complete changed the prefixes it was given; clone", Scribbles),
    (r"KnowsBetter.complete changed a token of the prefix: \d is not \d; begin", KnowsBetter),
    (r"gave a prefix that has ended another length: 5 is not \d; give it back", GoesOnAfterTheEnd),
    (
        r"stopped after \[\d\] tokens; go on to the end token 4 or to length 5",
        with_lengths(lambda n: (n - 1).clamp(min=1)),
    ),
    (r"wrote on after the end token 4; let lengths count", CountsPadding),
    (r"Dice says it is deterministic, but the same prefix got another completion", Dice),
    (r"Replans says .* but it leaves its own completion when the next token of it joins", Replans),
    (r"PretendsNotToRead says reads_prefix = False, but another prefix of \d tokens changes", PretendsNotToRead),
    (r"LooksAtTheLongest.complete of row \d beside prefixes of other lengths", LooksAtTheLongest),
    (r"LooksAtTheBatch.complete of row \d alone", LooksAtTheBatch),
]


@cases(BROKEN_EXPERTS)
def test_broken_experts(words: str, broken: type[Expert]) -> None:
    drafts = testing.policies.draft(TOY.predictor, EXAMPLES, SPEC).sequences
    with refused(words):
        check_expert(broken(), EXAMPLES, SPEC, drafts=drafts)


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
    """Completes as the toy expert does; the broken ones below change `next` alone."""

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
class Heard:
    toy: ToyState
    pending: Tensor | None = None


class ForgetsWhenNotAsked(NextTokenExpert[Heard]):
    """Keeps the last token until it is asked, but has room for one alone."""

    def start(self, examples: Examples) -> Heard:
        return Heard(TOY.expert.start(examples))

    def _read(self, state: Heard) -> ToyState:
        return state.toy if state.pending is None else TOY.expert.append(state.toy, state.pending)

    def next(self, state: Heard, rows: Tensor) -> tuple[Tensor, Heard]:
        toy = self._read(state)
        return TOY.expert.next(toy, rows)[0], Heard(toy)

    def append(self, state: Heard, tokens: Tensor) -> Heard:
        return Heard(state.toy, tokens)

    def select(self, state: Heard, rows: Tensor) -> Heard:
        return Heard(state.toy.select(rows), None if state.pending is None else state.pending[rows])


BROKEN_NEXT_TOKEN_EXPERTS = [
    (r"next gave a Tensor; give a pair: tokens \(R,\), state", TokensAlone),
    (r"next: tokens has shape \(8, 1\); give \(8\)", Columns),
    (r"TwoRules.next at position 0 is not what complete writes there: 2 is not \d; let both", TwoRules),
    (r"WearsOut.next asked twice: .*; states are values", WearsOut),
    (r"Advances.next from the state it gave back: .*; keep the position", Advances),
    (r"AllRows.next for rows \[7, .*; answer for these rows", AllRows),
    (r"SortedExpert.select of rows \[7, .*; select every part", SortedExpert),
    (r"InPlaceExpert.append or select changed the state it was given", InPlaceExpert),
    (r"ForgetsWhenNotAsked.next asked for the first time: .*; read every token appended", ForgetsWhenNotAsked),
]


@cases(BROKEN_NEXT_TOKEN_EXPERTS)
def test_broken_next_token_experts(words: str, broken: type[NextTokenExpert[Any]]) -> None:
    expert = broken(TOY) if issubclass(broken, ToyExpert) else broken()
    drafts = testing.policies.draft(TOY.predictor, EXAMPLES, SPEC).sequences
    with refused(words):
        check_expert(expert, EXAMPLES, SPEC, drafts=drafts)


# Policies


class Keeps(Policy[Tensor]):
    """Defers where the uncertainty is large; the broken ones change that. The state is the context's first column."""

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
    (r"decide gave a Tensor; give scores", deciding(lambda state, said: state)),
    (r"scores has dtype int64; give float", deciding(lambda state, said: (said.tokens, state > 2, state))),
    (r"scores holds \[nan\]", deciding(lambda state, said: (state * torch.nan, state > 2, state))),
    (r"scores has shape \(8, 3\)", deciding(lambda state, said: (said.features, state > 2, state))),
    (r"decisions has dtype float; give bool", deciding(lambda state, said: (state, state, state))),
    (r"decisions has shape \(1,\)", deciding(lambda state, said: (state, state[:1] > 2, state))),
    (r"Fickle.decide asked twice: decisions", Fickle),
    (r"SortedPolicy.select of rows \[7, .*: scores: .*; select every part", SortedPolicy),
    (r"ChangesItsState.decide asked twice: scores: .*; states are values", ChangesItsState),
    (r"FirstTokenOnly is final, but takes back row\(s\) \[\d.* at position 1; go on deferring", FirstTokenOnly),
    (r"with Rewrites and an expert that writes what the predictor would, the engine's result is no draft", Rewrites),
]


@cases(BROKEN_POLICIES)
def test_broken_policies(words: str, broken: type[Policy[Any]]) -> None:
    check_policy(Keeps(), TOY.predictor, EXAMPLES, SPEC)
    with refused(words):
        check_policy(broken(), TOY.predictor, EXAMPLES, SPEC)


# Tasks


def toy_with(**members: Any) -> Task:
    """A toy task with other members; a callable becomes a method."""
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
    """The sequence loss does not use it."""
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


def random_split() -> Task:
    counter = itertools.count()
    return other_split(ids=lambda examples: examples.ids + 100 * next(counter))


class PlansAnewAtThree(Expert):
    """Its claim to be deterministic fails at one prefix length alone, which the checks of a long sequence step over."""

    def complete(self, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
        plan = mix(examples.inputs, (prefixes.lengths == 3).long())
        planned = torch.stack([mix(plan, position) % 4 for position in range(spec.length)], 1)
        tokens = torch.where(prefixes.mask(), prefixes.tokens, planned)
        return Sequences(tokens, torch.full_like(prefixes.lengths, spec.length))


def inconsistent_at_three() -> Task:
    task = ToyTask(n=8, length=12, ends=False)
    task.expert = PlansAnewAtThree()
    return task


BROKEN_TASKS = [
    (r"Broken.name is ''; give a text", lambda: toy_with(name="")),
    (r"Broken.loss_unit is None; give a text", lambda: toy_with(loss_unit=None)),
    (r"ToyTask.spec is None; give a SequenceSpec", without_spec),
    (r"Broken.describe gave \{'data': 3\}; give texts", lambda: toy_with(describe=lambda self: {"data": 3})),
    (r"split 'train' of Broken is a int; give Examples", lambda: splits(lambda self, name: 3)),
    (r"ids of split 'train' .* dtype int32; give int64", lambda: other_split(ids=lambda some: some.ids.int())),
    (r"split 'train' .* has no examples", lambda: splits(lambda self, name: EXAMPLES.select(torch.arange(0)))),
    (r"has \{'inputs': 8, 'targets': 1, 'ids': 8\}", lambda: other_split(targets=lambda some: some.targets[:1])),
    (r"id 0 of split 'train' .* is also in split 'train'", lambda: other_split(ids=lambda some: 0 * some.ids)),
    (r"id 0 of split 'validation' .* is also in split 'train'", lambda: splits(lambda self, name: EXAMPLES)),
    (r"split 'train' .* is another one when asked twice; split by a fixed seed", random_split),
    (r"sequence_loss has shape \(4, 1\)", lambda: other_loss("sequence_loss", lambda loss, _: loss[:, None])),
    (r"sequence_loss is -.*; give 0 or more", lambda: other_loss("sequence_loss", lambda loss, _: -1 - loss)),
    (r"sequence_loss holds \[nan\]", lambda: other_loss("sequence_loss", lambda loss, _: loss * torch.nan)),
    (r"changes with what stands after the end: .*; look at", reads_padding),
    (r"sequence_loss of rows \[3, .*; compute each row", compares_rows),
    (r"ToyExpert names next tokens, but task 'toy' defines no token loss.*; define token_loss", no_token_loss),
    (r"token_loss is -.*; give 0 or more", lambda: other_token_loss(lambda self, some, after, _: after.lengths - 9.0)),
    (r"token_loss has dtype bool", lambda: other_token_loss(lambda self, some, prefixes, tokens: tokens > 0)),
    (r"token_cost holds \[inf\]", lambda: other_loss("token_cost", lambda loss, _: loss + torch.inf)),
    (r"token_cost of rows in another order", lambda: other_loss("token_cost", lambda loss, _: loss + loss.cumsum(0))),
    (r"ToyTask: the loss of a hand-off by the short-cuts of labelling", inconsistent_at_three),
]  # fmt: skip


@cases(BROKEN_TASKS)
def test_broken_tasks(words: str, broken: Callable[[], Task]) -> None:
    with refused(words):
        check_task(broken())


def toy_with_models(**models: Any) -> Task:
    task = ToyTask(n=8, seed=1)
    for name, made in models.items():
        setattr(task, name, made(task))
    return task


def test_models_of_a_task_are_checked() -> None:
    with refused("StateOnly.start gave a ToyState"):
        check_task(toy_with_models(predictor=StateOnly))
    with refused("KnowsBetter.complete changed a token of the prefix"):
        check_task(toy_with_models(expert=lambda _: KnowsBetter()))


def test_predictor_is_led_along_the_paths_of_the_expert() -> None:
    """One that stumbles over tokens it would not have written is right on its own paths alone."""

    class Stumbles(ToyPredictor):
        def append(self, state: ToyState, tokens: Tensor) -> ToyState:
            own = self.propose(state).tokens
            return super().append(state, torch.where(tokens == own, tokens, tokens.sum()))

    check_predictor(Stumbles(TOY), EXAMPLES.inputs, SPEC)
    with refused("Stumbles: append after select"):
        check_task(toy_with_models(predictor=Stumbles))


# Losses


def phi_with(**changes: Any) -> Phi:
    return replace(get_phi("logistic"), **changes)


def psi_with(**changes: Any) -> Psi:
    return replace(get_psi("cross_entropy"), **changes)


BROKEN_LOSSES = [
    (r"name of a Phi is ''; give a text", phi_with(name="")),
    (r"logistic of scores .* has shape \(\); give", phi_with(function=lambda z: z.mean())),
    (r"logistic is -.* somewhere; give 0 or more", phi_with(function=lambda z: -z)),
    (r"value of logistic at scores of size 10000 holds \[inf\]", phi_with(function=lambda z: torch.exp(-z))),
    (r"gradient of logistic at scores of size 0 holds \[nan\]", phi_with(function=lambda z: (z - z).sqrt() + 1)),
    (r"logistic is not convex: .* above a chord; use a convex", phi_with(function=lambda z: 2 * torch.sigmoid(-z))),
    (r"logistic rises by .* a unit, more than its lipschitz 0.5; declare that, or None", phi_with(lipschitz=0.5)),
    (r"upper_scale x logistic is 0.693147 at a mistake, below the 0-1 loss; raise", phi_with(upper_scale=1.0)),
    (r"calibration of logistic gives .* excess 0-1 risk is .*; give a larger", phi_with(calibration=lambda z: z / 2)),
    (r"cross_entropy of scores \(1000, 2\) has shape \(1000,\)", psi_with(function=lambda g: g.exp().sum(1))),
    (r"cross_entropy rises by .*, more than its lipschitz 1; declare that", psi_with(lipschitz=1.0)),
    (r"mean_absolute_error is not convex: .*; say convex=False", replace(get_psi("mean_absolute_error"), convex=True)),
    (r"upper_scale x cross_entropy is 0.693147 at a mistake", psi_with(upper_scale=1.0)),
    (r"cross_entropy reaches .*, more than its bound 1; correct bound", psi_with(bound=lambda limit, n: 1.0)),
    (r"calibration of cross_entropy gives", psi_with(calibration=lambda z, n: z / 2)),
    (r"value of cross_entropy .* holds", psi_with(function=lambda g: g.exp().sum(-1, keepdim=True).log() - g)),
]  # fmt: skip


@cases(BROKEN_LOSSES)
def test_broken_losses(words: str, broken: Phi | Psi) -> None:
    with refused(words):
        check_loss(broken)
