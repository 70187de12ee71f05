"""Is a policy right?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.engine.interleaved import roll_out
from seqdefer.interfaces import NextTokenExpert, Policy, Predictor
from seqdefer.testing.predictors import Stop, start, walk
from seqdefer.testing.rules import (
    EVERY_PART,
    NEW_STATE,
    name_of,
    require,
    require_same,
    require_same_sequences,
    require_tensor,
    shuffled,
)
from seqdefer.types import Examples, Proposal, SequenceSpec

Decision = tuple[Tensor, Tensor]  # scores (B,), whether to defer (B,)


@torch.no_grad()
def check_policy(policy: Policy[Any], predictor: Predictor[Any], examples: Examples, spec: SequenceSpec) -> None:
    """Follows the predictor's own drafts; the predictor should have passed its own check.

    Scores are numbers (B,), decisions bool (B,); deciding twice gives the same; select picks rows, and changes no old
    state; a `final` policy never takes back a row that it has deferred; the engine writes whole sequences with it.
    """
    _, context = start(predictor, examples.inputs)
    state = policy.start(context)
    deferred = torch.zeros_like(examples.ids, dtype=torch.bool)
    for stop in walk(predictor, examples.inputs, spec):
        decision, following = _decide(policy, state, stop.position, stop.proposal)
        if policy.final:
            _check_final(policy, stop, deferred[stop.rows] & ~decision[1])
        deferred[stop.rows] |= decision[1]
        _check_state(policy, state, stop, decision)
        if len(stop.stay):
            state = policy.select(following, stop.stay)
    rollout = roll_out(predictor, Echo(predictor), examples, policy, spec)
    what = f"with {name_of(policy)} and an expert that writes what the predictor would, the engine's result is no draft"
    written = draft(predictor, examples, spec).sequences
    require_same_sequences(rollout.sequences, written, what, "let decide and select see their arguments alone")


class Echo(NextTokenExpert[Any]):
    """An expert that writes what the predictor would: whatever a policy decides, the draft comes out."""

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
    who, n = f"{name_of(policy)}.decide", len(proposal.tokens)
    answer = policy.decide(state, position, proposal)
    is_triple = isinstance(answer, tuple) and len(answer) == 3
    require(is_triple, f"{who} gave a {name_of(answer)}", "give scores (B,), decisions (B,) and the state")
    scores = require_tensor(answer[0], f"{who}: scores", "float", n)
    return (scores, require_tensor(answer[1], f"{who}: decisions", "bool", n)), answer[2]


def _check_final(policy: Policy[Any], stop: Stop, back: Tensor) -> None:
    what = f"{name_of(policy)} is final, but takes back row(s) {stop.rows[back].tolist()} at position {stop.position}"
    require(~back.any(), what, "go on deferring, or set final = False")


def _check_state(policy: Policy[Any], state: Any, stop: Stop, decision: Decision) -> None:
    rows = shuffled(stop.rows)
    picked, _ = _decide(policy, policy.select(state, rows), stop.position, stop.proposal.select(rows))
    again, _ = _decide(policy, state, stop.position, stop.proposal)
    for index, word in enumerate(("scores", "decisions")):
        require_same(again[index], decision[index], f"{name_of(policy)}.decide asked twice: {word}", NEW_STATE)
        what = f"{name_of(policy)}.select of rows {rows.tolist()}: {word}"
        require_same(picked[index], decision[index][rows], what, EVERY_PART)
