"""WholeModelEmbed: whole deferral by a network that learns whether the expert is more accurate on the sequence."""

from __future__ import annotations

from dataclasses import asdict

from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.rejectors.draft_training import fit_whole


def fit(context: FitContext) -> Fit:
    """Fit on the two ends of the hand-off table: the expert alone, the predictor alone."""
    train, validation = context.train, context.validation
    settings = context.settings.whole or context.settings.once
    predictor = context.task.predictor
    return Fit(
        lambda progress: fit_whole(
            (train.draft, train.table), (validation.draft, validation.table), settings,
            fingerprint=predictor.fingerprint, seed=context.seed, device=predictor.device, progress=progress,
        ),
        epochs=settings.epochs,
        choices=asdict(settings),
        data=context.draft_data(context.grid[[0, -1]]),
    )  # fmt: skip


ABOUT = "Gives the whole sequence to the expert where a network expects it to be more accurate there."

METHODS = (Method("WholeModelEmbed", "whole", fit, learns_from="ends", order=10, about=ABOUT),)
