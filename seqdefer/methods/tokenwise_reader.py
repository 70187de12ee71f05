"""TokenwiseReader (ours): TokenwiseModel after the expert has read. Its network also sees both models' distributions at
the position, and whether they name different tokens.

What it defers costs no more tokens than what others defer, but the expert reads every position first: compare it with
TokenwiseModel against passes as well as against written tokens. It is fitted as TokenwiseModel is."""

from __future__ import annotations

from functools import partial

from seqdefer.methods import tokenwise_model
from seqdefer.methods.base import FitContext, Method


def note(context: FitContext) -> str:
    return "TokenwiseReader (ours) is TokenwiseModel after the expert has read: it sees both models' distributions."


METHODS = (
    Method(
        "TokenwiseReader", "token", partial(tokenwise_model.fit, reads_first=True), learns_from="trees",
        needs_entropy=True, reads_first=True, note=note, order=1, is_ours=True,
        about="TokenwiseModel after the expert has read every position: it sees what both models think.",
    ),
)  # fmt: skip
