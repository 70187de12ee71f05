"""The contract check of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqdefer.interfaces import Expert, NextTokenExpert
from seqdefer.testing.fakes import blank_prefixes
from seqdefer.testing.rules import (
    EVERY_PART,
    NEW_STATE,
    ONE_BY_ONE,
    cuts,
    indices_of,
    require,
    require_log_probs,
    require_same,
    require_same_sequences,
    require_tensor,
    require_tuple,
    shuffled,
    type_name,
)
from seqdefer.types import Examples, Sequences, SequenceSpec

Answers = dict[int, Sequences]  # completions by the number of tokens kept


@torch.no_grad()
def check_expert(expert: Expert, examples: Examples, spec: SequenceSpec, *, drafts: Sequences | None = None) -> None:
    """Check completions of empty prefixes, of the expert's own prefixes, and of `drafts` (a predictor's sequences).

    Shapes and dtypes; the prefix is kept; sequences end with the end token or at full length, and not before; ended
    prefixes stay unchanged. With `deterministic`: the same answer twice, alone and in any batch, and for every longer
    prefix of its own answer. With `reads_prefix = False`: the same tokens after any prefix. A NextTokenExpert names the
    tokens that it completes with, whether it is called at every position or late; its log probabilities, if any, are
    those of a distribution.
    """
    if isinstance(expert, NextTokenExpert):
        _check_next(expert, examples, None, {}, spec)
        _check_log_probs(expert, examples)
    blank = blank_prefixes(examples, spec)
    blank = blank if drafts is None else replace(blank, tokens=torch.zeros_like(drafts.tokens))
    own = _complete(expert, examples, blank, spec)
    for path in (own, drafts) if drafts is not None else (own,):
        answers = {kept: _complete(expert, examples, _keep(path, kept), spec) for kept in cuts(spec.length)}
        if expert.deterministic:
            _check_plan(expert, examples, path, answers, spec)
            _check_batch(expert, examples, path, answers, spec)
        if expert.deterministic and not expert.reads_prefix:
            _check_ignores_prefix(expert, own, answers)
        if isinstance(expert, NextTokenExpert):
            _check_next(expert, examples, path, answers, spec)
            _check_read(expert, examples, path)


def _keep(path: Sequences, kept: int) -> Sequences:
    return path.truncate(torch.full_like(path.lengths, kept))


def _complete(expert: Expert, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
    """Call the expert and check its answer. Tokens come back in the dtype of the prefixes."""
    who, n = f"{type_name(expert)}.complete", len(prefixes)
    given = Sequences(prefixes.tokens.clone(), prefixes.lengths.clone())
    answer = expert.complete(examples, prefixes, spec)
    is_intact = torch.equal(prefixes.tokens, given.tokens) and torch.equal(prefixes.lengths, given.lengths)
    require(is_intact, f"{who} changed the prefixes it was given", "clone them before writing")
    require(isinstance(answer, Sequences), f"{who} returned a {type_name(answer)}", "return Sequences")
    tokens = require_tensor(answer.tokens, f"{who}: tokens", "token", n, spec.length)
    lengths = require_tensor(answer.lengths, f"{who}: lengths", "int64", n)
    is_like = tokens.is_floating_point() == given.tokens.is_floating_point()
    require(is_like, f"{who} returned {tokens.dtype} for a prefix of {given.tokens.dtype}", "keep the kind of tokens")
    is_possible = (lengths >= 1) & (lengths <= spec.length)
    require(is_possible.all(), f"{who} returned lengths {lengths.tolist()}", f"return 1 to {spec.length}")
    answer = Sequences(tokens.to(given.tokens.dtype), lengths)
    _check_prefix(who, given, answer, spec)
    _check_end(who, answer, spec)
    return answer


def _check_prefix(who: str, given: Sequences, answer: Sequences, spec: SequenceSpec) -> None:
    is_over, mask = spec.is_over(given), given.mask()
    what, remedy = f"{who} changed the length of a prefix that has ended", "return it unchanged"
    require_same(answer.lengths[is_over], given.lengths[is_over], what, remedy)
    what, remedy = f"{who} changed a token of the prefix", "start the completion with its prefix"
    require_same(answer.tokens[mask], given.tokens[mask], what, remedy)


def _check_end(who: str, answer: Sequences, spec: SequenceSpec) -> None:
    last = answer.tokens.gather(1, answer.lengths[:, None] - 1).squeeze(1)
    is_whole = spec.is_end(last) | (answer.lengths == spec.length)
    what = f"{who} stopped after {answer.lengths[~is_whole][:1].tolist()} tokens"
    end = f"length {spec.length}" if spec.end is None else f"the end token {spec.end} or to length {spec.length}"
    require(is_whole.all(), what, f"continue to {end}")
    inside = answer.tokens[answer.truncate(answer.lengths - 1).mask()]
    what = f"{who} continued after the end token {spec.end}"
    require(~spec.is_end(inside).any(), what, "set lengths to end at the first one")


def _check_plan(expert: Expert, examples: Examples, path: Sequences, answers: Answers, spec: SequenceSpec) -> None:
    """Require the same answer for the same prefix, and for the prefix plus the answer's first token."""
    who, remedy = f"{type_name(expert)} is deterministic, but", "set deterministic = False, or follow one plan"
    for kept, answer in answers.items():
        again = _complete(expert, examples, _keep(path, kept), spec)
        require_same_sequences(again, answer, f"{who} the same prefix got two completions", remedy)
        longer = _complete(expert, examples, _keep(answer, kept + 1), spec)
        what = f"{who} it leaves its own completion after one more token of it"
        require_same_sequences(longer, answer, what, remedy)


def _check_batch(expert: Expert, examples: Examples, path: Sequences, answers: Answers, spec: SequenceSpec) -> None:
    """Check prefixes of all lengths in one batch, then each alone."""
    places = torch.linspace(0, len(answers) - 1, len(path), device=path.lengths.device).round().long()
    kept = torch.tensor(list(answers), device=places.device)[places]
    prefixes = path.truncate(kept)
    mixed = _complete(expert, examples, prefixes, spec)
    for row in range(len(path)):
        only = torch.tensor([row], device=places.device)
        expected = answers[int(kept[row])].select(only)
        what = f"{type_name(expert)}.complete of row {row} beside prefixes of other lengths"
        require_same_sequences(mixed.select(only), expected, what, ONE_BY_ONE)
        alone = _complete(expert, examples.select(only), prefixes.select(only), spec)
        require_same_sequences(alone, expected, f"{type_name(expert)}.complete of row {row} alone", ONE_BY_ONE)


def _check_ignores_prefix(expert: Expert, own: Sequences, answers: Answers) -> None:
    for kept, answer in answers.items():
        both = own.mask() & answer.mask()
        both[:, :kept] = False
        what = f"{type_name(expert)} has reads_prefix = False, but another prefix of {kept} tokens changes its answer"
        require_same(answer.tokens[both], own.tokens[both], what, "set reads_prefix = True")


def _check_next(
    expert: NextTokenExpert[Any], examples: Examples, path: Sequences | None, answers: Answers, spec: SequenceSpec
) -> None:
    """Walk along `path` or its own tokens, with a state that is asked at every position and one that never was."""
    state, unasked = expert.start(examples), expert.start(examples)
    rows = indices_of(examples.ids)
    for position in range(spec.length):
        named, asked = _next(expert, state, indices_of(rows))
        if expert.deterministic:
            if position in answers:
                what = f"{type_name(expert)}.next at position {position} is not what complete writes there"
                require_same(named, answers[position].tokens[rows, position], what, "make both follow one rule")
            _check_next_state(expert, state, asked, unasked, named)
        goes_on = ~spec.is_end(named) if path is None else position + 1 < path.lengths[rows]
        stay = (goes_on & (position + 1 < spec.length)).nonzero().squeeze(1)
        if not len(stay):
            return
        tokens, old = named[stay] if path is None else path.tokens[rows[stay], position], asked
        state, unasked = (expert.append(expert.select(each, stay), tokens) for each in (asked, unasked))
        if expert.deterministic:
            what = f"{type_name(expert)}.append or select changed the state it was given"
            require_same(_next(expert, old, indices_of(rows))[0], named, what, NEW_STATE)
        rows = rows[stay]


def _check_read(expert: NextTokenExpert[Any], examples: Examples, path: Sequences) -> None:
    """Require that chunks of all sizes are answered as their tokens are one by one."""
    who, every = f"{type_name(expert)}.read", indices_of(examples.ids)
    tokens = path.tokens[:, : int(path.lengths.min()) - 1]
    one_by_one, expected = _read(expert, expert.start(examples), tokens[:, :0]), []
    for position in range(tokens.shape[1] + 1):
        expected.append(_next(expert, one_by_one[1], every)[0])
        if position < tokens.shape[1]:
            one_by_one = (expected[-1], expert.append(one_by_one[1], tokens[:, position]))
    for size in {1, 3, tokens.shape[1]} - {0}:
        parts, state = [], expert.start(examples)
        for chunk in tokens.split(size, 1):
            named, state = _read(expert, state, chunk)
            parts.append(named[:, :-1])
        if expert.deterministic and parts:
            answers = torch.cat([*parts, named[:, -1:]], 1)
            what = f"{who} of chunks of {size} tokens"
            require_same(answers, torch.stack(expected, 1), what, "name the tokens that next names")


def _check_log_probs(expert: NextTokenExpert[Any], examples: Examples) -> None:
    telling, rows = expert.with_log_probs(), indices_of(examples.ids)
    if telling is not None:
        _, state = _next(telling, telling.start(examples), rows)
        require_log_probs(telling.log_probs(state, rows), f"{type_name(expert)}.log_probs", len(rows))


def _read(expert: NextTokenExpert[Any], state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    answer, who = expert.read(state, tokens), f"{type_name(expert)}.read"
    require_tuple(answer, 2, who, "a pair: tokens (B, T + 1), state")
    return require_tensor(answer[0], f"{who}: tokens", "token", len(tokens), tokens.shape[1] + 1), answer[1]


def _next(expert: NextTokenExpert[Any], state: Any, rows: Tensor) -> tuple[Tensor, Any]:
    answer = expert.next(state, rows)
    require_tuple(answer, 2, f"{type_name(expert)}.next", "a pair: tokens (R,), state")
    return require_tensor(answer[0], f"{type_name(expert)}.next: tokens", "token", len(rows)), answer[1]


def _check_next_state(expert: NextTokenExpert[Any], state: Any, asked: Any, unasked: Any, named: Tensor) -> None:
    who, every_row, rows = f"{type_name(expert)}.next", indices_of(named), shuffled(named)
    require_same(_next(expert, state, every_row)[0], named, f"{who} called twice", NEW_STATE)
    require_same(_next(expert, asked, every_row)[0], named, f"{who} from the state it returned", "keep the position")
    late = _next(expert, unasked, every_row)[0]
    require_same(late, named, f"{who} called late", "read every appended token, at once or when called")
    some = _next(expert, state, rows)[0]
    require_same(some, named[rows], f"{who} for rows {rows.tolist()}", "answer for these rows, in this order")
    picked = _next(expert, expert.select(state, rows), indices_of(rows))[0]
    require_same(picked, named[rows], f"{type_name(expert)}.select of rows {rows.tolist()}", EVERY_PART)
