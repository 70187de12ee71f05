"""The splits of a task with everything that both writers would do to them, made once for all that learn from them.

What a split is for is in its type: `Studied` (train, validation) is what rejectors are fitted on and every choice is
made with, a threshold, alpha_1, the hand-offs, when to stop; `Held` (test) is reported on and nothing else. What fits
or chooses takes `Studied`, so that a type checker, and `require_studied` at run time, refuse the test data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from seqdefer.engine import draft
from seqdefer.environment import Clock
from seqdefer.errors import ContractError, DataError
from seqdefer.exploration import explore_trees
from seqdefer.interfaces import NextTokenExpert, SplitName, Task
from seqdefer.labels import Calls, hand_off_table
from seqdefer.trees import MAX_ENUMERATED_LENGTH, DecisionTrees, enumerate_trees
from seqdefer.types import Draft, Examples, HandOffTable


@dataclass(frozen=True)
class Labelled:
    """A split, or some of it, with everything that both writers would do to it."""

    examples: Examples
    draft: Draft
    table: HandOffTable
    trees: DecisionTrees | None  # None where the expert only completes, or nobody wants them

    def seen_by_draft(self) -> list[Tensor]:
        """What rejectors by draft are fitted on, as far as it takes to tell splits and ways to count losses apart."""
        return [self.examples.inputs, self.table.loss, self.table.deferred]

    def seen_by_token(self) -> list[Tensor]:
        """Likewise of token-level rejectors."""
        by_token = [] if self.trees is None else self.trees.losses(self.trees.typical_nodes())
        return [*self.seen_by_draft(), *by_token]


class Studied(Labelled):
    """Training or validation data: to fit with, and to choose with."""


class Held(Labelled):
    """Test data: to report on, once everything is fitted and chosen."""


Part = TypeVar("Part", Studied, Held)


def require_studied(*parts: Labelled) -> None:
    """Raises where something would be fitted or chosen with test data."""
    for part in parts:
        if not isinstance(part, Studied):
            raise ContractError(
                f"something is fitted or chosen with a {type(part).__name__} split; only Studied ones (train, "
                "validation) may be: test data is for the report alone"
            )


class Splits:
    """Each split is labelled when it is first asked for. What an expert with a name answers is kept in `folder`.

    The test instances of `seeds` runs are disjoint draws of `instances` each; `rows(seed)` says where they stand.
    """

    def __init__(
        self,
        task: Task,
        folder: Path,
        clock: Clock | None = None,
        *,
        seeds: int,
        instances: int,
        rollouts: int = 8,
        by_token: bool = True,
    ) -> None:
        self.task, self.folder, self.clock = task, folder, clock or Clock()
        self.seeds, self.instances, self.rollouts, self.by_token = seeds, instances, rollouts, by_token
        self.table_calls = Calls()
        self.grown: list[DecisionTrees] = []  # they go on counting expert calls as they grow

    @cached_property
    def train(self) -> Studied:
        return self._label(Studied, "train", self.task.split("train"), self.by_token)

    @cached_property
    def validation(self) -> Studied:
        return self._label(Studied, "validation", self.task.split("validation"), self.by_token)

    @cached_property
    def test(self) -> Held:
        """With trees, whoever is compared: the oracle and the sweeps of confidence need them."""
        return self._label(Held, "test", self.task.split("test").select(self.test_rows()), True)

    @property
    def searches(self) -> bool:
        """Sequences are too long to try all decisions."""
        return self.task.spec.length > MAX_ENUMERATED_LENGTH

    @property
    def calls(self) -> Calls:
        """Expert calls so far."""
        return sum((trees.calls for trees in self.grown), start=self.table_calls)

    def rows(self, seed: int) -> Tensor:
        """Where the instances of a seed stand in `test`."""
        return torch.arange(self.instances) + seed * self.instances

    def test_rows(self) -> Tensor:
        """The test instances of all seeds, disjoint, in the order of the seeds."""
        available, wanted = len(self.task.split("test")), self.seeds * self.instances
        if available < wanted:
            raise DataError(
                f"the test split has {available} examples, {self.seeds} seeds x {self.instances} "
                "instances need more; lower --seeds or --instances, or give more test data (tsp: --test; text: more "
                "documents, --test-documents)"
            )
        return torch.randperm(available, generator=torch.Generator().manual_seed(0))[:wanted]

    def _label(self, kind: type[Part], name: SplitName, examples: Examples, by_token: bool) -> Part:
        """Draft, hand-off table and decision trees."""
        task, labels = self.task, self.folder / "labels"
        with self.clock.stage(f"draft ({name})", len(examples)) as advance:
            drafted = draft(task.predictor, examples, task.spec, progress=advance)
        with self.clock.stage(f"label hand-offs ({name})", len(examples)) as advance:
            table, calls = hand_off_table(task, examples, drafted, folder=labels, progress=advance)
        self.table_calls = self.table_calls + calls
        if not (by_token and isinstance(task.expert, NextTokenExpert)):
            return kind(examples, drafted, table, None)
        with self.clock.stage(f"label decisions ({name})", len(examples)) as advance:
            if not self.searches:
                trees = enumerate_trees(task, examples, progress=advance)
            elif kind is Held:  # sweeps and the oracle go wherever they like
                trees = DecisionTrees(task, examples, progress=advance)
            else:
                trees = explore_trees(task, examples, self.rollouts, folder=labels, progress=advance)
        self.grown.append(trees)
        return kind(examples, drafted, table, trees)
