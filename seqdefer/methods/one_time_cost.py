"""OneTimeCost (ours): one hand-off by a network that estimates the loss of each; a price of a token decides."""

from __future__ import annotations

from dataclasses import asdict

from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.rejectors.draft_training import fit_cost


def fit(context: FitContext) -> Fit:
    """Fit on the labelled hand-offs of the grid."""
    train, validation, settings = context.train, context.validation, context.settings.cost
    predictor = context.task.predictor
    return Fit(
        lambda progress: fit_cost(
            (train.draft, train.table), (validation.draft, validation.table), context.grid, settings,
            fingerprint=predictor.fingerprint, seed=context.seed, device=predictor.device, progress=progress,
        ),
        epochs=settings.epochs,
        choices=[asdict(settings), context.grid.tolist()],
        data=context.draft_data(context.grid),
    )  # fmt: skip


def note(context: FitContext) -> str:
    return "OneTimeCost (ours) estimates the loss of every hand-off; a price of a token decides."


ABOUT = "Hands over once, where a network that estimates the loss of each hand-off finds it worth the tokens' price."

METHODS = (Method("OneTimeCost", "once", fit, learns_from="hand_offs", note=note, order=1, is_ours=True, about=ABOUT),)
