"""Is a task right?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from seqdefer.engine.drafts import draft
from seqdefer.interfaces import NextTokenExpert, SplitName, Task
from seqdefer.labels.hand_offs import hand_off_table
from seqdefer.testing.experts import check_expert
from seqdefer.testing.predictors import check_predictor
from seqdefer.testing.rules import (
    ONE_BY_ONE,
    fail,
    name_of,
    require,
    require_loss,
    require_same,
    require_tensor,
    require_text,
    shuffled,
)
from seqdefer.types import Draft, Examples, Sequences, SequenceSpec

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@torch.no_grad()
def check_task(task: Task, *, n: int = 4) -> None:
    """Everything about a task, with `n` examples of each split.

    Splits share no example and hold fields of one length; the predictor and the expert pass their checks on their own
    and on each other's sequences; losses are finite, 0 or more, (B,), and look neither at padding nor at other rows;
    token losses exist where the expert names next tokens, and do not vanish together with token costs; the short-cuts
    of labelling change nothing.
    """
    who = name_of(task)
    require_text(getattr(task, "name", None), f"{who}.name")
    require_text(getattr(task, "loss_unit", None), f"{who}.loss_unit")
    spec, described = getattr(task, "spec", None), task.describe()
    is_spec = isinstance(spec, SequenceSpec) and spec.length >= 1
    require(is_spec, f"{who}.spec is {spec!r}", "give a SequenceSpec of length 1 or more")
    is_text = all(isinstance(text, str) for pair in described.items() for text in pair)
    require(is_text, f"{who}.describe gave {described!r}", "give texts by name")
    _check_splits(task)
    for name in SPLITS:
        examples = task.split(name)
        some = examples.select(torch.arange(min(n, len(examples)))).to(task.predictor.device)
        _check_models(task, some)


def _check_splits(task: Task) -> None:
    seen: dict[int, SplitName] = {}
    for name in SPLITS:
        where, examples = f"split {name!r} of {name_of(task)}", task.split(name)
        require(isinstance(examples, Examples), f"{where} is a {name_of(examples)}", "give Examples")
        ids = require_tensor(examples.ids, f"ids of {where}", "int64", None)
        require(len(ids) > 0, f"{where} has no examples", "give it some")
        sizes = {"inputs": len(examples.inputs), "targets": len(examples.targets), "ids": len(ids)}
        require(len(set(sizes.values())) == 1, f"{where} has {sizes}", "give as many of each")
        for one in ids.tolist():
            what = f"id {one} of {where} is also in split {seen.get(one)!r}"
            require(one not in seen, what, "give each example an id of its own, and put it into one split")
            seen[one] = name
        again = task.split(name).ids
        require(torch.equal(again, ids), f"{where} is another one when asked twice", "split by a fixed seed")


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
    who = f"{name_of(task)}.sequence_loss"
    loss = require_loss(task.sequence_loss(examples, sequences), who, len(examples))
    # Padding may hold anything: here, the last token again.
    last = sequences.tokens.gather(1, sequences.lengths[:, None] - 1)
    padded = replace(sequences, tokens=torch.where(sequences.mask(), sequences.tokens, last))
    what = f"{who} changes with what stands after the end"
    require_same(task.sequence_loss(examples, padded), loss, what, "look at sequences.mask() or sequences.lengths")
    rows = shuffled(examples.ids)
    picked = task.sequence_loss(examples.select(rows), sequences.select(rows))
    require_same(picked, loss[rows], f"{who} of rows {rows.tolist()}", ONE_BY_ONE)


def _check_token_losses(task: Task, examples: Examples, sequences: Sequences) -> None:
    rows, positions = sequences.mask().nonzero(as_tuple=True)  # the positions differ within the batch
    batch, tokens = examples.select(rows), sequences.tokens[rows, positions]
    prefixes = Sequences(sequences.tokens[rows], positions)  # what follows a prefix stands there and means nothing
    order = shuffled(rows)
    for name in ("token_loss", "token_cost"):
        loss = _token_loss(task, name, batch, prefixes, tokens)
        picked = _token_loss(task, name, batch.select(order), prefixes.select(order), tokens[order])
        require_same(picked, loss[order], f"{name_of(task)}.{name} of rows in another order", ONE_BY_ONE)
        bare = replace(prefixes, tokens=prefixes.tokens.masked_fill(~prefixes.mask(), 0))
        what = f"{name_of(task)}.{name} changes with what stands after a prefix"
        require_same(
            _token_loss(task, name, batch, bare, tokens), loss, what, "look at prefixes.mask() or prefixes.lengths"
        )


def _token_loss(task: Task, name: str, examples: Examples, prefixes: Sequences, tokens: Tensor) -> Tensor:
    try:
        loss = getattr(task, name)(examples, prefixes, tokens)
    except NotImplementedError as error:
        fail(
            f"{name_of(task.expert)} names next tokens, but {error}",
            "define token_loss, or give an Expert that completes",
        )
    return require_loss(loss, f"{name_of(task)}.{name}", len(tokens))


def _check_shortcuts(task: Task, examples: Examples, drafted: Draft) -> None:
    if task.expert.deterministic:
        short, plain = (hand_off_table(task, examples, drafted, shortcut=choice)[0] for choice in (True, False))
        what = f"{name_of(task)}: the loss of a hand-off by the short-cuts of labelling"
        remedy = f"let deterministic and reads_prefix of {name_of(task.expert)} say what it does"
        require_same(short.loss, plain.loss, what, remedy)
