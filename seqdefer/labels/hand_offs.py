"""Hand-off tables, which one-time rejectors learn from, made with as few expert runs as possible.

Row i, column k: keep the first k tokens of the predictor's draft, let the expert write the rest. Exact short-cuts
(`Expert.deterministic`, `Expert.reads_prefix`) skip the runs whose outcome is already known; a `DraftExpert` has
short-cuts of its own. `seqdefer.labels.trees` makes the labels of token-level deferral.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from seqdefer.interfaces import DraftExpert, NextTokenExpert, Task
from seqdefer.labels.branches import branch_out
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.types import Draft, Examples, HandOffTable, Sequences


@dataclass(frozen=True)
class Calls:
    """Expert calls that labelling made, and calls that short-cuts saved."""

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
    progress: Progress = NO_PROGRESS,
) -> tuple[HandOffTable, Calls]:
    """Return loss and deferred tokens of the hand-offs in `kept` (default: all of 0..L-1) and of no hand-off.
    `shortcut=False` runs the expert for every entry."""
    columns = torch.tensor(select_hand_offs(kept, task.spec.length), dtype=torch.long)
    losses, deferred, calls = [], [], Calls()
    for rows in torch.arange(len(examples)).split(batch_size or task.expert.batch_size):
        loss, count, made = _label_batch(task, examples.select(rows), draft.sequences.select(rows), columns, shortcut)
        losses.append(loss)
        deferred.append(count)
        calls = calls + made
        progress(len(rows))
    return HandOffTable(torch.cat(losses), torch.cat(deferred)), calls


def select_hand_offs(kept: Sequence[int] | None, length: int) -> tuple[int, ...]:
    """Return the hand-offs of `kept` below `length`, sorted and without repeats; all of them by default."""
    return tuple(range(length) if kept is None else sorted({each for each in kept if each < length}))


def _label_batch(
    task: Task, examples: Examples, drafted: Sequences, kept: Tensor, shortcut: bool
) -> tuple[Tensor, Tensor, Calls]:
    examples, device = examples.to(task.predictor.device), task.predictor.device
    drafted = drafted.to(device)
    own = task.sequence_loss(examples, drafted).cpu()[:, None]
    loss, deferred, calls = own[:, :0], torch.zeros(len(own), 0, dtype=torch.long), Calls()
    if len(kept):
        loss, deferred, calls = _label_columns(task, examples, drafted, kept.to(device), shortcut)
        is_over = drafted.lengths[:, None].cpu() <= kept  # a draft that has ended leaves nothing to hand off
        loss, deferred = torch.where(is_over, own, loss), deferred.masked_fill(is_over, 0)
    loss, deferred = torch.cat([loss, own], 1), torch.nn.functional.pad(deferred, (0, 1))
    return _spread(loss, kept, task.spec.length, torch.nan), _spread(deferred, kept, task.spec.length, -1), calls


def _spread(columns: Tensor, kept: Tensor, length: int, fill: float) -> Tensor:
    """Put the columns of `kept`, and the last one, at their places in a table filled with `fill`. (n, L+1)"""
    if len(kept) == length:
        return columns
    places = torch.nn.functional.pad(kept, (0, 1), value=length)
    return columns.new_full((len(columns), length + 1), fill).index_copy(1, places, columns)


def _label_columns(
    task: Task, examples: Examples, drafted: Sequences, kept: Tensor, shortcut: bool
) -> tuple[Tensor, Tensor, Calls]:
    """Return loss and deferred tokens (n, J) of hand-offs; entries past the end of a draft are meaningless."""
    if shortcut and isinstance(task.expert, DraftExpert):
        return _label_together(task, task.expert.hand_offs, examples, drafted, kept)
    is_plain = task.expert.deterministic and task.expert.reads_prefix
    if shortcut and is_plain and isinstance(task.expert, NextTokenExpert):
        return _label_together(task, partial(branch_out, task.expert), examples, drafted, kept)
    current: Sequences | None = None
    losses, deferred, calls = [], [], Calls()
    for each in kept.tolist():
        is_open = drafted.lengths > each
        needs_run = is_open & _is_unknown(task, drafted, current, each) if shortcut and current is not None else is_open
        if current is None:
            current = Sequences(drafted.tokens.clone(), drafted.lengths.clone())
        rows = needs_run.nonzero().squeeze(1)
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


def _label_together(
    task: Task, complete: Callable[..., tuple[Sequences, int]], examples: Examples, drafted: Sequences, kept: Tensor
) -> tuple[Tensor, Tensor, Calls]:
    """Return the columns of `kept` from one call of `complete`, which completes all prefixes of the drafts."""
    shape = len(drafted), len(kept)
    completed, runs = complete(examples, drafted, kept, task.spec)
    each = torch.arange(len(drafted), device=kept.device).repeat_interleave(len(kept))
    completed = Sequences(completed.tokens.to(drafted.tokens), completed.lengths.to(drafted.lengths))
    loss = task.sequence_loss(examples.select(each), completed).view(shape)
    n_open = int((drafted.lengths[:, None] > kept).sum())
    return loss.cpu(), (completed.lengths.view(shape) - kept).cpu(), Calls(runs, n_open - runs)


def _is_unknown(task: Task, drafted: Sequences, current: Sequences, kept: int) -> Tensor:
    """Find rows whose completion after `kept` tokens does not follow from `current`, a shorter prefix's. bool (B,)"""
    if not task.expert.deterministic:
        return torch.ones(len(drafted), dtype=torch.bool, device=drafted.tokens.device)
    if not task.expert.reads_prefix and task.spec.end is None:
        return torch.zeros(len(drafted), dtype=torch.bool, device=drafted.tokens.device)
    return (current.tokens[:, :kept] != drafted.tokens[:, :kept]).any(1)
