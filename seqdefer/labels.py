"""What each hand-off would have cost: the table a one-time rejector learns from, made with the fewest expert runs.

Row i, column k of a table: keep the first k tokens of the predictor's draft, let the expert write the rest. Exact
short-cuts (`Expert.deterministic`, `Expert.reads_prefix`) skip the runs whose outcome is already known; a `DraftExpert`
knows short-cuts of its own. The labels of token-level deferral are in `seqdefer.trees`; how labels are kept, and made
by many at once, is in `seqdefer.labelling`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from seqdefer.branches import branch_out
from seqdefer.engine import Progress
from seqdefer.interfaces import DraftExpert, NextTokenExpert, Task
from seqdefer.types import Draft, Examples, HandOffTable, Sequences, SequenceSpec

HandOffs: TypeAlias = Callable[[Examples, Sequences, Tensor, SequenceSpec], tuple[Sequences, int]]


@dataclass(frozen=True)
class Calls:
    """Expert calls that labelling made, and those that the naive way would have made besides."""

    made: int = 0
    saved: int = 0

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.made + other.made, self.saved + other.saved)


@torch.no_grad()
def hand_off_table(
    task: Task,
    examples: Examples,
    draft: Draft,
    *,
    shortcut: bool = True,
    batch_size: int | None = None,
    progress: Progress = lambda _: None,
) -> tuple[HandOffTable, Calls]:
    """Loss and deferred tokens of every hand-off kept = 0..L. `shortcut=False` asks the expert every time."""
    losses, deferred, calls = [], [], Calls()
    for rows in torch.arange(len(examples)).split(batch_size or task.expert.batch_size):
        loss, count, made = _table_of_batch(task, examples.select(rows), draft.sequences.select(rows), shortcut)
        losses.append(loss)
        deferred.append(count)
        calls = calls + made
        progress(len(rows))
    return HandOffTable(torch.cat(losses), torch.cat(deferred)), calls


def _table_of_batch(task: Task, examples: Examples, drafted: Sequences, shortcut: bool) -> tuple[Tensor, Tensor, Calls]:
    examples, device = examples.to(task.predictor.device), task.predictor.device
    drafted = Sequences(drafted.tokens.to(device), drafted.lengths.to(device))
    if shortcut and isinstance(task.expert, DraftExpert):
        return _table_by_draft(task, task.expert.hand_offs, examples, drafted)
    is_plain = task.expert.deterministic and task.expert.reads_prefix
    if shortcut and is_plain and isinstance(task.expert, NextTokenExpert):
        return _table_by_draft(task, partial(branch_out, task.expert), examples, drafted)
    current = Sequences(drafted.tokens.clone(), drafted.lengths.clone())
    losses, deferred, calls = [], [], Calls()
    for kept in range(task.spec.length):
        is_open = drafted.lengths > kept  # a draft that has ended leaves nothing to hand off
        needed = is_open & _is_news(task, drafted, current, kept) if shortcut and kept else is_open
        rows = needed.nonzero().squeeze(1)
        if len(rows):
            prefixes = Sequences(drafted.tokens[rows], torch.full_like(rows, kept))
            completed = task.expert.complete(examples.select(rows), prefixes, task.spec)
            current.tokens[rows] = completed.tokens.to(current.tokens)  # a solver may answer on the CPU
            current.lengths[rows] = completed.lengths.to(current.lengths)
        # An expert that ignores prefixes wrote its part once; only the kept tokens change under it.
        current.tokens[is_open, :kept] = drafted.tokens[is_open, :kept]
        current.tokens[~is_open], current.lengths[~is_open] = drafted.tokens[~is_open], drafted.lengths[~is_open]
        losses.append(task.sequence_loss(examples, current).cpu())
        deferred.append(torch.where(is_open, current.lengths - kept, 0).cpu())
        calls = calls + Calls(len(rows), int(is_open.sum()) - len(rows))
    losses.append(task.sequence_loss(examples, drafted).cpu())
    deferred.append(torch.zeros_like(deferred[0]))
    return torch.stack(losses, 1), torch.stack(deferred, 1), calls


def _table_by_draft(
    task: Task, hand_offs: HandOffs, examples: Examples, drafted: Sequences
) -> tuple[Tensor, Tensor, Calls]:
    """All prefixes of a draft are completed together."""
    n, length = len(drafted), task.spec.length
    kept = torch.arange(length, device=drafted.tokens.device)
    completed, runs = hand_offs(examples, drafted, kept, task.spec)
    each = torch.arange(n, device=kept.device).repeat_interleave(length)
    completed = Sequences(completed.tokens.to(drafted.tokens), completed.lengths.to(drafted.lengths))
    is_open = drafted.lengths[:, None] > kept  # (n, L)
    own = task.sequence_loss(examples, drafted)[:, None]
    loss = torch.where(is_open, task.sequence_loss(examples.select(each), completed).view(n, length), own)
    deferred = torch.where(is_open, completed.lengths.view(n, length) - kept, 0)
    loss, deferred = torch.cat([loss, own], 1), torch.nn.functional.pad(deferred, (0, 1))
    return loss.cpu(), deferred.cpu(), Calls(runs, int(is_open.sum()) - runs)


def _is_news(task: Task, drafted: Sequences, current: Sequences, kept: int) -> Tensor:
    """Rows whose completion after `kept` tokens does not follow from the one after `kept - 1`. bool (B,)"""
    if not task.expert.deterministic:
        return torch.ones(len(drafted), dtype=torch.bool, device=drafted.tokens.device)
    if not task.expert.reads_prefix and task.spec.end is None:
        return torch.zeros(len(drafted), dtype=torch.bool, device=drafted.tokens.device)
    return current.tokens[:, kept - 1] != drafted.tokens[:, kept - 1]
