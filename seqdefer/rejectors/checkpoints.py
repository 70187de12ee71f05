"""Rejectors by their kind: networks to choose from, and checkpoints of any class.

A class counts as soon as it is defined. One of another package is found by an entry point of the group
`seqdefer.networks`, whose value is the class:

    [project.entry-points."seqdefer.networks"]
    gru = "my_package.rejectors:GRURejector"
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isabstract
from pathlib import Path
from typing import Any, TypeVar

from seqdefer.errors import CheckpointError, unknown
from seqdefer.interfaces import Predictor
from seqdefer.registry import by_name, load_plugins
from seqdefer.rejectors import confidence, draft, other_rules, token
from seqdefer.rejectors.base import SavedRejector, read_config

Rejector = token.TokenNetwork | draft.DraftNetwork | confidence.TokenRule | confidence.DraftRule
Kind = TypeVar("Kind", bound=SavedRejector)
OWN_MODULES = (confidence, draft, other_rules, token)  # importing them is what makes their classes known


def token_networks() -> dict[str, type[token.TokenNetwork]]:
    """Return the token-level networks by kind."""
    return _by_kind(token.TokenNetwork)  # type: ignore[type-abstract]


def draft_networks() -> dict[str, type[draft.DraftNetwork]]:
    """Return the networks that score whole drafts by kind."""
    return _by_kind(draft.DraftNetwork)  # type: ignore[type-abstract]


def load_rejector(folder: Path | str, predictor: Predictor[Any] | None = None) -> Rejector:
    """Read what `save_pretrained` wrote, ready to score. With `predictor`, refuse a checkpoint made for another."""
    folder = Path(folder)
    kind, known = read_config(folder)["kind"], _by_kind(SavedRejector)  # type: ignore[type-abstract]
    if kind not in known:
        raise CheckpointError(f"{folder}: {unknown('rejector kind', kind, known)}")
    rejector = known[kind].from_pretrained(folder, predictor)
    assert isinstance(rejector, Rejector)
    # By token it scores what the predictor has just computed; by draft it works on the CPU, where drafts are kept.
    if predictor is not None and isinstance(rejector, token.TokenNetwork):
        rejector.to(predictor.device)
    return rejector


def _by_kind(base: type[Kind]) -> dict[str, type[Kind]]:
    load_plugins("seqdefer.networks")
    return by_name("network", ((one.kind, one.__module__.partition(".")[0], one) for one in _final_classes(base)))


def _final_classes(base: type[Kind]) -> Iterator[type[Kind]]:
    for child in base.__subclasses__():
        if not isabstract(child) and "kind" in vars(child):  # an inherited kind is the parent's
            yield child
        yield from _final_classes(child)
