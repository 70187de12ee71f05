"""Labelled data, with its purpose in its type.

`LearningData` (train, validation) is what rejectors are fitted on and every choice is made with: a threshold, alpha_1,
the hand-offs, when to stop. `TestData` is reported on and nothing else. What fits or chooses takes `LearningData`, so
that a type checker, and `require_learning_data` at run time, refuse test data. `CalibrationData` are inputs that a
guarantee rests on; learning data cannot become that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from seqdefer.errors import ContractError, OptionError
from seqdefer.hyperparameters import TreeKind
from seqdefer.interfaces import Codec
from seqdefer.labels.trees import DecisionTrees
from seqdefer.storage.files import fingerprint
from seqdefer.types import Draft, Examples, HandOffTable


@dataclass(frozen=True)
class LabelledData:
    """A split, or some of it, with everything that both writers would do to it."""

    examples: Examples
    draft: Draft
    table: HandOffTable
    # None where the expert only completes, or token-level labels were not asked for. Each kind is made once.
    make_trees: Callable[[TreeKind], DecisionTrees] | None

    @property
    def trees(self) -> DecisionTrees | None:
        """Trees to measure with: open, or complete where sequences are short."""
        return self.trees_of("open")

    def trees_of(self, kind: TreeKind) -> DecisionTrees | None:
        """Return the trees of a kind, made on first use. Short sequences have complete trees whatever the kind."""
        return None if self.make_trees is None else self.make_trees(kind)

    def seen_by_draft(self, kept: Tensor) -> list[Tensor]:
        """Return what rejectors of these hand-offs are fitted on, as far as it takes to tell splits and ways to count
        losses apart."""
        return [self.examples.inputs, self.table.loss[:, kept], self.table.deferred[:, kept]]

    def seen_by_token(self, kind: TreeKind) -> list[Tensor]:
        """Return the same for token-level rejectors that learn from trees of this kind."""
        trees = self.trees_of(kind)
        by_token = [] if trees is None else trees.losses(trees.typical_nodes())
        return [self.examples.inputs, *by_token]


class LearningData(LabelledData):
    """Training or validation data: to fit with, and to choose with."""


class TestData(LabelledData):
    """Test data: to report on, once everything is fitted and chosen."""

    __test__ = False  # pytest would take the name for a class of tests


def require_learning_data(*parts: LabelledData) -> None:
    """Raise where something would be fitted or chosen with test data."""
    for part in parts:
        if not isinstance(part, LearningData):
            raise ContractError(
                f"something is fitted or chosen with {type(part).__name__}; only LearningData (train, validation) may "
                "be: test data is for the report alone"
            )


@dataclass(frozen=True)
class CalibrationData:
    """Inputs that no fit and no choice has seen: a guarantee may rest on them. `of` makes it."""

    examples: Examples

    @classmethod
    def of(cls, examples: Examples, learned_from: Collection[str], codec: Codec | None = None) -> CalibrationData:
        """Refuse inputs that are among those learned from, which `all_names` has named."""
        seen = are_among(learned_from, examples, codec)
        if any(seen):
            raise OptionError(
                f"{sum(seen)} of {len(seen)} inputs were used to fit this rejector, the first at place "
                f"{seen.index(True) + 1}; a guarantee needs inputs that it was not fitted on"
            )
        return cls(examples)


def are_among(learned_from: Collection[str], examples: Examples, codec: Codec | None = None) -> list[bool]:
    """Tell which inputs are among those learned from."""
    known = frozenset(learned_from)
    return [not known.isdisjoint(names) for names in all_names(examples, codec)]


def all_names(examples: Examples, codec: Codec | None = None) -> list[tuple[str, ...]]:
    """Return the names of each input: of what models read and, where that is text, of its words, so that white space
    makes no input a new one."""
    words = None if codec is None else codec.words(examples)
    if words is None:
        return [(name,) for name in input_names(examples)]
    return [(name, fingerprint(text)) for name, text in zip(input_names(examples), words, strict=True)]


def input_names(examples: Examples) -> list[str]:
    """Return a name for each input: equal inputs, equal names. Whole numbers of 0 or less at the end of a row may pad
    it to the width of its batch, and do not count."""
    rows = examples.inputs.cpu()
    if rows.ndim != 2 or rows.is_floating_point():
        return [fingerprint(row) for row in rows]
    ends = torch.where(rows > 0, torch.arange(1, rows.shape[1] + 1), 0).amax(1).tolist()
    return [fingerprint(row[:end]) for row, end in zip(rows, ends, strict=True)]
