"""BiLD (Kim et al., 2023): fall back on the expert where the predictor is unsure, and roll back what it refuses.

The swept parameter is alpha, below which the predictor's probability must fall. How much the expert tolerates, rho, is
chosen among the values of the paper by the area under the curve of some validation examples.
"""

from __future__ import annotations

import torch

from seqdefer.budgets.rollback_sweeps import sweep_rollbacks
from seqdefer.methods.base import Fit, FitContext, Method
from seqdefer.rejectors.other_rules import RollbackRule

RHOS = (2.0, 3.0, 5.0)
N_EXAMPLES = 100  # validation examples that choose rho: long sequences grow a tree for each


def fit(context: FitContext) -> Fit:
    """Choose rho; nothing is trained."""

    def choose(_: object) -> tuple[RollbackRule, None]:
        areas = rho_areas(context)
        rule = RollbackRule(min(areas, key=lambda rho: areas[rho]))
        rule.predictor = context.task.predictor.fingerprint
        rule.notes = {"areas": {str(rho): area for rho, area in areas.items()}}
        return rule, None

    return Fit(choose)


def rho_areas(context: FitContext) -> dict[float, float]:
    """Return the area under the deferral curve of validation examples for each rho."""
    trees = context.validation.trees
    assert trees is not None
    rows = torch.arange(min(len(trees), N_EXAMPLES))
    areas = {}
    for rho in RHOS:
        swept = sweep_rollbacks(trees, rho, rows)
        x, y = swept.deferred.double().mean(1), swept.loss.double().mean(1)
        order = x.argsort()
        areas[rho] = float(torch.trapezoid(y[order], x[order]))
    return areas


def note(context: FitContext) -> str:
    areas = rho_areas(context)
    rho = min(areas, key=lambda one: areas[one])
    return (
        f"BiLD is a rule of Kim et al., 2023; it rolls back tokens with -log p > rho = {rho:g}, chosen from "
        f"{', '.join(f'{one:g}' for one in RHOS)} on validation data."
    )


METHODS = (
    Method(
        "BiLD", "token", fit, learns_from="trees", needs_entropy=True, reads_first=True, note=note, order=30,
        source="Kim et al., 2023",
        about="Falls back on the expert where the predictor is unsure, and rolls back tokens that the expert refuses.",
    ),
)  # fmt: skip
