"""THE interleaved loop: propose, score, decide, append. Rollouts, drafts, evaluation and the server all consume it.

`interleave` is a generator of `Step`s, one position of the whole batch at a time, that says who wrote each token. Rows
that have ended, or that a final policy has given to the expert for good, leave the batch: nothing is computed for them.
Whoever has no more use for some rows may `send` them, and they leave, too.

    for step in interleave(predictor, expert, examples, policy, spec):
        print(step.position, step.tokens, step.by_expert)
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from seqdefer.errors import ContractError
from seqdefer.interfaces import Expert, NextTokenExpert, Policy, Predictor
from seqdefer.progress import Progress
from seqdefer.types import Draft, Examples, Proposal, Rollout, Sequences, SequenceSpec, Step


class HandOff(Policy[Tensor]):
    """Keeps `kept` (n,) tokens of each row, then hands the row to the expert. L never defers, 0 defers everything."""

    final: ClassVar[bool] = True

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    def start(self, context: Tensor) -> Tensor:
        return self.kept.to(context.device)

    def decide(self, state: Tensor, position: int, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
        defer = position >= state
        return defer.float(), defer, state

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]


@torch.no_grad()
def interleave(
    predictor: Predictor[Any], expert: Expert | None, examples: Examples, policy: Policy[Any], spec: SequenceSpec
) -> Generator[Step, Tensor | None, None]:
    """Writes the sequences of one batch, yielding each position as soon as it is written. Rows that are sent to it
    (int64 indices) end there."""
    examples = examples.to(predictor.device)
    state, context = predictor.start(examples.inputs)
    policy_state = policy.start(context)
    proposal = predictor.propose(state)
    page = _Page.blank(len(examples), spec, proposal.tokens, context)
    pen = _pen(expert, examples, policy)

    for position in range(spec.length):
        # 1. propose, score, decide (rows is empty when the expert has been given all that is left)
        if len(page.rows):
            proposal = proposal if position == 0 else predictor.propose(state)
            scores, defer, policy_state = policy.decide(policy_state, position, proposal)
            page.note(position, proposal.tokens, scores, defer)
            # 2. the expert writes where the policy says so
            asked = defer.nonzero().squeeze(1)
            if len(asked):
                pen.write(page, position, asked)
        else:
            proposal = proposal.select(page.rows)
            page.scores = torch.zeros_like(page.scores)
        unwanted = yield page.step(position, proposal)
        if unwanted is not None:
            page.end(unwanted, position)
        if page.is_finished(position):
            return
        # 3. rows that have ended, or belong to the expert for good, leave; the others read what was written
        if len(page.rows):
            stay = page.staying(position, policy.final)
            if len(stay) < len(page.rows):
                page.rows = page.rows[stay]
                state, policy_state = predictor.select(state, stay), policy.select(policy_state, stay)
                pen.select(stay)
            tokens = page.tokens[page.rows, position]
            if len(tokens):
                state = predictor.append(state, tokens)
                pen.append(tokens)


@dataclass
class _Page:
    """What is written so far. `rows` are the rows that the loop still writes, in the order of the models' batches."""

    tokens: Tensor  # (n, L)
    lengths: Tensor  # (n,) L until the end is known
    by_expert: Tensor  # bool (n,) at this position
    scores: Tensor  # (n,) at this position
    rows: Tensor
    spec: SequenceSpec
    context: Tensor

    @classmethod
    def blank(cls, n: int, spec: SequenceSpec, like: Tensor, context: Tensor) -> _Page:
        return cls(
            tokens=torch.zeros(n, spec.length, dtype=like.dtype, device=like.device),
            lengths=torch.full((n,), spec.length, device=like.device),
            by_expert=torch.zeros(n, dtype=torch.bool, device=like.device),
            scores=torch.zeros(n, device=like.device),
            rows=torch.arange(n, device=like.device),
            spec=spec,
            context=context,
        )

    def note(self, position: int, proposed: Tensor, scores: Tensor, defer: Tensor) -> None:
        self.tokens[self.rows, position] = proposed
        self.scores = torch.zeros_like(self.scores)
        self.scores[self.rows] = scores.float()
        self.by_expert[self.rows] = defer

    def step(self, position: int, proposal: Proposal) -> Step:
        now = self.tokens[self.rows, position]
        ended = self.rows[self.spec.is_end(now)]
        self.end(ended, position)
        active = position < self.lengths
        tokens = self.tokens[:, position]
        return Step(
            position=position,
            tokens=torch.where(active, tokens, torch.zeros_like(tokens)),
            by_expert=self.by_expert & active,
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
            leaving = leaving | self.by_expert[self.rows]
        return (~leaving).nonzero().squeeze(1)


class _TokenByToken:
    """The expert writes one token and gives the pen back."""

    def __init__(self, expert: NextTokenExpert[Any], examples: Examples) -> None:
        self.expert, self.state = expert, expert.start(examples)

    def write(self, page: _Page, position: int, asked: Tensor) -> None:
        tokens, self.state = self.expert.next(self.state, asked)
        page.tokens[page.rows[asked], position] = tokens.to(page.tokens)

    def select(self, rows: Tensor) -> None:
        self.state = self.expert.select(self.state, rows)

    def append(self, tokens: Tensor) -> None:
        self.state = self.expert.append(self.state, tokens)


class _ToTheEnd:
    """The expert keeps the pen: it completes the row in one call."""

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
        """Nothing is kept per row."""

    def append(self, tokens: Tensor) -> None:
        """The prefix is read when the expert is asked."""


def _pen(expert: Expert | None, examples: Examples, policy: Policy[Any]) -> _TokenByToken | _ToTheEnd:
    if policy.final:
        return _ToTheEnd(expert, examples)
    if isinstance(expert, NextTokenExpert):
        return _TokenByToken(expert, examples)
    raise ContractError(
        f"token-level deferral needs an expert that names next tokens (a NextTokenExpert); {type(expert).__name__} "
        "only completes; use a one-time or whole policy"
    )


def roll_out(
    predictor: Predictor[Any],
    expert: Expert | None,
    examples: Examples,
    policy: Policy[Any],
    spec: SequenceSpec,
) -> Rollout:
    """The whole of what `interleave` writes, for a batch."""
    steps = list(interleave(predictor, expert, examples, policy, spec))
    lengths = torch.stack([step.active for step in steps], 1).sum(1)
    return Rollout(
        Sequences(_columns([step.tokens for step in steps], spec), lengths),
        _columns([step.by_expert for step in steps], spec),
        _columns([step.scores for step in steps], spec),
    )


def is_past(kept: Tensor, length: int) -> Tensor:
    """The positions after the first `kept` (n,). bool (n, L)"""
    return torch.arange(length, device=kept.device) >= kept[:, None]


@torch.no_grad()
def complete_drafts(
    predictor: Predictor[Any],
    expert: Expert | None,
    examples: Examples,
    drafts: Sequences,
    kept: Tensor,
    scores: Tensor,
    spec: SequenceSpec,
) -> Rollout:
    """What `roll_out` writes where each row keeps `kept` (n,) tokens, if the predictor's drafts are known: it is not
    asked again, and the expert once for all rows. `scores` (n, L) led to this. All on the CPU, as `draft` gives it."""
    handed = (kept < drafts.lengths).nonzero().squeeze(1)
    tokens, lengths = drafts.tokens.clone(), drafts.lengths.clone()
    if len(handed):
        if expert is None:
            raise ContractError("drafts are handed off, but there is no expert; give one or keep all")
        blank = tokens[handed].masked_fill(is_past(kept[handed], spec.length), 0)  # what it replaces, it shall not see
        prefixes = Sequences(blank.to(predictor.device), kept[handed].to(predictor.device))
        completed = expert.complete(examples.select(handed).to(predictor.device), prefixes, spec)
        tokens[handed], lengths[handed] = completed.tokens.to(tokens), completed.lengths.to(lengths)
    mask = Sequences(tokens, lengths).mask()
    is_scored = mask & ~is_past(kept + 1, spec.length)  # past the hand-off, the rejector is not asked
    return Rollout(
        Sequences(tokens.masked_fill(~mask, 0), lengths),
        mask & is_past(kept, spec.length),
        torch.where(is_scored, scores.float(), 0.0),
    )


def draft(
    predictor: Predictor[Any],
    examples: Examples,
    spec: SequenceSpec,
    *,
    batch_size: int | None = None,
    progress: Progress = lambda _: None,
) -> Draft:
    """What the predictor writes alone, with everything a rejector may look at; on the CPU."""
    parts = []
    for rows in torch.arange(len(examples)).split(batch_size or predictor.batch_size):
        parts.append(_draft_batch(predictor, examples.select(rows).to(predictor.device), spec))
        progress(len(rows))
    return _join(parts)


def _draft_batch(predictor: Predictor[Any], examples: Examples, spec: SequenceSpec) -> Draft:
    n = len(examples)
    keep_all = HandOff(torch.full((n,), spec.length))
    steps = list(interleave(predictor, None, examples, keep_all, spec))

    def gather(values: list[Tensor]) -> Tensor:
        return _columns([_spread(value, step.rows, n) for value, step in zip(values, steps, strict=True)], spec)

    entropies = [step.proposal.entropy for step in steps if step.proposal.entropy is not None]
    return Draft(
        steps[0].context.cpu(),
        Sequences(
            _columns([step.tokens for step in steps], spec).cpu(),
            torch.stack([step.active for step in steps], 1).sum(1).cpu(),
        ),
        gather([step.proposal.features for step in steps]).cpu(),
        gather([step.proposal.uncertainty for step in steps]).cpu(),
        gather(entropies).cpu() if entropies else None,
    )


def _spread(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Values of `rows` at their places among n; 0 elsewhere."""
    spread = torch.zeros(n, *values.shape[1:], dtype=values.dtype, device=values.device)
    spread[rows] = values
    return spread


def _columns(values: list[Tensor], spec: SequenceSpec) -> Tensor:
    """Stacks positions into (n, L, ...), zeros where the loop stopped early."""
    blank = torch.zeros_like(values[0])
    return torch.stack(values + [blank] * (spec.length - len(values)), 1)


def _join(parts: list[Draft]) -> Draft:
    entropies = [part.entropy for part in parts if part.entropy is not None]
    return Draft(
        torch.cat([part.context for part in parts]),
        Sequences(
            torch.cat([part.sequences.tokens for part in parts]), torch.cat([part.sequences.lengths for part in parts])
        ),
        torch.cat([part.features for part in parts]),
        torch.cat([part.uncertainty for part in parts]),
        torch.cat(entropies) if entropies else None,
    )
