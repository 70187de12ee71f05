"""Fallback to the predictor when an expert fails, takes too long, or returns an invalid answer.

`FallbackRows` (token level) and `FallbackCompletions` (hand-offs) stand between a plan and its expert: `ask` puts a
question of the plan to it, `receive` returns the answer to go on with. They change nothing while the expert works.
Where it fails, what the predictor wrote takes the place of its answer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from seqdefer.engine.drafts import HandedOff
from seqdefer.engine.rows import rows_of_expert
from seqdefer.errors import ContractError
from seqdefer.interfaces import Expert
from seqdefer.rows import Chunk, ExpertRows
from seqdefer.server.breaker import ExpertUnavailable
from seqdefer.server.expert_calls import ExpertAccess, ExpertCall, ExpertTimeout
from seqdefer.types import Examples, Sequences, SequenceSpec

Result = TypeVar("Result")


def reason_of(failure: Exception) -> str:
    """Return why the expert failed, without the text of its exception, which may be confidential."""
    is_ours = isinstance(failure, ExpertTimeout | ExpertUnavailable)
    return str(failure) if is_ours else f"the expert failed ({type(failure).__name__})"


class Fallback(ABC):
    """Asks an expert, and keeps its failure until that is taken. `n_tokens`: the size of the vocabulary, if any."""

    def __init__(self, expert: Expert, calls: ExpertAccess, n_tokens: int | None = None) -> None:
        self.expert, self.calls, self.n_tokens = expert, calls, n_tokens
        self._failure: Exception | None = None

    @abstractmethod
    def ask(self, question: Any) -> ExpertCall[Any]:
        """Put a question of a plan to the expert."""

    @abstractmethod
    def receive(self, question: Any, call: ExpertCall[Any]) -> Any:
        """Return the answer, which is the predictor's where the expert failed."""

    def take_failure(self) -> Exception | None:
        """Return the failure since the last time this was called, if any."""
        failure, self._failure = self._failure, None
        return failure

    def _result(self, call: ExpertCall[Result], check: Callable[[Result], None]) -> Result | None:
        """Return the expert's answer, or None if it failed or is no answer."""
        failure: Exception | None = None
        result = None
        try:
            result = call.result()
            check(result)
        except Exception as error:
            failure, result = error, None
            self._keep(error)
        self.calls.end(call, failure)
        return result

    def _keep(self, failure: Exception) -> None:
        self._failure = failure.with_traceback(None)  # the frames would keep the caches alive
        self._failure.__cause__ = self._failure.__context__ = None


class FallbackCompletions(Fallback):
    """Completions of drafts; where the expert fails, the drafts stay as they are."""

    def __init__(self, expert: Expert, calls: ExpertAccess, spec: SequenceSpec, n_tokens: int | None = None) -> None:
        super().__init__(expert, calls, n_tokens)
        self.spec = spec

    def ask(self, question: HandedOff) -> ExpertCall[Sequences]:
        asked = question.examples, question.prefixes, self.spec
        return self.calls.start(lambda: self.expert.submit(*asked), lambda: self.expert.complete(*asked))

    def receive(self, question: HandedOff, call: ExpertCall[Sequences]) -> Sequences:
        completed = self._result(
            call, lambda found: check_completed(found, question.prefixes, self.spec, self.n_tokens)
        )
        return question.drafts if completed is None else completed


class FallbackRows(Fallback, ExpertRows):
    """Rows of an expert. Once it fails, all rows at work keep the predictor's guesses; rows that come later ask it
    again."""

    def __init__(self, expert: Expert, calls: ExpertAccess, n_tokens: int | None = None) -> None:
        super().__init__(expert, calls, n_tokens)
        self.inner = rows_of_expert(expert)
        self.foresees = self.inner.foresees
        self.places: list[int | None] = []  # of each row, its place among those that may ask
        self.n_inner = self._read_before = 0

    def admit(self, examples: Examples) -> None:
        inner, new = self.inner, list[int | None](range(self.n_inner, self.n_inner + len(examples)))
        self.places += new
        self.n_inner += len(new)
        self._run(lambda: inner.admit(examples))

    def ask(self, question: Sequence[Chunk]) -> ExpertCall[list[list[Any]]]:
        inner, asked = self.inner, list(self._asked(question).values())
        if not asked:
            return ExpertCall.answered(list)
        self._read_before = inner.tokens_read
        return self.calls.start(lambda: inner.submit(asked), lambda: inner.read(asked))

    def receive(self, question: Sequence[Chunk], call: ExpertCall[list[list[Any]]]) -> list[list[Any]]:
        answers, asked = [list(chunk.guesses) for chunk in question], self._asked(question)
        if asked:
            named = self._result(call, lambda found: check_named(found, list(asked.values()), self.n_tokens))
            if named is None:
                self._abandon()
            else:
                self.tokens_read += self.inner.tokens_read - self._read_before
                for number, answer in zip(asked, named, strict=True):
                    answers[number] = answer
        return answers

    def read(self, chunks: Sequence[Chunk]) -> list[list[Any]]:
        return self.receive(chunks, self.ask(chunks))

    def _asked(self, chunks: Sequence[Chunk]) -> dict[int, Chunk]:
        """Return the chunks of rows that may ask, with their places among those, by number."""
        places = {number: self.places[chunk.row] for number, chunk in enumerate(chunks)}
        return {number: replace(chunks[number], row=place) for number, place in places.items() if place is not None}

    def go_back(self, steps: Sequence[int]) -> None:
        inner, back = self.inner, [0] * self.n_inner
        for place, n in zip(self.places, steps, strict=True):
            if place is not None:
                back[place] = n
        if any(back):
            self._run(lambda: inner.go_back(back))

    def keep(self, rows: Sequence[int]) -> None:
        inner, kept = self.inner, [self.places[row] for row in rows]
        asking = [place for place in kept if place is not None]
        if self.n_inner:
            self._run(lambda: inner.keep(asking))
        if self.n_inner:  # else that failed
            numbers = iter(range(len(asking)))
            self.places, self.n_inner = [None if place is None else next(numbers) for place in kept], len(asking)
        else:
            self.places = [None] * len(kept)

    def _run(self, call: Callable[[], None]) -> None:
        """Do something with the expert's rows."""
        try:
            self.calls.run(call)
        except Exception as error:
            self._keep(error)
            self.calls.report(error, 0.0)
            self._abandon()

    def _abandon(self) -> None:
        """Give up the expert's rows: its call may hang, or have stopped half-way."""
        self.inner, self.places, self.n_inner = rows_of_expert(self.expert), [None] * len(self.places), 0


# -- what counts as an answer --------------------------------------------------------------------------------------


def check_named(named: list[list[Any]], chunks: Sequence[Chunk], n_tokens: int | None) -> None:
    """Raise ContractError unless there is a token for every place asked."""
    wanted = [len(chunk.asked) for chunk in chunks]
    if not isinstance(named, list) or [len(line) for line in named] != wanted:
        raise ContractError(f"the expert named no token for each of {sum(wanted)} places")
    for token in (token for line in named for token in line):
        _check_token(token, n_tokens)


def check_completed(found: Sequences, prefixes: Sequences, spec: SequenceSpec, n_tokens: int | None) -> None:
    """Raise ContractError unless `found` are sequences that begin with the prefixes."""
    if not isinstance(found, Sequences) or found.tokens.shape != prefixes.tokens.shape:
        raise ContractError(f"the expert did not complete {len(prefixes)} sequences of up to {spec.length} tokens")
    lengths = found.lengths.to(prefixes.lengths)
    if lengths.shape != prefixes.lengths.shape or bool(((lengths < prefixes.lengths) | (lengths > spec.length)).any()):
        raise ContractError(f"the expert completed sequences to lengths {lengths.tolist()!r:.80}")
    kept = prefixes.mask()
    if not bool((found.tokens.to(prefixes.tokens) == prefixes.tokens)[kept].all()):
        raise ContractError("the expert changed what it was to complete")
    if not bool(spec.is_over(found).all()):
        raise ContractError("the expert did not complete sequences to their ends")
    for token in found.tokens[found.mask()].tolist():
        _check_token(token, n_tokens)


def _check_token(token: Any, n_tokens: int | None) -> None:
    is_number = isinstance(token, int | float) and math.isfinite(token)
    if not is_number or (n_tokens is not None and not 0 <= token < n_tokens):
        wanted = "a finite number" if n_tokens is None else f"a number from 0 to {n_tokens - 1}"
        raise ContractError(f"the expert named the token {token!r:.40}, which is not {wanted}")
