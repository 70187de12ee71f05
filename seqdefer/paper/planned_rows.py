"""The rows that each study measures: which variants of which methods, under what labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqdefer.evaluation.published import published_ablation, published_ablation_baseline, published_hand_offs
from seqdefer.evaluation.results import PaperFigure
from seqdefer.hyperparameters import Strategy
from seqdefer.paper.lab import DEFAULT_VARIANT, Lab, Variant
from seqdefer.paper.plan import ARCHITECTURES, PSIS, STRATEGIES, ReproductionPlan, ablated_settings

ONE_TIME_LEARNED, ONE_TIME_CONFIDENCE = ("OneTimeModel", "OneTimeCost"), ("OneTimeScore", "OneTimeEntropy")
TOKEN_CONFIDENCE = ("TokenwiseScore", "TokenwiseEntropy")


@dataclass(frozen=True)
class PlannedRow:
    """A row to measure: a method in a variant, what the study varies, and the paper's figure."""

    label: str
    variant: Variant
    method: str
    varied: Mapping[str, Any]
    paper: PaperFigure | None = None
    is_default: bool = False


def plan_rows(study: str, lab: Lab, plan: ReproductionPlan, recipe: str) -> list[PlannedRow]:
    """Return the rows that a study measures on the task of a lab: all methods where it varies nothing."""
    match study:
        case "table-handoffs":
            return _rows_of_sizes(lab, plan)
        case "figure-alpha":
            return _rows_of_alphas(lab, plan, recipe)
        case "table-psi":
            return _rows_of_psis(lab)
        case "table-ablation":
            return _rows_of_networks(lab)
    return [PlannedRow(method, DEFAULT_VARIANT, method, {}) for method in lab.methods]


def _rows_of_sizes(lab: Lab, plan: ReproductionPlan) -> list[PlannedRow]:
    chosen = lab.size(DEFAULT_VARIANT)
    return [
        PlannedRow(
            label=size_label(method, size),
            variant=_sized(lab, size),
            method=method,
            varied={"hand_offs": size},
            paper=published_hand_offs(lab.task.name, method, size) if lab.task.has_published_figures else None,
            is_default=size == chosen,
        )
        for size in measured_sizes(lab, plan)
        for method in (*ONE_TIME_LEARNED, *ONE_TIME_CONFIDENCE)
        if method in lab.methods
    ]


def _rows_of_alphas(lab: Lab, plan: ReproductionPlan, recipe: str) -> list[PlannedRow]:
    """Cross alpha_1 with the size of J where the plan says so; elsewhere only alpha_1 varies."""
    default = lab.alpha(DEFAULT_VARIANT)
    is_crossed = recipe in plan.crossed_recipes and plan.tasks[lab.task.name].hand_offs
    sizes = measured_sizes(lab, plan) if is_crossed else [lab.size(DEFAULT_VARIANT)]
    times = (*plan.times, lab.facts.rule / lab.unit)  # the rule may be one of the plan's, or the recipe's
    alphas = {lab.alpha(Variant(times=one)): one for one in reversed(times)}
    alphas.pop(default, None)
    return [
        PlannedRow(
            label=_alpha_label(lab, variant),
            variant=variant,
            method="OneTimeModel",
            varied={
                "hand_offs": size,
                "times": lab.alpha(variant) / lab.unit,
                "alpha": lab.alpha(variant),
                "alpha_token": lab.alpha(variant) / lab.task.spec.length,
                "is_rule": lab.alpha(variant) == lab.facts.rule,
                "is_own": variant.times not in plan.times,  # the recipe's, or the rule of thumb
            },
            is_default=variant == DEFAULT_VARIANT,
        )
        for size in sizes
        for variant in sorted(
            [_sized(lab, size), *(replace(_sized(lab, size), times=one) for one in alphas.values())], key=lab.alpha
        )
    ]


def _rows_of_psis(lab: Lab) -> list[PlannedRow]:
    return [
        PlannedRow(
            label=f"OneTimeModel, {psi}",
            variant=DEFAULT_VARIANT if psi == lab.settings.psi else Variant(psi=psi),
            method="OneTimeModel",
            varied={"psi": psi},
            is_default=psi == lab.settings.psi,
        )
        for psi in PSIS
    ]


def _rows_of_networks(lab: Lab) -> list[PlannedRow]:
    has_papers, task = lab.task.has_published_figures, lab.task.name
    networks = [
        PlannedRow(
            label=ablated_label(architecture, strategy),
            variant=_ablated(lab, architecture, strategy),
            method="TokenwiseModel",
            varied={"architecture": architecture, "strategy": strategy},
            paper=published_ablation(task, architecture, strategy) if has_papers else None,
        )
        for architecture in ARCHITECTURES
        for strategy in STRATEGIES
    ]
    baselines = [
        PlannedRow(
            label=name,
            variant=DEFAULT_VARIANT,
            method=name,
            varied={},
            paper=published_ablation_baseline(task, name) if has_papers else None,
            is_default=True,
        )
        for name in TOKEN_CONFIDENCE
        if name in lab.methods
    ]
    return networks + baselines


def measured_sizes(lab: Lab, plan: ReproductionPlan) -> list[int]:
    """Return the sizes of J to measure: those of the plan, that of the recipe, and all positions."""
    planned = [size for size in plan.tasks[lab.task.name].hand_offs if size < lab.n_positions]
    return sorted({*planned, lab.size(DEFAULT_VARIANT), lab.n_positions})


def size_label(method: str, size: int) -> str:
    return f"{method}, |J| = {size}"


def _sized(lab: Lab, size: int) -> Variant:
    """Return the variant with |J| = size: the default one where the recipe has that size."""
    return DEFAULT_VARIANT if size == lab.size(DEFAULT_VARIANT) else Variant(hand_offs=size)


def _ablated(lab: Lab, architecture: str, strategy: Strategy) -> Variant:
    """Return the variant of a cell of the ablation: the default one where the recipe trains that network so."""
    settings = lab.settings
    is_recipe = ablated_settings(lab.entry, settings, architecture, strategy) == settings
    return DEFAULT_VARIANT if is_recipe else Variant(architecture=architecture, strategy=strategy)


def _alpha_label(lab: Lab, variant: Variant) -> str:
    rule = " (rule of thumb)" if lab.alpha(variant) == lab.facts.rule else ""
    return f"{size_label('OneTimeModel', lab.size(variant))}, alpha = {lab.alpha(variant):.4g}{rule}"


def ablated_label(architecture: str, strategy: str) -> str:
    return f"{architecture.upper()}, {strategy}"
