"""All hand-offs of a draft in one pass, for experts that name next tokens.

The expert reads along with the draft. Where its token differs, a branch starts: the completion of the tokens kept so
far, unless no hand-off needs it. All branches of all drafts are written together, one position at a time, and no token
is read twice. Where the expert agrees with the draft, the completion is that of the next position where it does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqdefer.interfaces import NextTokenExpert
from seqdefer.types import Examples, Sequences, SequenceSpec

DRAFT = -1


class _BranchWriter:
    """Drafts and the branches that left them. A row of the expert's state either reads a draft or writes a branch."""

    def __init__(self, drafts: Sequences, kept: Tensor, spec: SequenceSpec) -> None:
        (n, length), device = drafts.tokens.shape, drafts.tokens.device
        self.drafts, self.spec, self.device, self.runs = drafts, spec, device, 0
        self.written = Sequences(drafts.tokens.clone(), drafts.lengths.clone())  # the drafts, then the branches
        self.completion = torch.arange(n, device=device)[:, None].repeat(1, length + 1)  # rows of `written`, by kept
        self.requested = torch.bincount(kept, minlength=length + 1).cumsum(0)  # (L + 1,) hand-offs up to each position
        self.served = torch.zeros(n, dtype=torch.long, device=device)  # (n,) hand-offs that have their branch
        self.draft = torch.arange(n, device=device)  # (R,) the draft that a row of the state belongs to
        self.branch = torch.full((n,), DRAFT, device=device)  # (R,) the row of `written` that it writes

    def advance(self, position: int, named: Tensor) -> tuple[Tensor, Tensor]:
        """Record what the expert named (R,) at `position`. Return the rows of the state that continue, twice where a
        branch starts, and the token that each reads next."""
        reads = self.branch == DRAFT
        drafted = self.drafts.tokens[self.draft, position]
        is_needed = self.requested[position] > self.served[self.draft]  # by a hand-off that has no branch yet
        leaving = (reads & (named != drafted) & is_needed).nonzero().squeeze(1)
        self._write(position, self.branch[~reads], named[~reads])
        is_last = self.drafts.lengths[self.draft] <= position + 1
        # Reading a draft to its end is the run that completes its last prefix.
        self.runs += int((reads & is_last & ~self._is_done()).sum()) + int((~is_last[leaving]).sum())
        self.served[self.draft[leaving]] = self.requested[position]
        new = self._start_branches(position, self.draft[leaving])
        self._write(position, new, named[leaving])
        rows = torch.cat([torch.arange(len(named), device=self.device), leaving])
        self.draft, self.branch = self.draft[rows], torch.cat([self.branch, new])
        tokens = torch.cat([torch.where(reads, drafted, named), named[leaving]])
        is_written = self.spec.is_end(tokens) | (position + 1 >= self.spec.length)
        continues = ~torch.where(self.branch == DRAFT, is_last[rows] | self._is_done(), is_written)
        self.draft, self.branch = self.draft[continues], self.branch[continues]
        return rows[continues], tokens[continues]

    def _is_done(self) -> Tensor:
        """Find rows whose draft has a branch for every requested hand-off. bool (R,)"""
        return self.served[self.draft] >= self.requested[self.drafts.lengths[self.draft] - 1]

    def _write(self, position: int, rows: Tensor, tokens: Tensor) -> None:
        self.written.tokens[rows, position], self.written.lengths[rows] = tokens, position + 1

    def _start_branches(self, position: int, drafts: Tensor) -> Tensor:
        """Add branches that leave `drafts` at `position`; return their rows in `written`."""
        n = len(self.written)
        new = torch.arange(n, n + len(drafts), device=self.device)
        kept = self.drafts.tokens[drafts].clone()
        kept[:, position:] = 0
        self.written = Sequences(
            torch.cat([self.written.tokens, kept]), torch.cat([self.written.lengths, torch.zeros_like(new)])
        )
        self.completion[drafts, position] = new
        return new

    def completions(self, kept: Tensor) -> Sequences:
        """Return n x J rows, grouped by draft. kept: int64 (J,)"""
        for position in range(self.completion.shape[1] - 2, -1, -1):
            agrees = self.completion[:, position] < len(self.drafts)
            self.completion[agrees, position] = self.completion[agrees, position + 1]
        return self.written.select(self.completion[:, kept].flatten())


def branch_out(
    expert: NextTokenExpert[Any], examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
) -> tuple[Sequences, int]:
    """Do what `DraftExpert.hand_offs` does, for a deterministic expert; `examples_at_once` drafts at a time."""
    parts = [
        _branch_out_batch(expert, examples.select(rows), drafts.select(rows), kept, spec)
        for rows in torch.arange(len(drafts), device=kept.device).split(expert.examples_at_once)
    ]
    return Sequences.join([part for part, _ in parts]), sum(runs for _, runs in parts)


def _branch_out_batch(
    expert: NextTokenExpert[Any], examples: Examples, drafts: Sequences, kept: Tensor, spec: SequenceSpec
) -> tuple[Sequences, int]:
    writer, state = _BranchWriter(drafts, kept, spec), expert.start(examples)
    for position in range(spec.length):
        named, state = expert.next(state, torch.arange(len(writer.draft), device=drafts.tokens.device))
        rows, tokens = writer.advance(position, named.to(drafts.tokens))
        if len(rows) == 0:
            break
        state = expert.append(expert.select(state, rows), tokens)
    return writer.completions(kept), writer.runs
