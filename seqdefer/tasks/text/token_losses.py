"""Losses of single tokens of a text, by name. Each follows from a metric of whole texts.

clipped      1 where the reference does not have the token as often as it is written: ROUGE-1
paper        1 where the reference does not have the token at all: the paper's, for ROUGE-1
first_error  1 for the first token that is not the reference's: exact match
alignment    how many edits the token adds to the best alignment with the reference: word and character error rates
to_go        what the token adds to the loss if the expert completes the text: any metric (`CostToGo`), at the price of
             a completion where predictor and expert differ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from seqdefer.tasks.common.edit_distance import alignment_loss, without_end
from seqdefer.tasks.text.passes import PADDING
from seqdefer.tasks.text.rouge import in_reference
from seqdefer.types import Examples, Sequences, SequenceSpec

TokenLoss = Callable[[Examples, Sequences, Tensor, SequenceSpec], Tensor]


def masked_tokens(sequences: Sequences) -> Tensor:
    """Return tokens (B, L) with PADDING after the end."""
    return sequences.tokens.masked_fill(~sequences.mask(), PADDING)


def clipped(examples: Examples, prefixes: Sequences, tokens: Tensor, spec: SequenceSpec) -> Tensor:
    wanted = (examples.targets == tokens[:, None]).sum(1)
    return (wanted <= (masked_tokens(prefixes) == tokens[:, None]).sum(1)).float()


def paper(examples: Examples, prefixes: Sequences, tokens: Tensor, spec: SequenceSpec) -> Tensor:
    return (~in_reference(tokens, examples.targets)).float()


def first_error(examples: Examples, prefixes: Sequences, tokens: Tensor, spec: SequenceSpec) -> Tensor:
    width = prefixes.tokens.shape[1]
    targets = torch.nn.functional.pad(examples.targets, (0, width + 1), value=PADDING)
    is_right = ((prefixes.tokens == targets[:, :width]) | ~prefixes.mask()).all(1)
    wanted = targets.gather(1, prefixes.lengths[:, None]).squeeze(1)
    return (is_right & (tokens != wanted)).float()


def alignment(examples: Examples, prefixes: Sequences, tokens: Tensor, spec: SequenceSpec) -> Tensor:
    references = Sequences(examples.targets, (examples.targets != PADDING).sum(1))
    return alignment_loss(prefixes, tokens, without_end(references, spec), spec).float()


BY_REFERENCE: Mapping[str, TokenLoss] = {
    one.__name__: one for one in (clipped, paper, first_error, alignment)
}  # fmt: skip
TOKEN_LOSSES = ("auto", *BY_REFERENCE, "to_go")
