"""Jobs: some rows of a split to be labelled one way. Each gives one shard, whoever does it and whenever.

    hand-offs    the predictor's drafts, with what rejectors may look at, and the table of all hand-offs, or of some
    trees        decision trees of long sequences, explored along a few rollouts
    whole-trees  decision trees of short sequences, with all their nodes

A shard's name is made of the code's version, the task and its losses, both models and the rows themselves. A worker
makes the name anew from what it has loaded, and refuses a job that is called otherwise: labels of another task cannot
come to stand under this one's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from seqdefer import __version__
from seqdefer.engine.drafts import draft
from seqdefer.errors import ContractError, OptionError
from seqdefer.interfaces import SplitName, Task
from seqdefer.labels.exploration import grow_along, toss
from seqdefer.labels.hand_offs import Calls, hand_off_table
from seqdefer.labels.trees import DecisionTrees, enumerate_trees, join_trees
from seqdefer.storage.files import fingerprint
from seqdefer.types import Draft, Examples, HandOffTable, Sequences

Kind = Literal["hand-offs", "trees", "whole-trees"]
LAYOUT = 1  # one more whenever the code changes what a shard holds: shards of before are then made again
NODES = 2**18  # of the whole trees in a shard, about


@dataclass(frozen=True)
class Part:
    """Rows of a split, to be labelled one way."""

    kind: Kind
    split: SplitName
    rows: Tensor  # int64 (n,) places in the split
    rollouts: int = 0  # of each example; for trees
    kept: tuple[int, ...] | None = None  # the hand-offs that somebody asks for; all by default

    def examples(self, task: Task) -> Examples:
        return task.split(self.split).select(self.rows)


@dataclass(frozen=True)
class Job:
    """The rows of one shard."""

    name: str  # of the shard; empty where the expert has no name, and labels are not kept
    kind: Kind
    split: SplitName
    rows: tuple[int, ...]
    first: int  # place of the first row within its part
    rollouts: int
    kept: tuple[int, ...] | None = None

    @property
    def part(self) -> Part:
        return Part(self.kind, self.split, torch.tensor(self.rows), self.rollouts, self.kept)


def cut(task: Task, part: Part, shard_size: int | None = None) -> list[Job]:
    """The jobs of a part, `shard_size` rows each; by default what the models take at once."""
    size = _usual_size(task, part.kind) if shard_size is None else shard_size
    if size < 1:
        raise OptionError(f"shards of {size} rows; give --shard-size of 1 or more")
    jobs, first = [], 0
    for rows in part.rows.split(size):
        name, places = name_of(task, replace(part, rows=rows), first), tuple(rows.tolist())
        jobs.append(Job(name, part.kind, part.split, places, first, part.rollouts, part.kept))
        first += len(rows)
    return jobs


def _usual_size(task: Task, kind: Kind) -> int:
    if kind == "whole-trees":
        return max(1, min(task.predictor.batch_size, NODES >> task.spec.length))
    if kind == "hand-offs":
        return task.expert.batch_size
    # Answers from elsewhere are paid for: few are lost where few are kept together.
    return min(task.predictor.batch_size, task.expert.batch_size) if task.expert.waits else task.predictor.batch_size


def name_of(task: Task, part: Part, first: int = 0) -> str:
    """Of all that the labels of these rows depend on; empty where the expert has no name."""
    if not task.expert.fingerprint:
        return ""
    examples = part.examples(task)
    losses = task.loss_unit if part.kind == "hand-offs" else task.token_rule
    rules = (task.name, part.kind, losses, task.loss_key(examples), task.spec.length, task.spec.end)
    models = (task.predictor.fingerprint, task.expert.fingerprint)
    choices = (part.rollouts, first) if part.kind == "trees" else () if part.kept is None else ("kept", *part.kept)
    return fingerprint(__version__, LAYOUT, *rules, *models, *choices, examples.inputs, examples.targets, examples.ids)


@torch.no_grad()
def label(task: Task, job: Job) -> dict[str, Tensor]:
    """What the shard of a job holds."""
    found = name_of(task, job.part, job.first)
    if found != job.name:
        raise ContractError(
            f"shard {job.name} was asked for, and what this process has loaded makes {found}: the version, the data or "
            "a model is another here; let all workers read the same folders, with the same version of seqdefer"
        )
    before, examples = task.expert.unproven, job.part.examples(task)
    if job.kind == "hand-offs":
        tensors, calls = _hand_offs(task, examples, job.kept)
    else:
        trees = _trees(task, job, examples)
        tensors, calls = trees.tensors(), trees.calls
    return {**tensors, "calls": torch.tensor([calls.made, calls.saved, task.expert.unproven - before])}


def _hand_offs(task: Task, examples: Examples, kept: tuple[int, ...] | None) -> tuple[dict[str, Tensor], Calls]:
    drafted = draft(task.predictor, examples, task.spec)
    table, calls = hand_off_table(task, examples, drafted, kept=kept)
    tensors = {
        "context": drafted.context,
        "tokens": drafted.sequences.tokens,
        "lengths": drafted.sequences.lengths,
        "features": drafted.features,
        "uncertainty": drafted.uncertainty,
        "loss": table.loss,
        "deferred": table.deferred,
    }
    return (tensors if drafted.entropy is None else {**tensors, "entropy": drafted.entropy}), calls


def _trees(task: Task, job: Job, examples: Examples) -> DecisionTrees:
    if job.kind == "whole-trees":
        return enumerate_trees(task, examples)
    return grow_along(task, examples, toss(job.first, len(examples), job.rollouts, task.spec.length))


def calls_in(shard: Mapping[str, Tensor]) -> tuple[Calls, int]:
    """Expert calls, and how many answers are unproven."""
    made, saved, unproven = shard["calls"].tolist()
    return Calls(made, saved), unproven


def hand_offs_in(shards: Sequence[Mapping[str, Tensor]]) -> tuple[Draft, HandOffTable]:
    joined = {name: torch.cat([one[name] for one in shards]) for name in shards[0] if name != "calls"}
    sequences = Sequences(joined["tokens"], joined["lengths"])
    drafted = Draft(
        joined["context"], sequences, joined["features"], joined["uncertainty"], joined.get("entropy")
    )  # fmt: skip
    return drafted, HandOffTable(joined["loss"], joined["deferred"])


def trees_in(task: Task, part: Part, shards: Sequence[Mapping[str, Tensor]]) -> DecisionTrees:
    """Whole, or closed to train on."""
    examples = part.examples(task)
    parts, first = [], 0
    for shard in shards:
        columns = {name: column for name, column in shard.items() if name != "calls"}
        rows = torch.arange(first, first + len(columns["roots"]))
        parts.append(DecisionTrees(task, examples.select(rows), grown=columns))
        parts[-1].calls = calls_in(shard)[0]
        first += len(rows)
    trees = join_trees(parts, task, examples)
    if part.kind == "whole-trees":
        trees.is_complete = True
    else:
        trees.close()
    return trees
