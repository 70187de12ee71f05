"""The contract check of tasks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.interfaces import Codec, Expert, NextTokenExpert, Predictor, SplitName, Task
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.testing.experts import check_expert
from seqdefer.testing.predictors import check_predictor
from seqdefer.testing.rules import (
    ONE_BY_ONE,
    fail,
    indices_of,
    require,
    require_loss,
    require_same,
    require_tensor,
    require_text,
    shuffled,
    type_name,
)
from seqdefer.types import Draft, Examples, Sequences, SequenceSpec

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@torch.no_grad()
def check_task(task: Task, *, n: int = 4) -> None:
    """Check everything about a task, with `n` examples of each split.

    Splits share no example, have fields of equal length and stay the same; predictor and expert pass their checks on
    their own and on each other's sequences; losses are finite, 0 or more, at most `max_loss`, (B,), and depend neither
    on padding nor on other rows; token losses exist where the expert names next tokens; the short-cuts of labelling
    change nothing.
    """
    require(isinstance(task, Task), f"check_task got {task!r:.80}", "pass an instance of a Task")
    who = type_name(task)
    _check_parts(task)
    require_text(getattr(task, "name", None), f"{who}.name")
    require_text(getattr(task, "loss_unit", None), f"{who}.loss_unit")
    spec, described = getattr(task, "spec", None), task.describe()
    is_spec = isinstance(spec, SequenceSpec) and spec.length >= 1
    require(is_spec, f"{who}.spec is {spec!r}", "use a SequenceSpec of length 1 or more")
    is_text = all(isinstance(text, str) for pair in described.items() for text in pair)
    require(is_text, f"{who}.describe returned {described!r}", "return a dict of strings")
    _check_splits(task)
    for name in SPLITS:
        examples = task.split(name)
        some = examples.select(torch.arange(min(n, len(examples)))).to(task.predictor.device)
        _check_models(task, some)


def _check_parts(task: Task) -> None:
    for name, kind in (("predictor", Predictor), ("expert", Expert), ("codec", Codec)):
        part = getattr(task, name, None)
        is_absent = name == "codec" and part is None
        what = f"{type_name(task)}.{name} is {'None' if part is None else f'a {type_name(part)}'}"
        require(is_absent or isinstance(part, kind), what, f"use an instance of a class that inherits {kind.__name__}")


def _check_splits(task: Task) -> None:
    seen: dict[int, SplitName] = {}
    for name in SPLITS:
        where, examples = f"split {name!r} of {type_name(task)}", task.split(name)
        require(isinstance(examples, Examples), f"{where} is a {type_name(examples)}", "return Examples")
        ids = require_tensor(examples.ids, f"ids of {where}", "int64", None)
        require(len(ids) > 0, f"{where} has no examples", "add some")
        sizes = {"inputs": len(examples.inputs), "targets": len(examples.targets), "ids": len(ids)}
        require(len(set(sizes.values())) == 1, f"{where} has {sizes}", "make them equally long")
        for one in ids.tolist():
            what = f"id {one} of {where} is also in split {seen.get(one)!r}"
            require(one not in seen, what, "give each example its own id and put it into one split")
            seen[one] = name
        again = task.split(name)
        is_same = all(_is_same(getattr(again, part), getattr(examples, part)) for part in ("ids", "inputs", "targets"))
        require(is_same, f"{where} differs between two calls", "split with a fixed seed")


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Return whether values are equal, those that are no numbers included."""
    return left.shape == right.shape and bool(((left == right) | (left != left)).all())


def _check_models(task: Task, examples: Examples) -> None:
    predictor, expert, spec = task.predictor, task.expert, task.spec
    check_predictor(predictor, examples.inputs, spec)
    drafted = draft(predictor, examples, spec)
    drafts = Sequences(drafted.sequences.tokens.to(predictor.device), drafted.sequences.lengths.to(predictor.device))
    check_expert(expert, examples, spec, drafts=drafts)
    completed = expert.complete(examples, drafts.truncate(torch.zeros_like(drafts.lengths)), spec)
    check_predictor(predictor, examples.inputs, spec, paths=completed)
    for sequences in (drafts, completed):
        _check_sequence_loss(task, examples, sequences)
        if isinstance(expert, NextTokenExpert):
            _check_token_losses(task, examples, sequences)
    _check_shortcuts(task, examples, drafted)


def _check_sequence_loss(task: Task, examples: Examples, sequences: Sequences) -> None:
    who = f"{type_name(task)}.sequence_loss"
    loss = require_loss(task.sequence_loss(examples, sequences), who, len(examples))
    if task.max_loss is not None:
        what = f"{who} is {float(loss.max()):.6g}, more than max_loss, {task.max_loss:.6g}"
        require((loss <= task.max_loss * (1 + 1e-5)).all(), what, "raise max_loss, or leave it None")
    # Padding may hold anything: here, the last token.
    last = sequences.tokens.gather(1, sequences.lengths[:, None] - 1)
    padded = replace(sequences, tokens=torch.where(sequences.mask(), sequences.tokens, last))
    what = f"{who} depends on tokens after the end"
    require_same(task.sequence_loss(examples, padded), loss, what, "use sequences.mask() or sequences.lengths")
    for rows in (shuffled(examples.ids), *indices_of(examples.ids).split(1)):
        picked = task.sequence_loss(examples.select(rows), sequences.select(rows))
        require_same(picked, loss[rows], f"{who} of rows {rows.tolist()}", ONE_BY_ONE)


def _check_token_losses(task: Task, examples: Examples, sequences: Sequences) -> None:
    rows, positions = sequences.mask().nonzero(as_tuple=True)  # positions differ within the batch
    batch, tokens = examples.select(rows), sequences.tokens[rows, positions]
    prefixes = Sequences(sequences.tokens[rows], positions)  # tokens after a prefix are meaningless
    order = shuffled(rows)
    for name in ("token_loss", "token_cost"):
        loss = _token_loss(task, name, batch, prefixes, tokens)
        for some in (order, *order.tensor_split(2)):
            picked = _token_loss(task, name, batch.select(some), prefixes.select(some), tokens[some])
            require_same(picked, loss[some], f"{type_name(task)}.{name} of rows in another order", ONE_BY_ONE)
        bare = replace(prefixes, tokens=prefixes.tokens.masked_fill(~prefixes.mask(), 0))
        what = f"{type_name(task)}.{name} depends on tokens after a prefix"
        require_same(
            _token_loss(task, name, batch, bare, tokens), loss, what, "use prefixes.mask() or prefixes.lengths"
        )


def _token_loss(task: Task, name: str, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
    try:
        loss = getattr(task, name)(examples, prefixes, tokens)
    except NotImplementedError as error:
        fail(
            f"{type_name(task.expert)} names next tokens, but {error}",
            "define token_loss, or use an Expert that only completes",
        )
    return require_loss(loss, f"{type_name(task)}.{name}", len(tokens))


def _check_shortcuts(task: Task, examples: Examples, drafted: Draft) -> None:
    if task.expert.deterministic:
        short, plain = (hand_off_table(task, examples, drafted, shortcut=choice)[0] for choice in (True, False))
        what = f"{type_name(task)}: the loss of a hand-off with the short-cuts of labelling"
        remedy = f"correct deterministic or reads_prefix of {type_name(task.expert)}"
        require_same(short.loss, plain.loss, what, remedy)
