"""OneTimeModel: one hand-off by a network that minimises the paper's one-time surrogate."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from seqdefer.methods.base import Fit, FitContext, Method, draft_fit
from seqdefer.rejectors.draft_training import fit_once


def fit(context: FitContext) -> Fit:
    """Fit on the labelled hand-offs of the grid."""
    settings, grid, alpha, psi = context.settings.once, context.grid, context.alpha, context.settings.psi
    train = partial(fit_once, grid=grid, alpha=alpha, psi=psi)
    return draft_fit(context, train, settings, grid, [asdict(settings), grid.tolist(), alpha, psi])


def note(context: FitContext) -> str:
    by_rule = " by the rule of thumb" if context.settings.alpha is None else ""
    return (
        f"OneTimeModel minimises the one-time surrogate with psi = {context.settings.psi} over "
        f"{len(context.grid)} hand-offs; alpha_1 = {context.alpha:.4g}{by_rule}."
    )


ABOUT = "Hands over once, where a network trained with the paper's one-time surrogate says; it sees the whole draft."

METHODS = (Method("OneTimeModel", "once", fit, learns_from="hand_offs", note=note, order=0, about=ABOUT),)
