"""The splits of a task with everything that both writers would do to them, made once for all that learn from them.

What a split is for is in its type: `Studied` (train, validation) is what rejectors are fitted on and every choice is
made with, a threshold, alpha_1, the hand-offs, when to stop; `Held` (test) is reported on and nothing else. What fits
or chooses takes `Studied`, so that a type checker, and `require_studied` at run time, refuse the test data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from seqdefer.environment import choose_device
from seqdefer.errors import ContractError, DataError, unknown
from seqdefer.interfaces import NextTokenExpert, SplitName, Task, TaskEntry
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.hand_offs import Calls, select_hand_offs
from seqdefer.labels.jobs import LabelPart as Rows
from seqdefer.labels.jobs import unpack_calls, unpack_hand_offs, unpack_trees
from seqdefer.labels.label_store import LabellingResult, LabelStore, open_labels
from seqdefer.labels.trees import MAX_ENUMERATED_LENGTH, DecisionTrees, enumerate_trees
from seqdefer.progress import Clock, Meter, Silent
from seqdefer.storage.shards import Store
from seqdefer.types import Draft, Examples, HandOffTable


@dataclass(frozen=True)
class Labelled:
    """A split, or some of it, with everything that both writers would do to it."""

    examples: Examples
    draft: Draft
    table: HandOffTable
    trees: DecisionTrees | None  # None where the expert only completes, or nobody wants them

    def seen_by_draft(self, kept: Tensor) -> list[Tensor]:
        """What rejectors of these hand-offs are fitted on, as far as it takes to tell splits and ways to count losses
        apart."""
        return [self.examples.inputs, self.table.loss[:, kept], self.table.deferred[:, kept]]

    def seen_by_token(self) -> list[Tensor]:
        """Likewise of token-level rejectors."""
        by_token = [] if self.trees is None else self.trees.losses(self.trees.typical_nodes())
        return [self.examples.inputs, *by_token]


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
    """Each split is labelled when it is first asked for. What an expert with a name answers is kept: in `labels`, or
    in `folder`.

    The test instances of `seeds` runs are disjoint draws of `instances` each; `rows(seed)` says where they stand.
    Of training and validation data the hand-offs in `kept` are labelled, all by default; of test data all, always.
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
        kept: Sequence[int] | None = None,
        labels: LabelStore | None = None,
    ) -> None:
        self.task, self.clock = task, clock or Clock()
        self.labels = labels or LabelStore(task, Store(folder / "labels"))
        self.seeds, self.instances, self.rollouts, self.by_token = seeds, instances, rollouts, by_token
        self.kept = select_hand_offs(kept, task.spec.length)
        self.table_calls = Calls()
        self.grown: list[DecisionTrees] = []  # they go on counting expert calls as they grow

    @cached_property
    def train(self) -> Studied:
        return self._label(Studied, "train")

    @cached_property
    def validation(self) -> Studied:
        return self._label(Studied, "validation")

    @cached_property
    def test(self) -> Held:
        """With trees, whoever is compared: the oracle and the sweeps of confidence need them."""
        return self._label(Held, "test")

    def make(self, names: Sequence[SplitName]) -> list[LabellingResult]:
        """All labels of these splits that can be kept, into the store and not into memory; many workers have more to
        share then than with one split after the other."""
        parts = [part for name in names for part in self._parts(name)]
        with self.clock.stage("label", sum(len(part.rows) for part in parts)) as advance:
            return self.labels.make(parts, advance)

    def make_by_engine(self, *names: SplitName) -> None:
        """For those who are about to ask for them all: nothing where this process makes them anyway."""
        if self.labels.executor is not None:
            self.make(names)

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

    def _rows(self, name: SplitName) -> Tensor:
        return self.test_rows() if name == "test" else torch.arange(len(self.task.split(name)))

    def _parts(self, name: SplitName) -> list[Rows]:
        """What is kept of a split. Trees of test data that are long grow wherever sweeps and the oracle go."""
        rows = self._rows(name)
        parts = [self._hand_offs(name, rows)]
        if self._has_trees(name):
            if not self.searches and self._is_dear():
                parts.append(Rows("whole-trees", name, rows))
            elif self.searches and name != "test":
                parts.append(Rows("trees", name, rows, self.rollouts))
        return parts

    def _hand_offs(self, name: SplitName, rows: Tensor) -> Rows:
        """All of them where somebody has labelled them already."""
        every = Rows("hand-offs", name, rows)
        is_whole = len(self.kept) == self.task.spec.length
        return every if name == "test" or is_whole or self.labels.has(every) else replace(every, kept=self.kept)

    def _is_dear(self) -> bool:
        """Whether whole trees are worth their room. An expert that ignores prefixes is asked once a position, and a
        tree of it takes less than a millisecond."""
        return bool(self.task.expert.fingerprint) and self.task.expert.reads_prefix

    def _has_trees(self, name: SplitName) -> bool:
        return (self.by_token or name == "test") and isinstance(self.task.expert, NextTokenExpert)

    def _label(self, kind: type[Part], name: SplitName) -> Part:
        """Draft, hand-off table and decision trees."""
        hand_offs, *trees = self._parts(name)
        examples = hand_offs.examples(self.task)
        with self.clock.stage(f"label hand-offs ({name})", len(examples)) as advance:
            shards = self.labels.read(hand_offs, advance)
        drafted, table = unpack_hand_offs(shards)
        self.table_calls = sum((unpack_calls(shard)[0] for shard in shards), start=self.table_calls)
        grown = self._trees(name, examples, *trees) if self._has_trees(name) else None
        return kind(examples, drafted, table, grown)

    def _trees(self, name: SplitName, examples: Examples, kept: Rows | None = None) -> DecisionTrees:
        with self.clock.stage(f"label decisions ({name})", len(examples)) as advance:
            if kept is not None:
                trees = unpack_trees(self.task, kept, self.labels.read(kept, advance))
            elif self.searches:
                trees = DecisionTrees(self.task, examples, progress=advance)
            else:
                trees = enumerate_trees(self.task, examples, progress=advance)
        self.grown.append(trees)
        return trees


def label_task(
    entry: TaskEntry,
    options: Any,
    folder: Path,
    names: Sequence[SplitName],
    labelling: ExecutorSettings,
    *,
    seeds: int,
    instances: int,
    rollouts: int,
    device: str = "auto",
    meter: Meter | None = None,
) -> list[LabellingResult]:
    """`seqdefer label`: prepares the task in `folder` and makes what `run` will need of these splits."""
    for name in names:
        if name not in get_args(SplitName):
            raise unknown("split", name, get_args(SplitName))
    clock = Clock(meter or Silent())
    task = entry.prepare(options, folder, choose_device(device), clock)
    labels = open_labels(labelling, entry, options, task, folder, device)
    splits = Splits(task, folder, clock, seeds=seeds, instances=instances, rollouts=rollouts, labels=labels)
    return splits.make(names)
