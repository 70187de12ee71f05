"""The interleaved loop: propose, score, decide, append. Rollouts, drafts, evaluation and the server all consume it.

`interleave` is a generator of `Step`s, one position of the whole batch at a time, with the author of each token. Rows
that have ended, or that a final policy has given to the expert for good, leave the batch: nothing is computed for them.
A consumer that needs some rows no longer can `send` their indices, and they leave too.

    for step in interleave(predictor, expert, examples, policy, spec):
        print(step.position, step.tokens, step.authors)
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from seqdefer.errors import ContractError
from seqdefer.interfaces import Expert, NextTokenExpert, Policy, Predictor
from seqdefer.types import EXPERT, PREDICTOR, Examples, Proposal, Rollout, Sequences, SequenceSpec, Step


def not_a_number(what: str) -> ContractError:
    """Return the error for a score that is nan, which would count as a decision to keep."""
    return ContractError(
        f"the score of {what} is not a number (nan), so nothing can be decided by it; check the rejector's "
        "weights and what the predictor shows it"
    )


def only_completes(expert: Expert | None) -> ContractError:
    """Return the error for token-level deferral to an expert that names no next tokens."""
    return ContractError(
        f"token-level deferral needs an expert that names next tokens (a NextTokenExpert); {type(expert).__name__} "
        "only completes; use a one-time or whole policy"
    )


class HandOff(Policy[Tensor]):
    """Keeps `kept` (n,) tokens of each row, then hands the row to the expert. L never defers, 0 defers everything."""

    final: ClassVar[bool] = True

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def start(self, context: Tensor) -> Tensor:
        return self.kept.to(context.device)

    def decide(self, state: Tensor, position: int | Tensor, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        defer = position >= state
        return defer.float(), defer, state


@torch.no_grad()
def interleave(
    predictor: Predictor[Any], expert: Expert | None, examples: Examples, policy: Policy[Any], spec: SequenceSpec
) -> Generator[Step, Tensor | None, None]:
    """Write the sequences of one batch, and yield each position as soon as it is written. Rows that are sent in (int64
    indices) end there."""
    examples = examples.to(predictor.device)
    state, context = predictor.start(examples.inputs)
    policy_state = policy.start(context)
    proposal = predictor.propose(state)
    page = _Page.blank(len(examples), spec, proposal.tokens, context)
    writer = _expert_writer(expert, examples, policy)

    for position in range(spec.length):
        # 1. propose, score, decide (rows is empty once the expert has all that is left)
        if len(page.rows):
            proposal = proposal if position == 0 else predictor.propose(state)
            scores, defer, policy_state = policy.decide(policy_state, position, proposal)
            if bool(scores.isnan().any()):
                raise not_a_number(f"token {position}")
            page.note(position, proposal.tokens, scores, defer)
            # 2. the expert writes where the policy says so
            asked = defer.nonzero().squeeze(1)
            if len(asked):
                writer.write(page, position, asked)
        else:
            proposal = proposal.select(page.rows)
            page.scores = torch.zeros_like(page.scores)
        dropped = yield page.step(position, proposal)
        if dropped is not None:
            page.end(dropped, position)
        if page.is_finished(position):
            return
        # 3. rows that have ended, or belong to the expert for good, leave; the models of the others read the tokens
        if len(page.rows):
            stay = page.staying(position, policy.final)
            if len(stay) < len(page.rows):
                page.rows = page.rows[stay]
                state, policy_state = predictor.select(state, stay), policy.select(policy_state, stay)
                writer.select(stay)
            tokens = page.tokens[page.rows, position]
            if len(tokens):
                state = predictor.append(state, tokens)
                writer.append(tokens)


@dataclass
class _Page:
    """What is written so far. `rows` are those that the loop still writes, in the order of the models' batches."""

    tokens: Tensor  # (n, L)
    lengths: Tensor  # (n,) L until the end is known
    authors: Tensor  # int64 (n,) at this position
    scores: Tensor  # (n,) at this position
    rows: Tensor
    spec: SequenceSpec
    context: Tensor

    @classmethod
    def blank(cls, n: int, spec: SequenceSpec, like: Tensor, context: Tensor) -> _Page:
        return cls(
            tokens=torch.zeros(n, spec.length, dtype=like.dtype, device=like.device),
            lengths=torch.full((n,), spec.length, device=like.device),
            authors=torch.full((n,), PREDICTOR, device=like.device),
            scores=torch.zeros(n, device=like.device),
            rows=torch.arange(n, device=like.device),
            spec=spec,
            context=context,
        )

    def note(self, position: int, proposed: Tensor, scores: Tensor, defer: Tensor) -> None:
        self.tokens[self.rows, position] = proposed
        self.scores = torch.zeros_like(self.scores)
        self.scores[self.rows] = scores.float()
        self.authors[self.rows] = torch.where(defer, EXPERT, PREDICTOR)

    def step(self, position: int, proposal: Proposal) -> Step:
        now = self.tokens[self.rows, position]
        ended = self.rows[self.spec.is_end(now)]
        self.end(ended, position)
        active = position < self.lengths
        tokens = self.tokens[:, position]
        return Step(
            position=position,
            tokens=torch.where(active, tokens, torch.zeros_like(tokens)),
            authors=torch.where(active, self.authors, PREDICTOR),
            scores=torch.where(active, self.scores, torch.zeros_like(self.scores)),
            active=active,
            rows=self.rows,
            proposal=proposal,
            context=self.context,
        )

    def end(self, rows: Tensor, position: int) -> None:
        self.lengths[rows] = self.lengths[rows].clamp(max=position + 1)

    def is_finished(self, position: int) -> bool:
        return not bool((self.lengths > position + 1).any())

    def staying(self, position: int, final: bool) -> Tensor:
        leaving = self.lengths[self.rows] <= position + 1
        if final:
            leaving = leaving | (self.authors[self.rows] != PREDICTOR)
        return (~leaving).nonzero().squeeze(1)


class _NextTokens:
    """The expert writes one token at a time."""

    def __init__(self, expert: NextTokenExpert[Any], examples: Examples) -> None:
        self.expert, self.state = expert, expert.start(examples)

    def write(self, page: _Page, position: int, asked: Tensor) -> None:
        tokens, self.state = self.expert.next(self.state, asked)
        page.tokens[page.rows[asked], position] = tokens.to(page.tokens)

    def select(self, rows: Tensor) -> None:
        self.state = self.expert.select(self.state, rows)

    def append(self, tokens: Tensor) -> None:
        self.state = self.expert.append(self.state, tokens)


class _Completions:
    """The expert completes the row in one call."""

    def __init__(self, expert: Expert | None, examples: Examples) -> None:
        self.expert, self.examples = expert, examples

    def write(self, page: _Page, position: int, asked: Tensor) -> None:
        if self.expert is None:
            raise ContractError("the policy deferred, but there is no expert; give one or use a policy that keeps all")
        rows = page.rows[asked]
        prefixes = Sequences(page.tokens[rows], torch.full_like(rows, position))
        completed = self.expert.complete(self.examples.select(rows), prefixes, page.spec)
        page.tokens[rows], page.lengths[rows] = completed.tokens.to(page.tokens), completed.lengths.to(page.lengths)

    def select(self, rows: Tensor) -> None:
        """Do nothing: no state is kept per row."""

    def append(self, tokens: Tensor) -> None:
        """Do nothing: the expert reads the prefix when it is called."""


def _expert_writer(expert: Expert | None, examples: Examples, policy: Policy[Any]) -> _NextTokens | _Completions:
    if policy.final:
        return _Completions(expert, examples)
    if isinstance(expert, NextTokenExpert):
        return _NextTokens(expert, examples)
    raise only_completes(expert)


def roll_out(
    predictor: Predictor[Any],
    expert: Expert | None,
    examples: Examples,
    policy: Policy[Any],
    spec: SequenceSpec,
) -> Rollout:
    """Run `interleave` to its end and collect what it writes."""
    steps = list(interleave(predictor, expert, examples, policy, spec))
    lengths = torch.stack([step.active for step in steps], 1).sum(1)
    return Rollout(
        Sequences(stack_positions([step.tokens for step in steps], spec), lengths),
        stack_positions([step.authors for step in steps], spec),
        stack_positions([step.scores for step in steps], spec),
    )


def stack_positions(values: list[Tensor], spec: SequenceSpec) -> Tensor:
    """Stack values of positions into (n, L, ...), with zeros where the loop stopped early."""
    blank = torch.zeros_like(values[0])
    return torch.stack(values + [blank] * (spec.length - len(values)), 1)
