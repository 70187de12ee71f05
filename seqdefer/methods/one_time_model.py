"""OneTimeModel: one hand-off by a network that minimises the paper's one-time surrogate."""

from __future__ import annotations

from dataclasses import asdict

from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.rejectors.draft_training import fit_once


def fit(context: FitContext) -> Fit:
    """Fit on the labelled hand-offs of the grid."""
    train, validation, settings = context.train, context.validation, context.settings.once
    predictor, psi = context.task.predictor, context.settings.psi
    return Fit(
        lambda progress: fit_once(
            (train.draft, train.table), (validation.draft, validation.table), context.grid, settings,
            alpha=context.alpha, psi=psi, fingerprint=predictor.fingerprint, seed=context.seed,
            device=predictor.device, progress=progress,
        ),
        epochs=settings.epochs,
        choices=[asdict(settings), context.grid.tolist(), context.alpha, psi],
        data=context.draft_data(context.grid),
    )  # fmt: skip


def note(context: FitContext) -> str:
    by_rule = " by the rule of thumb" if context.settings.alpha is None else ""
    return (
        f"OneTimeModel minimises the one-time surrogate with psi = {context.settings.psi} over "
        f"{len(context.grid)} hand-offs; alpha_1 = {context.alpha:.4g}{by_rule}."
    )


ABOUT = "Hands over once, where a network trained with the paper's one-time surrogate says; it sees the whole draft."

METHODS = (Method("OneTimeModel", "once", fit, learns_from="hand_offs", note=note, order=0, about=ABOUT),)
