"""What each hand-off would have cost: the table a one-time rejector learns from, made with the fewest expert runs.

Row i, column k of a table: keep the first k tokens of the predictor's draft, let the expert write the rest. Exact
short-cuts (`Expert.deterministic`, `Expert.reads_prefix`) skip the runs whose outcome is already known; a `DraftExpert`
knows short-cuts of its own. The labels of token-level deferral are in `seqdefer.labels.trees`; how labels are
kept, and made by many workers at once, is in `label_store` and `executors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from seqdefer.interfaces import DraftExpert, NextTokenExpert, Task
from seqdefer.labels.branches import branch_out
from seqdefer.progress import Progress
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
    kept: Sequence[int] | None = None,
    shortcut: bool = True,
    batch_size: int | None = None,
    progress: Progress = lambda _: None,
) -> tuple[HandOffTable, Calls]:
    """Loss and deferred tokens of the hand-offs in `kept`, by default all of 0..L-1, and of none, which costs nothing.
    `shortcut=False` asks the expert every time."""
    columns = torch.tensor(asked_for(kept, task.spec.length), dtype=torch.long)
    losses, deferred, calls = [], [], Calls()
    for rows in torch.arange(len(examples)).split(batch_size or task.expert.batch_size):
        loss, count, made = _table_of_batch(
            task, examples.select(rows), draft.sequences.select(rows), columns, shortcut
        )
        losses.append(loss)
        deferred.append(count)
        calls = calls + made
        progress(len(rows))
    return HandOffTable(torch.cat(losses), torch.cat(deferred)), calls


def asked_for(kept: Sequence[int] | None, length: int) -> tuple[int, ...]:
    """The hand-offs among `kept`, all by default: in order, none twice, and without keeping everything."""
    return tuple(range(length) if kept is None else sorted({each for each in kept if each < length}))


def _table_of_batch(
    task: Task, examples: Examples, drafted: Sequences, kept: Tensor, shortcut: bool
) -> tuple[Tensor, Tensor, Calls]:
    examples, device = examples.to(task.predictor.device), task.predictor.device
    drafted = Sequences(drafted.tokens.to(device), drafted.lengths.to(device))
    own = task.sequence_loss(examples, drafted).cpu()[:, None]
    loss, deferred, calls = own[:, :0], torch.zeros(len(own), 0, dtype=torch.long), Calls()
    if len(kept):
        loss, deferred, calls = _columns(task, examples, drafted, kept.to(device), shortcut)
        is_over = drafted.lengths[:, None].cpu() <= kept  # a draft that has ended leaves nothing to hand off
        loss, deferred = torch.where(is_over, own, loss), deferred.masked_fill(is_over, 0)
    loss, deferred = torch.cat([loss, own], 1), torch.nn.functional.pad(deferred, (0, 1))
    return _spread(loss, kept, task.spec.length, torch.nan), _spread(deferred, kept, task.spec.length, -1), calls


def _spread(columns: Tensor, kept: Tensor, length: int, unasked: float) -> Tensor:
    """Columns of the hand-offs in `kept`, and of none, where they belong in a table. (n, L+1)"""
    if len(kept) == length:
        return columns
    places = torch.nn.functional.pad(kept, (0, 1), value=length)
    return columns.new_full((len(columns), length + 1), unasked).index_copy(1, places, columns)


def _columns(
    task: Task, examples: Examples, drafted: Sequences, kept: Tensor, shortcut: bool
) -> tuple[Tensor, Tensor, Calls]:
    """Loss and deferred tokens (n, J) of hand-offs; they mean nothing past the end of a draft."""
    if shortcut and isinstance(task.expert, DraftExpert):
        return _all_together(task, task.expert.hand_offs, examples, drafted, kept)
    is_plain = task.expert.deterministic and task.expert.reads_prefix
    if shortcut and is_plain and isinstance(task.expert, NextTokenExpert):
        return _all_together(task, partial(branch_out, task.expert), examples, drafted, kept)
    current: Sequences | None = None
    losses, deferred, calls = [], [], Calls()
    for each in kept.tolist():
        is_open = drafted.lengths > each
        is_needed = is_open & _is_news(task, drafted, current, each) if shortcut and current is not None else is_open
        if current is None:
            current = Sequences(drafted.tokens.clone(), drafted.lengths.clone())
        rows = is_needed.nonzero().squeeze(1)
        if len(rows):
            prefixes = Sequences(drafted.tokens[rows], torch.full_like(rows, each))
            completed = task.expert.complete(examples.select(rows), prefixes, task.spec)
            current.tokens[rows] = completed.tokens.to(current.tokens)  # a solver may answer on the CPU
            current.lengths[rows] = completed.lengths.to(current.lengths)
        # An expert that ignores prefixes wrote its part once; only the kept tokens change under it.
        current.tokens[is_open, :each] = drafted.tokens[is_open, :each]
        current.tokens[~is_open], current.lengths[~is_open] = drafted.tokens[~is_open], drafted.lengths[~is_open]
        losses.append(task.sequence_loss(examples, current).cpu())
        deferred.append((current.lengths - each).cpu())
        calls = calls + Calls(len(rows), int(is_open.sum()) - len(rows))
    return torch.stack(losses, 1), torch.stack(deferred, 1), calls


def _all_together(
    task: Task, hand_offs: HandOffs, examples: Examples, drafted: Sequences, kept: Tensor
) -> tuple[Tensor, Tensor, Calls]:
    """All prefixes of a draft are completed together."""
    shape = len(drafted), len(kept)
    completed, runs = hand_offs(examples, drafted, kept, task.spec)
    each = torch.arange(len(drafted), device=kept.device).repeat_interleave(len(kept))
    completed = Sequences(completed.tokens.to(drafted.tokens), completed.lengths.to(drafted.lengths))
    loss = task.sequence_loss(examples.select(each), completed).view(shape)
    n_open = int((drafted.lengths[:, None] > kept).sum())
    return loss.cpu(), (completed.lengths.view(shape) - kept).cpu(), Calls(runs, n_open - runs)


def _is_news(task: Task, drafted: Sequences, current: Sequences, kept: int) -> Tensor:
    """Rows whose completion after `kept` tokens does not follow from `current`, that after fewer. bool (B,)"""
    if not task.expert.deterministic:
        return torch.ones(len(drafted), dtype=torch.bool, device=drafted.tokens.device)
    if not task.expert.reads_prefix and task.spec.end is None:
        return torch.zeros(len(drafted), dtype=torch.bool, device=drafted.tokens.device)
    return (current.tokens[:, :kept] != drafted.tokens[:, :kept]).any(1)
