"""What a token-level rejector does at many thresholds, rolled through decision trees all at once.

After a deferral the prefix changes, so the scores of a draft alone do not tell what a threshold will spend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqdefer.budgets.passes import PassCounter
from seqdefer.errors import OptionError
from seqdefer.interfaces import TokenRejector
from seqdefer.labels.nodes import END
from seqdefer.labels.trees import DecisionTrees
from seqdefer.types import TensorRecord

N_THRESHOLDS = 200  # of a sweep, at quantiles of the scores that rollouts meet
# (state, its rows before the nodes, position, nodes) -> scores, next state
Score = Callable[[Any, Tensor, int, Tensor], tuple[Tensor, Any]]
# (rows, thresholds) -> what they do to these examples, and the scores that were met
Roll = Callable[[Tensor, Tensor], tuple["TokenSweep", Tensor]]


@dataclass(frozen=True)
class TokenSweep(TensorRecord):
    """What a token-level rejector does to n examples at each of T thresholds."""

    thresholds: Tensor  # (T,) rising: the first defers everything, the last nothing
    deferred: Tensor  # int64 (T, n)
    lengths: Tensor  # int64 (T, n)
    loss: Tensor  # (T, n) sequence loss
    passes: Tensor | None = None  # int64 (T, n) of the expert: see `budgets.passes`
    first_scores: Tensor | None = None  # (n,) of the first token, whatever the threshold

    @property
    def share(self) -> Tensor:
        """The realised budget at each threshold. (T,)"""
        return self.deferred.sum(1) / self.lengths.sum(1)


def join_sweeps(parts: list[TokenSweep]) -> TokenSweep:
    """Return one sweep of the examples of all parts, which have the same thresholds."""
    deferred, lengths, loss = (
        torch.cat([getattr(part, name) for part in parts], 1) for name in ("deferred", "lengths", "loss")
    )
    counted = [part.passes for part in parts if part.passes is not None]
    passes = torch.cat(counted, 1) if len(counted) == len(parts) else None
    scored = [part.first_scores for part in parts if part.first_scores is not None]
    first_scores = torch.cat(scored) if len(scored) == len(parts) else None
    return TokenSweep(parts[0].thresholds, deferred, lengths, loss, passes, first_scores)


@torch.no_grad()
def sweep_thresholds(
    rejector: TokenRejector[Any], trees: DecisionTrees, rows: Tensor | None = None, thresholds: Tensor | None = None
) -> TokenSweep:
    """Roll all thresholds through the trees at once; each prefix is scored once however many thresholds reach it.

    Without `thresholds`, take quantiles of the scores that rollouts meet: first coarse (met while deferring all and
    nothing), then fine."""

    def score(state: Any, before: Tensor, position: int, nodes: Tensor) -> tuple[Tensor, Any]:
        return rejector.score(rejector.select(state, before), position, trees.proposal(nodes))

    require_statistics(trees, reads_first=rejector.reads_first)
    roll = partial(_roll, score, rejector.start(trees.context), trees, rejector.reads_first)
    return sweep_all(roll, trees, rows, thresholds)


@torch.no_grad()
def sweep_hindsight(trees: DecisionTrees, rows: Tensor | None = None) -> TokenSweep:
    """Return the same for who knows the losses of both next tokens, but not what follows from them: the score is l - c,
    and at thresholds just above 0 the expert writes where l > c."""

    def score(_: Any, __: Tensor, ___: int, nodes: Tensor) -> tuple[Tensor, None]:
        loss, cost = trees.losses(nodes)
        return loss - cost, None

    return sweep_all(partial(_roll, score, None, trees, True), trees, rows, None)


def require_statistics(trees: DecisionTrees, *, reads_first: bool) -> None:
    """Raise where a rule that reads first meets trees that were made without what it reads."""
    if reads_first and not trees.reads_first:
        raise OptionError(
            "these trees hold no statistics of both models' distributions, which this rule reads before it decides; "
            "make them with DecisionTrees(task, examples, reads_first=True)"
        )


def sweep_all(roll: Roll, trees: DecisionTrees, rows: Tensor | None, thresholds: Tensor | None) -> TokenSweep:
    """Roll the examples `rows` (all by default) at the thresholds, by default at quantiles of the scores met."""
    trees.require_open()
    rows = torch.arange(len(trees), device=trees.device) if rows is None else rows.to(trees.device)
    if thresholds is not None:
        return _sweep(roll, trees, rows, thresholds.to(trees.device))[0]
    ends = torch.tensor([-torch.inf, torch.inf], device=trees.device)
    for size in (N_THRESHOLDS // 8, N_THRESHOLDS):
        _, met = _sweep(roll, trees, rows, ends if thresholds is None else thresholds)
        thresholds = torch.cat([ends[:1], _quantiles(met, size), ends[1:]])
    assert thresholds is not None
    return _sweep(roll, trees, rows, thresholds)[0]


def _quantiles(scores: Tensor, size: int) -> Tensor:
    ordered: Tensor = scores[scores.isfinite()].unique()  # sorted; equal scores need one threshold
    places = torch.linspace(0, len(ordered) - 1, min(size, len(ordered)), device=scores.device)
    return ordered[places.round().long()]


def _sweep(roll: Roll, trees: DecisionTrees, rows: Tensor, thresholds: Tensor) -> tuple[TokenSweep, Tensor]:
    """Return the sweep, and all the scores it met."""
    swept = [roll(rows[part], thresholds) for part in trees.parts(rows)]
    return join_sweeps([one for one, _ in swept]), torch.cat([met for _, met in swept])


def _roll(
    score: Score, state: Any, trees: DecisionTrees, reads_first: bool, rows: Tensor, thresholds: Tensor
) -> tuple[TokenSweep, Tensor]:
    """Roll some examples; `state` before any token."""
    shape = (len(thresholds), len(rows))
    nodes = trees.roots[rows].expand(shape)
    last, last_choice = nodes.clone(), torch.zeros(shape, dtype=torch.bool, device=trees.device)
    deferred = torch.zeros(shape, dtype=torch.long, device=trees.device)
    counter = PassCounter(shape, trees.device, reads_first=reads_first)
    known, met = torch.arange(0), []
    for position in range(trees.task.spec.length):
        live = nodes != END
        here, back = torch.unique(nodes[live], return_inverse=True)
        # The state before a node is its parent's, however many thresholds lead there; roots start from the context.
        parents = trees.nodes.parent[here]
        before = trees.nodes.example[here] if position == 0 else torch.searchsorted(known, parents)
        scores, state = score(state, before, position, here)
        known = here
        met.append(scores)
        if position == 0:
            first_scores = scores[back.view(shape)[0]]
        defer, differ = (torch.zeros(shape, dtype=torch.bool, device=trees.device) for _ in range(2))
        defer[live] = scores[back] >= thresholds[:, None].expand(shape)[live]
        deferred += defer
        last, last_choice = torch.where(live, nodes, last), torch.where(live, defer, last_choice)
        following = torch.full_like(nodes, END)
        following[live] = trees.children(nodes[live], defer[live])
        differ[defer] = trees.differ(nodes[defer])
        nodes = following
        counter.add(live, defer, differ, nodes == END)
        if not bool((nodes != END).any()):
            break
    loss, lengths = trees.outcomes(last.flatten(), last_choice.flatten())
    passes = counter.passes.masked_fill((thresholds == torch.inf)[:, None], 0)  # to never defer takes no pass
    swept = TokenSweep(thresholds, deferred, lengths.view(shape), loss.view(shape), passes, first_scores)
    return swept, torch.cat(met)
