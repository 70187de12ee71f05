"""Requests that are written together: one `engine.interleave` for all their inputs, each with its own threshold.

Rows of a batch do not see each other, so nobody gets other tokens than he would get alone. A cohort tells each request
what happens to it, token by token, until it has its fill; when nobody listens any more it is closed, and its caches
are free.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from seqdefer.deferring import AUTHORS, DeferringModel
from seqdefer.engine import draft, interleave
from seqdefer.interfaces import Codec, Policy
from seqdefer.policies import PlannedHandOff, by_position, choose_kept
from seqdefer.rejectors import DraftNetwork, TokenNetwork
from seqdefer.server.guarding import Caller, Guard, RowThresholds
from seqdefer.types import Examples, SequenceSpec, Step

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
        single = [codec.encode([one]) for one in inputs]
        joined = single[0] if len(single) == 1 else codec.encode(inputs)
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
    """Its constructor reads nothing and runs nothing: all work is in `advance`."""

    def __init__(self, model: DeferringModel, members: Sequence[tuple[Listener, Encoded]], call: Caller) -> None:
        self.model, self.members, self.call = model, list(members), call
        self.has_told = False
        self._rows = [_Row(one, index) for one, _ in members for index in range(len(one.ask.inputs))]
        self._missed = torch.zeros(len(self._rows), dtype=torch.bool)  # rows that the expert should have written
        self._guard: Guard | None = None
        self._steps = self._write()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_wanted(self) -> bool:
        return any(not (row.is_finished or row.listener.is_gone) for row in self._rows)

    @property
    def failure(self) -> Exception | None:
        """Of the expert, if it failed."""
        return self._guard.error if self._guard else None

    def advance(self) -> None:
        """Writes one position and tells all who listen. Raises what the predictor raises."""
        told = next(self._steps, None)
        if told is None:
            raise RuntimeError("the engine stopped before all sequences had ended")
        made_at = time.perf_counter()
        step, wishes = told
        self._tell(step, wishes, made_at)

    def close(self) -> None:
        """Frees what both models keep for it."""
        self._steps.close()
        if self._guard is not None:
            self._guard.proposed = None

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self) -> Generator[tuple[Step, Tensor], None, None]:
        """Steps, and the rows (n,) where the rejector wants the expert."""
        served = self.model.served
        examples = _joined(served.codec, self.members)
        plan = self._plan(examples)
        self._guard = plan.guard
        for step in interleave(served.predictor, plan.guard, examples, plan.policy, served.spec):
            if plan.guard.has_failed:
                self._missed |= plan.asking(step) & step.active.cpu()
            yield step, plan.wishes(step)

    def _plan(self, examples: Examples) -> _ByToken | _OneTime:
        thresholds = [row.listener.ask.threshold for row in self._rows]
        silent = torch.tensor([not row.listener.ask.may_defer for row in self._rows])
        kind = _ByToken if isinstance(self.model.rejector, TokenNetwork) else _OneTime
        return kind(self.model, examples, thresholds, silent, self.call)

    # -- telling ---------------------------------------------------------------------------------------------------

    def _tell(self, step: Step, wishes: Tensor, made_at: float) -> None:
        tokens, ends = step.tokens.tolist(), self.model.served.spec.is_end(step.tokens).tolist()
        authors = (step.by_expert.cpu() & ~self._missed).tolist()
        scores, active, missed = step.scores.tolist(), step.active.tolist(), self._missed.tolist()
        events: dict[int, list[Event]] = {}
        for place, row in enumerate(self._rows):
            if not active[place] or row.is_finished or row.listener.is_gone:
                continue
            row.tokens.append(tokens[place])
            finish = row.finish(self.model.served.spec, ends[place])
            text = row.gain(self.model.served.codec, is_last=finish is not None)
            row.is_finished = finish is not None
            reason = self._guard.reason if self._guard and missed[place] else None
            token = Token(
                row.index, step.position, tokens[place], text, AUTHORS[authors[place]], scores[place],
                bool(wishes[place]), finish, reason,
            )  # fmt: skip
            events.setdefault(id(row.listener), []).append(token)
        for listener, encoded in self.members:
            first: list[Event] = [] if self.has_told else [encoded.read]
            listener.tell([*first, *events.get(id(listener), [])], made_at)
        self.has_told = True


# -- who decides -----------------------------------------------------------------------------------------------------


class _ByToken:
    """Each row by its own threshold."""

    def __init__(
        self, model: DeferringModel, examples: Examples, thresholds: list[float], silent: Tensor, call: Caller
    ) -> None:
        assert isinstance(model.rejector, TokenNetwork)
        self.thresholds, self.silent = torch.tensor(thresholds), silent
        self.guard = Guard(model.served.expert, call)
        effective = torch.where(silent, math.inf, self.thresholds)
        self.policy: Policy[Any] = RowThresholds(model.rejector, effective, self.guard)

    def wishes(self, step: Step) -> Tensor:
        return step.scores.cpu() >= self.thresholds

    def asking(self, step: Step) -> Tensor:
        return self.wishes(step) & ~self.silent


class _OneTime:
    """A draft, then the hand-off that each row's threshold chooses."""

    def __init__(
        self, model: DeferringModel, examples: Examples, thresholds: list[float], silent: Tensor, call: Caller
    ) -> None:
        rejector = model.rejector
        assert isinstance(rejector, DraftNetwork)
        drafted = draft(model.served.predictor, examples, model.served.spec)
        scores = rejector.score(drafted)
        rows = torch.arange(len(examples)).split(1)
        kept = [
            choose_kept(rejector, scores[row], drafted.select(row), threshold)
            for row, threshold in zip(rows, thresholds, strict=True)
        ]
        self.kept, self.silent = torch.cat(kept), silent
        self.guard = Guard(model.served.expert, call, drafted.sequences)
        effective = torch.where(silent, model.served.spec.length, self.kept)
        self.policy: Policy[Any] = PlannedHandOff(effective, by_position(scores, rejector.sizes.hand_offs))

    def wishes(self, step: Step) -> Tensor:
        return step.position >= self.kept

    def asking(self, step: Step) -> Tensor:
        """Only at the hand-off itself: what was completed before the expert failed is the expert's."""
        return (step.position == self.kept) & ~self.silent
