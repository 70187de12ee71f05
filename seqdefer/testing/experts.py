"""Is an expert right?"""

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
    name_of,
    require,
    require_same,
    require_same_sequences,
    require_tensor,
    shuffled,
)
from seqdefer.types import Examples, Sequences, SequenceSpec

Answers = dict[int, Sequences]  # completions by the number of tokens kept


@torch.no_grad()
def check_expert(expert: Expert, examples: Examples, spec: SequenceSpec, *, drafts: Sequences | None = None) -> None:
    """Asks for completions of nothing, of prefixes of its own sequences, and of `drafts` (what a predictor wrote).

    Shapes and dtypes; the prefix is kept; sequences end with the end token or at full length, and nowhere before;
    prefixes that have ended stay as they are. With `deterministic`: the same answer twice, alone and in any batch, and
    for every longer prefix of its own answer. With `reads_prefix = False`: the same tokens after any prefix. A
    NextTokenExpert names the tokens that it completes with, whether it is asked at every position or late.
    """
    if isinstance(expert, NextTokenExpert):
        _check_next(expert, examples, None, {}, spec)
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


def _keep(path: Sequences, kept: int) -> Sequences:
    return path.truncate(torch.full_like(path.lengths, kept))


def _complete(expert: Expert, examples: Examples, prefixes: Sequences, spec: SequenceSpec) -> Sequences:
    """Asks, and checks all that one answer shows. Tokens come back as the dtype of the prefixes."""
    who, n = f"{name_of(expert)}.complete", len(prefixes)
    given = Sequences(prefixes.tokens.clone(), prefixes.lengths.clone())
    answer = expert.complete(examples, prefixes, spec)
    is_intact = torch.equal(prefixes.tokens, given.tokens) and torch.equal(prefixes.lengths, given.lengths)
    require(is_intact, f"{who} changed the prefixes it was given", "clone them before writing")
    require(isinstance(answer, Sequences), f"{who} gave a {name_of(answer)}", "give Sequences")
    tokens = require_tensor(answer.tokens, f"{who}: tokens", "token", n, spec.length)
    lengths = require_tensor(answer.lengths, f"{who}: lengths", "int64", n)
    is_like = tokens.is_floating_point() == given.tokens.is_floating_point()
    require(is_like, f"{who} gave {tokens.dtype} after a prefix of {given.tokens.dtype}", "write tokens of its kind")
    is_possible = (lengths >= 1) & (lengths <= spec.length)
    require(is_possible.all(), f"{who} gave lengths {lengths.tolist()}", f"give lengths from 1 to {spec.length}")
    answer = Sequences(tokens.to(given.tokens.dtype), lengths)
    _check_prefix(who, given, answer, spec)
    _check_end(who, answer, spec)
    return answer


def _check_prefix(who: str, given: Sequences, answer: Sequences, spec: SequenceSpec) -> None:
    is_over, mask = spec.is_over(given), given.mask()
    what, remedy = f"{who} gave a prefix that has ended another length", "give it back as it is"
    require_same(answer.lengths[is_over], given.lengths[is_over], what, remedy)
    what, remedy = f"{who} changed a token of the prefix", "begin the completion with its prefix"
    require_same(answer.tokens[mask], given.tokens[mask], what, remedy)


def _check_end(who: str, answer: Sequences, spec: SequenceSpec) -> None:
    last = answer.tokens.gather(1, answer.lengths[:, None] - 1).squeeze(1)
    is_whole = spec.is_end(last) | (answer.lengths == spec.length)
    what = f"{who} stopped after {answer.lengths[~is_whole][:1].tolist()} tokens"
    end = f"length {spec.length}" if spec.end is None else f"the end token {spec.end} or to length {spec.length}"
    require(is_whole.all(), what, f"go on to {end}")
    inside = answer.tokens[answer.truncate(answer.lengths - 1).mask()]
    what = f"{who} wrote on after the end token {spec.end}"
    require(~spec.is_end(inside).any(), what, "let lengths count up to the first one")


def _check_plan(expert: Expert, examples: Examples, path: Sequences, answers: Answers, spec: SequenceSpec) -> None:
    """The same prefix gets the same answer, and so does the answer's own first token added to it."""
    who, remedy = f"{name_of(expert)} says it is deterministic, but", "set deterministic = False, or follow one plan"
    for kept, answer in answers.items():
        again = _complete(expert, examples, _keep(path, kept), spec)
        require_same_sequences(again, answer, f"{who} the same prefix got another completion", remedy)
        longer = _complete(expert, examples, _keep(answer, kept + 1), spec)
        what = f"{who} it leaves its own completion when the next token of it joins the prefix"
        require_same_sequences(longer, answer, what, remedy)


def _check_batch(expert: Expert, examples: Examples, path: Sequences, answers: Answers, spec: SequenceSpec) -> None:
    """Prefixes of all lengths in one batch, then each alone."""
    places = torch.linspace(0, len(answers) - 1, len(path), device=path.lengths.device).round().long()
    kept = torch.tensor(list(answers), device=places.device)[places]
    prefixes = path.truncate(kept)
    mixed = _complete(expert, examples, prefixes, spec)
    for row in range(len(path)):
        only = torch.tensor([row], device=places.device)
        expected = answers[int(kept[row])].select(only)
        what = f"{name_of(expert)}.complete of row {row} beside prefixes of other lengths"
        require_same_sequences(mixed.select(only), expected, what, ONE_BY_ONE)
        alone = _complete(expert, examples.select(only), prefixes.select(only), spec)
        require_same_sequences(alone, expected, f"{name_of(expert)}.complete of row {row} alone", ONE_BY_ONE)


def _check_ignores_prefix(expert: Expert, own: Sequences, answers: Answers) -> None:
    for kept, answer in answers.items():
        both = own.mask() & answer.mask()
        both[:, :kept] = False
        what = (
            f"{name_of(expert)} says reads_prefix = False, but another prefix of {kept} tokens changes what it writes"
        )
        require_same(answer.tokens[both], own.tokens[both], what, "set reads_prefix = True")


def _check_next(
    expert: NextTokenExpert[Any], examples: Examples, path: Sequences | None, answers: Answers, spec: SequenceSpec
) -> None:
    """Along `path` or its own tokens, with one state that is asked at every position and one that was never asked."""
    state, silent = expert.start(examples), expert.start(examples)
    rows = indices_of(examples.ids)
    for position in range(spec.length):
        said, asked = _next(expert, state, indices_of(rows))
        if expert.deterministic:
            if position in answers:
                what = f"{name_of(expert)}.next at position {position} is not what complete writes there"
                require_same(said, answers[position].tokens[rows, position], what, "let both follow one rule")
            _check_next_state(expert, state, asked, silent, said)
        goes_on = ~spec.is_end(said) if path is None else position + 1 < path.lengths[rows]
        stay = (goes_on & (position + 1 < spec.length)).nonzero().squeeze(1)
        if not len(stay):
            return
        tokens, old = said[stay] if path is None else path.tokens[rows[stay], position], asked
        state, silent = (expert.append(expert.select(each, stay), tokens) for each in (asked, silent))
        if expert.deterministic:
            what = f"{name_of(expert)}.append or select changed the state it was given"
            require_same(_next(expert, old, indices_of(rows))[0], said, what, NEW_STATE)
        rows = rows[stay]


def _next(expert: NextTokenExpert[Any], state: Any, rows: Tensor) -> tuple[Tensor, Any]:
    answer = expert.next(state, rows)
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    require(is_pair, f"{name_of(expert)}.next gave a {name_of(answer)}", "give a pair: tokens (R,), state")
    return require_tensor(answer[0], f"{name_of(expert)}.next: tokens", "token", len(rows)), answer[1]


def _check_next_state(expert: NextTokenExpert[Any], state: Any, asked: Any, silent: Any, said: Tensor) -> None:
    who, everyone, rows = f"{name_of(expert)}.next", indices_of(said), shuffled(said)
    require_same(_next(expert, state, everyone)[0], said, f"{who} asked twice", NEW_STATE)
    require_same(_next(expert, asked, everyone)[0], said, f"{who} from the state it gave back", "keep the position")
    late = _next(expert, silent, everyone)[0]
    require_same(late, said, f"{who} asked for the first time", "read every token appended, at once or when asked")
    some = _next(expert, state, rows)[0]
    require_same(some, said[rows], f"{who} for rows {rows.tolist()}", "answer for these rows, in that order")
    picked = _next(expert, expert.select(state, rows), indices_of(rows))[0]
    require_same(picked, said[rows], f"{name_of(expert)}.select of rows {rows.tolist()}", EVERY_PART)
