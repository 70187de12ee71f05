"""Drafts: what the predictor writes alone, and what the expert makes of them after one hand-off."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqdefer.engine.interleaved import HandOff, interleave, stack_positions
from seqdefer.interfaces import Predictor
from seqdefer.progress import NO_PROGRESS, Progress
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


@torch.no_grad()
def completing(
    device: torch.device, examples: Examples, drafts: Sequences, kept: Tensor, scores: Tensor, spec: SequenceSpec
) -> Generator[HandedOff, Sequences, Rollout]:
    """Write what `roll_out` would with each row keeping `kept` (n,) tokens, from drafts that are known: the predictor
    does not run again. Yield what the expert is to complete, all rows together, if there are any; send the completed
    sequences. `scores` (n, L) are recorded in the result. All tensors are on the CPU, as `draft` gives them."""
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
    return Draft.join(parts)


def _draft_batch(predictor: Predictor[Any], examples: Examples, spec: SequenceSpec) -> Draft:
    n = len(examples)
    keep_all = HandOff(torch.full((n,), spec.length))
    steps = list(interleave(predictor, None, examples, keep_all, spec))

    def gather(values: list[Tensor]) -> Tensor:
        return stack_positions([_spread(value, step.rows, n) for value, step in zip(values, steps, strict=True)], spec)

    tokens = stack_positions([step.tokens for step in steps], spec)
    lengths = torch.stack([step.active for step in steps], 1).sum(1)
    entropies = [step.proposal.entropy for step in steps if step.proposal.entropy is not None]
    return Draft(
        steps[0].context,
        Sequences(tokens, lengths),
        gather([step.proposal.features for step in steps]),
        gather([step.proposal.uncertainty for step in steps]),
        gather(entropies) if entropies else None,
    ).to("cpu")


def _spread(values: Tensor, rows: Tensor, n: int) -> Tensor:
    """Put the values of `rows` at their places among n; 0 elsewhere."""
    spread = torch.zeros(n, *values.shape[1:], dtype=values.dtype, device=values.device)
    spread[rows] = values
    return spread
