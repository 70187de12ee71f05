"""OneTimeCost (ours): one hand-off by a network that estimates the loss of each; a price of a token decides."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from seqdefer.methods.base import Fit, FitContext, Method, draft_fit
from seqdefer.rejectors.draft_training import fit_cost


def fit(context: FitContext) -> Fit:
    """Fit on the labelled hand-offs of the grid."""
    settings, grid = context.settings.cost, context.grid
    return draft_fit(context, partial(fit_cost, grid=grid), settings, grid, [asdict(settings), grid.tolist()])


def note(context: FitContext) -> str:
    return "OneTimeCost (ours) estimates the loss of every hand-off; a price of a token decides."


ABOUT = "Hands over once, where a network that estimates the loss of each hand-off finds it worth the tokens' price."

METHODS = (Method("OneTimeCost", "once", fit, learns_from="hand_offs", note=note, order=1, is_ours=True, about=ABOUT),)
