"""The contract check of predictors, and walks along their sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from seqdefer.interfaces import Predictor
from seqdefer.testing.rules import (
    EVERY_PART,
    NEW_STATE,
    ONE_BY_ONE,
    require,
    require_log_probs,
    require_loss,
    require_same,
    require_tensor,
    require_text,
    require_tuple,
    shuffled,
    type_name,
)
from seqdefer.types import Proposal, Sequences, SequenceSpec


@torch.no_grad()
def check_predictor(
    predictor: Predictor[Any], inputs: Tensor, spec: SequenceSpec, *, paths: Sequences | None = None
) -> None:
    """Check a predictor along its own proposals, or along `paths`: sequences of another author for these inputs.

    Shapes, dtypes and finite values; a fingerprint; proposing twice gives the same; select picks rows and commutes with
    append; no method changes a state it was given; a batch equals its rows one by one; log probabilities, if any, are
    those of a distribution.
    """
    require_text(getattr(predictor, "fingerprint", None), f"{type_name(predictor)}.fingerprint")
    steps: list[WalkStep] = []
    for step in walk(predictor, inputs, spec, paths):
        _check_proposal(predictor, step, spec, steps[0].proposal if steps else step.proposal)
        _check_state(predictor, step)
        steps.append(step)
    for row in torch.arange(len(inputs), device=inputs.device).split(1):
        alone = walk(predictor, inputs[row], spec, None if paths is None else paths.select(row))
        _check_row(type_name(predictor), int(row), steps, alone)
    telling = predictor.with_log_probs()
    if telling is not None:
        for step in walk(telling, inputs, spec, paths):
            require_log_probs(telling.log_probs(step.state), f"{type_name(predictor)}.log_probs", len(step.rows))


@dataclass(frozen=True)
class WalkStep:
    """The predictor at one position of a walk, without rows that have ended."""

    position: int
    rows: Tensor
    state: Any
    proposal: Proposal
    tokens: Tensor  # to read next
    stay: Tensor  # indices into rows that continue after that


def walk(
    predictor: Predictor[Any], inputs: Tensor, spec: SequenceSpec, path: Sequences | None = None
) -> Iterator[WalkStep]:
    """Walk a predictor along `path`, or along its own proposals."""
    state, _ = start(predictor, inputs)
    rows = torch.arange(len(inputs), device=inputs.device)
    for position in range(spec.length):
        proposal, who = predictor.propose(state), type_name(predictor)
        is_proposal = isinstance(proposal, Proposal)
        require(is_proposal, f"{who}.propose returned a {type_name(proposal)}", "return a Proposal")
        own = require_tensor(proposal.tokens, f"{who}: proposal.tokens", "token", len(rows))
        tokens = own if path is None else path.tokens[rows, position]
        goes_on = ~spec.is_end(tokens) if path is None else position + 1 < path.lengths[rows]
        stay = (goes_on & (position + 1 < spec.length)).nonzero().squeeze(1)
        yield WalkStep(position, rows, state, proposal, tokens, stay)
        if not len(stay):
            return
        rows, state = rows[stay], predictor.append(predictor.select(state, stay), tokens[stay])


def start(predictor: Predictor[Any], inputs: Tensor) -> tuple[Any, Tensor]:
    started = predictor.start(inputs)
    require_tuple(started, 2, f"{type_name(predictor)}.start", "a pair: state, context (B, C)")
    context = require_tensor(started[1], f"the context of {type_name(predictor)}.start", "float", len(inputs), None)
    return started[0], context


def _check_proposal(predictor: Predictor[Any], step: WalkStep, spec: SequenceSpec, first: Proposal) -> None:
    who, n, proposal = f"{type_name(predictor)}: proposal", len(step.rows), step.proposal
    is_vocabulary = spec.end is None or not proposal.tokens.is_floating_point()
    require(is_vocabulary, f"{who}.tokens are floats, but the end token is {spec.end}", "use int64")
    vocabulary = predictor.vocabulary_size
    if vocabulary is not None:
        is_token = (proposal.tokens >= 0) & (proposal.tokens < vocabulary)
        what = f"{who}.tokens holds {proposal.tokens[~is_token][:1].tolist()}, but vocabulary_size is {vocabulary}"
        require(is_token.all(), what, "use tokens from 0 on below it, or leave it None")
    require_tensor(proposal.features, f"{who}.features", "float", n, first.features.shape[-1])
    require_loss(proposal.uncertainty, f"{who}.uncertainty", n)
    is_mixed = (proposal.entropy is None) != (first.entropy is None)
    require(not is_mixed, f"{who}.entropy is None at some positions only", "set it always or never")
    if proposal.entropy is not None:
        require_tensor(proposal.entropy, f"{who}.entropy", "float", n)


def _check_state(predictor: Predictor[Any], step: WalkStep) -> None:
    who, proposal, state, rows = type_name(predictor), step.proposal, step.state, shuffled(step.rows)
    again = predictor.propose(state)
    _require_same_proposal(again, proposal, f"{who}.propose called twice", "make it depend on the state only")
    picked = predictor.propose(predictor.select(state, rows))
    remedy = f"{EVERY_PART}, and {ONE_BY_ONE}"
    _require_same_proposal(picked, proposal.select(rows), f"{who}.select of rows {rows.tolist()}", remedy)
    again = predictor.propose(state)
    _require_same_proposal(again, proposal, f"{who}.select changed the state it was given", NEW_STATE)
    if not len(step.stay):
        return
    staying, tokens = predictor.select(state, step.stay), step.tokens[step.stay]
    before, after = predictor.propose(staying), predictor.append(staying, tokens)
    again = predictor.propose(staying)
    _require_same_proposal(again, before, f"{who}.append changed the state it was given", NEW_STATE)
    rows = shuffled(step.stay)
    branched = predictor.propose(predictor.append(predictor.select(staying, rows), tokens[rows]))
    expected = predictor.propose(after).select(rows)
    _require_same_proposal(branched, expected, f"{who}: append after select is not select after append", EVERY_PART)


def _require_same_proposal(got: Proposal, expected: Proposal, what: str, remedy: str) -> None:
    for field in fields(Proposal):
        left, right = getattr(got, field.name), getattr(expected, field.name)
        if left is not None and right is not None:
            require_same(left, right, f"{what}: {field.name}", remedy)


def _check_row(who: str, row: int, steps: list[WalkStep], alone: Iterator[WalkStep]) -> None:
    for step, single in zip(steps, alone, strict=False):  # the batch lasts as long as its longest row
        place = (step.rows == row).nonzero().squeeze(1)
        what = f"{who}: row {row} in a batch is not row {row} alone at position {step.position}"
        _require_same_proposal(step.proposal.select(place), single.proposal, what, ONE_BY_ONE)
