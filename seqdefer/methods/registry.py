"""All methods by name: those of this folder, and those of other packages (entry point group `seqdefer.methods`)."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import get_args

import torch

from seqdefer import methods
from seqdefer.errors import ContractError, OptionError, look_up
from seqdefer.interfaces import NextTokenExpert, Task
from seqdefer.labels.pair_statistics import can_read_first
from seqdefer.methods.base import Method
from seqdefer.registry import OWN, by_name, find_plugins, load_plugins, package_of
from seqdefer.types import Granularity

GROUP = "seqdefer.methods"
RANK: dict[str, int] = {name: rank for rank, name in enumerate(get_args(Granularity))}  # from coarse to fine
PREFERRED = ("TokenwiseModel", "OneTimeCost", "OneTimeModel")  # where no method is named, the best first


@cache
def all_methods() -> dict[str, Method]:
    """Return every method by name, from coarse to fine, in the order of tables."""
    found: list[tuple[str, Method]] = []
    for info in pkgutil.iter_modules(methods.__path__):
        module = import_module(f"{methods.__name__}.{info.name}")
        if not hasattr(module, "METHODS") and any(isinstance(one, Method) for one in vars(module).values()):
            raise ContractError(f"{module.__name__} defines a method, but no METHODS: list its records in that tuple")
        found += ((OWN, one) for one in getattr(module, "METHODS", ()))
    points = find_plugins(GROUP)
    found += ((package_of(points.get(name)), one) for name, one in load_plugins(GROUP).items())
    found.sort(key=lambda offer: (RANK[offer[1].granularity], offer[1].order))
    return by_name("method", ((one.name, package, one) for package, one in found))


def get_method(name: str) -> Method:
    """Return the method of this name."""
    return look_up("method", name, all_methods())


def methods_for(task: Task, *, has_entropy: bool = True) -> dict[str, Method]:
    """Return the methods that a task allows: token level needs an expert that names next tokens, and methods that read
    first need the probabilities of both models."""
    by_token, reads_first = isinstance(task.expert, NextTokenExpert), can_read_first(task)
    return {
        name: one
        for name, one in all_methods().items()
        if (by_token or one.granularity != "token")
        and (has_entropy or not one.needs_entropy)
        and (reads_first or not one.reads_first)
    }


def require_applicable(task: Task, names: Iterable[str]) -> None:
    """Raise OptionError where a task or its predictor does not allow one of these methods. Nothing is labelled: whether
    there is an entropy shows in the first proposal for one example."""
    wanted = [get_method(name) for name in names]
    has_entropy = not any(one.needs_entropy for one in wanted) or _has_entropy(task)
    available = methods_for(task, has_entropy=has_entropy)
    for one in wanted:
        if one.name not in available:
            no_entropy = "the predictor gives no entropy of its tokens, as real numbers have none"
            no_token = "its expert completes sequences and names no next token"
            no_probabilities = "it reads first, and the two models do not both give probabilities of their tokens"
            by_token = isinstance(task.expert, NextTokenExpert)
            reason = no_entropy if one.needs_entropy and not has_entropy else no_probabilities if by_token else no_token
            raise OptionError(
                f"method {one.name!r} does not apply to task {task.name!r}: {reason}; available: {', '.join(available)}"
            )


@torch.no_grad()
def _has_entropy(task: Task) -> bool:
    one = task.split("train").select(torch.arange(1)).to(task.predictor.device)
    state, _ = task.predictor.start(one.inputs)
    return task.predictor.propose(state).entropy is not None


def require_fittable(name: str) -> None:
    """Raise OptionError where a method runs on labelled data alone: the engine asks the expert after it decides."""
    if get_method(name).reads_first:
        raise OptionError(
            f"method {name!r} cannot be fitted to generate or serve: the expert would have to read every position "
            f"before it decides. Compare it with others: seqdefer run TASK --methods {name},TokenwiseModel. These can "
            f"be fitted: {', '.join(fittable_methods())}"
        )


def usual_methods() -> list[str]:
    """Return the methods that a run has without naming them."""
    return [name for name, one in all_methods().items() if not one.runs_when_named]


def fittable_methods() -> list[str]:
    """Return the methods that can generate and serve."""
    return [name for name, one in all_methods().items() if not one.reads_first]


def preferred_methods(task: Task) -> list[str]:
    """Return the methods to take where none is named, the best first; the first one is the default of `fit`."""
    allowed = methods_for(task)
    return [name for name in PREFERRED if name in allowed]
