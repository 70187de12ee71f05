"""Requests whose inputs are written together, each at its own threshold.

A request joins the running batch between two turns, gets what is settled after each, and leaves when its sequences end
or its client does. Rows are independent, so every request gets the tokens that it would get alone.

A turn that asks a remote expert is left where it is until the answer is there.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from seqdefer.budgets.caps import UNLIMITED, Allowance, Cap, allowances
from seqdefer.engine.pace import Turn
from seqdefer.interfaces import Codec, TokenRejector
from seqdefer.methods.plans import PlanRow, ScoredDraft
from seqdefer.model.deferring_model import DeferringModel
from seqdefer.model.generation import input_tokens
from seqdefer.server.expert_calls import ExpertAccess, ExpertCall
from seqdefer.server.fallback import Fallback, FallbackCompletions, FallbackRows, reason_of
from seqdefer.server.log_probs import RowLogProbs, WrittenLogProb
from seqdefer.server.stopping import StopText
from seqdefer.types import PREDICTOR, Examples

FinishReason = Literal["stop", "length"]
_encoding = threading.Lock()  # the event loop encodes too, and neither warnings nor tokenizers are made for threads


@dataclass(frozen=True)
class WriteRequest:
    """What one request asks the models to write."""

    inputs: Sequence[Any]
    threshold: float
    max_tokens: int
    may_defer: bool = True  # False: only score the predictor's sequence
    is_streamed: bool = False  # False: events may be delivered together at the end
    stop: tuple[str, ...] = ()  # strings before which a text ends
    caps: tuple[Cap, ...] = ()
    n_likeliest: int | None = None  # tokens to tell the log-probabilities of, beside the written one; None: none at all


@dataclass(frozen=True)
class InputsRead:
    """The first event of a request: the length of each input, and remarks on how the inputs were read."""

    input_tokens: list[int]
    remarks: list[str]


@dataclass(frozen=True)
class Token:
    """One token of one of the inputs."""

    index: int
    position: int
    token: Any
    text: str  # what it adds; empty while a character is incomplete
    author: str
    score: float
    defer: bool  # the rejector's decision, even if the expert failed
    finish: FinishReason | None  # for the last token
    degraded: str | None  # why the expert failed to write this token or an earlier one
    log_prob: WrittenLogProb | None = None
    capped: bool = False  # a cap kept it from the expert


@dataclass(frozen=True)
class Drafted:
    """The draft of one of the inputs, where deferral is by whole drafts; comes before its tokens."""

    index: int
    draft: ScoredDraft


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed."""

    error: Exception


Event = InputsRead | Drafted | Token | Failed


class Recipient(Protocol):
    """A request as its batch sees it."""

    request: WriteRequest
    is_cancelled: bool
    span: Any  # of OpenTelemetry, or None

    def deliver(self, events: Sequence[Event], made_at: float) -> None: ...


@dataclass(frozen=True)
class EncodedInputs:
    """The inputs of one request as examples."""

    examples: Examples
    event: InputsRead


def encode_inputs(codec: Codec, inputs: Sequence[Any]) -> EncodedInputs:
    """Encode the inputs of one request, turning warnings into remarks. Raises InputError."""
    with _encoding:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            joined = codec.encode(inputs)
        tokens = input_tokens(codec, inputs, joined)
    return EncodedInputs(joined, InputsRead(tokens, sorted({str(warning.message) for warning in caught})))


def _join(codec: Codec, members: Sequence[Member]) -> Examples:
    if len(members) == 1:
        return members[0].encoded.examples
    inputs = [one for member in members for one in member.recipient.request.inputs]
    with _encoding, warnings.catch_warnings():  # each request has its remarks already
        warnings.simplefilter("ignore")
        return codec.encode(inputs)


@dataclass(eq=False)
class _Row:
    """One sequence and the request that it belongs to."""

    recipient: Recipient
    index: int  # among the inputs of its request
    plan_row: PlanRow
    seen: Sequence[Any] = ()  # tokens that were delivered before the request began anew
    n_delivered: int = 0
    text: str = ""
    is_finished: bool = False
    lost: str | None = None  # why the expert can no longer write here
    degraded: str | None = None  # why it failed to write a token
    log_probs: RowLogProbs | None = None

    def __post_init__(self) -> None:
        self.stop = StopText(self.recipient.request.stop)

    @property
    def is_active(self) -> bool:
        return not (self.is_finished or self.recipient.is_cancelled)


@dataclass(eq=False)
class Member:
    """A request of a batch."""

    recipient: Recipient
    encoded: EncodedInputs
    has_delivered: bool = False
    seen: Sequence[Sequence[Any]] = ()  # of each row, if the request begins anew
    rows: list[_Row] = field(default_factory=list)

    def anew(self) -> Member:
        """Return the request before its first turn. What its client has got is not delivered again."""
        seen = [max(row.plan_row.written.tokens[: row.n_delivered], row.seen, key=len) for row in self.rows]
        return Member(self.recipient, self.encoded, self.has_delivered, seen or self.seen)

    @property
    def is_active(self) -> bool:
        return not self.rows or any(row.is_active for row in self.rows)


class RunningBatch:
    """Requests at work.

    The constructor runs no model: `advance` does all the work. Where the expert is remote, a batch that has asked it
    `is_waiting`, and nobody may join until `is_due`."""

    def __init__(self, model: DeferringModel, calls: ExpertAccess) -> None:
        self.model, self.calls = model, calls
        self.members: list[Member] = []
        self.refused: list[tuple[Recipient, Exception]] = []  # requests that broke the models, not answered yet
        self._joining: list[Member] = []
        self._turning: Generator[Any, Any, None] | None = None  # a turn that is not over
        self._question: Any = None
        self.call: ExpertCall[Any] | None = None  # its question, put to the expert
        served, n_tokens = model.served, model.served.predictor.vocabulary_size
        self.guard: Fallback
        if isinstance(model.rejector, TokenRejector):
            self.guard = FallbackRows(served.expert, calls, n_tokens)
            self.plan = model.plan(expert_rows=self.guard)
        else:
            self.guard = FallbackCompletions(served.expert, calls, served.spec, n_tokens)
            self.plan = model.plan()

    def __len__(self) -> int:
        """The sequences at work or about to be."""
        return len(self.plan.rows) + sum(len(member.recipient.request.inputs) for member in self._joining)

    def join(self, members: Sequence[Member]) -> None:
        """Let requests take part from the next turn on."""
        self.members += members
        self._joining += members

    @property
    def is_active(self) -> bool:
        """Whether a request still needs tokens."""
        return any(member.is_active and not member.recipient.is_cancelled for member in self.members)

    @property
    def is_waiting(self) -> bool:
        """Whether the expert has not answered."""
        return self.call is not None and not self.call.is_over

    @property
    def is_due(self) -> bool:
        """Whether there is something to do."""
        return not (self.is_waiting and self.is_active)

    def advance(self) -> Turn | None:
        """Take one turn, or as much of it as possible without waiting, and deliver it. Return what it took, if it is
        over. Raises what the predictor raises."""
        if self._turning is None:
            self._leave()
            self._admit()
            self._turning = self.plan.turning() if self.plan.rows else None
        if self._turning is not None and self._go_on(self._turning):
            self._turning = None
            self._end_turn()
            self._leave()
            return self.plan.last_turn
        return None

    def _go_on(self, turning: Generator[Any, Any, None]) -> bool:
        """Go on with a turn; return whether it is over."""
        answer = None
        while True:
            if self.call is not None:
                if not self.call.is_over:
                    return False
                answer = self.guard.receive(self._question, self.call)
                self._question = self.call = None
            try:
                self._question = turning.send(answer)
            except StopIteration:
                return True
            self.call = self.guard.ask(self._question)

    def _end_turn(self) -> None:
        self._note_failure()
        made_at = time.perf_counter()
        for member in list(self.members):
            try:
                self._deliver(member, made_at)
            except Exception as error:
                self._fail(member, error)

    def close(self) -> None:
        """Free the caches of both models, and cancel a call of the expert."""
        if self.call is not None:
            self.calls.abandon(self.call)
        self.members, self._joining, self._turning, self.call = [], [], None, None

    def _admit(self) -> None:
        """Let the models read the inputs of requests that join; one that breaks them fails alone."""
        joining, self._joining = self._joining, []
        joining = [member for member in joining if not member.recipient.is_cancelled]
        if not joining:
            return
        try:
            self._admit_together(joining)
        except Exception as error:
            if len(joining) == 1:
                self._fail(joining[0], error)
                return
            for member in joining:
                try:
                    self._admit_together([member])
                except Exception as own:
                    self._fail(member, own)

    def _admit_together(self, members: Sequence[Member]) -> None:
        requests = [member.recipient.request for member in members for _ in member.recipient.request.inputs]
        settings = torch.tensor([request.threshold for request in requests], dtype=torch.float64)
        may_defer = torch.tensor([request.may_defer for request in requests])
        examples = _join(self.model.served.codec, members)
        new = iter(self.plan.admit(examples, settings, may_defer, self._allowed(members)))
        for member in members:
            n = len(member.recipient.request.inputs)
            seen = member.seen or [()] * n
            member.rows = [_Row(member.recipient, index, next(new), seen[index]) for index in range(n)]
        for place, row in enumerate(row for member in members for row in member.rows):
            if (n_likeliest := requests[place].n_likeliest) is not None:
                example = examples.select(torch.tensor([place]))
                row.log_probs = RowLogProbs(self.model.served, example, n_likeliest)

    def _allowed(self, members: Sequence[Member]) -> list[Allowance] | None:
        """Return what the caps of requests allow for each sequence; None if none has any."""
        if not any(member.recipient.request.caps for member in members):
            return None
        found = list[Allowance]()
        for member in members:
            tokens = member.encoded.event.input_tokens
            allowed = allowances(member.recipient.request.caps, tokens, self.model.prices)
            found += [UNLIMITED] * len(tokens) if allowed is None else allowed
        return found

    def _fail(self, member: Member, error: Exception) -> None:
        self.members.remove(member)
        self.refused.append((member.recipient, error))

    def _leave(self) -> None:
        """Let requests leave that need nothing more, and their sequences with them."""
        self.members = [member for member in self.members if member.is_active and not member.recipient.is_cancelled]
        needed = {row.plan_row for member in self.members for row in member.rows if row.is_active}
        unneeded = [row for row in self.plan.rows if row not in needed]
        if unneeded:
            self.plan.drop(unneeded)

    def _note_failure(self) -> None:
        """Mark the rows that the expert failed in this turn."""
        failure = self.guard.take_failure()
        if failure is None:
            return
        for row in (row for member in self.members for row in member.rows if row.is_active):
            # Of hand-offs, those that were not asked for are not over.
            if isinstance(self.guard, FallbackRows) or row.plan_row.is_over:
                row.lost = reason_of(failure)

    def _deliver(self, member: Member, made_at: float) -> None:
        errors = [row.plan_row.written.error for row in member.rows]
        for error in (error for error in errors if error is not None):
            raise error
        events: list[Event] = [] if member.has_delivered else [member.encoded.event]
        for row in member.rows:
            if row.n_delivered == 0 and row.plan_row.draft is not None and not row.seen:
                events.append(Drafted(row.index, row.plan_row.draft))
        events += [token for row in member.rows if row.is_active for token in self._tokens(row)]
        member.has_delivered = True
        member.recipient.deliver(events, made_at)

    def _tokens(self, row: _Row) -> Iterator[Token]:
        """Yield what was written since the last time."""
        served, one = self.model.served, row.plan_row
        limit = min(served.spec.length, row.recipient.request.max_tokens)
        for position in range(row.n_delivered, min(limit, len(one.written.tokens))):
            tokens, is_wanted = one.written.tokens[: position + 1], one.wanted[position]
            is_end = tokens[-1] == served.spec.end or (served.spec.end is None and position + 1 == served.spec.length)
            finish: FinishReason | None = "stop" if is_end else "length" if position + 1 == limit else None
            author = one.written.authors[position]
            if row.lost is not None and author != PREDICTOR:
                row.degraded, author = row.lost, PREDICTOR
            text = served.codec.added(tokens, row.text, is_last=finish is not None)
            row.text += text
            shown, is_stopped = row.stop.push(text, is_last=finish is not None)
            finish = "stop" if is_stopped else finish
            row.n_delivered, row.is_finished = position + 1, finish is not None
            if position < len(row.seen):
                if tokens[-1] != row.seen[position]:
                    raise RuntimeError(f"token {position} was {row.seen[position]} before the batch failed")
                if is_stopped:
                    return
                continue
            log_prob = None if row.log_probs is None else row.log_probs.read(tokens, author)
            yield Token(
                row.index, position, tokens[-1], shown, served.authors[author], one.written.scores[position], is_wanted,
                finish, row.degraded, log_prob, one.is_capped(position),
            )  # fmt: skip
            if is_stopped:
                return
