"""TokenwiseReader (ours): TokenwiseModel after the expert has read. Its network also sees both models' distributions at
the position, and whether they name different tokens.

What it defers costs no more tokens than what others defer, but the expert reads every position first: compare it with
TokenwiseModel against passes as well as against written tokens. It is fitted as TokenwiseModel is."""

from __future__ import annotations

from dataclasses import replace

from seqdefer.methods import tokenwise_model
from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.rejectors.token_training import fit_token


def fit(context: FitContext) -> Fit:
    """Fit on rollouts through decision trees with statistics of both models."""
    settings, kind = context.settings, context.settings.tree_kind
    train, validation = context.train.trees_of(kind), context.validation.trees_of(kind)
    assert train is not None
    assert validation is not None
    return replace(
        tokenwise_model.fit(context),
        run=lambda progress: fit_token(
            train, validation, settings.token, seed=context.seed, phi=settings.phi, strategy=settings.strategy,
            price=context.price, reads_first=True, progress=progress,
        ),
    )  # fmt: skip


def note(context: FitContext) -> str:
    return "TokenwiseReader (ours) is TokenwiseModel after the expert has read: it sees both models' distributions."


METHODS = (
    Method(
        "TokenwiseReader", "token", fit, learns_from="trees", needs_entropy=True, reads_first=True, note=note, order=1,
        is_ours=True, about="TokenwiseModel after the expert has read every position: it sees what both models think.",
    ),
)  # fmt: skip
