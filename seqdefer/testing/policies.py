"""The contract check of policies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.interfaces import NextTokenExpert, Policy, Predictor
from seqdefer.testing.predictors import WalkStep, start, walk
from seqdefer.testing.rules import (
    EVERY_PART,
    NEW_STATE,
    require,
    require_same,
    require_same_sequences,
    require_tensor,
    require_tuple,
    shuffled,
    type_name,
)
from seqdefer.types import Examples, Proposal, SequenceSpec

Decision = tuple[Tensor, Tensor]  # scores (B,), whether to defer (B,)


@torch.no_grad()
def check_policy(policy: Policy[Any], predictor: Predictor[Any], examples: Examples, spec: SequenceSpec) -> None:
    """Check a policy along the drafts of a predictor, which should have passed its own check.

    Scores are floats (B,), decisions bool (B,); deciding twice gives the same; select picks rows and changes no old
    state; a `final` policy never takes back a deferred row; the engine writes whole sequences with it.
    """
    _, context = start(predictor, examples.inputs)
    state = policy.start(context)
    deferred = torch.zeros_like(examples.ids, dtype=torch.bool)
    for step in walk(predictor, examples.inputs, spec):
        decision, following = _decide(policy, state, step.position, step.proposal)
        if policy.final:
            _check_final(policy, step, deferred[step.rows] & ~decision[1])
        deferred[step.rows] |= decision[1]
        _check_state(policy, state, step, decision)
        if len(step.stay):
            state = policy.select(following, step.stay)
    rollout = roll_out(predictor, EchoExpert(predictor), examples, policy, spec)
    what = f"with {type_name(policy)} and an expert that echoes the predictor, the engine does not write the draft"
    written = draft(predictor, examples, spec).sequences
    require_same_sequences(rollout.sequences, written, what, "make decide and select change none of their arguments")


class EchoExpert(NextTokenExpert[Any]):
    """An expert that writes what the predictor would, so that every policy writes the draft."""

    def __init__(self, predictor: Predictor[Any]) -> None:
        self.predictor = predictor

    def start(self, examples: Examples) -> Any:
        return self.predictor.start(examples.inputs)[0]

    def next(self, state: Any, rows: Tensor) -> tuple[Tensor, Any]:
        return self.predictor.propose(self.predictor.select(state, rows)).tokens, state

    def append(self, state: Any, tokens: Tensor) -> Any:
        return self.predictor.append(state, tokens)

    def select(self, state: Any, rows: Tensor) -> Any:
        return self.predictor.select(state, rows)


def _decide(policy: Policy[Any], state: Any, position: int, proposal: Proposal) -> tuple[Decision, Any]:
    who, n = f"{type_name(policy)}.decide", len(proposal.tokens)
    answer = policy.decide(state, position, proposal)
    require_tuple(answer, 3, who, "scores (B,), decisions (B,) and the state")
    scores = require_tensor(answer[0], f"{who}: scores", "float", n)
    return (scores, require_tensor(answer[1], f"{who}: decisions", "bool", n)), answer[2]


def _check_final(policy: Policy[Any], step: WalkStep, back: Tensor) -> None:
    what = f"{type_name(policy)} is final, but takes back row(s) {step.rows[back].tolist()} at position {step.position}"
    require(~back.any(), what, "keep deferring, or set final = False")


def _check_state(policy: Policy[Any], state: Any, step: WalkStep, decision: Decision) -> None:
    rows = shuffled(step.rows)
    picked, _ = _decide(policy, policy.select(state, rows), step.position, step.proposal.select(rows))
    again, _ = _decide(policy, state, step.position, step.proposal)
    for index, word in enumerate(("scores", "decisions")):
        require_same(again[index], decision[index], f"{type_name(policy)}.decide called twice: {word}", NEW_STATE)
        what = f"{type_name(policy)}.select of rows {rows.tolist()}: {word}"
        require_same(picked[index], decision[index][rows], what, EVERY_PART)
