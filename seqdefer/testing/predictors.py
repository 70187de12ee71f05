"""Is a predictor right?"""

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
    name_of,
    require,
    require_loss,
    require_same,
    require_tensor,
    require_text,
    shuffled,
)
from seqdefer.types import Proposal, Sequences, SequenceSpec


@torch.no_grad()
def check_predictor(
    predictor: Predictor[Any], inputs: Tensor, spec: SequenceSpec, *, paths: Sequences | None = None
) -> None:
    """Walks along what it proposes itself, or along `paths`: sequences that another author wrote for these inputs.

    Shapes, dtypes and finite values; a text as fingerprint; proposing twice gives the same; select picks rows, and
    commutes with append; no method changes a state it was given; a batch equals its rows one by one.
    """
    require_text(getattr(predictor, "fingerprint", None), f"{name_of(predictor)}.fingerprint")
    stops: list[Stop] = []
    for stop in walk(predictor, inputs, spec, paths):
        _check_proposal(predictor, stop, spec, stops[0].proposal if stops else stop.proposal)
        _check_state(predictor, stop)
        stops.append(stop)
    for row in range(len(inputs)):
        _check_row_alone(predictor, inputs, spec, paths, stops, row)


@dataclass(frozen=True)
class Stop:
    """The predictor at one position of a walk. Rows that have ended are not there any more."""

    position: int
    rows: Tensor
    state: Any
    proposal: Proposal
    tokens: Tensor  # what it reads next
    stay: Tensor  # the indices (into rows) that go on after that


def walk(
    predictor: Predictor[Any], inputs: Tensor, spec: SequenceSpec, path: Sequences | None = None
) -> Iterator[Stop]:
    """Leads a predictor along `path`, or along its own proposals."""
    state, _ = start(predictor, inputs)
    rows = torch.arange(len(inputs), device=inputs.device)
    for position in range(spec.length):
        proposal = predictor.propose(state)
        require(
            isinstance(proposal, Proposal),
            f"{name_of(predictor)}.propose gave a {name_of(proposal)}",
            "give a Proposal",
        )
        own = require_tensor(proposal.tokens, f"{name_of(predictor)}: proposal.tokens", "token", len(rows))
        tokens = own if path is None else path.tokens[rows, position]
        goes_on = ~spec.is_end(tokens) if path is None else position + 1 < path.lengths[rows]
        stay = (goes_on & (position + 1 < spec.length)).nonzero().squeeze(1)
        yield Stop(position, rows, state, proposal, tokens, stay)
        if not len(stay):
            return
        rows, state = rows[stay], predictor.append(predictor.select(state, stay), tokens[stay])


def start(predictor: Predictor[Any], inputs: Tensor) -> tuple[Any, Tensor]:
    started = predictor.start(inputs)
    is_pair = isinstance(started, tuple) and len(started) == 2
    require(is_pair, f"{name_of(predictor)}.start gave a {name_of(started)}", "give a pair: state, context (B, C)")
    context = require_tensor(started[1], f"the context of {name_of(predictor)}.start", "float", len(inputs), None)
    return started[0], context


def _check_proposal(predictor: Predictor[Any], stop: Stop, spec: SequenceSpec, first: Proposal) -> None:
    who, n, proposal = f"{name_of(predictor)}: proposal", len(stop.rows), stop.proposal
    is_vocabulary = spec.end is None or not proposal.tokens.is_floating_point()
    require(is_vocabulary, f"{who}.tokens are real numbers, but the end token is {spec.end}", "give int64")
    require_tensor(proposal.features, f"{who}.features", "float", n, first.features.shape[-1])
    require_loss(proposal.uncertainty, f"{who}.uncertainty", n)
    came_and_went = (proposal.entropy is None) != (first.entropy is None)
    require(not came_and_went, f"{who}.entropy is there at some positions alone", "give it always or never")
    if proposal.entropy is not None:
        require_tensor(proposal.entropy, f"{who}.entropy", "float", n)


def _check_state(predictor: Predictor[Any], stop: Stop) -> None:
    who, said, state, rows = name_of(predictor), stop.proposal, stop.state, shuffled(stop.rows)
    again = predictor.propose(state)
    _require_same_proposal(again, said, f"{who}.propose asked twice", "let it depend on the state alone")
    picked = predictor.propose(predictor.select(state, rows))
    _require_same_proposal(picked, said.select(rows), f"{who}.select of rows {rows.tolist()}", EVERY_PART)
    _require_same_proposal(predictor.propose(state), said, f"{who}.select changed the state it was given", NEW_STATE)
    if not len(stop.stay):
        return
    staying, tokens = predictor.select(state, stop.stay), stop.tokens[stop.stay]
    before, after = predictor.propose(staying), predictor.append(staying, tokens)
    _require_same_proposal(
        predictor.propose(staying), before, f"{who}.append changed the state it was given", NEW_STATE
    )
    rows = shuffled(stop.stay)
    branched = predictor.propose(predictor.append(predictor.select(staying, rows), tokens[rows]))
    expected = predictor.propose(after).select(rows)
    _require_same_proposal(branched, expected, f"{who}: append after select is not select after append", EVERY_PART)


def _require_same_proposal(got: Proposal, expected: Proposal, what: str, remedy: str) -> None:
    for field in fields(Proposal):
        left, right = getattr(got, field.name), getattr(expected, field.name)
        if left is not None and right is not None:
            require_same(left, right, f"{what}: {field.name}", remedy)


def _check_row_alone(
    predictor: Predictor[Any], inputs: Tensor, spec: SequenceSpec, path: Sequences | None, stops: list[Stop], row: int
) -> None:
    only = torch.tensor([row], device=inputs.device)
    alone = walk(predictor, inputs[only], spec, None if path is None else path.select(only))
    for stop, single in zip(stops, alone, strict=False):  # the batch goes on as long as its longest row
        place = (stop.rows == row).nonzero().squeeze(1)
        what = f"{name_of(predictor)}: row {row} in a batch is not row {row} alone at position {stop.position}"
        _require_same_proposal(stop.proposal.select(place), single.proposal, what, ONE_BY_ONE)
