"""Jobs: rows of a split to label one way. Each job makes one shard.

    hand-offs    the predictor's drafts, the features of rejectors, and the table of all hand-offs, or of some
    trees        decision trees of long sequences, explored along a few rollouts
    branched-    the same, with both decisions wherever the models differ
      trees
    whole-trees  decision trees of short sequences, with all their nodes
    open-trees   decision trees of long sequences, as far as training has grown them; no job makes these

A shard's name is a fingerprint of the code's version, the task and its losses, both models and the rows. A worker
recomputes the name from what it has loaded and refuses a job whose name differs, so labels of another task cannot be
stored under this one's names.
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
from seqdefer.labels.enumeration import enumerate_trees
from seqdefer.labels.exploration import draw_decisions, grow_along
from seqdefer.labels.hand_offs import Calls, hand_off_table
from seqdefer.labels.trees import DecisionTrees, join_trees
from seqdefer.storage.files import fingerprint
from seqdefer.types import Draft, Examples, HandOffTable, Sequences

LabelKind = Literal["hand-offs", "trees", "branched-trees", "whole-trees", "open-trees"]
EXPLORED: tuple[LabelKind, ...] = ("trees", "branched-trees")
SHARD_LAYOUT = 1  # increment whenever the content of shards changes: older shards are then made again
MAX_SHARD_NODES = 2**18  # of whole trees, about


@dataclass(frozen=True)
class LabelPart:
    """Rows of a split to label one way."""

    kind: LabelKind
    split: SplitName
    rows: Tensor  # int64 (n,) indices into the split
    rollouts: int = 0  # per example; for trees
    kept: tuple[int, ...] | None = None  # hand-offs to label; all by default
    reads_first: bool = False  # trees with the pair's statistics at every node

    def examples(self, task: Task) -> Examples:
        return task.split(self.split).select(self.rows)


@dataclass(frozen=True)
class Job:
    """The rows of one shard."""

    name: str  # of the shard; empty where the expert has no fingerprint and labels are not stored
    kind: LabelKind
    split: SplitName
    rows: tuple[int, ...]
    first: int  # index of the first row within its part
    rollouts: int
    kept: tuple[int, ...] | None = None
    reads_first: bool = False

    @property
    def part(self) -> LabelPart:
        return LabelPart(self.kind, self.split, torch.tensor(self.rows), self.rollouts, self.kept, self.reads_first)


def make_jobs(task: Task, part: LabelPart, shard_size: int | None = None) -> list[Job]:
    """Cut a part into jobs of `shard_size` rows; by default, a batch of the models."""
    size = _default_shard_size(task, part.kind) if shard_size is None else shard_size
    if size < 1:
        raise OptionError(f"--shard-size is {size}; it must be at least 1")
    jobs, first = [], 0
    for rows in part.rows.split(size):
        name, indices = shard_name(task, replace(part, rows=rows), first), tuple(rows.tolist())
        jobs.append(Job(name, part.kind, part.split, indices, first, part.rollouts, part.kept, part.reads_first))
        first += len(rows)
    return jobs


def _default_shard_size(task: Task, kind: LabelKind) -> int:
    if kind == "whole-trees":
        return max(1, min(task.predictor.batch_size, MAX_SHARD_NODES >> task.spec.length))
    if kind == "hand-offs":
        return task.expert.batch_size
    # Answers of a remote expert cost money: small shards lose few of them.
    return min(task.predictor.batch_size, task.expert.batch_size) if task.expert.waits else task.predictor.batch_size


def shard_name(task: Task, part: LabelPart, first: int = 0) -> str:
    """Return the fingerprint of all that the labels of a part depend on; empty where the expert has none."""
    if not task.expert.fingerprint:
        return ""
    examples = part.examples(task)
    losses = task.loss_unit if part.kind == "hand-offs" else task.token_rule
    rules = (task.name, part.kind, losses, task.loss_key(examples), task.spec.length, task.spec.end)
    models = (task.predictor.fingerprint, task.expert.fingerprint)
    options = (part.rollouts, first) if part.kind in EXPLORED else () if part.kept is None else ("kept", *part.kept)
    options += ("reads first",) if part.reads_first else ()  # other labels keep the names they always had
    data = (examples.inputs, examples.targets, examples.ids)
    return fingerprint(__version__, SHARD_LAYOUT, *rules, *models, *options, *data)


@torch.no_grad()
def run_job(task: Task, job: Job) -> dict[str, Tensor]:
    """Return the tensors of a job's shard."""
    found = shard_name(task, job.part, job.first)
    if found != job.name:
        raise ContractError(
            f"the job is for shard {job.name}, but this worker's version, data or models make shard {found}; "
            "let all workers read the same folders with the same version of seqdefer"
        )
    before, examples = task.expert.unproven, job.part.examples(task)
    if job.kind == "hand-offs":
        tensors, calls = _label_hand_offs(task, examples, job.kept)
    else:
        if job.kind == "whole-trees":
            trees = enumerate_trees(task, examples, reads_first=job.reads_first)
        else:
            decisions = draw_decisions(job.first, len(examples), job.rollouts, task.spec.length)
            branched = job.kind == "branched-trees"
            trees = grow_along(task, examples, decisions, reads_first=job.reads_first, branched=branched)
        tensors, calls = trees.tensors(), trees.calls
    return {**tensors, "calls": torch.tensor([calls.made, calls.saved, task.expert.unproven - before])}


def _label_hand_offs(task: Task, examples: Examples, kept: tuple[int, ...] | None) -> tuple[dict[str, Tensor], Calls]:
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


def unpack_calls(shard: Mapping[str, Tensor]) -> tuple[Calls, int]:
    """Return the expert calls of a shard, and how many of its answers are unproven."""
    made, saved, unproven = shard["calls"].tolist()
    return Calls(made, saved), unproven


def unpack_hand_offs(shards: Sequence[Mapping[str, Tensor]]) -> tuple[Draft, HandOffTable]:
    """Join the drafts and hand-off tables of shards."""
    joined = {name: torch.cat([one[name] for one in shards]) for name in shards[0] if name != "calls"}
    sequences = Sequences(joined["tokens"], joined["lengths"])
    drafted = Draft(joined["context"], sequences, joined["features"], joined["uncertainty"], joined.get("entropy"))
    return drafted, HandOffTable(joined["loss"], joined["deferred"])


def unpack_trees(task: Task, part: LabelPart, shards: Sequence[Mapping[str, Tensor]]) -> DecisionTrees:
    """Join the trees of shards: complete ones of kind `whole-trees`, closed ones of those that were explored."""
    examples = part.examples(task)
    parts, first = [], 0
    for shard in shards:
        columns = {name: column for name, column in shard.items() if name != "calls"}
        rows = torch.arange(first, first + len(columns["roots"]))
        parts.append(DecisionTrees(task, examples.select(rows), grown=columns))
        parts[-1].calls = unpack_calls(shard)[0]
        first += len(rows)
    trees = join_trees(parts, task, examples)
    trees.is_complete = part.kind == "whole-trees"
    if part.kind in EXPLORED:
        trees.close(branched=part.kind == "branched-trees")
    return trees
