"""WholeModelEmbed: whole deferral by a network that learns whether the expert is more accurate on the sequence."""

from __future__ import annotations

from dataclasses import asdict

from seqdefer.methods.base import Fit, FitContext, Method, draft_fit
from seqdefer.rejectors.draft_training import fit_whole


def fit(context: FitContext) -> Fit:
    """Fit on the two ends of the hand-off table: the expert alone, the predictor alone."""
    settings = context.settings.whole or context.settings.once
    return draft_fit(context, fit_whole, settings, context.grid[[0, -1]], asdict(settings))


ABOUT = "Gives the whole sequence to the expert where a network expects it to be more accurate there."

METHODS = (Method("WholeModelEmbed", "whole", fit, learns_from="ends", order=10, about=ABOUT),)
