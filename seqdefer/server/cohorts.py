"""Requests that are written together, all their inputs in one batch, each with its own threshold.

Rows of a batch do not see each other, so nobody gets other tokens than he would get alone. A cohort tells each request
what happens to it, token by token, until it has its fill; when nobody listens any more it is closed, and its caches
are free.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from seqdefer.interfaces import Codec
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.server.guarding import Caller, Guard
from seqdefer.server.plans import GuardedPlan, GuardedStep
from seqdefer.server.turns import Turns
from seqdefer.types import Examples, SequenceSpec

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Ask:
    """What one request wants written."""

    inputs: Sequence[Any]
    threshold: float
    max_tokens: int
    may_defer: bool = True  # False: only say where it would
    is_streamed: bool = False  # else nobody needs to hear of a token before the last one


@dataclass(frozen=True)
class Read:
    """The inputs were read: how long each is, and what there is to say of them."""

    input_tokens: list[int]
    remarks: list[str]


@dataclass(frozen=True)
class Token:
    """One token of one of the inputs."""

    index: int
    position: int
    token: Any
    text: str  # what it adds; empty while a letter is half written
    author: str
    score: float
    defer: bool  # what the rejector wants, whoever then wrote
    finish: FinishReason | None  # where it is the last
    degraded: str | None  # why the expert did not write what it should have, here or before


@dataclass(frozen=True)
class Failed:
    error: Exception


Event = Read | Token | Failed


class Listener(Protocol):
    """A request as cohorts see it."""

    ask: Ask
    is_gone: bool

    def tell(self, events: Sequence[Event], made_at: float) -> None: ...


@dataclass(frozen=True)
class Encoded:
    """The inputs of one request, read one by one: alone, an input has no padding, and its width is its length."""

    examples: Examples
    read: Read


def read_inputs(codec: Codec, inputs: Sequence[Any]) -> Encoded:
    """Raises InputError where an input is no input."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        joined = codec.encode(inputs)
    with warnings.catch_warnings():  # said already
        warnings.simplefilter("ignore")
        single = [joined] if len(inputs) == 1 else [codec.encode([one]) for one in inputs]
    sizes = [one.inputs.shape[1] if one.inputs.ndim > 1 else 1 for one in single]
    return Encoded(joined, Read(sizes, sorted({str(warning.message) for warning in said})))


def _joined(codec: Codec, members: Sequence[tuple[Listener, Encoded]]) -> Examples:
    if len(members) == 1:
        examples = members[0][1].examples
    else:
        inputs = [one for listener, _ in members for one in listener.ask.inputs]
        with warnings.catch_warnings():  # said already, to whom it concerns
            warnings.simplefilter("ignore")
            examples = codec.encode(inputs)
    return replace(examples, ids=torch.arange(len(examples)))  # the guard knows rows by them


@dataclass
class _Row:
    """One sequence on its way to its listener."""

    listener: Listener
    index: int  # among the inputs of its request
    tokens: list[Any] = field(default_factory=list)
    shown: str = ""
    is_finished: bool = False

    def finish(self, spec: SequenceSpec, is_end: bool) -> FinishReason | None:
        """Why it ends after its last token, if it does."""
        n = len(self.tokens)
        if is_end or (spec.end is None and n == spec.length):
            return "stop"
        return "length" if n >= min(spec.length, self.listener.ask.max_tokens) else None

    def gain(self, codec: Codec, *, is_last: bool) -> str:
        """What the last token adds to the text."""
        added = codec.added(self.tokens, self.shown, is_last=is_last)
        self.shown += added
        return added


class Cohort:
    """Its constructor reads nothing and runs nothing: all work is in `advance`. With an expert that waits it takes
    `turns`, and is not ready to advance while it waits."""

    def __init__(
        self,
        model: DeferringModel,
        members: Sequence[tuple[Listener, Encoded]],
        call: Caller,
        turns: Turns | None = None,
    ) -> None:
        self.model, self.members, self.call, self.turns = model, list(members), call, turns
        self.has_told = False
        self._rows = [_Row(one, index) for one, _ in members for index in range(len(one.ask.inputs))]
        self._guard: Guard | None = None
        self._steps = self._write()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_wanted(self) -> bool:
        return any(map(self._is_wanted, self._rows))

    @property
    def is_ready(self) -> bool:
        return self.turns is None or not self.turns.is_waiting

    @property
    def failure(self) -> Exception | None:
        """Of the expert, if it failed."""
        return self._guard.error if self._guard else None

    def advance(self) -> None:
        """Writes one position, or as much as it can without waiting, and tells all who listen. Raises what the
        predictor raises."""
        if self.turns is None:
            self._advance()
        else:
            self.turns.run(self._advance)

    def _advance(self) -> None:
        written = next(self._steps, None)
        if written is None:
            raise RuntimeError("the engine stopped before all sequences had ended")
        self._tell(written, time.perf_counter())

    def close(self) -> None:
        """Frees what both models keep for it, where it waits when the wait is over."""
        if self.turns is not None:
            self.turns.close()
            self.call.close()
        if self.turns is None or self.turns.is_idle:
            self._steps.close()
        if self._guard is not None:
            self._guard.proposed = None

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self) -> Generator[GuardedStep, None, None]:
        thresholds = [row.listener.ask.threshold for row in self._rows]
        may_defer = torch.tensor([row.listener.ask.may_defer for row in self._rows])
        examples = _joined(self.model.served.codec, self.members)
        plan = GuardedPlan(self.model, examples, thresholds, may_defer, self.call)
        self._guard = plan.guard
        yield from plan.steps(self._unwanted)

    def _unwanted(self) -> Tensor:
        return torch.tensor([not self._is_wanted(row) for row in self._rows]).nonzero().squeeze(1)

    @staticmethod
    def _is_wanted(row: _Row) -> bool:
        return not (row.is_finished or row.listener.is_gone)

    # -- telling ---------------------------------------------------------------------------------------------------

    def _tell(self, written: GuardedStep, made_at: float) -> None:
        tokens, ends = written.tokens.tolist(), self.model.served.spec.is_end(written.tokens).tolist()
        parts = (written.authors, written.scores, written.active, written.wanted, written.missed)
        authors, scores, active, wishes, missed = (part.tolist() for part in parts)
        events: dict[int, list[Event]] = {}
        for place, row in enumerate(self._rows):
            if not (active[place] and self._is_wanted(row)):
                continue
            row.tokens.append(tokens[place])
            finish = row.finish(self.model.served.spec, ends[place])
            text = row.gain(self.model.served.codec, is_last=finish is not None)
            row.is_finished = finish is not None
            reason = self._guard.reason if self._guard and missed[place] else None
            token = Token(
                row.index, written.position, tokens[place], text, self.model.served.authors[authors[place]],
                scores[place], wishes[place], finish, reason,
            )  # fmt: skip
            events.setdefault(id(row.listener), []).append(token)
        for listener, encoded in self.members:
            first: list[Event] = [] if self.has_told else [encoded.read]
            listener.tell([*first, *events.get(id(listener), [])], made_at)
        self.has_told = True
