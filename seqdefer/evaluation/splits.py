"""The labelled splits of a task, made once for all methods that learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from seqdefer.environment import choose_device
from seqdefer.errors import DataError, require_known
from seqdefer.hyperparameters import TreeKind
from seqdefer.interfaces import NextTokenExpert, SplitName, Task, TaskEntry
from seqdefer.labels.enumeration import enumerate_trees, is_enumerable
from seqdefer.labels.executors.settings import ExecutorSettings
from seqdefer.labels.hand_offs import Calls, select_hand_offs
from seqdefer.labels.jobs import LabelKind, unpack_calls, unpack_hand_offs, unpack_trees
from seqdefer.labels.jobs import LabelPart as Rows
from seqdefer.labels.label_store import LabellingResult, LabelStore, open_labels
from seqdefer.labels.labelled import LearningData, TestData
from seqdefer.labels.trees import DecisionTrees
from seqdefer.progress import Clock, Meter, Progress, Silent
from seqdefer.storage.shards import Store
from seqdefer.types import Examples

Data = TypeVar("Data", LearningData, TestData)


class Splits:
    """The three splits; each is labelled on first use. Labels are stored in `labels`, or in `folder`.

    The test instances of `seeds` runs are disjoint draws of `instances` each; `rows(seed)` are their places. Training
    and validation data get the hand-offs in `kept`, all by default; test data always gets all. Where sequences are too
    long to enumerate, `trees` is the kind of trees that training and validation data come with; other kinds are made
    when a fit first learns from them. Test data always has open ones. With `reads_first`, trees hold the statistics of
    both models' distributions.
    """

    def __init__(
        self,
        task: Task,
        folder: Path,
        clock: Clock | None = None,
        *,
        seeds: int,
        instances: int,
        trees: TreeKind | None = None,
        rollouts: int = 8,
        by_token: bool = True,
        kept: Sequence[int] | None = None,
        reads_first: bool = False,
        labels: LabelStore | None = None,
    ) -> None:
        self.task, self.clock = task, clock or Clock()
        self.labels = labels or LabelStore(task, Store(folder / "labels"))
        self.seeds, self.instances, self.by_token = seeds, instances, by_token
        self.trees, self.rollouts, self.reads_first = trees, rollouts, reads_first
        self.kept = select_hand_offs(kept, task.spec.length)
        self.table_calls = Calls()
        self.grown: list[DecisionTrees] = []  # they go on counting expert calls as they grow
        self._open: list[tuple[Rows, DecisionTrees]] = []  # of training and validation data
        self._sizes: dict[SplitName, int] = {}  # nodes of open trees that are stored

    @cached_property
    def train(self) -> LearningData:
        return self._label(LearningData, "train")

    @cached_property
    def validation(self) -> LearningData:
        return self._label(LearningData, "validation")

    @cached_property
    def test(self) -> TestData:
        """Test data always has trees: the oracle and the sweeps of confidence need them."""
        return self._label(TestData, "test")

    def make(self, names: Sequence[SplitName]) -> list[LabellingResult]:
        """Make all labels of these splits that can be stored, without reading them. Several workers are busier then
        than with one split after the other."""
        parts = [part for name in names for part in self._parts(name)]
        with self.clock.stage("label", sum(len(part.rows) for part in parts)) as advance:
            return self.labels.make(parts, advance)

    def make_by_engine(self, *names: SplitName) -> None:
        """Make the labels of these splits ahead of their use, where an executor shares out the work."""
        if self.labels.executor is not None:
            self.make(names)

    @property
    def searches(self) -> bool:
        """Whether there are too many decisions to try them all."""
        return not is_enumerable(self.task)

    @property
    def calls(self) -> Calls:
        """Expert calls so far."""
        return sum((trees.calls for trees in self.grown), start=self.table_calls)

    def rows(self, seed: int) -> Tensor:
        """Return the places of a seed's instances in `test`."""
        return torch.arange(self.instances) + seed * self.instances

    def test_rows(self) -> Tensor:
        """Return the places of the test instances of all seeds, disjoint, in the order of the seeds."""
        available, wanted = len(self.task.split("test")), self.seeds * self.instances
        if available < wanted:
            raise DataError(
                f"the test split has {available} examples, {self.seeds} seeds x {self.instances} "
                f"instances need more; lower --seeds or --instances, or {self.task.more_test_data}"
            )
        return torch.randperm(available, generator=torch.Generator().manual_seed(0))[:wanted]

    def _rows(self, name: SplitName) -> Tensor:
        return self.test_rows() if name == "test" else torch.arange(len(self.task.split(name)))

    def store_grown(self) -> None:
        """Store the open trees of training and validation data as far as they have grown: another run starts there."""
        for part, trees in self._open:
            if trees.nodes.size > self._sizes.get(part.split, 0):
                self.labels.write_grown(part, trees)
                self._sizes[part.split] = trees.nodes.size

    def _parts(self, name: SplitName) -> list[Rows]:
        """Return what is made of a split before anything is fitted."""
        kind = self._first_kind(name)
        trees = None if kind is None else self._stored_trees(name, kind)
        return [self._hand_offs(name), *([] if trees is None else [trees])]

    def _stored_trees(self, name: SplitName, kind: TreeKind) -> Rows | None:
        """Return the trees to store before their use. Open ones are not: fits, sweeps and the oracle grow them."""
        if not self._has_trees(name):
            return None
        rows, reads_first = self._rows(name), self.reads_first
        if self.searches:
            explored: LabelKind = "branched-trees" if kind == "branched" else "trees"
            return Rows(explored, name, rows, self.rollouts, reads_first=reads_first) if kind != "open" else None
        # With an expert that ignores prefixes, a whole tree takes less than a millisecond to make.
        is_worth_storing = self.task.expert.fingerprint and self.task.expert.reads_prefix
        return Rows("whole-trees", name, rows, reads_first=reads_first) if is_worth_storing else None

    def _first_kind(self, name: SplitName) -> TreeKind | None:
        """Return the kind of trees that a split comes with; short sequences have but one."""
        return "open" if name == "test" or not self.searches else self.trees

    def _hand_offs(self, name: SplitName) -> Rows:
        """Return the hand-offs to label: all of them where they are stored already."""
        every = Rows("hand-offs", name, self._rows(name))
        is_whole = len(self.kept) == self.task.spec.length
        return every if name == "test" or is_whole or self.labels.has(every) else replace(every, kept=self.kept)

    def _has_trees(self, name: SplitName) -> bool:
        return (self.by_token or name == "test") and isinstance(self.task.expert, NextTokenExpert)

    def _label(self, kind: type[Data], name: SplitName) -> Data:
        """Read or make draft, hand-off table and decision trees."""
        hand_offs = self._hand_offs(name)
        examples = hand_offs.examples(self.task)
        with self.clock.stage(f"label hand-offs ({name})", len(examples)) as advance:
            shards = self.labels.read(hand_offs, advance)
        drafted, table = unpack_hand_offs(shards)
        self.table_calls = sum((unpack_calls(shard)[0] for shard in shards), start=self.table_calls)
        if not self._has_trees(name):
            return kind(examples, drafted, table, None)
        make = cache(lambda kind: self._make_trees(name, examples, kind))
        complete = cache(lambda kind: _complete(make("open"), kind))
        first = self._first_kind(name)
        if first is not None:
            make(first)
        return kind(examples, drafted, table, make if self.searches else complete)

    def _make_trees(self, name: SplitName, examples: Examples, kind: TreeKind) -> DecisionTrees:
        stored = self._stored_trees(name, kind)
        with self.clock.stage(f"label decisions ({name})", len(examples)) as advance:
            if stored is not None:
                trees = unpack_trees(self.task, stored, self.labels.read(stored, advance))
            elif not self.searches:
                trees = enumerate_trees(self.task, examples, reads_first=self.reads_first, progress=advance)
            elif name == "test":
                trees = DecisionTrees(self.task, examples, reads_first=self.reads_first, progress=advance)
            else:
                trees = self._open_trees(name, examples, advance)
        self.grown.append(trees)
        return trees

    def _open_trees(self, name: SplitName, examples: Examples, progress: Progress) -> DecisionTrees:
        """Return open trees for training, as far as an earlier run has grown them."""
        part = Rows("open-trees", name, self._rows(name), reads_first=self.reads_first)
        found = self.labels.read_grown(part)
        if found is None:
            trees = DecisionTrees(self.task, examples, reads_first=self.reads_first, progress=progress)
        else:
            trees = unpack_trees(self.task, part, [found])
            self._sizes[name] = trees.nodes.size
            progress(len(examples))
        self._open.append((part, trees))
        return trees


def _complete(trees: DecisionTrees, kind: TreeKind) -> DecisionTrees:
    """Return complete trees as a kind: all decisions are known, so only branched ones differ."""
    return trees.branched() if kind == "branched" else trees


def label_task(
    entry: TaskEntry,
    options: Any,
    folder: Path,
    names: Sequence[SplitName],
    labelling: ExecutorSettings,
    *,
    seeds: int,
    instances: int,
    trees: TreeKind = "closed",
    rollouts: int,
    device: str = "auto",
    meter: Meter | None = None,
) -> list[LabellingResult]:
    """Run `seqdefer label`: prepare the task in `folder` and make what `run` will need of these splits."""
    for name in names:
        require_known("split", name, get_args(SplitName))
    clock = Clock(meter or Silent())
    task = entry.prepare(options, folder, choose_device(device), clock)
    labels = open_labels(labelling, entry, options, task, folder, device)
    splits = Splits(
        task, folder, clock, seeds=seeds, instances=instances, trees=trees, rollouts=rollouts, labels=labels
    )  # fmt: skip
    return splits.make(names)
