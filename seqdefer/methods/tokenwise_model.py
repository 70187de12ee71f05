"""TokenwiseModel: token-level deferral by a network that minimises the paper's token surrogate."""

from __future__ import annotations

from dataclasses import asdict

from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.rejectors.token_training import fit_token


def fit(context: FitContext, *, reads_first: bool = False) -> Fit:
    """Fit on rollouts through the decision trees. With `reads_first`, the network sees statistics of both models."""
    settings, kind = context.settings, context.settings.tree_kind
    train, validation = context.train.trees_of(kind), context.validation.trees_of(kind)
    assert train is not None
    assert validation is not None
    return Fit(
        lambda progress: fit_token(
            train, validation, settings.token, seed=context.seed, phi=settings.phi, strategy=settings.strategy,
            price=context.price, reads_first=reads_first, progress=progress,
        ),
        epochs=settings.token.epochs,
        choices=[asdict(settings.token), settings.phi, settings.strategy, kind, context.price],
        data=context.token_data(),
    )  # fmt: skip


def note(context: FitContext) -> str:
    trees = context.train.trees_of(context.settings.tree_kind)
    closed = " as far as closed trees go" if trees is not None and trees.is_closed else ""
    closed += ", and losses are regrets up to the end" if trees is not None and trees.is_branched else ""
    price = f"; each expert token costs an extra {context.price:.3g}" if context.price else ""
    return (
        f"TokenwiseModel minimises the token surrogate with phi = {context.settings.phi}; its training rollouts follow "
        f"the strategy '{context.settings.strategy}'{closed}{price}."
    )


ABOUT = "Asks the expert for single tokens, where a network trained with the paper's token surrogate says."

METHODS = (Method("TokenwiseModel", "token", fit, learns_from="trees", note=note, order=0, about=ABOUT),)
