"""Drafts: what the predictor writes alone, and what the expert makes of them after one hand-off."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.interleaved import HandOff, interleave, stack_positions
from seqdefer.errors import ContractError
from seqdefer.interfaces import Expert, Predictor
from seqdefer.progress import NO_PROGRESS, Progress
from seqdefer.rows import run_turn
from seqdefer.types import EXPERT, Draft, Examples, Rollout, Sequences, SequenceSpec


def is_past(kept: Tensor, length: int) -> Tensor:
    """Mark the positions after the first `kept` (n,). bool (n, L)"""
    return torch.arange(length, device=kept.device) >= kept[:, None]


@dataclass(frozen=True)
class HandedOff:
    """Drafts that the expert is asked to complete: on the predictor's device, cut at their hand-offs."""

    examples: Examples
    prefixes: Sequences
    drafts: Sequences  # what the predictor wrote, whole, on the CPU


def complete_drafts(
    predictor: Predictor[Any],
    expert: Expert | None,
    examples: Examples,
    drafts: Sequences,
    kept: Tensor,
    scores: Tensor,
    spec: SequenceSpec,
) -> Rollout:
    """Write what `roll_out` would with each row keeping `kept` (n,) tokens, from drafts that are known: the predictor
    does not run again, and the expert is called once for all rows. `scores` (n, L) are recorded in the result. All
    tensors are on the CPU, as `draft` gives them."""

    def complete(handed: HandedOff) -> Sequences:
        if expert is None:
            raise ContractError("drafts are handed off, but there is no expert; give one or keep all")
        return expert.complete(handed.examples, handed.prefixes, spec)

    return run_turn(completing(predictor.device, examples, drafts, kept, scores, spec), complete)


@torch.no_grad()
def completing(
    device: torch.device, examples: Examples, drafts: Sequences, kept: Tensor, scores: Tensor, spec: SequenceSpec
) -> Generator[HandedOff, Sequences, Rollout]:
    """Do `complete_drafts`, but yield what the expert is to complete, if anything; send the completed sequences."""
    handed = (kept < drafts.lengths).nonzero().squeeze(1)
    tokens, lengths = drafts.tokens.clone(), drafts.lengths.clone()
    if len(handed):
        # The expert must not see what it replaces.
        blank = tokens[handed].masked_fill(is_past(kept[handed], spec.length), 0)
        prefixes = Sequences(blank.to(device), kept[handed].to(device))
        completed = yield HandedOff(examples.select(handed).to(device), prefixes, drafts.select(handed))
        tokens[handed], lengths[handed] = completed.tokens.to(tokens), completed.lengths.to(lengths)
    mask = Sequences(tokens, lengths).mask()
    is_scored = mask & ~is_past(kept + 1, spec.length)  # there are no scores past the hand-off
    return Rollout(
        Sequences(tokens.masked_fill(~mask, 0), lengths),
        torch.where(mask & is_past(kept, spec.length), EXPERT, 0),
        torch.where(is_scored, scores.float(), 0.0),
    )


def draft(
    predictor: Predictor[Any],
    examples: Examples,
    spec: SequenceSpec,
    *,
    batch_size: int | None = None,
    progress: Progress = NO_PROGRESS,
) -> Draft:
    """Write with the predictor alone, and keep everything a rejector may look at; on the CPU."""
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
        return stack_positions([_spread(value, step.rows, n) for value, step in zip(values, steps, strict=True)], spec)

    entropies = [step.proposal.entropy for step in steps if step.proposal.entropy is not None]
    return Draft(
        steps[0].context.cpu(),
        Sequences(
            stack_positions([step.tokens for step in steps], spec).cpu(),
            torch.stack([step.active for step in steps], 1).sum(1).cpu(),
        ),
        gather([step.proposal.features for step in steps]).cpu(),
        gather([step.proposal.uncertainty for step in steps]).cpu(),
        gather(entropies).cpu() if entropies else None,
    )


def _spread(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Put the values of `rows` at their places among n; 0 elsewhere."""
    spread = torch.zeros(n, *values.shape[1:], dtype=values.dtype, device=values.device)
    spread[rows] = values
    return spread


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
